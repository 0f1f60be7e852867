"""Streamed weights in the hands of code that was not written for them, and partly trained."""

import gc
from itertools import product
from types import MethodType

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.nn import functional as F

from tests.activations.support import noise
from tests.activations.test_transforms import AROUND
from tests.activations.zoo import batch, build, loss_of
from tests.training import assert_same_bits, attached, bits, gradients, in_turn, weights
from tests.weights.nets import Block, Net, adamw, loss, net, step, train, zoo_loss
from tests.weights.support import OVERLAPS, away, compared, nearly_all_left, the_same


class Subclass(torch.Tensor):
    """Of a user."""


LOOKS = {
    "no bytes": lambda p: (p.shape, p.stride(), p.dtype, p.numel(), len(p), p.requires_grad),
    "no bytes either": lambda p: (isinstance(p, nn.Parameter), p.is_contiguous(), p.grad),
    "repr": repr,
    "format": lambda p: f"{p} {p.sum():.3f} {p.shape}",
    "array": lambda p: p.detach().numpy().tobytes(),
    "sum": lambda p: float(p.sum()),
    "item": lambda p: p.reshape(-1)[0].item(),
    "finite": lambda p: bool(torch.isfinite(p).all()),
    "rows": lambda p: [bits(row) for row in p],
    "stacked": lambda p: bits(torch.stack([p, p * 2])),
    "type": lambda p: (p.type(), p.is_leaf, p.is_cpu, p.device, p.layout, p.nbytes, p.data.shape),
    "form": lambda p: (p.stride(), p.is_contiguous(), p.storage_offset(), p.dim_order()),
    "storage": lambda p: p.untyped_storage().nbytes(),
    "class": lambda p: (isinstance(p, nn.Parameter), isinstance(p, torch.Tensor), bool(p.grad)),
    "new": lambda p: (p.new_zeros(2).dtype, torch.empty_like(p).shape, type(torch.zeros_like(p))),
    "to": lambda p: (type(p.to(torch.float64)), bits(p.double()), bits(p.cpu()), p.cpu() is p),
    "clone": lambda p: (type(p.clone()), bits(p.clone()), type(p.detach()), type(p.data)),
    "hash": lambda p: (p in {p: 1}, {p: 1}[p], any(p is q for q in [p])),
    "as another class": lambda p: bits(p.as_subclass(Subclass).as_subclass(torch.Tensor)),
    "wrapped again": lambda p: (type(nn.Parameter(p)), bits(nn.Parameter(p, False))),
    "detached in place": lambda p: bits(p.detach().detach_()),
}  # fmt: skip


