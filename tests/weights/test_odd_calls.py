"""Streamed models that are called in other ways than by a training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.activations.support import noise
from tests.activations.test_transforms import AROUND
from tests.activations.zoo import build
from tests.training import Numbers, gradients, in_turn
from tests.weights.support import (
    OVERLAPS,
    Net,
    compare,
    compared,
    loss,
    net,
    step,
    train,
    zoo_loss,
)


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


def _kept(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t):
        return model.features(x)  # type: ignore[no-any-return]


def _on_the_host(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return model(x)  # type: ignore[no-any-return]


CALLS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "with its own weights": lambda m, x: torch.func.functional_call(
        m, dict(m.named_parameters()), (x,)
    ),
    "in evaluation mode": lambda m, x: m.eval()(x),
    "not by way of its hooks": lambda m, x: m.forward(x),
    "of a part": lambda m, x: m.features(x),
    "of one block": lambda m, x: m.blocks[1](x),
    "of one layer in a block": lambda m, x: m.blocks[1].up(x),
    "of one block and not by way of its hooks": lambda m, x: m.blocks[1].forward(x),
    "of its pieces by hand": lambda m, x: m.head(m.blocks[0](m.stem(x)) * m.scale),
    "under hooks that keep": _kept,
    "on the host": _on_the_host,
}


@pytest.mark.parametrize(("call", "activations"), in_turn(CALLS, [True, False]))
def test_gradients_of_a_call(disk, call, activations):
    """Whichever way a model is called, autograd has the weights that it saved."""

    def use(model: Any, _: Any) -> list[Numbers]:
        history = []
        for number in range(2):
            x = noise(4, 8, seed=number).requires_grad_()
            value = CALLS[call](model, x).pow(2).sum()
            value.backward()
            assert x.grad is not None
            history.append({"loss": value.detach().clone(), "x": x.grad, **gradients(model)})
            model.train()
        return history

    compare(disk, use, optimizer_of=None, activations={"enabled": activations})


class Used(nn.Module):
    """Uses weights outside of the module that has them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = (x @ layer.weight).tanh()
        return x


class Odd(nn.Module):
    """Has parameters of odd forms."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.waves = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.nothing = nn.Parameter(torch.empty(0, 8))
        self.one = nn.Parameter(torch.ones(1))
        self.turned = nn.Parameter(torch.randn(8, 8).t())
        self.halves = nn.Parameter(torch.randn(16, 8))
        self.wide = nn.Parameter(torch.randn(8, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x / self.temperature + (x * self.waves).abs() + x @ self.turned @ self.halves[8:]
        return x * self.one + (x * self.wide).float() + self.nothing.sum()


class Limited(nn.Module):
    """Its embeddings limit their own norms."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(
            [nn.Embedding(16, 8, max_norm=1.0, padding_idx=0) for _ in range(3)]
        )
        self.bag = nn.EmbeddingBag(16, 8, max_norm=0.5)
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        indices = x.abs().mul(10).long() % 16
        summed: torch.Tensor = sum(e(indices) for e in self.embeddings).mean(1)
        return self.head(summed + self.bag(indices))  # type: ignore[no-any-return]


ODD_MODELS: dict[str, Callable[[], nn.Module]] = {
    "weights of layers": Used,
    "odd forms": lambda: Net(Odd),
    "norms that are limited": Limited,
}


@pytest.mark.parametrize(("kind", "overlap"), in_turn(ODD_MODELS, OVERLAPS))
@compared(lambda kind: net(ODD_MODELS[kind]), overlaps=[])
def test_odd_models(model, optimizer):
    return train(model, optimizer)


@compared(lambda: build("ResNet"), overlaps=["off"])
def test_channels_last(model, optimizer):
    history = train(model, optimizer, 2, loss_of=zoo_loss("ResNet"))
    model.to(memory_format=torch.channels_last)
    history += [{"strides": torch.tensor(p.stride())} for p in model.parameters()]
    return [*history, *train(model, optimizer, 2, first=2, loss_of=zoo_loss("ResNet"))]


