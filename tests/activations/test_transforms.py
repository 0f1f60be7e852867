"""Models that are transformed, compiled, traced or captured: they work, or it is said why not."""

import pytest
import torch
import torch._inductor.config
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx

from offload_strategy import ConfigError, OffloadEngine, OffloadError
from offload_strategy.examples.gpt import GPT
from tests.activations.support import Calls, X, compare, network, noise
from tests.training import assert_same_bits, bits, gradients, left_bytes, moved, on_disk


def batch(step):
    return noise(6, 8, seed=step)


# ---------------------------------------------------------------------- torch.func
def _per_sample(model):
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x[None],)).pow(2).sum()

    slopes = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    return list(slopes(parameters, batch(0)).values())


def _slopes(model, output):
    return list(torch.autograd.grad(output.pow(2).sum(), list(model.parameters())))


AROUND = {
    "vmap": lambda m: _slopes(m, torch.func.vmap(m)(batch(0)[:, None])),
    "gradients per sample": _per_sample,
    "Jacobians": lambda m: [torch.func.jacrev(m)(batch(0)[0])],
    "vector-Jacobian products": lambda m: [torch.func.vjp(m, batch(0))[1](torch.ones(6, 8))[0]],
    "Jacobian-vector products": lambda m: [*torch.func.jvp(m, (batch(0),), (batch(1),))],
    "Hessians": lambda m: [torch.func.hessian(lambda x: m(x).pow(2).sum())(batch(0)[0])],
    "other parameters": lambda m: _slopes(
        m, torch.func.functional_call(m, {k: (v * 2) for k, v in m.named_parameters()}, (batch(0),))
    ),
}


@pytest.mark.parametrize("transform", AROUND)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch's own use of it
def test_a_model_may_be_called_by(transform, engine):
    model = network()

    def run():
        torch.manual_seed(3)
        return [bits(tensor) for tensor in AROUND[transform](model)]

    expected = run()
    engine.attach(model)
    assert run() == expected
    assert run() == expected


def test_hooks_of_the_users_own_are_refused_by_transforms_as_without_offload(engine):
    model = Calls(lambda w: torch.func.grad(lambda v: (v * w).sum())(w * 1).sum())

    def run():
        mine = saved_tensors_hooks(lambda tensor: tensor, lambda packed: packed)
        with mine, pytest.raises(RuntimeError, match="saved tensor hooks"):
            model()

    run()
    engine.attach(model)
    run()
    model()  # without them


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
def test_anomaly_mode_names_the_operation_and_changes_nothing_else(engine):
    with torch.autograd.detect_anomaly():
        compare(engine, Calls(lambda w: (X @ w).exp().sum()))
    model = Calls(lambda w: ((w - w) * 1).sqrt().mul(0).sum())
    engine.attach(model)
    with (
        torch.autograd.detect_anomaly(),
        pytest.raises(RuntimeError, match=r"SqrtBackward0.* returned nan"),
        pytest.warns(UserWarning, match="in SqrtBackward0"),
    ):
        model().backward()


# ---------------------------------------------------------------------- scripted
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_model_is_attached_by_a_module_that_calls_it(engine):
    def run(model):
        slopes = [_slopes(model, model(batch(0))) for _ in range(4)]
        return [bits(tensor) for tensor in slopes[-1]]  # torch fuses operations in the first ones

    model = torch.jit.script(network())
    expected = run(model)
    with pytest.raises(ConfigError, match=r"is a ScriptModule.*nn\.Sequential"):
        engine.attach(model)
    outer = nn.Sequential(model)
    engine.attach(outer)
    assert run(outer) == expected


# ---------------------------------------------------------------------- compiled
@pytest.fixture(autouse=True)
def nothing_compiled_remains():
    yield
    torch._dynamo.reset()


def compiled(model, **options):
    return torch.compile(model, backend="aot_eager", **options)


def _in_place(*modules):
    for module in modules:
        module.compile(backend="aot_eager")


class Break(nn.Module):
    """Where the graph of a model breaks, which branches on its data."""

    def forward(self, x):
        torch._dynamo.graph_break()
        return x.tanh() if x.sum() > 0 else x


