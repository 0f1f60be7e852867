"""What waits for `step()` in memory or on the tiers, and buffers that stay for the next step."""

import weakref
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch

from offload_strategy import ConfigError, OffloadEngine
from offload_strategy.errors import TierFullError
from offload_strategy.host_memory import idle_memory as idle
from offload_strategy.host_memory import pool as pool_module
from offload_strategy.host_memory.arena import Arena
from offload_strategy.optimizer.gradients.gradient_backing import StoredGradient
from offload_strategy.optimizer.gradients.offloaded_gradient import OffloadedGradient
from offload_strategy.units import MiB
from tests.optimizer.runs import adamw, give_room_for_new_weights, make_layers, offloading
from tests.training import assert_same_bits, attached, moved, on_disk, settings, weights


def _backward(model):
    model(torch.ones(2, model[0].in_features)).pow(2).mean().backward()


def _train(model, engine, watch=lambda model: None, steps=3):
    """Train; `watch` gets the model after each backward."""
    optimizer = attached(engine, model, adamw(model))
    for _ in range(steps):
        optimizer.zero_grad()
        _backward(model)
        watch(model)
        optimizer.step()
    return model


def _stored(model):
    """Of each large gradient, whether it is on a tier."""
    gradients = [p.grad for p in model.parameters()]
    assert all(isinstance(gradient, OffloadedGradient) for gradient in gradients)
    return [isinstance(g.backing._source, StoredGradient) for g in gradients]


# ---------------------------------------------------------------------- new weights
_WIDTH = 64


@pytest.mark.usefixtures("gradients_leave")
@pytest.mark.parametrize("has_room", [True, False])
def test_new_weights_stay_in_memory_where_there_is_room(has_room, disk, monkeypatch, aheads):
    give_room_for_new_weights(monkeypatch, has_room)
    in_memory = []

    def watch(model):
        ran = aheads[len(in_memory) :]  # and not those whose states came too late
        in_memory.extend(bool(ahead.new_weights) for ahead in ran)
        on_disk(engine)  # step() would cancel what is not

    with offloading(disk, optimizer={"subgroup_size": _WIDTH**2}) as engine:
        trained = _train(make_layers(4, _WIDTH), engine, watch)
        on_disk(engine)
        written = moved(engine, "optimizer")
        assert engine._resources.pool._limit.waiting == 0
    assert set(in_memory) == {has_room}
    # Two states and, of what was updated ahead, gradients and, without room, new weights.
    parts = 3 * 2 * 4 + len(in_memory) * (2 - has_room)
    assert written == parts * _WIDTH**2 * 4
    assert_same_bits(weights(trained), weights(_train(make_layers(4, _WIDTH), None)))


@pytest.mark.usefixtures("gradients_leave")
@pytest.mark.parametrize("kept", ["nothing", "alias", "numpy", "strides"])
def test_new_weights_take_the_memory_of_a_gradient_that_is_unused(kept, disk, monkeypatch, aheads):
    give_room_for_new_weights(monkeypatch, True)
    keeping, found = [], []

    def keep(parameter):
        """Runs before the engine's own hook, and sees the plain gradient."""
        if kept == "strides":
            parameter.grad = parameter.grad.t().contiguous().t()
        elif kept != "nothing":
            keeping.append(parameter.grad.numpy() if kept == "numpy" else parameter.grad.view(-1))
        found.append((parameter.grad.data_ptr(), parameter.grad.clone()))

    def watch(model):
        if len(found) == 1:  # others may not be updated ahead
            [(address, gradient)] = found
            assert (aheads[0].new_weights[0].data_ptr() == address) == (kept == "nothing")
            assert torch.equal(model[0].weight.grad, gradient)
            # What somebody may change at any time stays where it is.
            assert _stored(model) == [kept not in ("alias", "numpy")]

    def trained(engine, watch):
        model = make_layers(1, _WIDTH)
        model[0].weight.register_post_accumulate_grad_hook(keep)
        return _train(model, engine, watch)

    with offloading(disk, optimizer={"subgroup_size": _WIDTH**2}) as engine:
        offloaded = trained(engine, watch)
        assert_same_bits(weights(offloaded), weights(trained(None, lambda model: None)))


# ---------------------------------------------------------------------- gradients
_WIDE = 600  # a weight of 1.4 MB


