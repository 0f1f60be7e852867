"""`Fabric(strategy="ssd_offload")` against the same Fabric without, to the last bit."""

import importlib
import pickle
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from offload_strategy import ConfigError
from offload_strategy.units import MiB
from tests.distributed.loops import same
from tests.integrations.lightning_runs import WIDTH, assert_equal, batches, tiny_model
from tests.integrations.support import OFFLOAD_ALL
from tests.training import left_bytes, on_disk

FAMILIES = {"lightning.fabric": "for_lightning_fabric", "lightning_fabric": "for_standalone_fabric"}
FIRST = "lightning.fabric"
SCALED = "16-mixed"
BY_NORM, BY_VALUE = {"max_norm": 0.05}, {"clip_val": 1e-3}
EAGER = {**OFFLOAD_ALL, "optimizer": {"overlap": "eager"}}
STREAMED = {**OFFLOAD_ALL, "parameters": {"enabled": True, "min_size": "1KiB"}}


def offloading(config=OFFLOAD_ALL, family=FIRST):
    module = importlib.import_module(f"offload_strategy.integrations.fabric.{FAMILIES[family]}")
    return module.SSDOffloadStrategy(config=config)


def make_fabric(strategy, family=FIRST, **options):
    options = {"accelerator": "cpu", "devices": 1, "precision": "32-true", **options}
    if options["precision"] == SCALED:  # which the CPU has only with a plugin of one's own
        plugins = importlib.import_module(f"{family}.plugins")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
        plugin = plugins.MixedPrecision(SCALED, device="cpu", scaler=scaler)
        options |= {"plugins": plugin, "precision": None}
    return pytest.importorskip(family).Fabric(strategy=strategy, **options)


