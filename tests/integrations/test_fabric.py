"""`Fabric(strategy="ssd_offload")` against the same Fabric without, to the last bit."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload_strategy import ConfigError
from tests.distributed.data_parallel_runs import same
from tests.integrations.lightning_runs import WIDTH, assert_equal, tiny_model
from tests.training import left_bytes

FAMILIES = {
    "lightning.fabric": "for_lightning_fabric",
    "lightning_fabric": "for_standalone_fabric",
}
EVERYTHING: dict[str, Any] = {
    "mode": "always",
    "activations": {"min_size": "1KiB", "budget": "100%"},
}
EAGER: dict[str, Any] = {**EVERYTHING, "optimizer": {"overlap": "eager"}}
STREAMED: dict[str, Any] = {**EVERYTHING, "parameters": {"enabled": True, "min_size": "1KiB"}}


FIRST = "lightning.fabric"


def offloading(config: Any = EVERYTHING, family: str = FIRST) -> Any:
    module = importlib.import_module(f"offload_strategy.integrations.fabric.{FAMILIES[family]}")
    return module.SSDOffloadStrategy(config=config)


def make_fabric(strategy: Any, family: str = FIRST, **options: Any) -> Any:
    options = {"accelerator": "cpu", "devices": 1, "precision": "32-true", **options}
    return pytest.importorskip(family).Fabric(strategy=strategy, **options)


def seeded_model() -> nn.Module:
    torch.manual_seed(0)
    return tiny_model()


def batches(count: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(16, WIDTH, generator=generator)


@dataclass
class Run:
    """What a training did, and what goes on with it."""

    fabric: Any
    models: list[Any]
    optimizers: list[Any]
    losses: list[str] = field(default_factory=list)
    others: list[torch.Tensor] = field(default_factory=list)

    @property
    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for model in self.models for p in model.parameters()]

    def assert_same(self, plain: Run) -> None:
        assert self.losses == plain.losses
        assert len(self.losses) > 0
        assert_equal(self.weights, plain.weights)
        assert_equal(self.others, plain.others)

    def assert_moved(self, *clients: str) -> None:
        metrics = self.fabric.strategy.offload_engine.metrics()
        for client in clients or ("activations", "optimizer"):
            assert left_bytes(metrics, client) > 0, client


def both(train: Callable[[Any], Run], config: Any = EVERYTHING, **options: Any) -> Run:
    """Train with and without offload, see that they agree, and return the former."""
    plain = train(make_fabric("auto", **options))
    offloaded = train(make_fabric(offloading(config), **options))
    offloaded.assert_same(plain)
    offloaded.assert_moved()
    return offloaded


def train(fabric: Any, steps: int = 6, accumulate: int = 1, clip: dict[str, Any] = {}) -> Run:  # noqa: B006
    """Set up a model, its optimizer and a schedule, and train."""
    model = seeded_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
    model, optimizer, schedule = fabric.setup(model, optimizer, scheduler=schedule)
    run = Run(fabric, [model], [optimizer])
    go_on(run, steps, accumulate, clip)
    if steps:
        schedule.step()
    run.others.append(torch.tensor(optimizer.param_groups[0]["lr"]))
    return run


def go_on(run: Run, steps: int, accumulate: int = 1, clip: dict[str, Any] = {}) -> None:  # noqa: B006
    (model,), (optimizer,) = run.models, run.optimizers
    for index, x in enumerate(batches(steps * accumulate), start=1):
        ends = index % accumulate == 0
        with run.fabric.no_backward_sync(model, enabled=not ends):
            loss = nn.functional.mse_loss(model(x), x)
            run.fabric.backward(loss)
        run.losses.append(loss.item().hex())
        if ends:
            if clip:
                norm = run.fabric.clip_gradients(model, optimizer, **clip)
                run.others.append(torch.tensor(0.0) if norm is None else norm)
            optimizer.step()
            optimizer.zero_grad()


# ---------------------------------------------------------------------- numbers


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_training_is_identical(precision: str, hints: list[tuple[int, bool]]) -> None:
    both(lambda fabric: train(fabric, accumulate=3), precision=precision)
    # Of every micro-batch: while it runs, and after it.
    assert [last for _, last in hints] == 6 * [False, True, False, True, True, True]


def test_clipping_by_value_is_identical() -> None:
    both(lambda fabric: train(fabric, accumulate=2, clip={"clip_val": 1e-3}))


def mixed() -> dict[str, Any]:
    """Options for float16 with loss scaling on the CPU."""
    plugin = importlib.import_module(f"{FIRST}.plugins").MixedPrecision("16-mixed", device="cpu")
    return {"plugins": plugin, "precision": None}


def test_loss_scaling_is_identical() -> None:
    def scaled(fabric: Any) -> Run:
        fabric.strategy.precision.scaler = scaler = torch.amp.GradScaler(
            "cpu", init_scale=2.0**16, growth_interval=2
        )
        run = train(fabric, steps=8, accumulate=2, clip={"max_norm": 0.05})
        run.others.append(torch.tensor(scaler.get_scale()))
        return run

    plain = scaled(make_fabric("auto", **mixed()))
    offloaded = scaled(make_fabric(offloading(), **mixed()))
    offloaded.assert_same(plain)
    offloaded.assert_moved()
    assert float(plain.others[-1]) != 2.0**16


@pytest.mark.parametrize("family", FAMILIES)
def test_the_name_finds_the_strategy_of_its_own_install(family: str, tmp_path: Path) -> None:
    options = {"accumulate": 3, "clip": {"max_norm": 0.05}}
    run = train(make_fabric("ssd_offload", family), **options)
    run.assert_moved("optimizer")
    run.assert_same(train(make_fabric("auto", family), **options))
    run.fabric.save(tmp_path / "file.ckpt", {"model": run.models[0]})
    assert type(run.fabric.strategy) is type(offloading(family=family))
    assert isinstance(run.optimizers[0], torch.optim.Optimizer)


@pytest.mark.parametrize("outside", [False, True], ids=["hooks-inside", "hooks-outside"])
def test_a_compiled_model_is_identical(outside: bool) -> None:
    def compiled(fabric: Any) -> Run:
        torch._dynamo.reset()
        model = seeded_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model = torch.compile(model, backend="aot_eager")
        # Fabric takes a compiled model apart and compiles again what the strategy returned.
        again = {"_reapply_compile": not outside}
        run = Run(fabric, *([each] for each in fabric.setup(model, optimizer, **again)))
        go_on(run, 4)
        return run

    both(compiled)


def test_eager_updates_are_identical_as_no_backward_sync_tells_the_last_micro_batch() -> None:
    both(lambda fabric: train(fabric, accumulate=3), config=EAGER)


def test_streamed_weights_are_identical() -> None:
    def streamed(fabric: Any) -> Run:
        torch.manual_seed(0)
        with fabric.init_module():
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run = Run(fabric, *([each] for each in fabric.setup(model, optimizer)))
        go_on(run, 4)
        run.others = [tensor.clone() for tensor in run.models[0].state_dict().values()]
        return run

    run = both(streamed, config=STREAMED)
    run.assert_moved("parameters")


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(
    ("first", "second"),
    [("auto", EVERYTHING), (EVERYTHING, "auto")],
    ids=["plain-offloaded", "offloaded-plain"],
)
def test_training_resumes_from_a_checkpoint_with_and_without_offload(
    tmp_path: Path, first: Any, second: Any
) -> None:
    def halves(first: Any, second: Any, folder: Path) -> list[Run]:
        runs = []
        for half, config in enumerate((first, second)):
            strategy = config if config == "auto" else offloading(config)
            run = train(make_fabric(strategy), steps=0)
            state = {"model": run.models[0], "optimizer": run.optimizers[0], "half": half}
            if half:
                run.fabric.load(folder / "half.ckpt", state)
                assert state["half"] == 0
            go_on(run, 4)
            run.fabric.save(folder / "half.ckpt", state)
            runs.append(run)
        return runs

    plain = halves("auto", "auto", tmp_path / "plain")
    mixed = halves(first, second, tmp_path / "mixed")
    for run, reference in zip(mixed, plain, strict=True):
        run.assert_same(reference)
    states = [torch.load(tmp_path / name / "half.ckpt") for name in ("plain", "mixed")]
    assert same(*(state["optimizer"] for state in states))


def test_a_plain_optimizer_keeps_no_tensor_of_the_file(tmp_path: Path) -> None:
    config = {**EVERYTHING, "optimizer": {"enabled": False}}
    run = train(make_fabric(offloading(config)))
    (optimizer,) = run.optimizers
    run.fabric.save(tmp_path / "file.ckpt", {"optimizer": optimizer})
    run.fabric.load(tmp_path / "file.ckpt", {"optimizer": optimizer})
    before = [s["exp_avg"].clone() for s in optimizer.state.values()]
    size = (tmp_path / "file.ckpt").stat().st_size
    (tmp_path / "file.ckpt").write_bytes(bytes(size))  # in place, under every map of it
    assert_equal([s["exp_avg"] for s in optimizer.state.values()], before)


# ---------------------------------------------------------------------- refusals, end


def test_several_devices_or_machines_make_it_data_parallel() -> None:
    for options in ({"devices": 2}, {"num_nodes": 2}):
        strategy = make_fabric("ssd_offload", **options).strategy
        assert type(strategy).__name__ == "SSDOffloadDataParallelStrategy"
        assert (strategy.num_nodes, len(strategy.parallel_devices)) == (
            options.get("num_nodes", 1),
            options.get("devices", 1),
        )


@pytest.mark.parametrize("clip", [{"max_norm": 0.05}, {"clip_val": 1e-3}, {}], ids=str)
def test_edited_gradients_are_refused_with_eager_updates(clip: dict[str, Any]) -> None:
    fabric = make_fabric(offloading(EAGER), **({} if clip else mixed()))
    what = "fabric.clip_gradients" if clip else "with loss scaling"
    with pytest.raises(ConfigError, match=rf"{what}.*overlap: commit"):
        train(fabric, clip=clip)


def test_the_other_installs_strategy_is_refused_with_the_name_of_the_right_one() -> None:
    pytest.importorskip("lightning_fabric")
    with pytest.raises(ValueError, match=r"for_lightning_fabric\.SSDOffloadStrategy"):
        make_fabric(offloading(family="lightning_fabric"))


def test_a_model_may_be_trained_again_once_its_earlier_training_is_over() -> None:
    fabric = make_fabric(offloading())
    model = seeded_model()

    def set_up(fabric: Any) -> Run:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return Run(fabric, *([each] for each in fabric.setup(model, optimizer)))

    earlier = set_up(fabric)
    go_on(earlier, 2)
    with pytest.raises(ConfigError, match="is attached already") as raised:
        fabric.setup(model, earlier.optimizers[0].optimizer.inner)
    assert "del optimizer" in raised.value.__notes__[0]
    earlier.optimizers.clear()
    earlier = set_up(fabric)
    go_on(earlier, 2)

    other = make_fabric(offloading())
    with pytest.raises(ConfigError, match="is attached already") as raised:
        set_up(other)
    assert "fabric.strategy.teardown()" in raised.value.__notes__[0]
    fabric.strategy.teardown()
    assert fabric.strategy.offload_engine is None
    latest = set_up(other)
    go_on(latest, 2)
    latest.assert_moved()

    del fabric, other, earlier, latest, raised  # as a notebook does that makes them anew
    latest = set_up(make_fabric(offloading()))
    go_on(latest, 2)
    latest.assert_moved()


def test_no_backward_sync_of_other_strategies_is_as_it_was() -> None:
    run = train(make_fabric("auto"))
    with run.fabric.no_backward_sync(run.models[0]) as nothing:
        assert nothing is None
    with pytest.raises(TypeError, match="set up the model first"):
        run.fabric.no_backward_sync(seeded_model())


def test_the_strategy_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # `fabric run --strategy` would set it, but refuses every name with "offload" in it.
    monkeypatch.setenv("LT_STRATEGY", "ssd_offload")
    train(make_fabric("auto")).assert_moved("optimizer")
