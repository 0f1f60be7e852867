"""Streamed weights from attach to close: disks that fail, errors in a step, and other threads."""

import gc
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn

from offload_strategy import ConfigError, OffloadEngine, StorageError
from offload_strategy.units import round_up
from offload_strategy.weights import block_residency
from offload_strategy.weights.guarded_parameter import GuardedParameter
from tests.activations.support import noise
from tests.activations.test_recompute import WAYS
from tests.activations.zoo import batch, build
from tests.support import raising
from tests.training import (
    assert_same_bits,
    assert_same_history,
    bits,
    gradients,
    in_turn,
    moved,
    on_disk,
    weights,
)
from tests.weights.nets import Net, adamw, loss, net, step, train, zoo_loss
from tests.weights.support import all_plain, compared, nearly_all_left, open_turns, streaming


def gradients_of(model):
    return step(model, None, look=gradients)


def test_a_model_that_is_freed_gives_everything_back(engine):
    model = net()
    engine.attach(model)
    gradients_of(model)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    on_disk(engine)
    assert engine._resources.store.registry.live == 0


def test_a_weight_is_streamed_by_one_engine_and_not_if_processes_share_it(disk, engine, tmp_path):
    one, other = net(), net()
    other.blocks[1].up.weight = one.blocks[0].up.weight
    engine.attach(one)
    with streaming(tmp_path) as second:
        with pytest.raises(
            ConfigError, match=r"blocks\.1\.up\.weight is streamed by another engine"
        ):
            second.attach(other)
        guarded = [n for n, p in other.named_parameters() if type(p) is GuardedParameter]
        assert guarded == ["blocks.1.up.weight"]
        engine.close()
        other.blocks[0].up.weight.data.share_memory_()
        second.attach(other)
        assert type(other.blocks[0].up.weight) is nn.Parameter
        assert type(other.blocks[1].up.weight) is GuardedParameter


@pytest.mark.parametrize("wrap", [nn.Sequential, partial(torch.compile, backend="eager")])
@pytest.mark.parametrize("part", [lambda model: model, lambda model: model.blocks[1].up])
def test_a_part_that_outlives_the_attached_model_keeps_its_weights(disk, sections, wrap, part):
    plain = net()
    train(plain, adamw(plain), 2)

    def fit():
        model = net()
        wrapper, engine = wrap(model), streaming(disk, **sections)
        train(wrapper, engine.attach(wrapper, adamw(model)), 2)
        on_disk(engine)
        return part(model), weakref.ref(engine)

    kept, engine = fit()
    gc.collect()
    assert_same_bits(weights(kept), weights(part(plain)))
    assert torch.equal(kept(noise(2, 8)), part(plain)(noise(2, 8)))
    del kept
    gc.collect()
    assert engine() is None


def test_detaching_brings_the_weights_back(engine):
    model = net()
    engine.attach(model)
    gradients_of(model)
    engine.detach_model(model)
    assert all_plain(model)
    assert_same_bits(gradients_of(model), gradients_of(net()))
    assert engine._resources.store.registry.live == 0


@pytest.mark.parametrize("overlap", ["in memory"])
def test_two_engines_in_turn_leave_plain_parameters(disk, sections):
    plain, model = net(), net()
    expected = train(plain, adamw(plain), 4)
    history, own = [], adamw(model)
    for number in range(2):
        with streaming(disk, **sections) as engine:
            optimizer = engine.attach(model, own)
            assert any(type(p) is GuardedParameter for p in model.parameters())
            history += train(model, optimizer, 2, first=2 * number)
        stream = weakref.ref(engine._stream)
        del engine
        gc.collect()
        assert stream() is None, "the user's optimizer keeps nothing of the engine"
        assert all_plain(model)
    assert_same_history([*history, weights(model)], [*expected, weights(plain)])


def test_weights_that_do_not_change_are_not_written_again(engine):
    model = build("Llama")
    engine.attach(model)
    written = []
    for number in range(4):
        step(model, None, number, loss_of=zoo_loss("Llama"))
        on_disk(engine)
        written.append(moved(engine, "parameters"))
    assert written == written[:1] * 4


@pytest.mark.parametrize("overlap", ["commit"])
def test_a_step_that_commits_neither_reads_nor_writes_streamed_weights(engine):
    """But for `scale`, which is used outside of a block, so that it may have changed."""
    model = net()
    optimizer = engine.attach(model, adamw(model))
    train(model, optimizer)
    loss(model).backward()
    on_disk(engine)
    before = moved(engine, "parameters", "read"), moved(engine, "parameters")
    optimizer.step()
    on_disk(engine)
    assert moved(engine, "parameters", "read") == before[0]
    assert moved(engine, "parameters") - before[1] <= model.scale.nbytes
    assert nearly_all_left(model)