@dataclass
class Run:
    """A model and an optimizer that were set up, and what their training came to."""

    fabric: Any
    model: Any
    optimizer: Any
    schedule: Any = None
    losses: list[str] = field(default_factory=list)
    others: list[torch.Tensor] = field(default_factory=list)

    def train(self, steps, accumulate=1, clip=None):
        for index, (x, _) in enumerate(batches(steps * accumulate), start=1):
            ends = index % accumulate == 0
            with self.fabric.no_backward_sync(self.model, enabled=not ends):
                loss = nn.functional.mse_loss(self.model(x), x)
                self.fabric.backward(loss)
            self.losses.append(loss.item().hex())
            if ends:
                if clip:
                    norm = self.fabric.clip_gradients(self.model, self.optimizer, **clip)
                    self.others.append(torch.tensor(0.0) if norm is None else norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
        self.others.extend(tensor.clone() for tensor in self.model.state_dict().values())
        if self.schedule is not None:
            self.schedule.step()
            self.others.append(torch.tensor(self.optimizer.param_groups[0]["lr"]))
        if scaler := getattr(self.fabric.strategy.precision, "scaler", None):
            assert scaler.get_scale() != 2.0**16
            self.others.append(torch.tensor(scaler.get_scale()))
        return self

    def assert_same(self, plain):
        assert self.losses == plain.losses
        assert len(self.losses) > 0
        assert_equal(self.others, plain.others)

    def assert_moved(self, *clients):
        engine = self.fabric.strategy.offload_engine
        on_disk(engine)  # what is still on its way is not counted as written
        metrics = engine.metrics()
        for client in clients or ("activations", "optimizer"):
            assert left_bytes(metrics, client) > 0, client


def set_up(fabric, model=None, scheduled=False, **options):
    torch.manual_seed(0)
    model = tiny_model() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if scheduled:
        options["scheduler"] = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
    return Run(fabric, *fabric.setup(model, optimizer, **options))


def train(fabric, clip=None):
    """Train with a schedule, in groups of three micro-batches."""
    return set_up(fabric, scheduled=True).train(6, accumulate=3, clip=clip)


def both(train, config=OFFLOAD_ALL, **options):
    plain = train(make_fabric("auto", **options))
    offloaded = train(make_fabric(offloading(config), **options))
    offloaded.assert_same(plain)
    offloaded.assert_moved()
    return offloaded


@pytest.mark.parametrize(
    ("config", "precision", "clip"),
    [
        (OFFLOAD_ALL, "32-true", {}),
        (OFFLOAD_ALL, "bf16-mixed", {}),
        (OFFLOAD_ALL, "bf16-true", {}),
        (OFFLOAD_ALL, "32-true", BY_VALUE),
        (OFFLOAD_ALL, SCALED, BY_NORM),
        (EAGER, "32-true", {}),
    ],
    ids=str,
)
def test_training_is_identical(config, precision, clip, hints):
    both(lambda fabric: train(fabric, clip), config=config, precision=precision)
    # Of every micro-batch: while it runs, and after it.
    assert hints == 6 * [False, True, False, True, True, True]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_name_finds_the_strategy_of_its_own_install(family, tmp_path, monkeypatch):
    plain = train(make_fabric("auto", family), BY_NORM)
    # `fabric run --strategy` would set it, but refuses every name with "offload" in it.
    monkeypatch.setenv("LT_STRATEGY", "ssd_offload")
    for name in ("ssd_offload", "auto"):
        run = train(make_fabric(name, family), BY_NORM)
        run.assert_moved("optimizer")
        run.assert_same(plain)
        assert type(run.fabric.strategy) is type(offloading(family=family))
    run.fabric.save(tmp_path / "file.ckpt", {"model": run.model})
    assert isinstance(run.optimizer, torch.optim.Optimizer)


@pytest.mark.parametrize("outside", [False, True], ids=["hooks-inside", "hooks-outside"])
def test_a_compiled_model_is_identical(outside):
    def compiled(fabric):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = torch.compile(tiny_model(), backend="aot_eager")
        # Fabric takes a compiled model apart and compiles again what the strategy returned.
        return set_up(fabric, model, _reapply_compile=not outside).train(4)

    both(compiled)


def test_streamed_weights_are_identical():
    def streamed(fabric):
        torch.manual_seed(0)
        with fabric.init_module():
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        return set_up(fabric, model).train(4)

    both(streamed, config=STREAMED).assert_moved("parameters")


def test_training_resumes_from_a_checkpoint_with_and_without_offload(tmp_path):
    def half(offload, name, source=None):
        run = set_up(make_fabric(offloading() if offload else "auto"))
        state = {"model": run.model, "optimizer": run.optimizer}
        if source is not None:
            run.fabric.load(tmp_path / source, state)
        run.train(4).fabric.save(tmp_path / name, state)
        return run

    half(False, "plain").assert_same(half(True, "ours"))
    plain = half(False, "plain end", "plain")
    for offload, source in ((True, "plain"), (False, "ours")):
        half(offload, "end", source).assert_same(plain)
        assert same(*map(torch.load, (tmp_path / "end", tmp_path / "plain end")))


def test_a_plain_optimizer_keeps_no_tensor_of_the_file(tmp_path):
    file = tmp_path / "file.ckpt"
    run = train(make_fabric(offloading({**OFFLOAD_ALL, "optimizer": {"enabled": False}})))
    run.fabric.save(file, {"optimizer": run.optimizer})
    run.fabric.load(file, {"optimizer": run.optimizer})
    before = [s["exp_avg"].clone() for s in run.optimizer.state.values()]
    file.write_bytes(bytes(file.stat().st_size))  # in place, under every map of it
    assert_equal([s["exp_avg"] for s in run.optimizer.state.values()], before)


@pytest.mark.parametrize(("devices", "nodes"), [(2, 1), (1, 2)])
def test_several_devices_or_machines_make_it_data_parallel(devices, nodes):
    strategy = make_fabric("ssd_offload", devices=devices, num_nodes=nodes).strategy
    assert type(strategy).__name__ == "SSDOffloadDataParallelStrategy"
    assert (strategy.num_nodes, len(strategy.parallel_devices)) == (nodes, devices)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_strategy_can_be_pickled_for_processes_that_are_spawned(family):
    pytest.importorskip(family)
    original = offloading(family=family)
    copy = pickle.loads(pickle.dumps(original))
    assert (type(copy), copy.config) == (type(original), original.config)


def test_fabrics_in_a_group_of_processes_share_the_tiers(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    config = {"tiers": [{"name": "host", "kind": "dram", "capacity": "2MiB"}]}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        engine = set_up(make_fabric(offloading(config))).fabric.strategy.offload_engine
        assert engine._resources.memory_tiers["host"].capacity == MiB
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("precision", "clip"), [("32-true", BY_NORM), ("32-true", BY_VALUE), (SCALED, {})], ids=str
)
def test_edited_gradients_are_refused_with_eager_updates(precision, clip):
    what = "fabric.clip_gradients" if clip else "with loss scaling"
    with pytest.raises(ConfigError, match=rf"{what}.*overlap: commit"):
        train(make_fabric(offloading(EAGER), precision=precision), clip)


def test_the_other_installs_strategy_is_refused_with_the_name_of_the_right_one():
    pytest.importorskip("lightning_fabric")
    with pytest.raises(ValueError, match=r"for_lightning_fabric\.SSDOffloadStrategy"):
        make_fabric(offloading(family="lightning_fabric"))


def test_a_model_may_be_trained_again_once_its_earlier_training_is_over():
    fabric, other = make_fabric(offloading()), make_fabric(offloading())
    model = tiny_model()
    earlier = set_up(fabric, model).train(2)
    with pytest.raises(ConfigError, match="is attached already") as raised:
        fabric.setup(model, earlier.optimizer.optimizer.inner)
    assert "del optimizer" in raised.value.__notes__[0]
    del earlier
    earlier = set_up(fabric, model).train(2)

    with pytest.raises(ConfigError, match="is attached already") as raised:
        set_up(other, model)
    assert "fabric.strategy.teardown()" in raised.value.__notes__[0]
    fabric.strategy.teardown()
    assert fabric.strategy.offload_engine is None
    latest = set_up(other, model).train(2)
    latest.assert_moved()

    del fabric, other, earlier, latest, raised  # as a notebook does that makes them anew
    set_up(make_fabric(offloading()), model).train(2).assert_moved()


def test_no_backward_sync_of_other_strategies_is_as_it_was():
    run = train(make_fabric("auto"))
    with run.fabric.no_backward_sync(run.model) as nothing:
        assert nothing is None
    with pytest.raises(TypeError, match="set up the model first"):
        run.fabric.no_backward_sync(tiny_model())
