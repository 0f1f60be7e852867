"""Pipeline schedules of torch.distributed.pipelining over two processes, to the last bit."""

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed import pipelining

from offload_strategy import ConfigError, OffloadEngine
from offload_strategy.integrations.pipelining import follow_schedule
from tests.distributed.loops import same
from tests.distributed.ranks import run_ranks
from tests.integrations.lightning_runs import WIDTH, tiny_model
from tests.training import settings

RANKS = 2
MICRO_BATCHES = 4
STEPS = 6
ROWS = 16 * MICRO_BATCHES


@dataclass(frozen=True)
class Way:
    overlap: str | None = None  # `optimizer.overlap`; None for plain PyTorch
    follow: bool = True  # Whether the engine is told of the schedule
    # Whether the schedule divides gradients by the number of micro-batches, or the loss does
    divides: bool = True
    clip: float | None = None  # Largest norm of a rank's gradients
    together: bool = False  # Whether one optimizer is for all stages of a rank

    @property
    def plain(self):
        """The same numbers without offload."""
        return Way(divides=self.divides, clip=self.clip)


_COMMIT = {"commit": Way("commit")}
_AND_EAGER = {**_COMMIT, "eager": Way("eager", divides=False)}
_1F1B = {"told nothing": Way("commit", follow=False), "clipped": Way("commit", clip=0.05)}
_TOGETHER = {"one optimizer": Way("commit", together=True)}

#: The schedule, how many stages a process has with it, and the ways to train that are compared.
SCHEDULES = {
    "GPipe": (pipelining.ScheduleGPipe, 1, _COMMIT),
    "1F1B": (pipelining.Schedule1F1B, 1, _COMMIT | _1F1B),
    "interleaved 1F1B": (pipelining.ScheduleInterleaved1F1B, 2, _AND_EAGER | _TOGETHER),
    "interleaved zero-bubble": (pipelining.ScheduleInterleavedZeroBubble, 2, _AND_EAGER),
}


class Pipeline:
    """This rank's stages of a schedule of `SCHEDULES`, with an optimizer for each, or for all."""

    def __init__(self, rank, name, way, tier):
        make_schedule, per_rank, _ = SCHEDULES[name]
        torch.manual_seed(0)
        blocks = [tiny_model() for _ in range(RANKS * per_rank)]
        indices = range(rank, len(blocks), RANKS)
        self.modules = [blocks[index] for index in indices]
        self.stages = [
            pipelining.PipelineStage(module, index, len(blocks), torch.device("cpu"))
            for module, index in zip(self.modules, indices, strict=True)
        ]
        self.schedule = make_schedule(
            self.stages if per_rank > 1 else self.stages[0],
            MICRO_BATCHES,
            loss_fn=nn.functional.mse_loss if way.divides else _share_of_loss,
            scale_grads=way.divides,
        )
        self.parameters = [p for module in self.modules for p in module.parameters()]
        groups = [self.parameters] if way.together else [m.parameters() for m in self.modules]
        self.optimizers = [torch.optim.AdamW(group, lr=1e-2) for group in groups]
        self.engine = None
        if way.overlap is not None:
            options = {"subgroup_size": 4000, "overlap": way.overlap}
            self.engine = OffloadEngine(settings(tier, optimizer=options))
            store = self.engine._resources.store
            for module in self.modules:
                self.engine.attach(module)
                # So that backward finds on the disk, and not in memory, what the stage has saved.
                module.register_forward_hook(lambda *_: store.wait_for_writes())
            self.optimizers = [self.engine.attach(None, own) for own in self.optimizers]


def _share_of_loss(output, target):
    return nn.functional.mse_loss(output, target) / MICRO_BATCHES