@pytest.mark.parametrize(("overlap", "parameters"), [("eager", {"blocks_in_flight": 1})])
def test_a_weight_that_is_updated_in_slices_is_written_once(disk, sections):
    """One slice is in a subgroup with a bias of the block before, whose gradient comes later."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    sections["optimizer"] = {**sections["optimizer"], "subgroup_size": 2500}
    written = []
    with streaming(disk, **sections) as engine:
        optimizer = engine.attach(model, adamw(model))
        for _ in range(3):
            model(noise(4, 64)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            on_disk(engine)
            written.append(moved(engine, "parameters"))
        assert not [w.name for w in engine._stream._weights.values() if w.held]
    pages = sum(round_up(parameter.nbytes, 4096) for parameter in model.parameters())
    assert 0 < written[2] - written[1] <= pages


@compared()
def test_a_model_that_is_detached_between_backward_and_step(model, optimizer, engine):
    history = train(model, optimizer)
    loss(model).backward()
    if engine is not None:
        on_disk(engine)
        engine.detach_model(model)
    optimizer.step()
    return [*history, weights(model)]


@pytest.mark.parametrize("spare", [2, 100], ids=["no room for both", "room for both"])
def test_new_weights_go_where_there_is_room(tmp_path, spare):
    """Each weight takes a page of a tier."""
    plain, model = net(), net()
    expected = train(plain, adamw(plain), 5)
    pages = {"weights": len(list(model.parameters())) + spare, "states": 4096}
    tiers = [{"name": name, "kind": "ssd", "path": str(tmp_path / name)} for name in pages]
    for tier in tiers:
        (tmp_path / tier["name"]).mkdir()
        tier["capacity"] = 4096 * pages[tier["name"]]
    config = {
        "tiers": tiers,
        "activations": {"enabled": False},
        "optimizer": {"tiers": ["states"], "subgroup_size": 500},
        "parameters": {"enabled": True, "min_size": 1, "tiers": ["weights"]},
    }
    with OffloadEngine(config) as engine:
        found = train(model, engine.attach(model, adamw(model)), 5)
        assert 0 < engine._resources.tier_used_bytes()["weights"] <= 4096 * pages["weights"]
    assert_same_history([*found, weights(model)], [*expected, weights(plain)])


def test_a_whole_pass_reads_each_weight_once(engine):
    model = net()
    engine.attach(model)
    with torch.no_grad():
        loss(model)
        on_disk(engine)
        before = moved(engine, "parameters", "read")
        loss(model)
    total = sum(p.nbytes for p in model.parameters())
    assert 0 < moved(engine, "parameters", "read") - before <= total


@compared(optimizer_of=None)
def test_a_graph_may_be_used_twice(model, optimizer):
    value = loss(model)
    value.backward(retain_graph=True)
    value.backward()
    return [gradients(model)]


# ---------------------------------------------------------------------- failing disks
def test_a_disk_that_fails_at_attach_leaves_the_model_as_it_was(engine, monkeypatch):
    model, store = net(), engine._resources.store
    real, calls = store.put, []

    def put(*args, **options):
        calls.append(args)
        if len(calls) == 5:
            raise StorageError("the disk fails")
        return real(*args, **options)

    monkeypatch.setattr(store, "put", put)
    with pytest.raises(StorageError, match="the disk fails"):
        engine.attach(model)
    assert all_plain(model)
    assert store.registry.live == 0
    engine.attach(model)
    assert_same_bits(gradients_of(model), gradients_of(net()))


def test_a_block_that_cannot_be_read_says_so_and_nothing_is_wrong(engine, monkeypatch):
    model = net()
    engine.attach(model)
    on_disk(engine)
    with monkeypatch.context() as broken:
        broken.setattr(engine._resources.store, "private", raising(StorageError("the disk fails")))
        with pytest.raises(StorageError, match="the disk fails"):
            loss(model)
    assert_same_bits(gradients_of(model), gradients_of(net()))


# ---------------------------------------------------------------------- errors
PLACES = {
    "before a block": lambda m, fail: m.blocks[1].register_forward_pre_hook(fail, prepend=True),
    "in a block": lambda m, fail: m.blocks[1].down.register_forward_pre_hook(fail),
    "at the end of a block": lambda m, f: m.blocks[1].register_forward_hook(f, prepend=True),
    "after the model": lambda m, fail: m.register_forward_hook(fail),
    "after the backward of a layer": lambda m, f: m.blocks[1].down.register_full_backward_hook(f),
    "at the gradient of a weight": lambda m, fail: m.blocks[1].up.weight.register_hook(fail),
    "at a whole gradient": lambda m, f: m.blocks[1].up.weight.register_post_accumulate_grad_hook(f),
}
ERRORS = [LookupError, KeyboardInterrupt]
RECOMPUTED = ["reentrant", "non-reentrant", "two reentrant"]


@pytest.mark.parametrize(
    ("place", "recomputed", "error", "overlap"),
    [
        *in_turn(PLACES, [None], ERRORS, ["commit", "off", "commit"]),
        *in_turn(["in a block"] * 3, RECOMPUTED, ERRORS, ["off"]),
    ],
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@compared(lambda recomputed: net(lambda: Net(around=WAYS[recomputed])) if recomputed else net())
def test_an_error_leaves_no_weight_in_use(model, optimizer, engine, place, recomputed, error):
    """After steps that fail, training has the numbers of one in which none did."""

    def fail(*args):
        if not recomputed or torch._C._current_graph_task_id() != -1:
            raise error

    if engine is not None:
        handle = PLACES[place](model, fail)
        for _ in range(2):
            with pytest.raises(error):
                step(model, optimizer)
            optimizer.zero_grad()
            if error is LookupError:
                assert open_turns(engine) == []
        handle.remove()
    history = train(model, optimizer)
    assert engine is None or nearly_all_left(model)
    return history


@pytest.mark.parametrize("at_once", [True, False], ids=["and then the end", "and passes after it"])
@pytest.mark.parametrize("error", ERRORS)
def test_an_error_and_no_step_after_it(engine, error, at_once):
    model, expected = net(), weights(net())
    engine.attach(model)
    handle = model.blocks[1].up.register_forward_pre_hook(raising(error()))
    model.eval()
    with torch.set_grad_enabled(at_once), pytest.raises(error):
        loss(model)
    handle.remove()
    assert torch.equal(model.head.weight, expected["head.weight"])
    if not at_once:
        with torch.no_grad():
            for number in range(3):
                loss(model, number)
        assert open_turns(engine) == []
        assert nearly_all_left(model)
    engine.close()
    assert all_plain(model)
    assert_same_bits(weights(model), expected)


def test_a_touch_that_fails_leaves_no_turn_open(engine):
    model = net()
    engine.attach(model)
    for parameter in model.parameters():
        with pytest.raises(RuntimeError):
            parameter @ torch.ones(77)
        with pytest.raises((RuntimeError, IndexError)):
            parameter[999]
        with pytest.raises(RuntimeError, match="leaf Variable"):
            parameter.mul_(2)
    assert open_turns(engine) == []
    with torch.no_grad():
        loss(model)
    assert nearly_all_left(model)
    engine.close()
    assert_same_bits(weights(model), weights(net()))


# ---------------------------------------------------------------------- threads
@pytest.fixture
def impatient_threads():
    """So that threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("impatient_threads")
