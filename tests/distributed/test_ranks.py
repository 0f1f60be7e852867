"""Data-parallel ranks: numbers and checkpoints of plain training; each has a part of the states.

The ranks compare what they come to by themselves.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import save as save_folder
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from offload_strategy import OffloadEngine, load, save
from offload_strategy.checkpoints.scratch_file import ScratchFile
from offload_strategy.cli import main
from offload_strategy.errors import ConfigError, OffloadError, TierFullError
from offload_strategy.optimizer.overlap.backward_overlap import BackwardOverlap
from offload_strategy.optimizer.ranks.gradient_reductions import GradientReductions
from tests.distributed.loops import STEPS, Net, check, config, run_steps, same, tokens
from tests.distributed.ranks import run_ranks
from tests.optimizer import custom_optimizers
from tests.support import raising
from tests.training import assert_same_bits, moved, settings, weights


@contextlib.contextmanager
def early_gradients():
    """Yield the parameters whose gradients are used as soon as reduced, while backward runs.

    Only one reduction is under way at a time: a rank may be ahead of the others for a whole run,
    and would find none that is over by then.
    """
    used, begun = [], []
    take, add = BackwardOverlap.gradient_reduced, GradientReductions.add

    def taken(overlap, parameter, gradient):
        used.append(parameter)
        take(overlap, parameter, gradient)

    def added(backward, future, *args):
        while begun:
            begun.pop().wait()
        begun.append(future)
        add(backward, future, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BackwardOverlap, "gradient_reduced", taken)
        patch.setattr(GradientReductions, "add", added)
        yield used


class Recomputed(nn.Module):
    """Blocks with reentrant checkpoints; if it has `ends`, between layers that have none."""

    def __init__(self, ends):
        super().__init__()
        self.first = nn.Linear(96, 96) if ends else nn.Identity()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 96)) for _ in range(3)
        )
        self.last = nn.Linear(96, 96) if ends else nn.Identity()

    def forward(self, tokens, *_):
        hidden = self.first(nn.functional.one_hot(tokens, 96).float().requires_grad_())
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=True)
        return self.last(hidden)


def train(
    rank, engine, *, optimizer="AdamW", blocks=None, steps=range(STEPS), states=None,
    order="together", after=lambda step, net, optimizer: None, loop=None, on_first=False, **ddp,
):  # fmt: skip
    """Train a net over all ranks: `Net`, or `Recomputed` with "blocks" or "ends".

    `loop` has options of `run_steps`; with `on_first`, rank 0 alone is asked for all states. Others
    are those of `DistributedDataParallel`. Returns what `run_steps` does, weights and states.
    """
    torch.manual_seed(0)
    net = Net() if blocks is None else Recomputed(blocks == "with ends")
    kinds = torch.optim if hasattr(torch.optim, optimizer) else custom_optimizers
    used = made = getattr(kinds, optimizer)(net.parameters(), lr=1e-2)
    if engine is not None and order != "together":
        used = engine.attach(None, made)
        used.load_state_dict(used.state_dict())  # as Accelerate does
    model = DistributedDataParallel(net, bucket_cap_mb=0.02, **ddp)
    if engine is not None and order == "optimizer first":
        engine.attach(model)
    elif engine is not None and order == "together":
        used = engine.attach(model, made)
    if states is not None:
        used.load_state_dict(states["optimizer"])
        net.load_state_dict(states["model"])

    found = run_steps(
        model, used, engine, lambda step, micro: tokens(1000 * rank + 10 * step + micro), steps,
        after=lambda step: after(step, net, used), **loop or {},
    )  # fmt: skip
    if on_first and engine is not None:
        used.consolidate_state_dict()
    return {
        **found,
        "weights": {name: value.clone() for name, value in net.state_dict().items()},
        "states": used.state_dict() if rank == 0 or not on_first else {},
    }


def half(step, net, optimizer):
    """Change weights by hand, on every rank, between two steps."""
    with torch.no_grad():
        net.up.weight.mul_(0.5)
        net.down.load_state_dict({k: v * 0.5 for k, v in net.down.state_dict().items()})


STREAMED = {"enabled": True, "min_size": "4KiB"}
#: What is trained, and the overlaps with which; the first ones without sharing the states as well.
CASES = [
    ({}, ("commit", "eager", "off")),
    ({"loop": {"accumulation": 3, "clip": 0.5}}, ("commit",)),
    ({"loop": {"accumulation": 3, "clip": 0.5, "hints": False}}, ("commit",)),
    ({"find_unused_parameters": True, "loop": {"unused": True, "clip": 0.5}}, ("commit",)),
    ({"find_unused_parameters": True, "loop": {"unused": True}}, ("eager",)),
    ({"gradient_as_bucket_view": True, "loop": {"clip": 0.5}}, ("commit",)),
    ({"gradient_as_bucket_view": True, "loop": {"accumulation": 3}}, ("eager",)),
    ({"static_graph": True}, ("commit", "eager")),
    ({"order": "optimizer first", "loop": {"clip": 0.5}}, ("commit",)),
    ({"order": "optimizer alone", "loop": {"accumulation": 3}}, ("commit",)),
    ({"optimizer": "SGD"}, ("commit",)),
    ({"optimizer": "QuantizedMomentum"}, ("commit",)),
    ({"optimizer": "RAdam", "loop": {"accumulation": 3}}, ("off",)),
    # They run backward passes within the pass.
    ({"blocks": "with ends"}, ("commit", "eager", "off")),
    ({"blocks": "alone", "static_graph": True}, ("commit",)),
    ({"blocks": "alone", "gradient_as_bucket_view": True}, ("eager",)),
    ({"streams": True, "loop": {"clip": 0.5}}, ("commit", "off")),
    ({"streams": True, "loop": {"accumulation": 3}}, ("eager",)),
    ({"streams": True, "after": half}, ("commit", "eager")),
    ({"streams": True, "blocks": "with ends"}, ("commit",)),
]


def against_plain(rank, directory):
    for number, (case, overlaps) in enumerate(CASES):
        streams = case.pop("streams", False)
        plain = train(rank, None, **case)
        for overlap in overlaps:
            used = []  # bytes that were written and read, with shared states and without
            for sharding in (True, False)[: 2 if number < 2 else 1]:
                sections = config(directory, overlap, sharding=sharding)
                sections["parameters"] = {**STREAMED, "enabled": streams}
                with early_gradients() as early, OffloadEngine(sections) as engine:
                    ours = train(rank, engine, **case)
                clients = {"activations", "optimizer"} | ({"parameters"} if streams else set())
                clients -= {"activations"} if case.get("order") == "optimizer alone" else set()
                clients -= {"optimizer"} if case.get("optimizer") == "SGD" else set()
                check((case, overlap, sharding), plain, ours, moved=clients)
                whole_pass = {"find_unused_parameters", "static_graph"} & case.keys()
                if "blocks" not in case:
                    # Gradients are used as soon as their bucket is reduced, where it can be known.
                    expected = not whole_pass and overlap != "off"
                    assert bool(early) is expected, (case, overlap, len(early))
                verbs = ("written", "read")
                used.append([ours["metrics"][f"offload/optimizer/{verb}_bytes"] for verb in verbs])
                del ours
            # With accumulation, what ran ahead in vain was written as far as the disk got.
            if len(used) == 2 and "loop" not in case:
                shares = [share / whole for share, whole in zip(*used, strict=True)]
                assert all(0.45 < share < 0.55 for share in shares), (case, overlap, shares)
    dist.barrier()


def test_every_way_gives_what_plain_data_parallel_training_gives(tmp_path):
    run_ranks("tests.distributed.test_ranks:against_plain", tmp_path)


# ---------------------------------------------------------------------- other numbers of ranks
def maybe_offloading(directory, offload):
    sections = {**config(directory, "commit"), "parameters": STREAMED}
    return OffloadEngine(sections) if offload else contextlib.nullcontext()


def one_has_no_room(step, net, optimizer):
    """Collect the states where rank 0 has no room for them: all ranks are told, and go on."""
    told = "there is no room" if dist.get_rank() == 0 else "another rank could not collect"
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr(ScratchFile, "open", raising(TierFullError("there is no room")))
        with pytest.raises(OffloadError, match=told):
            optimizer.consolidate_state_dict()


def save_half(rank, directory):
    """Train and save without offload and with it; the files have the same."""
    files = {offload: directory / f"{offload}.ckpt" for offload in (False, True)}
    for offload, file in files.items():
        with maybe_offloading(directory / "disk", offload) as engine:
            after = {"after": one_has_no_room} if offload else {}
            found = train(rank, engine, on_first=True, **after)
            if rank == 0:
                saved = {"model": found["weights"], "optimizer": found["states"]}
                (save if offload else torch.save)(saved, file)
    dist.barrier()
    assert same(*map(torch.load, files.values()))


def second_half(rank, directory):
    """Load what two ranks saved, with and without offload, and go on with any number of them."""
    runs = []
    for offload, saved in ((False, False), (False, True), (True, False)):
        source = directory / f"{saved}.ckpt"
        states = load(source) if offload else torch.load(source)
        with maybe_offloading(directory / "disk", offload) as engine:
            runs.append(train(rank, engine, states=states))
    check("from ours", runs[0], runs[1], moved=())
    check("offloaded", runs[0], runs[2], moved=("activations", "optimizer", "parameters"))


def test_checkpoints_of_two_ranks_go_on_as_plain_ones_with_one_rank_and_with_four(tmp_path, disk):
    where = "tests.distributed.test_ranks"
    run_ranks(f"{where}:save_half", tmp_path)
    for size in (1, 4):
        run_ranks(f"{where}:second_half", tmp_path, size)


# ---------------------------------------------------------------------- files and machines
def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    groups = [{"params": model[n].parameters(), "lr": 0.01 / (1 + n)} for n in (2, 0)]
    return model, torch.optim.AdamW(groups)


def trained(optimizer, model):
    for x in torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(1)):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_folder_becomes_a_file_that_plain_training_loads(tmp_path, disk, capsys):
    folder, file, other_file = (tmp_path / name for name in ("folder", "one.pt", "two.pt"))
    model, plain = make()
    with OffloadEngine(settings(disk)) as engine:
        optimizer = engine.attach(model, plain)
        trained(optimizer, model)
        states = get_optimizer_state_dict(model, optimizer)
        saved = {"model": model.state_dict(), "optimizer": states, "step": 3}
        save_folder(saved, checkpoint_id=folder, no_dist=True)
    assert main(["consolidate", str(folder), str(file)]) == 0
    assert "model, optimizer" in capsys.readouterr().out
    found = torch.load(file)
    assert found["step"] == 3

    other, again = make()
    other.load_state_dict(found["model"])
    again.load_state_dict(found["optimizer"])
    reference, expected = make()
    trained(expected, reference)
    assert again.state_dict()["param_groups"] == expected.state_dict()["param_groups"]
    trained(again, other)
    trained(expected, reference)
    assert_same_bits(weights(other), weights(reference))

    # What is no such checkpoint is refused.
    assert main(["consolidate", str(tmp_path), str(other_file)]) == 2
    assert "not a checkpoint of torch.distributed.checkpoint" in capsys.readouterr().err
    assert not other_file.exists()


def large_gradients(rank, directory, size=2):
    """Each layer has slices that either rank updates."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(3)))
    sections = {"activations": {"enabled": False}, "optimizer": {"subgroup_size": 1 << 18}}
    config = settings(directory, **sections)
    config["tiers"][0]["capacity"] = "1GiB"
    with OffloadEngine(config, processes=size) as engine:
        model = DistributedDataParallel(model) if size > 1 else model
        optimizer = engine.attach(model, torch.optim.AdamW(model.parameters()))
        for _ in range(4):
            model(torch.ones(2, 1024)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            engine._resources.store.wait_for_writes()
        written = engine.metrics()["offload/optimizer/written_bytes"]
    states = 2 * 4 * 3 * 1024 * 1024
    # Updates, and alone new weights or gradients, which may wait on the path as well.
    assert written <= (5 * states / size if size > 1 else 7 * states), written / states


def test_ranks_that_share_updates_do_not_each_write_all_gradients(tmp_path):
    large_gradients(0, tmp_path, size=1)
    run_ranks(f"{__name__}:large_gradients", tmp_path)


def apart(rank, directory):
    """What ranks do not do alike is refused before a weight changes, and training goes on."""
    with OffloadEngine(config(directory, "commit")) as engine:
        torch.manual_seed(0)
        net = Net()
        model = DistributedDataParallel(net)
        optimizer = engine.attach(model, torch.optim.SGD(net.parameters(), 1e-2))
        before = weights(net)
        with model.no_sync():  # as in LocalSGD
            model(tokens(rank)).square().sum().backward()
        with pytest.raises(OffloadError, match=r"gradients differ between the ranks.*sharding"):
            optimizer.step()
        with model.join():
            model(tokens(rank)).square().sum().backward()
            with pytest.raises(OffloadError, match=r"join.*sharding: false"):
                optimizer.step()
        assert_same_bits(weights(net), before)


def noisy(rank, directory):
    """Each rank adds something of its own to reduced gradients, which `eager` uses up at once."""

    def reduce(state, bucket):
        reduced = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return reduced.then(lambda future: future.value()[0].add_(rank))

    for overlap in ("commit", "eager"):
        with OffloadEngine(config(directory, overlap)) as engine:
            net = Net()
            model = DistributedDataParallel(net)
            model.register_comm_hook(None, reduce)
            optimizer = engine.attach(model, torch.optim.SGD(net.parameters(), 1e-2))
            engine.microbatch(0, last=True)
            model(tokens(rank)).square().sum().backward()
            with pytest.raises(OffloadError, match=r"gradients differ between the ranks.*sharding"):
                optimizer.step()


def partly(rank, directory):
    """One parameter of the optimizer is in no data-parallel module: each rank has its own."""

    def run(engine):
        torch.manual_seed(0)
        net, own = Net(), nn.Parameter(torch.full((3000,), 1.0 + rank))
        model = DistributedDataParallel(net)
        optimizer = torch.optim.AdamW([*net.parameters(), own], 1e-2)
        optimizer = optimizer if engine is None else engine.attach(model, optimizer)
        for step in range(3):
            (model(tokens(10 * step + rank)).square().mean() * own.mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {**weights(net), "own": own.detach().clone()}

    expected = run(None)
    with OffloadEngine(config(directory, "commit")) as engine:
        assert_same_bits(run(engine), expected)


@pytest.mark.parametrize("what", ["apart", "noisy", "partly"])
def test_ranks_that_do_not_have_the_same(what, tmp_path):
    run_ranks(f"{__name__}:{what}", tmp_path)


def test_on_a_shared_path_each_process_has_a_folder_of_its_own(disk):
    config = settings(disk)
    config["tiers"][0]["shared"] = True
    model, plain = make()
    with OffloadEngine(config) as one, OffloadEngine(settings(disk)):
        (folder,) = disk.iterdir()
        assert "-rank0-" in folder.name
        trained(one.attach(model, plain), model)
        assert moved(one, "optimizer") > 0

    # Host memory is not shared.
    tier = {"name": "host", "kind": "dram", "capacity": "1GiB", "shared": True}
    with pytest.raises(ConfigError, match="remove shared"):
        OffloadEngine({"tiers": [tier]})