def test_gradients_that_memory_has_no_room_for_wait_on_the_disk(disk, monkeypatch):
    give_room_for_new_weights(monkeypatch, True)
    written = []
    for memory, expected in (("3MiB", [True, True, False, False]), ("1GiB", [False] * 4)):
        options = {"gradient_memory": memory, "subgroup_size": 100_000}
        with offloading(disk, optimizer=options) as engine:
            model, storages = make_layers(4, _WIDE), []
            for parameter in model.parameters():  # before the engine's own hook
                parameter.register_post_accumulate_grad_hook(
                    lambda p, kept=storages: kept.append(weakref.ref(p.grad.untyped_storage()))
                )
            optimizer = engine.attach(model, adamw(model))
            _backward(model)
            on_disk(engine)
            # Backward goes from the last to the first: two of 1.4 MB find room.
            assert _stored(model) == expected
            assert [storage() is None for storage in storages] == expected[::-1]
            optimizer.step()
            optimizer.zero_grad()
            on_disk(engine)
            written.append(moved(engine, "optimizer"))
            states = 2 * 4 * _WIDE**2 * 4
            used = engine.metrics()["offload/tier/nvme/used_bytes"]
            assert states <= used < states + _WIDE**2 * 4
    # Two gradients, in whole pages, are all that is written on top.
    assert 2 * _WIDE**2 * 4 <= written[0] - written[1] <= 2 * (_WIDE**2 * 4 + 4096)


@pytest.mark.parametrize("has_room", [True, False])
def test_gradients_that_clipping_changes_in_every_step_wait_where_new_weights_would(
    has_room, disk, monkeypatch
):
    give_room_for_new_weights(monkeypatch, has_room)

    def trained(engine):
        model, stored = make_layers(4, _WIDE), []
        optimizer = attached(engine, model, adamw(model))
        for _ in range(4):
            optimizer.zero_grad()
            _backward(model)
            stored.append(engine is not None and _stored(model))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-4)
            optimizer.step()
        optimizer.zero_grad()
        return weights(model), stored

    options = {"gradient_memory": "1B", "subgroup_size": 100_000}
    with offloading(disk, optimizer=options) as engine:
        offloaded, stored = trained(engine)
        assert engine._resources.pool.waiting_bytes == 0, "of gradients that are gone"
    assert_same_bits(offloaded, trained(None)[0])
    # An update ran ahead of the first step(), and the others read the gradients.
    assert stored == [[True] * 4, *[[not has_room] * 4] * 3]


def test_the_tiers_must_have_room_for_gradients(disk):
    model = make_layers(4, _WIDE)
    config = settings(disk, optimizer={"gradient_memory": "1B"}, activations={"enabled": False})
    # Twice the states, once the weights, and not quite the gradients.
    config["tiers"][0]["capacity"] = int(5.5 * 4 * _WIDE**2 * 4)
    with OffloadEngine(config) as engine, pytest.raises(ConfigError, match="too little"):
        engine.attach(model, adamw(model))
    config["optimizer"]["gradient_memory"] = "1GiB"
    with OffloadEngine(config) as engine:
        engine.attach(model, adamw(model))


@pytest.mark.parametrize(("overlap", "parts"), [("off", 2), ("commit", 5)])
def test_the_tiers_must_have_room_for_the_alignment_of_states(overlap, parts, monkeypatch):
    give_room_for_new_weights(monkeypatch, False)
    model = torch.nn.ParameterList(torch.ones(65) for _ in range(10))  # 260 bytes take 512
    options = {"overlap": overlap, "subgroup_size": 130, "gradient_memory": "1GiB"}
    for less in (1, 0):
        tier = {"name": "host", "kind": "dram", "capacity": parts * 10 * 512 - less}
        refused = pytest.raises(ConfigError, match=": 1 B too little") if less else nullcontext()
        with OffloadEngine({"tiers": [tier], "optimizer": options}) as engine, refused:
            optimizer = engine.attach(None, adamw(model))
            for _ in range(3):
                sum(parameter.pow(2).sum() for parameter in model).backward()
                optimizer.step()


def test_the_tiers_must_have_room_for_the_states_of_all_optimizers(disk):
    first, second = make_layers(2, _WIDE), make_layers(2, _WIDE)
    config = settings(disk, optimizer={"overlap": "off"}, activations={"enabled": False})
    config["tiers"][0]["capacity"] = int(1.5 * 4 * _WIDE**2 * 4)  # of one and a half
    with OffloadEngine(config) as engine:
        optimizers = [engine.attach(first, adamw(first))]
        with pytest.raises(ConfigError, match=r"beside 5.5 MiB of other optimizers.* too little"):
            optimizers.append(engine.attach(second, adamw(second)))


