"""A part of a streamed model is trained: adapters, some layers, beside weights that are frozen."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.nn import functional as F

from offload_strategy.weights.guarded_parameter import GuardedParameter
from tests.activations.zoo import batch, build, loss_of
from tests.training import (
    Numbers,
    assert_same_bits,
    assert_same_history,
    bits,
    moved,
    on_disk,
    weights,
)
from tests.weights.support import (
    EACH_OVERLAP,
    Net,
    adamw,
    compare,
    net,
    open_turns,
    overlapping,
    train,
)
from tests.weights.test_streaming import away, streaming

KINDS = ["GPT-2", "Llama"]
TARGETS = {"GPT-2": ["c_attn", "c_fc"], "Llama": ["q_proj", "v_proj", "down_proj"]}

#: With 1 KiB the adapters stay in memory, and of the frozen base all but norms and biases leaves.
SIZES = pytest.mark.parametrize("min_size", [1, 1024], ids=["adapters leave", "adapters stay"])


def lora(kind: str, **options: Any) -> LoraConfig:
    return LoraConfig(
        r=2,
        lora_alpha=4,
        lora_dropout=0.1,
        target_modules=TARGETS[kind],
        fan_in_fan_out=kind == "GPT-2",
        **options,
    )


def adapted(kind: str, reentrant: bool | None = None) -> Any:
    """A model with adapters, the same every time."""
    model = build(kind, reentrant)
    torch.manual_seed(1)
    return get_peft_model(model, lora(kind)).train()


def adamw_of_trained(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-1)


def fit(
    model: Any,
    optimizer: Any,
    kind: str,
    steps: int = 5,
    before: Callable[[int], None] = lambda step: None,
    after: Callable[[int], None] = lambda step: None,
) -> list[Numbers]:
    history = []
    for number in range(steps):
        before(number)
        torch.manual_seed(100 + number)
        value = loss_of(model, batch(kind, number))
        value.backward()
        history.append({"loss": value.detach().clone()})
        del value
        optimizer.step()
        optimizer.zero_grad()
        after(number)
    return history


# ---------------------------------------------------------------------- adapters
@SIZES
@EACH_OVERLAP
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_train_the_same(disk: Path, kind: str, overlap: str, min_size: int) -> None:
    compare(
        disk,
        lambda model, optimizer: fit(model, optimizer, kind),
        lambda: adapted(kind),
        adamw_of_trained,
        **overlapping(overlap),
        parameters={"enabled": True, "min_size": min_size},
    )


@pytest.mark.parametrize("activations", [True, False], ids=["activations", "none"])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_train_the_same_without_the_other_clients(
    disk: Path, kind: str, activations: bool
) -> None:
    compare(
        disk,
        lambda model, optimizer: fit(model, optimizer, kind),
        lambda: adapted(kind),
        adamw_of_trained,
        optimizer={"enabled": False},
        activations={"enabled": activations},
    )


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_train_the_same_in_checkpointed_layers(
    disk: Path, kind: str, reentrant: bool
) -> None:
    def make() -> Any:
        model = adapted(kind, reentrant)
        model.enable_input_require_grads()
        return model

    compare(
        disk,
        lambda model, optimizer: fit(model, optimizer, kind),
        make,
        adamw_of_trained,
        **overlapping("eager"),
    )


@SIZES
@EACH_OVERLAP
@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_base_is_written_once(disk: Path, kind: str, overlap: str, min_size: int) -> None:
    sections = {
        **overlapping(overlap),
        "parameters": {"enabled": True, "min_size": min_size},
    }
    with streaming(disk, **sections) as engine:
        written = []

        def look(step: int) -> None:
            on_disk(engine)
            written.append(moved(engine, "parameters", "written"))

        model = adapted(kind)
        optimizer = engine.attach(model, adamw_of_trained(model))
        look(-1)
        fit(model, optimizer, kind, after=look)
        sizes = [(p.requires_grad, p.nbytes) for p in model.parameters() if p.nbytes >= min_size]
        each_step = sum(nbytes for trained, nbytes in sizes if trained)
        base = sum(nbytes for trained, nbytes in sizes if not trained)
        assert written[0] >= 10_000
        # An adapter is written twice if the computation still has it when its update arrives.
        assert written[5] - written[2] <= 3 * 2 * each_step
        assert 2 * each_step < base, "else this does not tell the base from its adapters"
        assert moved(engine, "parameters", "read") > 5 * 10_000


@EACH_OVERLAP
@pytest.mark.parametrize("kind", KINDS)
def test_merged_adapters_give_the_weights_of_plain_training(
    disk: Path, kind: str, overlap: str
) -> None:
    def use(model: Any, optimizer: Any) -> list[Numbers]:
        fit(model, optimizer, kind)
        merged = model.merge_and_unload()
        return [weights(merged)]

    compare(disk, use, lambda: adapted(kind), adamw_of_trained, **overlapping(overlap))


@SIZES
@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_model_computes_when_its_adapters_are_gone(
    disk: Path, kind: str, min_size: int
) -> None:
    results = []
    for streamed in (False, True):
        options = {"enabled": True, "min_size": min_size}
        engine = streaming(disk, parameters=options) if streamed else None
        with nullcontext() if engine is None else engine:
            model = adapted(kind)
            optimizer: Any = adamw_of_trained(model)
            if engine is not None:
                optimizer = engine.attach(model, optimizer)
            fit(model, optimizer, kind, steps=2)
            merged = model.merge_and_unload().eval()
            optimizer.zero_grad()
            del model, optimizer
            gc.collect()
            with torch.no_grad():
                results.append({"loss": loss_of(merged, batch(kind, 7)).clone()})
    assert_same_bits(results[1], results[0])


@pytest.mark.parametrize("kind", KINDS)
def test_saved_adapters_load_into_a_plain_model(disk: Path, tmp_path: Path, kind: str) -> None:
    with streaming(disk) as engine:
        model = adapted(kind)
        optimizer = engine.attach(model, adamw_of_trained(model))
        fit(model, optimizer, kind)
        model.save_pretrained(tmp_path / "adapters")
    loaded = PeftModel.from_pretrained(build(kind), str(tmp_path / "adapters"))
    assert_same_bits(weights(loaded), weights(model))


@pytest.mark.parametrize("overlap", ["commit", "off"])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_that_come_when_the_base_is_streamed_already(
    disk: Path, kind: str, overlap: str
) -> None:
    results = []
    for streamed in (False, True):
        engine = streaming(disk, **overlapping(overlap)) if streamed else None
        with nullcontext() if engine is None else engine:
            base = build(kind)
            if engine is not None:
                engine.attach(base)
            torch.manual_seed(1)
            model: Any = get_peft_model(base, lora(kind)).train()
            optimizer: Any = adamw_of_trained(model)
            if engine is not None:
                optimizer = engine.attach(optimizer=optimizer)
            history = fit(model, optimizer, kind, steps=3)
        results.append([*history, weights(model)])
    assert_same_history(results[1], results[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_adapter_in_the_middle_of_training(disk: Path, kind: str) -> None:
    def use(model: Any, optimizer: Any) -> list[Numbers]:
        history = fit(model, optimizer, kind, steps=2)
        torch.manual_seed(2)
        model.add_adapter("second", lora(kind))
        model.set_adapter("second")
        optimizer.add_param_group({"params": [p for p in model.parameters() if p.requires_grad]})
        history += fit(model, optimizer, kind, steps=2)
        with model.disable_adapter(), torch.no_grad():
            history.append({"without": loss_of(model, batch(kind, 5)).clone()})
        model.set_adapter("default")
        return [*history, *fit(model, optimizer, kind, steps=2)]

    compare(disk, use, lambda: adapted(kind), adamw_of_trained)


# ---------------------------------------------------------------------- parts
PARTS: dict[str, Callable[[str], bool]] = {
    "the first layers": lambda name: ".0." in name,
    "the last layers": lambda name: ".1." in name,
    "embeddings": lambda name: "wte" in name or "embed" in name,
    "norms": lambda name: "norm" in name or "ln_" in name,
    "matrices of the middle": lambda name: "mlp" in name,
}


@EACH_OVERLAP
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_part_is_trained(disk: Path, kind: str, part: str, overlap: str) -> None:
    def make() -> Any:
        model = build(kind)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(PARTS[part](name))
        return model

    compare(
        disk,
        lambda model, optimizer: fit(model, optimizer, kind, steps=3),
        make,
        adamw_of_trained,
        **overlapping(overlap),
    )


@EACH_OVERLAP
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [True, False], ids=["frozen first", "trained first"])
def test_layers_are_frozen_for_a_while(disk: Path, kind: str, overlap: str, first: bool) -> None:
    def use(model: Any, optimizer: Any) -> list[Numbers]:
        def freeze(step: int) -> None:
            trained = step // 2 % 2 == (1 if first else 0)
            for name, parameter in model.named_parameters():
                if ".1." in name:
                    parameter.requires_grad_(trained)

        return fit(model, optimizer, kind, steps=7, before=freeze)

    compare(disk, use, lambda: build(kind), adamw, **overlapping(overlap))


@EACH_OVERLAP
def test_a_model_that_is_frozen_as_a_whole_still_gives_gradients_of_its_input(
    disk: Path, overlap: str
) -> None:
    def use(model: Any, _: Any) -> list[Numbers]:
        model.requires_grad_(False)
        x = torch.ones(2, 8, requires_grad=True)
        for _ in range(3):
            model(x).pow(2).sum().backward()
        assert x.grad is not None
        return [{"input": x.grad.clone()}]

    compare(disk, use, net, **overlapping(overlap))


# ---------------------------------------------------------------------- other weights
class Quantised(nn.Module):
    """A frozen layer whose weight is narrow, and a trained one beside it."""

    def __init__(self, dtype: torch.dtype, width: int = 8) -> None:
        super().__init__()
        wide = torch.randn(width, width)
        self.scale = nn.Parameter(wide.abs().amax(1, keepdim=True) / 127, requires_grad=False)
        narrow = wide / self.scale
        if dtype in (torch.uint8, torch.bool):
            narrow = narrow.relu()
        self.weight = nn.Parameter(narrow.round().to(dtype), requires_grad=False)
        self.delta = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = F.linear(x, self.weight.to(x.dtype) * self.scale)
        change: torch.Tensor = self.delta(x).tanh()
        return output + change


NARROW = [
    torch.int8, torch.uint8, torch.bool, torch.int16, torch.int64,
    torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_weights_that_are_not_of_floating_point_come_back_as_they_were(
    disk: Path, dtype: torch.dtype
) -> None:
    def make() -> Any:
        return net(lambda: Net(lambda: Quantised(dtype)))

    plain: Any = make()
    expected = train(plain, adamw_of_trained(plain))
    model: Any = make()
    names = [f"blocks.{number}.weight" for number in range(3)]
    with streaming(disk) as engine:
        optimizer = engine.attach(model, adamw_of_trained(model))
        assert set(names) <= set(away(model))
        assert [model.get_parameter(name).dtype for name in names] == [dtype] * 3
        history = train(model, optimizer)
        assert len(set(names) & set(away(model))) >= 2
        assert open_turns(engine) == []
    assert_same_history(history, expected)
    got, wanted = dict(model.named_parameters()), dict(plain.named_parameters())
    for name in names:
        assert bits(got[name].view(torch.uint8)) == bits(wanted[name].view(torch.uint8))
        assert got[name].dtype == dtype
    assert_same_bits(
        {n: p for n, p in got.items() if n not in names},
        {n: p for n, p in wanted.items() if n not in names},
    )


class Tagged(nn.Parameter):
    """What libraries make of quantised weights: a class of its own, with attributes."""

    tag = ""


def tagged() -> Any:
    model = net()
    for block in model.blocks:
        block.up.weight = Tagged(block.up.weight.detach())
        block.up.weight.tag = "mine"
    return model


@EACH_OVERLAP
def test_parameters_of_other_classes_stay(disk: Path, overlap: str) -> None:
    def use(model: Any, optimizer: Any) -> list[Numbers]:
        own = [block.up.weight for block in model.blocks]
        history = train(model, optimizer)
        assert all(b.up.weight is p for b, p in zip(model.blocks, own, strict=True))
        assert all(type(p) is Tagged and p.tag == "mine" for p in own)
        assert not {f"blocks.{number}.up.weight" for number in range(3)} & set(away(model))
        return history

    compare(disk, use, tagged, **overlapping(overlap))


@EACH_OVERLAP
def test_parameters_keep_their_identity_and_what_was_hung_on_them(disk: Path, overlap: str) -> None:
    def make() -> Any:
        model = net()
        for name, parameter in model.named_parameters():
            parameter.tag = name
        return model

    def use(model: Any, optimizer: Any) -> list[Numbers]:
        before = {name: id(parameter) for name, parameter in model.named_parameters()}
        history = train(model, optimizer)
        assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
        assert all(parameter.tag == name for name, parameter in model.named_parameters())
        return history

    compare(disk, use, make, **overlapping(overlap))


def test_two_engines_in_turn_leave_plain_parameters(disk: Path) -> None:
    plain, model = net(), net()
    expected = train(plain, adamw(plain), 4)
    history, own = [], adamw(model)
    for number in range(2):
        with streaming(disk, optimizer={"enabled": False}) as engine:
            optimizer = engine.attach(model, own)
            assert any(type(p) is GuardedParameter for p in model.parameters())
            history += train(model, optimizer, 2, first=2 * number)
        assert all(type(p) is nn.Parameter for p in model.parameters())
    assert_same_history([*history, weights(model)], [*expected, weights(plain)])