#: How a model is compiled, and when it is attached: before, after, or after by its inner module.
ORDERS = {
    "attach, compile": (compiled, "before"),
    "compile, attach": (lambda m: compiled(m, fullgraph=True), "after"),
    "compile, attach the inner": (compiled, "inner"),
    "attach, compile in place": (_in_place, "before"),
    "compile in place, attach": (_in_place, "after"),
    "compile blocks, attach": (lambda m: _in_place(*m.children()), "after"),
    "compile a graph that breaks, attach": (compiled, "after"),
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_compiled_model_is_the_same_in_whatever_order(order, engine):
    plain, model = network(), network()
    compile_model, when = ORDERS[order]
    if "breaks" in order:
        plain, model = (nn.Sequential(each, Break(), network()) for each in (plain, model))
    if when == "before":
        engine.attach(model)
    call = compile_model(model) or model
    if when != "before":
        engine.attach(model if when == "inner" else call)
    for sign in (1, 1, -1):
        for each, function in ((plain, plain), (model, call)):
            each.zero_grad()
            loss = function(noise(4, 8) * sign).pow(2).sum()
            on_disk(engine)
            loss.backward()
        assert_same_bits(gradients(model), gradients(plain))
    assert moved(engine) > 0


def test_one_graph_around_an_attached_model_is_refused_with_advice(engine):
    model = network()
    engine.attach(model)
    with pytest.raises(Exception, match="compile first, and attach what it returns"):
        compiled(model, fullgraph=True)(noise(4, 8))
    engine.detach_model(model)
    compiled(model, fullgraph=True)(noise(4, 8))


def test_generated_kernels_get_the_same_inputs(engine, tmp_path, monkeypatch):
    """They check the strides of what was saved, and rely on its alignment."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten(), nn.Linear(36, 8)
    ).to(memory_format=torch.channels_last)
    # No pool of processes, and no programs that try what the processor can do.
    with torch._inductor.config.patch({"compile_threads": 1, "cpp.vec_isa_ok": True}):
        call = torch.compile(model)
        x = noise(2, 3, 5, 5).requires_grad_()
        compare(engine, call, lambda: (call(x).pow(2).sum(), x))


# ---------------------------------------------------------------------- traced, without data
def _fake(model):
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        model(noise(4, 8)).sum().backward()
    model.zero_grad()


TRACES = {
    "make_fx": lambda m: make_fx(m)(noise(4, 8)),
    "make_fx of a training step": lambda m: make_fx(lambda x: _slopes(m, m(x)))(noise(4, 8)),
    "torch.export": lambda m: torch.export.export(m, (noise(4, 8),)),
    "torch.export, not strict": lambda m: torch.export.export(m, (noise(4, 8),), strict=False),
    "torch.jit.trace": lambda m: torch.jit.trace(m, noise(4, 8)),
    "torch.fx": torch.fx.symbolic_trace,
    "fake tensors": _fake,
}


@pytest.mark.parametrize("how", TRACES)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_nothing_leaves_while_a_model_is_traced(how, engine):
    model = network()
    engine.attach(model)
    traced = TRACES[how](model)
    on_disk(engine)
    assert moved(engine) == 0
    if traced is not None and how != "make_fx of a training step":
        call = traced.module() if hasattr(traced, "module") else traced
        assert torch.equal(call(noise(4, 8)), model(noise(4, 8)))
    model(noise(4, 8)).sum().backward()
    assert left_bytes(engine.metrics()) > 0


def test_a_capture_into_a_cuda_graph_is_refused(engine, monkeypatch):
    model = network()
    engine.attach(model)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(OffloadError, match=r"CUDA graph.*activations\.enabled: false"):
            model(noise(4, 8))
        with torch.no_grad():
            model(noise(4, 8))  # nothing would leave
    model(noise(4, 8)).sum().backward()
    assert left_bytes(engine.metrics()) > 0


def test_torch_compile_leaves_this_package_alone_but_for_models_of_its_examples(engine):
    engine.attach(network())
    is_left_alone = torch._dynamo.trace_rules.check
    assert is_left_alone(OffloadEngine.metrics)
    assert not is_left_alone(GPT.forward)