def train(rank, name, way, tier):
    """Train a few steps; the arguments are those of `Pipeline`.

    Returns what is compared, the metrics, and how many loads of each step had not begun when
    backward needed the bytes.
    """
    pipeline = Pipeline(rank, name, way, tier)
    engine, stages = pipeline.engine, pipeline.stages
    if engine is not None and way.follow:
        follow_schedule(engine, pipeline.schedule)
    inputs, targets = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(3))
    found, metrics, missed = {"losses": [], "gradients": []}, {}, []
    for _ in range(STEPS):
        losses = []
        before = engine.metrics() if engine else {}
        pipeline.schedule.step(
            *([inputs] if stages[0].is_first else []),
            **({"target": targets, "losses": losses} if stages[-1].is_last else {}),
        )
        found["losses"] += [loss.item().hex() for loss in losses]
        if engine is not None:
            key = "offload/activations/missed_loads"
            missed.append(engine.metrics()[key] - before[key])
        if way.overlap != "eager":  # which leaves none
            found["gradients"] += [p.grad.clone() for p in pipeline.parameters]
        if way.clip is not None:
            nn.utils.clip_grad_norm_(pipeline.parameters, way.clip)
        for optimizer in pipeline.optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found["parameters"] = [p.detach().clone() for p in pipeline.parameters]
    if engine is not None:
        engine._resources.store.wait_for_writes()
        metrics = engine.metrics()
        for optimizer in pipeline.optimizers:  # states are tickets as well
            fresh = torch.optim.AdamW(optimizer.parameters())
            optimizer.load_state_dict(fresh.state_dict())
        assert engine._resources.store.registry.live == 0, (name, way)
        engine.close()
    return found, metrics, missed


def check_refusals(rank, tier):
    together = Way("eager", divides=False, together=True)
    for message, name, way in (
        ("scale_grads=False.*overlap: commit", "1F1B", Way("eager")),
        ("optimizer for each stage", "interleaved 1F1B", together),
    ):
        pipeline = Pipeline(rank, name, way, tier)
        with pipeline.engine, pytest.raises(ConfigError, match=message):
            follow_schedule(pipeline.engine, pipeline.schedule)


def every_schedule(rank, directory):
    tier = directory / f"tier{rank}"
    tier.mkdir()
    check_refusals(rank, tier)
    for name, (_, stages, ways) in SCHEDULES.items():
        plain_runs = {way.plain: train(rank, name, way.plain, tier)[0] for way in ways.values()}
        # The first rank has the first stage, which has no loss, and the last one the last.
        assert all(bool(run["losses"]) is (rank == RANKS - 1) for run in plain_runs.values())
        for label, way in ways.items():
            plain = plain_runs[way.plain]
            ours, metrics, missed = train(rank, name, way, tier)
            expected = {**plain, "gradients": []} if label == "eager" else plain
            assert same(ours, expected), (name, label)
            for client, verb in product(("activations", "optimizer"), ("written", "read")):
                assert metrics[f"offload/{client}/{verb}_bytes"] > 0, (name, label)
            # Steps of which something was updated during backward, and in vain.
            verbs = ("speculated", "redone")
            ahead = [metrics[f"offload/optimizer/{verb}_steps"] for verb in verbs]
            if label == "told nothing":
                # Nobody tells which backward is the last: updates wait for the step.
                assert ahead == [0, 0]
            if label == "commit" and "zero-bubble" not in name:
                # That gradients are divided is learned from the first step, and trusted three
                # later.
                assert ahead == [3 * stages, stages]
                # Of a step, only what is asked for first of all was not fetched ahead of anything.
                # But the last stage goes back at once after each forward: what it has just saved
                # is asked for.
                most = 1 if name == "GPipe" or rank == 0 else 4
                assert missed[-3:] == [most] * 3
    assert list(tier.iterdir()) == []


def test_every_schedule_trains_the_same_and_updates_early_where_it_may(tmp_path):
    run_ranks(f"{__name__}:every_schedule", tmp_path)


def test_what_is_no_schedule_is_refused():
    with OffloadEngine() as engine, pytest.raises(ConfigError, match=r"Schedule1F1B.*got Linear"):
        follow_schedule(engine, nn.Linear(1, 1))