class Conjugate(nn.Module):
    """Autograd saves a conjugate view of its weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.cfloat))

    def forward(self, x):
        return torch.tanh(x) @ self.weight.mH


def test_conjugate_views_of_a_weight(engine):
    def run(engine):
        torch.manual_seed(0)
        model = nn.Sequential(*(Conjugate() for _ in range(3)))
        if engine is not None:
            engine.attach(model)
        x = torch.randn(2, 4, dtype=torch.cfloat, requires_grad=True)
        model(x).abs().square().sum().backward()
        return {"x": x.grad, **gradients(model)}

    assert_same_bits(run(engine), run(None))


@pytest.mark.usefixtures("no_room")  # each look brings each weight
def test_looking_at_a_weight(engine):
    plain, model = net(), net()
    train(plain, adamw(plain))
    optimizer = engine.attach(model, adamw(model))
    train(model, optimizer)
    for name, look in LOOKS.items():
        before = away(model)
        assert before
        for (of, streamed), twin in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert look(streamed) == look(twin), f"{name} of {of}"
        assert not name.startswith("no bytes") or away(model) == before
    assert repr(model) == repr(plain)


# ---------------------------------------------------------------------- calls of other kinds
@pytest.mark.parametrize("transform", AROUND)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@compared()
def test_transforms(model, optimizer, transform):
    history = train(model, optimizer)
    for _ in range(2):
        results = AROUND[transform](model)
        history.append({str(n): value.detach().clone() for n, value in enumerate(results)})
    return [*history, *train(model, optimizer)]


def _kept(model, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t):
        return model.features(x)


def _kept_in_tuples(model, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t,), lambda kept: kept[0]):
        return model(x)


def _on_the_host(model, x):
    with torch.autograd.graph.save_on_cpu():
        return model(x)


CALLS = {
    "as a function": lambda m, x: torch.func.functional_call(m, dict(m.named_parameters()), (x,)),
    "in evaluation mode": lambda m, x: m.eval()(x),
    "not by way of its hooks": lambda m, x: m.forward(x),
    "of a part": lambda m, x: m.features(x),
    "of one block": lambda m, x: m.blocks[1](x),
    "of one layer in a block": lambda m, x: m.blocks[1].up(x),
    "of one block and not by way of its hooks": lambda m, x: m.blocks[1].forward(x),
    "of its pieces by hand": lambda m, x: m.head(m.blocks[0](m.stem(x)) * m.scale),
    "under hooks that keep": _kept,
    "under hooks that keep in tuples": _kept_in_tuples,
    "on the host": _on_the_host,
}


@pytest.mark.parametrize(("call", "activations"), in_turn(CALLS, [True, False]))
@compared(optimizer_of=None)
def test_gradients_of_a_call(model, optimizer, call):
    """Whichever way a model is called, autograd has the weights that it saved."""
    history = []
    for number in range(2):
        x = noise(4, 8, seed=number).requires_grad_()
        value = CALLS[call](model, x).pow(2).sum()
        value.backward()
        history.append({"loss": value.detach().clone(), "x": x.grad, **gradients(model)})
        model.train()
    return history


def _after_a_transform(block, x):
    y, slopes = torch.func.vjp(lambda x: Block.forward(block, x), x)
    return Block.forward(block, x) + slopes(y)[0] * block.gain


def _in(context):
    def forward(block, x):
        with context():
            return Block.forward(block, x)

    return forward


#: What a block does in its own forward.
WITHIN = {
    "hooks": _in(lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)),
    "no hooks allowed": _in(lambda: torch.autograd.graph.disable_saved_tensors_hooks("none here")),
    "gradients enabled": _in(torch.enable_grad),
    "a transform": _after_a_transform,
}


class Odd(Block):
    forward = None

    def __init__(self, within):
        super().__init__()
        self.forward = MethodType(WITHIN[within], self)


def odd(within):
    return net(lambda: Net(lambda: Odd(within)))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("within", "activations"), [*product(WITHIN, [True, False])])
@compared(odd, optimizer_of=None)
def test_gradients_of_blocks_that_do_in_their_own_forward(model, optimizer, within, frozen):
    """Autograd has their weights, also where no hook of ours is told of what it saves."""
    for block in model.blocks if frozen else ():
        block.up.requires_grad_(False)
    history = []
    for number in range(2):
        x = noise(4, 8, seed=number).requires_grad_()
        y = x
        with torch.set_grad_enabled(within != "gradients enabled"):
            for block in model.blocks:
                y = block(y)
        value = y.pow(2).sum()
        value.backward()
        history.append({"value": value.detach().clone(), "x": x.grad, **gradients(model)})
    return history


# ---------------------------------------------------------------------- evaluation
def layer():
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


class Encoder(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.encoder = nn.TransformerEncoder(layer(), 3)
        self.mask = mask

    def forward(self, x):
        padding = torch.zeros(4, 6, dtype=torch.bool)
        padding[:, 4:] = self.mask
        # Without padding the fast path is taken in evaluation, with it nested tensors are made.
        encoded = self.encoder(x, src_key_padding_mask=padding)
        return F.pad(encoded, (0, 0, 0, 6 - encoded.shape[1]))


FAST_PATHS = {
    "a layer": lambda: nn.Sequential(layer()),
    "layers": lambda: nn.Sequential(layer(), layer()),
    "an encoder": lambda: Encoder(False),
    "an encoder with padding": lambda: Encoder(True),
}


@pytest.mark.parametrize(("kind", "parameters"), in_turn(FAST_PATHS, [{}, {"blocks": ["Linear"]}]))
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@compared(lambda kind: nn.Sequential(net(FAST_PATHS[kind]), nn.Linear(8, 8)))
def test_attention_takes_the_same_fast_paths(model, optimizer):
    def loss_of(model, number):
        torch.manual_seed(number)
        return model(noise(4, 6, 8, seed=number)).pow(2).sum()

    history = []
    for number in range(3):
        history.append(step(model.train(), optimizer, number, loss_of))
        with torch.no_grad():
            history.append({"checked": loss_of(model.eval(), number).clone()})
    return history


@pytest.mark.parametrize("change", [False, True])
@compared()
def test_inference_mode_from_the_first_pass_on(model, optimizer, change):
    with torch.inference_mode():
        first = {"loss": loss(model).clone()}
        first |= {n: p.norm().clone() for n, p in model.named_parameters()}
        for parameter in model.parameters() if change else ():
            parameter.mul_(0.5)
    return [{n: value.clone() for n, value in first.items()}, *train(model, optimizer)]


@pytest.mark.parametrize(("kind", "beams"), [("GPT-2", 1), ("T5", 3)])
@compared(lambda kind: build(kind))
def test_text_generation_between_steps(model, optimizer, kind, beams):
    history = []
    prompt = torch.tensor([[5, 6, 7], [8, 9, 10]])
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 6, "pad_token_id": 0}
    for number in range(2):
        history.append(step(model.train(), optimizer, number, loss_of=zoo_loss(kind)))
        torch.manual_seed(number)
        tokens = model.eval().generate(prompt, do_sample=False, num_beams=beams, **options)
        history.append({"tokens": tokens})
    return history


# ---------------------------------------------------------------------- gradients
@compared(optimizer_of=None)
def test_gradients_as_values_of_a_function(model, optimizer):
    inputs = dict(model.named_parameters())
    if "dict[" not in str(torch.autograd.grad.__annotations__["inputs"]):  # torch before 2.12
        inputs = list(inputs.values())
    slopes = torch.autograd.grad(loss(model), inputs, materialize_grads=True)
    named = slopes.items() if isinstance(slopes, dict) else enumerate(slopes)
    return [{str(name): slope.clone() for name, slope in named}]


@pytest.mark.parametrize("how", ["grad", "inputs of backward"])
def test_asking_for_gradients_brings_no_weights(engine, accessed, how):
    model = net()
    engine.attach(model)
    value = loss(model)
    accessed.clear()
    if how == "grad":
        torch.autograd.grad(value, list(model.parameters()))
    else:
        value.backward(inputs=list(model.parameters()))
    assert not accessed
    assert nearly_all_left(model)


@compared(optimizer_of=None)
def test_a_backward_hook_sees_weights_whichever_gradients_are_asked_for(model, optimizer):
    seen = []

    def look(module, *gradients):
        seen.append({n: p.detach().norm().clone() for n, p in module.named_parameters()})

    handles = [b.register_full_backward_hook(look) for b in (*model.blocks, model.head)]
    model(noise(4, 8).requires_grad_()).sum().backward()
    assert model.stem.weight.grad is not None
    torch.autograd.grad(model(noise(4, 8).requires_grad_()).sum(), [model.stem.weight])
    for handle in handles:
        handle.remove()
    assert len(seen) == 8
    return seen


def _penalty_on_the_gradient_of_the_input(model, number):
    x = noise(4, 8, seed=number).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).pow(2).mean() + model(x.detach()).mean()


def _penalty_on_the_gradients_of_the_weights(model, number):
    value = loss(model, number)
    slopes = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
    return value + torch.stack([slope.pow(2).sum() for slope in slopes]).sum()


PENALTIES = [_penalty_on_the_gradient_of_the_input, _penalty_on_the_gradients_of_the_weights]


@pytest.mark.parametrize(("penalty", "overlap"), in_turn(PENALTIES, ["commit", "off"]))
@compared()
def test_penalties(model, optimizer, penalty):
    return train(model, optimizer, loss_of=penalty, look=gradients)


@compared(optimizer_of=None)
def test_an_own_optimizer_that_is_not_attached_lets_weights_go(model, optimizer, engine):
    def penalized(model, number):
        return loss(model, number) + 0.1 * sum(p.pow(2).sum() for p in model.parameters())

    history = train(model, adamw(model), loss_of=penalized)
    with torch.no_grad():
        for number in range(2):
            loss(model, number)
    assert engine is None or nearly_all_left(model), "a penalty of long ago holds them"
    return history


# ---------------------------------------------------------------------- partly trained
TARGETS = {"GPT-2": ["c_attn", "c_fc"], "Llama": ["q_proj", "v_proj", "down_proj"]}

#: With 1 KiB the adapters stay in memory, and of the frozen base all but norms and biases leaves.
SIZES = [{"min_size": size} for size in (1, 1024, 1, 1024, 1)]


def adapted(base, kind):
    """The same adapters every time."""
    torch.manual_seed(1)
    options = {"r": 2, "lora_alpha": 4, "lora_dropout": 0.1, "target_modules": TARGETS[kind]}
    return get_peft_model(base, LoraConfig(**options, fan_in_fan_out=kind == "GPT-2")).train()


@pytest.mark.parametrize(
    ("kind", "overlap", "parameters", "reentrant", "activations"),
    in_turn(
        [*TARGETS] * 4, [*OVERLAPS, "in memory"], SIZES, [None, True, False], [True, False, False]
    ),
)
@the_same
def test_adapters_train_the_same_and_are_merged_the_same(engine, kind, reentrant):
    """The merged model computes when the one with adapters is gone."""
    base = build(kind, reentrant)
    model = adapted(base, kind)
    if reentrant is not None:
        model.enable_input_require_grads()
    optimizer = attached(engine, model, adamw(model))
    assert engine is None or away(model)
    history = train(model, optimizer, loss_of=zoo_loss(kind))
    merged = model.merge_and_unload().eval()
    optimizer.zero_grad()
    del base, model, optimizer
    gc.collect()
    with torch.no_grad():
        history.append({"loss": loss_of(merged, batch(kind, 7)).clone()})
    return history, merged


@pytest.mark.parametrize(("kind", "overlap"), [("GPT-2", "commit"), ("Llama", "off")])
@the_same
def test_adapters_that_come_when_the_base_is_streamed_already_and_are_saved(engine, kind, tmp_path):
    base = build(kind)
    if engine is not None:
        engine.attach(base)
    model = adapted(base, kind)
    optimizer = attached(engine, None, adamw(model))
    history = train(model, optimizer, loss_of=zoo_loss(kind))
    model.save_pretrained(tmp_path / "adapters")
    loaded = PeftModel.from_pretrained(build(kind), str(tmp_path / "adapters"))
    assert_same_bits(weights(loaded), weights(model))
    return history, model


@pytest.mark.parametrize(("overlap", "kind", "first"), in_turn(OVERLAPS, TARGETS, [0, 0, 1]))
@compared(lambda kind: build(kind))
def test_layers_are_frozen_for_a_while(model, optimizer, kind, first):
    history = []
    for number in range(5):
        for name, parameter in model.named_parameters():
            if ".1." in name:
                parameter.requires_grad_(number // 2 % 2 == first)
        history += train(model, optimizer, 1, first=number, loss_of=zoo_loss(kind))
    return history
