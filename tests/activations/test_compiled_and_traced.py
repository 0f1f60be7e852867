"""Models that are compiled, traced or captured: they work, or it is said why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from offload_strategy import OffloadEngine, OffloadError
from offload_strategy.activations.saved_tensor_hooks import ActivationOffload
from offload_strategy.examples.gpt import GPT
from offload_strategy.store.tensor_store import TensorStore
from tests.activations.support import compare, noise
from tests.training import activations_only, assert_same_bits, gradients, moved, on_disk


@pytest.fixture(autouse=True)
def _nothing_compiled_remains() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="aot_eager", **options)


class Breaks(nn.Module):
    """A model whose graph breaks in the middle, and which branches on its data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = network(), network()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        if x.sum() > 0:
            x = x.tanh()
        return self.second(x)


def _in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


def _block_by_block(model: nn.Module) -> nn.Module:
    for block in model.children():
        block.compile(backend="aot_eager")
    return model


#: How a model is compiled, and when it is attached: before, after, or after by its inner module.
ORDERS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "attach, compile": (compiled, "before"),
    "compile, attach": (lambda m: compiled(m, fullgraph=True), "after"),
    "compile, attach the inner": (compiled, "inner"),
    "attach, compile in place": (_in_place, "before"),
    "compile in place, attach": (_in_place, "after"),
    "compile blocks, attach": (_block_by_block, "after"),
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_compiled_model_is_the_same_in_whatever_order(order: str, engine: OffloadEngine) -> None:
    plain = network()
    plain(noise(4, 8)).pow(2).sum().backward()
    model = network()
    compile_model, when = ORDERS[order]
    if when == "before":
        engine.attach(model)
    call = compile_model(model)
    if when != "before":
        engine.attach(model if when == "inner" else call)
    for _ in range(2):
        model.zero_grad()
        loss = call(noise(4, 8)).pow(2).sum()
        on_disk(engine)
        loss.backward()
        assert_same_bits(gradients(model), gradients(plain))
    assert moved(engine) > 0


def test_one_graph_around_an_attached_model_is_refused_with_advice(engine: OffloadEngine) -> None:
    model = network()
    engine.attach(model)
    with pytest.raises(Exception, match="compile first, and attach what it returns"):
        compiled(model, fullgraph=True)(noise(4, 8))
    engine.detach_model(model)
    compiled(model, fullgraph=True)(noise(4, 8))


def test_graphs_that_break(engine: OffloadEngine) -> None:
    torch.manual_seed(0)
    model = Breaks()
    call = compiled(model)
    x = noise(4, 8).requires_grad_()
    for sign in (1, -1):
        compare(engine, call, lambda sign=sign: (call(x * sign).pow(2).sum(), x))


def test_generated_kernels_get_the_same_inputs(
    engine: OffloadEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def _fake(model: nn.Module) -> None:
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        model(noise(4, 8)).sum().backward()
    model.zero_grad()


TRACES: dict[str, Callable[[nn.Module], Any]] = {
    "make_fx": lambda m: make_fx(m)(noise(4, 8)),
    "make_fx of a training step": lambda m: make_fx(
        lambda x: torch.autograd.grad(m(x).sum(), list(m.parameters()))
    )(noise(4, 8)),
    "torch.export": lambda m: torch.export.export(m, (noise(4, 8),)),
    "torch.export, not strict": lambda m: torch.export.export(m, (noise(4, 8),), strict=False),
    "torch.jit.trace": lambda m: torch.jit.trace(m, noise(4, 8)),
    "torch.fx": lambda m: torch.fx.symbolic_trace(m),
    "fake tensors": _fake,
}


@pytest.mark.parametrize("how", TRACES)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_nothing_leaves_while_a_model_is_traced(how: str, engine: OffloadEngine) -> None:
    model = network()
    engine.attach(model)
    traced = TRACES[how](model)
    on_disk(engine)
    assert moved(engine) == 0
    if traced is not None and how != "make_fx of a training step":
        call = traced.module() if hasattr(traced, "module") else traced
        assert torch.equal(call(noise(4, 8)), model(noise(4, 8)))
    model(noise(4, 8)).sum().backward()
    assert moved(engine) + moved(engine, verb="forwarded") > 0


# ---------------------------------------------------------------------- CUDA graphs
def test_a_capture_into_a_cuda_graph_is_refused(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network()
    with activations_only(disk) as engine:
        engine.attach(model)
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_initialized", lambda: True)
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            with pytest.raises(OffloadError, match=r"CUDA graph.*activations\.enabled: false"):
                model(noise(4, 8))
            with torch.no_grad():
                model(noise(4, 8))  # nothing would leave
        model(noise(4, 8)).sum().backward()
        assert moved(engine) + moved(engine, verb="forwarded") > 0


def test_torch_compile_leaves_the_packages_own_code_alone(engine: OffloadEngine) -> None:
    engine.attach(network())
    is_left_alone = torch._dynamo.trace_rules.check
    for function in (
        ActivationOffload.enter,
        TensorStore.put,
        TensorStore.get,
        OffloadEngine.metrics,
    ):
        assert is_left_alone(function)
    assert not is_left_alone(GPT.forward)