def test_two_threads_infer_with_one_model(engine):
    model = build("GPT-2").eval()

    def infer(number):
        with torch.no_grad():
            return model(batch("GPT-2", number)["input_ids"]).logits.clone()

    expected = [bits(infer(number)) for number in range(16)]
    engine.attach(model)
    with ThreadPoolExecutor(2) as pool:
        got = [bits(output) for output in pool.map(infer, range(16))]
    assert got == expected
    assert open_turns(engine) == []
    infer(0)
    infer(1)
    assert nearly_all_left(model)


def test_a_touch_is_seen_while_another_thread_touches_the_same_weight(engine, accessed):
    """Each keeps the weight in memory by itself, whichever is over first."""
    model = net()
    expected = float(model.scale.sum())
    engine.attach(model)
    weight = engine._stream._weights[model.scale]
    accessed.clear()
    weight.begin_access()  # as this thread does, before a long operation
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: float(model.scale.sum())).result() == expected
    assert accessed == [weight, weight]
    weight.begin_access()  # as another does, beside it
    weight.end_access()
    assert weight.is_resident
    assert not weight.can_be_offloaded()
    weight.end_access()
    assert weight.can_be_offloaded()


@pytest.mark.usefixtures("impatient_threads")
@compared()
def test_a_thread_that_watches_while_another_trains(model, optimizer):
    """As one that logs norms does: what it sees is of one step or another, and never NaN."""
    over, seen = threading.Event(), []

    def watch():
        while not over.is_set():
            for parameter in model.parameters():
                seen.append(bool(torch.isfinite(parameter.detach().clone()).all()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        history = train(model, optimizer, 6)
    finally:
        over.set()
        watcher.join()
    assert set(seen) == {True}
    return history


@compared()
def test_backward_on_another_thread(model, optimizer):
    def loss_of(model, number):
        value = loss(model, number)
        thread = threading.Thread(target=value.backward)
        value.backward = lambda: (thread.start(), thread.join())
        return value

    return train(model, optimizer, loss_of=loss_of)


def test_no_garbage_is_collected_while_frames_are_read(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "_current_frames", lambda: seen.append(gc.isenabled()) or {})
    assert block_residency._current_frames() == {}
    assert [*seen, gc.isenabled()] == [False, True]


def test_what_other_processes_may_read_of_a_model_ends_when_it_is_detached(engine):
    model, other = net(), net()
    for each in (model, other):
        engine.attach(each)
    shared = engine._stream.share(list(model.parameters()))
    assert any(shared)
    live = engine._resources.store.registry.live
    engine.detach_model(model)
    gc.collect()
    assert engine._resources.store.registry.live == live - len(shared)