# ---------------------------------------------------------------------- evaluation


def layer(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options)


class Encoder(nn.Module):
    def __init__(self, mask: bool) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(layer(), 3)
        self.mask = mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padding = torch.zeros(4, 6, dtype=torch.bool)
        padding[:, 4:] = self.mask
        # Without padding the fast path is taken in evaluation, with it nested tensors are made.
        encoded = self.encoder(x, src_key_padding_mask=padding)
        return F.pad(encoded, (0, 0, 0, 6 - encoded.shape[1]))


FAST_PATHS: dict[str, Callable[[], nn.Module]] = {
    "a layer": lambda: nn.Sequential(layer()),
    "layers": lambda: nn.Sequential(layer(), layer()),
    "an encoder": lambda: Encoder(False),
    "an encoder with padding": lambda: Encoder(True),
}


@pytest.mark.parametrize(("kind", "blocks"), in_turn(FAST_PATHS, [[], ["Linear"]]))
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_attention_takes_the_same_fast_paths(disk, kind, blocks):
    def use(model: Any, optimizer: Any) -> list[Numbers]:
        history = []
        for number in range(3):
            torch.manual_seed(number)
            value = model.train()(noise(4, 6, 8, seed=number)).pow(2).sum()
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                checked = model.eval()(noise(4, 6, 8, seed=number))
            history.append({"loss": value.detach().clone(), "checked": checked.clone()})
        return history

    def make() -> Any:
        return nn.Sequential(net(FAST_PATHS[kind]), nn.Linear(8, 8))

    compare(disk, use, make, parameters={"enabled": True, "min_size": 1, "blocks": blocks})


@pytest.mark.parametrize("change", [False, True])
@compared()
def test_inference_mode_from_the_first_pass_on(model, optimizer, change):
    with torch.inference_mode():
        first = {"loss": loss(model).clone()}
        first |= {n: p.norm().clone() for n, p in model.named_parameters()}
        for parameter in model.parameters() if change else ():
            parameter.mul_(0.5)
    return [{n: value.clone() for n, value in first.items()}, *train(model, optimizer)]


GENERATION: dict[tuple[str, str], dict[str, Any]] = {
    ("GPT-2", "greedy"): {"do_sample": False},
    ("T5", "beams"): {"do_sample": False, "num_beams": 3},
}


@pytest.mark.parametrize(("kind", "way"), GENERATION)
@compared(lambda kind: build(kind))
def test_text_generation_between_steps(model, optimizer, kind, way):
    history = []
    prompt = torch.tensor([[5, 6, 7], [8, 9, 10]])
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 6, "pad_token_id": 0}
    for number in range(2):
        history.append(step(model.train(), optimizer, number, loss_of=zoo_loss(kind)))
        torch.manual_seed(number)
        tokens = model.eval().generate(prompt, **options, **GENERATION[kind, way])
        history.append({"tokens": tokens})
    return history


# ---------------------------------------------------------------------- compiled
@pytest.fixture
def _nothing_compiled_remains() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def _compiled(module: Any) -> Any:
    return torch.compile(module, backend="aot_eager")


def _compiled_in_place(model: Any, *modules: Any) -> Any:
    for module in modules:
        module.compile(backend="aot_eager")
    return model


COMPILED: dict[str, Callable[[Any], Any]] = {
    "the model": _compiled,
    "the model in place": lambda m: _compiled_in_place(m, m),
    "blocks in place": lambda m: _compiled_in_place(m, *m.blocks),
}


@pytest.mark.usefixtures("_nothing_compiled_remains")
@pytest.mark.parametrize(("part", "before"), in_turn(COMPILED, [False, True]))
@compared(lambda part, before: COMPILED[part](net()) if before else net())
def test_compiled_models(model, optimizer, part, before):
    model = model if before else COMPILED[part](model)
    history = train(model, optimizer)
    model.eval()
    with torch.no_grad():
        history.append({"checked": loss(model, 9).clone()})
    model.train()
    return [*history, *train(model, optimizer, 2, first=4)]
