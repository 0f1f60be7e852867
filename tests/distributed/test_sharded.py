"""FSDP2 on several ranks gives what it gives without offload; they compare by themselves."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint import state_dict as state_dicts
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from offload_strategy import ConfigError, OffloadEngine
from tests.distributed.loops import STEPS, Net, check, config, run_steps, tokens, whole
from tests.distributed.ranks import run_ranks


def build(low=False, device="cpu"):
    torch.manual_seed(0)
    with torch.device(device):
        net = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if low else None, reduce_dtype=torch.float32 if low else None
    )
    for block in (net.up, net.down, net.spare):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    return net, list(net.parameters())


def train(
    rank, engine, *, optimizer="AdamW", low=False, steps=range(STEPS), checkpoint=None,
    save_to=None, options=None, meta=False, source=None, **loop,
):  # fmt: skip
    """Train a sharded net; every rank has other data, the same whatever the number of ranks.

    With `meta` it is built on the meta device and initialized when it is attached, or by FSDP2's
    recipe without an engine. From the safetensors in `source`, an engine loads what is built on the
    meta device; these are the weights that plain training begins with.
    """
    from_meta = meta or (source is not None and engine is not None)
    net, parameters = build(low, "meta" if from_meta else "cpu")
    if engine is None and from_meta:
        net.to_empty(device="cpu")
        net.head.weight = net.embedding.weight
        for module in (net.embedding, net.up, net.down, net.norm, net.spare):
            module.reset_parameters()
        parameters = list(net.parameters())
    elif engine is not None and source is not None:
        assert engine.load_weights(net, source).missing == []
    made = getattr(torch.optim, optimizer)(parameters, lr=1e-2, **(options or {}))
    used = made if engine is None else engine.attach(net, made)

    def states():
        return {
            "model": state_dicts.get_model_state_dict(net),
            "optimizer": state_dicts.get_optimizer_state_dict(net, used),
        }

    if checkpoint is not None:
        loaded = states()
        load(loaded, checkpoint_id=checkpoint)
        state_dicts.set_model_state_dict(net, loaded["model"])
        state_dicts.set_optimizer_state_dict(net, used, loaded["optimizer"])

    def tokens_of(step, micro):
        return tokens(10 * step + micro, rows=8).chunk(dist.get_world_size())[rank]

    found = run_steps(net, used, engine, tokens_of, steps, **loop)
    if save_to is not None:
        save(states(), checkpoint_id=save_to)
    state_dict = used.state_dict()
    kinds = {
        type(value).__name__
        for state in state_dict["state"].values()
        for name, value in state.items()
        if name != "step"
    }
    options = state_dicts.StateDictOptions(full_state_dict=True)
    return {
        **found,
        "weights": whole(net.state_dict()),
        "states": whole(state_dict),
        "full": state_dicts.get_optimizer_state_dict(net, used, options=options),
        "kinds": sorted(kinds),
    }


FIRST_HALF, SECOND_HALF = range(STEPS // 2), range(STEPS // 2, STEPS)
#: What is trained, and the overlaps with which.
CASES = [
    ({}, ("commit", "eager", "off")),
    ({"accumulation": 3}, ("eager",)),
    ({"accumulation": 3, "clip": 0.5, "low": True}, ("commit",)),
    ({"optimizer": "SGD"}, ("commit",)),
    ({"options": {"fused": True}}, ("off",)),
    ({"options": {"foreach": True, "amsgrad": True}}, ("commit",)),
]


#: Small blocks, of which two are in memory.
STREAMED = {"enabled": True, "min_size": "1KiB", "blocks_in_flight": 2}
#: What is saved with offload: without streamed weights, and with them.
KINDS = {"commit": {"enabled": False}, "streamed": STREAMED}


def engine_of(directory, overlap, parameters):
    return OffloadEngine({**config(directory, overlap), "parameters": parameters})


def offloaded(directory, case, plain, run, overlap="commit", parameters=KINDS["commit"]):
    """Check a run with offload against a plain one, and return it."""
    with engine_of(directory, overlap, parameters) as engine:
        ours = run(engine)
    moved = ["activations"] + ["optimizer"] * ("SGD" not in str(case))
    moved += ["parameters"] * (parameters is STREAMED)
    check((case, overlap), plain, ours, moved=moved)
    return ours


def against_plain(rank, directory):
    """Every overlap beside plain FSDP2, without streamed weights and with them."""
    for case, overlaps in CASES:
        run = partial(train, rank, **case)
        plain = run(None)
        for overlap in overlaps:
            settings = directory, case, plain, run, overlap
            kinds = [offloaded(*settings, parameters) for parameters in KINDS.values()]
            metrics = [ours["metrics"] for ours in kinds]
            if overlap == "commit" and "clip" not in case:
                ahead = [of["offload/optimizer/speculated_steps"] for of in metrics]
                assert ahead == 2 * [STEPS], case
            if overlap == "eager":
                # Gradients of streamed weights are used in backward, too, and not kept until then.
                written = [of["offload/optimizer/written_bytes"] for of in metrics]
                assert written[0] == written[1], case
            if "SGD" not in str(case):
                assert [ours["kinds"] for ours in kinds] == 2 * [["DTensor"]]


def two_ranks(rank, directory):
    for work in (against_plain, first_half, loaded, tensor_parallel, refusals):
        work(rank, directory)


def loaded(rank, directory):
    """Models that never fit whole: loaded from safetensors, and initialized by their modules."""
    source = directory / "safetensors"
    if rank == 0:
        torch.manual_seed(0)
        with OffloadEngine(config(directory, "off")) as engine:
            engine.save_weights(Net(), source)
    dist.barrier()
    for case, kinds in (({"source": source}, KINDS), ({"meta": True}, ["streamed"])):
        run = partial(train, rank, **case)
        plain = run(None)
        for kind in kinds:
            offloaded(directory, str(case), plain, run, parameters=KINDS[kind])


def first_half(rank, directory):
    """Train half of the steps and save, without offload and with it."""
    train(rank, None, steps=FIRST_HALF, save_to=directory / "checkpoint-None")
    for saved, parameters in KINDS.items():
        with engine_of(directory, "commit", parameters) as engine:
            train(rank, engine, steps=FIRST_HALF, save_to=directory / f"checkpoint-{saved}")


def second_half(rank, directory, source):
    """Load what two ranks saved, with and without offload; train the other half."""

    def run(saved, engine):
        checkpoint = Path(source) / f"checkpoint-{saved}"
        return train(rank, engine, steps=SECOND_HALF, checkpoint=checkpoint)

    plain = run(None, None)
    check("plain of streamed", plain, run("streamed", None), moved=())
    for saved, kind in (
        (None, "commit"), (None, "streamed"), ("commit", "streamed"), ("streamed", "commit"),
    ):  # fmt: skip
        offloaded(directory, saved, plain, partial(run, saved), parameters=KINDS[kind])
    if dist.get_world_size() == 4:
        net = Net()
        fully_shard(net, mesh=init_device_mesh("cpu", (4,)), reshard_after_forward=2)
        refused = pytest.raises(ConfigError, match="reshard_after_forward=N")
        with engine_of(directory, "commit", STREAMED) as engine, refused:
            engine.attach(net)


def parallel():
    """A net of which two ranks compute two layers together."""
    torch.manual_seed(0)
    net = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return net


def tensor_parallel(rank, directory):
    """Layers that two ranks compute together, which are updated part by part."""

    def run(engine):
        net = parallel()
        assert sum(isinstance(p, DTensor) for p in net.parameters()) == 4  # two layers
        made = torch.optim.AdamW(net.parameters(), lr=1e-2)
        used = made if engine is None else engine.attach(net, made)
        found = run_steps(net, used, engine, lambda step, _: tokens(step))  # the same on all ranks
        return {**found, "weights": whole(net.state_dict()), "states": whole(used.state_dict())}

    plain = run(None)
    for overlap in ("commit", "eager"):
        offloaded(directory, "tensor parallel", plain, run, overlap)


def refusals(rank, directory):
    """What is refused of sharded models, before any step."""

    class Centred(torch.optim.SGD):
        """Looks at all elements of a gradient together."""

        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.data -= 0.1 * (parameter.grad - parameter.grad.mean())

    torch.manual_seed(0)
    on_cpu, mesh = Net(), init_device_mesh("cpu", (2,))
    fully_shard(on_cpu, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    together = "does not update every element by itself"
    for net, optimizer, sections, message in (
        (on_cpu, torch.optim.AdamW, {}, "CPUOffloadPolicy"),
        (parallel(), torch.optim.AdamW, {"parameters": {"enabled": True}}, "parallelism alone"),
        (build()[0], Centred, {"optimizer": {"enabled": True}}, together),
    ):
        settings = {**config(directory, "commit"), **sections}
        with OffloadEngine(settings) as engine, pytest.raises(ConfigError, match=message):
            engine.attach(net, optimizer(net.parameters(), lr=0.1))


# One test for what the ranks did: pytest-xdist would run them again for others.
def test_sharded_training_gives_what_it_gives_without_offload(tmp_path):
    run_ranks("tests.distributed.test_sharded:two_ranks", tmp_path)
    # A checkpoint of two ranks goes on with one and with four.
    for size in (1, 4):
        place = tmp_path / str(size)
        place.mkdir()
        run_ranks("tests.distributed.test_sharded:second_half", place, size, source=str(tmp_path))
