"""Streamed models that are called in other ways than by a training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.activations.support import noise
from tests.activations.test_transforms import AROUND
from tests.activations.zoo import batch, build, loss_of
from tests.training import (
    Numbers,
    gradients,
)
from tests.weights.support import (
    EACH_OVERLAP,
    EACH_THAT_KEEPS_GRADIENTS,
    OVERLAPS,
    Block,
    Net,
    compare,
    in_pairs,
    loss,
    net,
    overlapping,
    step,
    train,
    zoo_loss,
)


# ---------------------------------------------------------------------- calls of other kinds
@EACH_THAT_KEEPS_GRADIENTS
def test_functional_call_with_its_own_weights(disk: Path, overlap: str) -> None:
    def forward(model: Any, number: int) -> torch.Tensor:
        x = noise(4, 8, seed=number)
        own = dict(model.named_parameters())
        value: torch.Tensor = torch.func.functional_call(model, own, (x,)).pow(2).mean()
        return value

    compare(disk, partial(train, loss_of=forward, look=gradients), **overlapping(overlap))


@pytest.mark.parametrize("transform", AROUND)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_transforms(disk: Path, transform: str) -> None:
    def use(model: Any, optimizer: Any) -> list[Numbers]:
        history = train(model, optimizer)
        for _ in range(2):
            results = AROUND[transform](model)
            history.append({str(n): value.detach().clone() for n, value in enumerate(results)})
        return [*history, *train(model, optimizer)]

    compare(disk, use)


CALLS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "in evaluation mode": lambda m, x: m.eval()(x),
    "not by way of its hooks": lambda m, x: m.forward(x),
    "of a part": lambda m, x: m.features(x),
    "of one block": lambda m, x: m.blocks[1](x),
    "of one layer in a block": lambda m, x: m.blocks[1].up(x),
    "of one block and not by way of its hooks": lambda m, x: m.blocks[1].forward(x),
    "of its pieces by hand": lambda m, x: m.head(m.blocks[0](m.stem(x)) * m.scale),
    "under hooks that keep": lambda m, x: _kept(m, x),
    "on the host": lambda m, x: _on_the_host(m, x),
}


def _kept(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t):
        return model.features(x)  # type: ignore[no-any-return]


def _on_the_host(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return model(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("activations", [True, False], ids=["activations", "none"])
@pytest.mark.parametrize("call", CALLS)
def test_gradients_of_a_call(disk: Path, call: str, activations: bool) -> None:
    """Whichever way a model is called, autograd has the weights that it saved."""

    def use(model: Any, _: Any) -> list[Numbers]:
        history = []
        for number in range(3):
            x = noise(4, 8, seed=number).requires_grad_()
            value = CALLS[call](model, x).pow(2).sum()
            value.backward()
            assert x.grad is not None
            history.append({"loss": value.detach().clone(), "x": x.grad, **gradients(model)})
            model.train()
        return history

    compare(disk, use, optimizer_of=None, activations={"enabled": activations})


@pytest.mark.parametrize("kind", ["GPT-2", "Llama", "T5", "BERT", "ResNet", "ViT", "CLIP"])
def test_gradients_in_evaluation_mode(disk: Path, kind: str) -> None:
    def use(model: Any, _: Any) -> list[Numbers]:
        return train(model.eval(), None, 2, loss_of=zoo_loss(kind), look=gradients)

    compare(disk, use, lambda: build(kind), optimizer_of=None)


def test_gradients_of_the_encoder_alone(disk: Path) -> None:
    def use(model: Any, _: Any) -> list[Numbers]:
        torch.manual_seed(3)
        hidden = model.get_encoder()(batch("T5", 0)["input_ids"]).last_hidden_state
        hidden.pow(2).sum().backward()
        return [gradients(model)]

    compare(disk, use, lambda: build("T5"), optimizer_of=None)


@EACH_OVERLAP
def test_a_head_that_is_the_embedding_without_being_tied(disk: Path, overlap: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(16, 8)
            self.blocks = nn.ModuleList([Block() for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embedding(x.abs().mul(10).long() % 16)
            for block in self.blocks:
                x = block(x)
            return F.linear(x, self.embedding.weight)

    compare(disk, train, lambda: net(Model), **overlapping(overlap))


@pytest.mark.parametrize("container", ["list", "dictionary", "of its own"])
@EACH_OVERLAP
def test_weights_that_are_used_outside_of_the_module_that_has_them(
    disk: Path, container: str, overlap: str
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            made = [nn.Parameter(torch.randn(8, 8)) for _ in range(4)]
            self.matrices: Any
            if container == "list":
                self.matrices = nn.ParameterList(made)
            elif container == "dictionary":
                self.matrices = nn.ParameterDict({str(n): p for n, p in enumerate(made)})
            else:
                self.matrices = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

        def each(self) -> list[Any]:
            if container == "list":
                return list(self.matrices)
            if container == "dictionary":
                return list(self.matrices.values())
            return [layer.weight for layer in self.matrices]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for matrix in self.each():
                x = (x @ matrix).tanh()
            return x

    compare(disk, train, lambda: net(Model), **overlapping(overlap))


@EACH_OVERLAP
def test_parameters_of_odd_forms(disk: Path, overlap: str) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.tensor(1.5))
            self.waves = nn.Parameter(torch.randn(8, dtype=torch.complex64))
            self.nothing = nn.Parameter(torch.empty(0, 8))
            self.one = nn.Parameter(torch.ones(1))
            self.turned = nn.Parameter(torch.randn(8, 8).t())
            self.wide = nn.Parameter(torch.randn(8, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x / self.temperature + (x * self.waves).abs() + x @ self.turned
            return x * self.one + (x * self.wide).float() + self.nothing.sum()

    compare(disk, train, lambda: net(lambda: Net(Odd)), **overlapping(overlap))


def test_an_embedding_that_limits_its_own_norm(disk: Path) -> None:
    class Model(nn.Module):
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

    compare(disk, train, lambda: net(Model))


def test_channels_last(disk: Path) -> None:
    def use(model: Any, optimizer: Any) -> list[Numbers]:
        history = train(model, optimizer, 2, loss_of=zoo_loss("ResNet"))
        model.to(memory_format=torch.channels_last)
        history += [{"strides": torch.tensor(p.stride())} for p in model.parameters()]
        return [*history, *train(model, optimizer, 2, first=2, loss_of=zoo_loss("ResNet"))]

    compare(disk, use, lambda: build("ResNet"), **overlapping("off"))


# ---------------------------------------------------------------------- evaluation
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_an_encoder_takes_the_same_short_cuts_in_evaluation(disk: Path, mask: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            padding = torch.zeros(4, 6, dtype=torch.bool)
            padding[:, 4:] = mask
            return self.encoder(x, src_key_padding_mask=padding)  # type: ignore[no-any-return]

    def use(model: Any, _: Any) -> list[Numbers]:
        x = noise(4, 6, 8)
        torch.manual_seed(0)
        model(x).sum().backward()
        model.eval()
        with torch.no_grad():
            return [{"out": model(x).clone(), "again": model(x).clone()}]

    compare(disk, use, lambda: net(Model), optimizer_of=None)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


FAST_PATHS: dict[str, Callable[[], nn.Module]] = {
    "attention": Attention,
    "a layer": lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)),
    "layers": lambda: nn.Sequential(
        *(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))
    ),
    "another layer": lambda: nn.Sequential(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True), nn.Linear(8, 8)
    ),
}


@pytest.mark.parametrize("blocks", [[], ["Linear"]], ids=["found", "named"])
@pytest.mark.parametrize("kind", FAST_PATHS)
def test_attention_takes_the_same_short_cuts(disk: Path, kind: str, blocks: list[str]) -> None:
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


WATCHES = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "gradients": nullcontext,
}


@pytest.mark.parametrize(
    ("kind", "overlap", "watch"), in_pairs(["GPT-2", "T5", "ResNet"], OVERLAPS, list(WATCHES))
)
def test_validation_between_steps(disk: Path, kind: str, overlap: str, watch: str) -> None:
    def use(model: Any, optimizer: Any) -> list[Numbers]:
        history = []
        for number in range(4):
            history.append(step(model.train(), optimizer, number, loss_of=zoo_loss(kind)))
            with WATCHES[watch]():
                checked = loss_of(model.eval(), batch(kind, 100 + number)).detach().clone()
            history.append({"checked": checked.clone()})
        return history

    compare(disk, use, lambda: build(kind), **overlapping(overlap))


def test_inference_mode_from_the_first_pass_on(disk: Path) -> None:
    def use(model: Any, optimizer: Any) -> list[Numbers]:
        with torch.inference_mode():
            first = {"loss": loss(model).clone()}
            norms = {n: p.norm().clone() for n, p in model.named_parameters()}
        return [
            {name: value.clone() for name, value in first.items()},
            {name: value.clone() for name, value in norms.items()},
            *train(model, optimizer),
        ]

    compare(disk, use)


def test_weights_that_are_changed_in_inference_mode(disk: Path) -> None:
    def use(model: Any, optimizer: Any) -> list[Numbers]:
        with torch.inference_mode():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        return train(model, optimizer)

    compare(disk, use)


GENERATION: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
    "without a cache": {"do_sample": False, "use_cache": False},
}


@pytest.mark.parametrize("way", GENERATION)
@pytest.mark.parametrize("kind", ["GPT-2", "Llama", "T5"])
def test_text_generation_between_steps(disk: Path, kind: str, way: str) -> None:
    def use(model: Any, optimizer: Any) -> list[Numbers]:
        history = []
        prompt = torch.tensor([[5, 6, 7], [8, 9, 10]])
        options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 6}
        for number in range(3):
            history.append(step(model.train(), optimizer, number, loss_of=zoo_loss(kind)))
            torch.manual_seed(number)
            tokens = model.eval().generate(prompt, pad_token_id=0, **options, **GENERATION[way])
            history.append({"tokens": tokens})
        return history

    compare(disk, use, lambda: build(kind))


# ---------------------------------------------------------------------- compiled
@pytest.fixture
def _nothing_compiled_remains() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def _compiled(model: Any) -> Any:
    return torch.compile(model, backend="aot_eager")


def _compiled_in_place(model: Any) -> Any:
    model.compile(backend="aot_eager")
    return model


def _block_compiled(model: Any) -> Any:
    model.blocks[1] = torch.compile(model.blocks[1], backend="aot_eager")
    return model


def _blocks_compiled_in_place(model: Any) -> Any:
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


def _layer_compiled_in_place(model: Any) -> Any:
    model.blocks[1].up.compile(backend="aot_eager")
    return model


def _function_compiled(model: Any) -> Any:
    model.blocks[1].forward = torch.compile(model.blocks[1].forward, backend="aot_eager")
    return model


COMPILED: dict[str, Callable[[Any], Any]] = {
    "the model": _compiled,
    "the model in place": _compiled_in_place,
    "a block": _block_compiled,
    "blocks in place": _blocks_compiled_in_place,
    "a layer in place": _layer_compiled_in_place,
    "a block's forward": _function_compiled,
}


@pytest.mark.usefixtures("_nothing_compiled_remains")
@pytest.mark.parametrize("order", ["compile, attach", "attach, compile"])
@pytest.mark.parametrize("part", COMPILED)
def test_compiled_models(disk: Path, part: str, order: str) -> None:
    def run(model: Any, optimizer: Any) -> list[Numbers]:
        history = train(model, optimizer, 4)
        model.eval()
        with torch.no_grad():
            history.append({"checked": loss(model, 9).clone()})
        model.train()
        return [*history, *train(model, optimizer, 2, first=4)]

    if order == "compile, attach":
        compare(disk, run, lambda: COMPILED[part](net()))
    else:
        compare(disk, lambda model, optimizer: run(COMPILED[part](model), optimizer))


@pytest.mark.usefixtures("_nothing_compiled_remains")
@pytest.mark.parametrize("kind", ["GPT-2", "Llama"])
def test_a_compiled_language_model(disk: Path, kind: str) -> None:
    def use(model: Any, optimizer: Any) -> list[Numbers]:
        run = _compiled(model)
        return train(model, optimizer, loss_of=lambda _, number: run(**batch(kind, number)).loss)

    def make() -> Any:
        model = build(kind)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.0
        return model

    compare(disk, use, make)