def _beside_the_device(disk, device, outside, **options):
    """A config with a tier of the device of so many bytes, and one on the disk, if that has any."""
    options = {"subgroup_size": 256**2, "gradient_memory": "1GiB", **options}
    config = settings(disk, optimizer=options, activations={"enabled": False})
    config["tiers"][0]["capacity"] = outside
    own = {"name": "gpu", "kind": "device", "capacity": device}
    return {**config, "tiers": [own, *config["tiers"]] if outside else [own]}


@pytest.mark.parametrize("on_device", [2, 4], ids=["half", "all"])
def test_states_in_a_tier_of_the_device_need_no_room_for_new_ones(disk, on_device):
    each = 256**2 * 4  # bytes of a layer's weights, and half of those of its states
    device, left = on_device * 2 * each + 4096, 4 - on_device
    expected = weights(_train(make_layers(4, 256), None))
    # Outside are twice the states, once the weights, and room for one layer more.
    room = 5 * (left + 1) * each if left else 0
    with OffloadEngine(_beside_the_device(disk, device, room)) as engine:
        assert_same_bits(weights(_train(make_layers(4, 256), engine)), expected)
        assert engine.metrics()["offload/tier/gpu/used_bytes"] == on_device * 2 * each
    if left:
        config = _beside_the_device(disk, device, 5 * left * each)
        with OffloadEngine(config) as engine, pytest.raises(ConfigError, match=r"need 4\.2 MiB"):
            _train(make_layers(4, 256), engine)


def test_an_error_about_full_tiers_names_each_tier_of_the_config_once(disk):
    nbytes = 4 * 256**2 * 8  # without what the step counters and alignment take
    with OffloadEngine(_beside_the_device(disk, nbytes + 1024, 0, overlap="off")) as engine:
        model = make_layers(4, 256)
        optimizer = engine.attach(model, adamw(model))
        _backward(model)
        optimizer.step()
        with pytest.raises(TierFullError, match=r"optimizer \(gpu: 2 MiB of 2 MiB used\)\."):
            optimizer.load_state_dict(optimizer.state_dict())


# ---------------------------------------------------------------------- idle buffers
#: What passes need is remembered for eight of them.
_WARM_UP, _STEPS = 8, 12


@pytest.mark.parametrize(
    ("overlap", "activations", "host"),
    [
        ("eager", False, None),
        ("commit", True, None),
        ("commit", False, "64MiB"),
        ("off", False, None),
    ],
)
def test_buffers_are_not_given_back_in_each_step(overlap, activations, host, disk, monkeypatch):
    if host is not None:
        # Less than the states have, which step() gives back together when new ones are current.
        # Where they are on a disk, this little would also limit what lanes have idle in turns.
        monkeypatch.setattr(pool_module, "IDLE_BYTES", 16 * MiB)
    pools = []

    # A process of which everything else stays as large as it is.
    def resident_bytes(*_):
        return 500 * MiB + sum(p._held + p._limit.waiting for p in pools)

    monkeypatch.setattr(idle, "resident_bytes", resident_bytes)
    monkeypatch.setattr(idle, "_LOOK_SECONDS", 0.0)
    give_room_for_new_weights(monkeypatch, True)
    given_back = []
    give_back = Arena._give_back

    def noted(arena, block):
        given_back.append(block)
        give_back(arena, block)

    monkeypatch.setattr(Arena, "_give_back", noted)
    sections = {"activations": {"enabled": activations}, "memory": {"pinned": "128MiB"}}
    sections["optimizer"] = {"overlap": overlap, "subgroup_size": 1024**2}
    after_backward = []
    config = settings(disk, host, **sections)
    config["tiers"][-1]["capacity"] = "256MiB"  # writes that end late have room beside others
    with OffloadEngine(config) as engine:
        pools.append(engine._resources.pool)
        model = make_layers(3, 1024)
        _train(model, engine, lambda _: after_backward.append(len(given_back)), _WARM_UP + _STEPS)
        assert pools[0].usage().held_bytes >= 4 * MiB
    gave_back = [later > earlier for earlier, later in pairwise(after_backward[_WARM_UP:])]
    # How many buffers are in use at a time is up to threads: a step now and then may need more than
    # those before it, and the next gives the rest back.
    assert sum(gave_back) < _STEPS / 2, gave_back
