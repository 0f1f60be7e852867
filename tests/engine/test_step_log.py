"""An engine that is asked, after a few steps, what it had expected of them."""

import gc
import logging
import sys
import time
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from offload_strategy import ConfigError, OffloadEngine, OffloadError
from offload_strategy.engine.step_log import StepLog
from offload_strategy.io.bandwidth.history import CACHE_VARIABLE, MeasuredRate, load_all_rates
from offload_strategy.io.bandwidth.measured_paths import MeasuredPaths
from offload_strategy.plan_runtime.profile import Profile
from offload_strategy.plan_runtime.replay import replay
from offload_strategy.telemetry import Direction, Recorder
from offload_strategy.units import MiB
from tests.training import on_disk, settings

measured_paths = sys.modules[MeasuredPaths.__module__]
pytestmark = pytest.mark.usefixtures("rates_cache")
PARTS = ("computing", "updates", "waiting for reads", "waiting for room", "waiting for updates")


def engine_on(*directories, **sections):
    config = settings(directories[0], **sections)
    if len(directories) > 1:
        config["tiers"][0]["path"] = [str(directory) for directory in directories]
    config["optimizer"]["subgroup_size"] = 64 * 64
    config["io"] = {"threads": 1, "block_size": "64KiB"}
    return OffloadEngine(config)


def layers():
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))


def train(engine, steps=6, passes=1):
    torch.manual_seed(0)
    net = layers()
    optimizer = engine.attach(net, AdamW(net.parameters()))
    for _ in range(steps):
        for number in range(passes):
            if passes > 1:
                engine.microbatch(number, last=number == passes - 1)
            net(torch.randn(512, 64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def seconds(found, name, which="observed"):
    return getattr(found.part(name), which)


# ---------------------------------------------------------------------- one run
@pytest.mark.parametrize(
    ("overlap", "passes"), [("commit", 1), ("eager", 1), ("off", 3), ("not offloaded", 1)]
)
def test_a_step_is_the_sum_of_its_parts(disk, tmp_path, overlap, passes):
    offloads = overlap != "not offloaded"
    section = {"overlap": overlap} if offloads else {"enabled": False}
    with engine_on(disk, optimizer=section) as engine:
        train(engine, passes=passes)
        on_disk(engine)
        found, profile = engine.report().comparison, engine.profile()
        assert engine._log.middle_step()[1] == passes
        states_bytes = engine.metrics()["offload/tier/nvme/used_bytes"]
    assert (states_bytes > 0) == offloads
    for which in ("predicted", "observed"):
        parts = sum(seconds(found, name, which) for name in PARTS)
        assert parts == pytest.approx(seconds(found, "step", which), rel=1e-3)
        assert (seconds(found, "updates", which) > 0) == offloads
    assert seconds(found, "computing") > 0
    # The states at least: how much of what was saved leaves depends on how long the tiers take.
    assert seconds(found, "written in a step", "predicted") >= states_bytes
    assert "| step |" in str(found)

    assert [tensor.nbytes for tensor in profile.tensors if tensor.nbytes >= 512 * 64 * 4]
    assert 0 < profile.forward_seconds < profile.step_seconds
    assert profile.shared_cores
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    moving = [update for update in profile.updates if update.written_bytes]
    assert len(moving) == (4 if offloads else 0), "one for each layer"
    # What was computed ahead is made visible in step(), which moves nothing. An update whose
    # states come late is made there as a whole.
    assert len(moving) <= len(profile.updates) <= len(moving) * (2 if overlap == "commit" else 1)
    for way in ("read_bytes", "written_bytes"):
        assert sum(getattr(update, way) for update in moving) == states_bytes
    assert all(update.seconds > 0 for update in profile.updates)
    ready = [update.ready_at for update in profile.updates]
    assert ready == sorted(ready)
    first = max(tensor.uses[-1] for tensor in profile.tensors)
    assert min(ready, default=first) >= (first if overlap == "off" else profile.forward_seconds)
    replayed = replay(profile)
    parts = profile.step_seconds + sum(update.seconds for update in profile.updates)
    assert replayed.step_seconds >= parts - 1e-6
    assert not moving or replayed.lanes["tiers write"].nbytes == states_bytes


def test_the_middle_step_is_told_with_updates_that_waited_and_no_weights_that_did_not(monkeypatch):
    recorder = Recorder()
    log = StepLog(recorder, [SimpleNamespace()], lambda: None)
    for now in (0.0, 5.0, 6.0, 9.0):  # steps of 5, 1 and 3 seconds
        monkeypatch.setattr(sys.modules[StepLog.__module__], "perf_counter", lambda now=now: now)
        recorder.update_seconds, recorder.stall_seconds["optimizer"] = now / 2, now / 6
        log.pass_begins(last=True)
        log._step_over()
        if now <= 5:
            assert log.middle_step() is None, "one step does not tell"
    step, passes = log.middle_step()
    assert (step["step"], passes) == (3.0, 1)
    assert step["updates"] == pytest.approx(1.0)
    assert step["waiting for updates"] == pytest.approx(0.5)
    assert step["computing"] == pytest.approx(1.5)
    assert "waiting for weights" not in step


def test_all_that_moves_in_a_step_is_predicted(disk):
    with engine_on(disk, optimizer={"enabled": False}) as engine:
        net = layers()
        engine.attach(net)
        for _ in range(8):
            loss = net(torch.randn(512, 64)).square().sum()
            on_disk(engine)  # so that all of it is read again
            # That wait is predicted as none: in the time that is left all of it must be out, too.
            time.sleep(0.1)
            loss.backward()
        found = engine.report().comparison
        saved = engine.metrics()["offload/activations/step_left_bytes"]
    assert seconds(found, "written in a step", "predicted") == saved
    # With a few bytes before each, up to the begin of a page.
    assert found.part("written in a step").ratio == pytest.approx(1.0, rel=0.05)
    assert seconds(found, "updates") == 0


def test_a_limit_of_memory_tells_its_peak(disk):
    config = settings(disk, planning={"device_memory": "100GiB", "profile_steps": 1})
    del config["activations"]["budget"]
    with OffloadEngine(config) as engine:
        train(engine)
        found = engine.report().comparison
    peak = found.part("peak of memory")
    assert peak.unit == "B"
    assert peak.observed > 50 * MiB, "this process has torch in it"
    assert peak.ratio == pytest.approx(1.0, rel=0.3)


def test_before_there_were_steps_nothing_is_compared(disk):
    with engine_on(disk) as engine:
        with pytest.raises(ConfigError, match="Train a step first"):
            engine.profile()
        train(engine, steps=2)
        assert engine.report().comparison is None
        assert engine.report().changes
    with pytest.raises(OffloadError, match="is closed"):
        engine.report()
    with engine_on(disk, activations={"enabled": False}) as engine:
        train(engine, steps=4)
        with pytest.raises(ConfigError, match=r"activations\.enabled: true"):
            engine.profile()
        report, metrics = engine.report(), engine.metrics()
    assert (report.timeline, report.comparison) == ((), None)
    assert "Too few steps" in str(report)
    read = "offload/optimizer/read_bytes"
    assert report.metrics[read] == metrics[read]


def test_nothing_of_the_engine_stays_on_the_users_optimizer(disk):
    inner = SGD(layers().parameters(), 0.1)
    with engine_on(disk) as engine:
        engine.attach(None, inner)
        assert inner._optimizer_step_post_hooks
        log = weakref.ref(engine._log)
    assert not inner._optimizer_step_post_hooks
    del engine
    gc.collect()
    assert log() is None


# ---------------------------------------------------------------------- from run to run
def observe(monkeypatch, **rates):
    """Let every path of a run have been seen with such rates."""

    def observed(queue, direction):
        return MeasuredRate(rates[direction], "observed", 1 << 20)

    monkeypatch.setattr(measured_paths, "_observed", observed)


def test_what_a_path_carries_is_seen_and_the_next_engine_begins_with_it(disk, monkeypatch, caplog):
    observe(monkeypatch, read=10e6, write=5e6)
    compared = []
    for known in (None, 5e6):
        with engine_on(disk) as engine, caplog.at_level(logging.INFO):
            (queue,) = engine._resources.queues["nvme"]
            assert queue.bandwidth.rate(Direction.WRITE) == known
            train(engine)
            compared.append(engine.report().comparison)
        assert "the next run begins with" in caplog.text
    first, again = (found.part(f"{disk} write") for found in compared)
    assert (first.predicted, first.observed) == (None, 5e6)
    assert any("nothing was known before this run" in text for text in compared[0].remarks)
    assert again.predicted == pytest.approx(5e6)
    assert again.ratio == pytest.approx(1.0), "the path is as it was"
    assert again.remark == "predicted by 1 earlier run; seen over 1 MiB"
    ((_, figures),) = load_all_rates()
    assert figures[Direction.WRITE].runs == 2


@pytest.mark.parametrize("why", ["nothing leaves", "host memory takes it all"])
def test_a_path_that_has_nothing_to_do_is_not_judged(disk, why):
    config = settings(disk, "64MiB")
    if why == "nothing leaves":
        config = settings(disk, activations={"budget": "0%"}, optimizer={"enabled": False})
    with OffloadEngine(config) as engine:
        train(engine)
        found = engine.report().comparison
    for name in ("written in a step", "read in a step"):
        assert seconds(found, name, "predicted") == 0
        assert found.part(name).ratio == 1.0
    path = found.part(f"{disk} write")
    assert path.observed is None
    assert "was too rarely busy to tell" in path.remark
    assert load_all_rates() == []


def test_a_probe_that_was_wrong_is_corrected_by_half_and_not_repeated(tmp_path, monkeypatch):
    places = [tmp_path / "nvme0", tmp_path / "nvme1"]
    for place in places:
        place.mkdir()
    probe = mock.Mock(return_value=dict.fromkeys(Direction, MeasuredRate(20e6, "probe", 1 << 20)))
    monkeypatch.setattr(measured_paths, "probe", probe)
    observe(monkeypatch, read=5e6, write=5e6)  # the path is slower than the probe saw
    with engine_on(*places) as engine:
        train(engine)
        found = engine.report().comparison
    for place in places:
        part = found.part(f"{place} write")
        assert part.remark.startswith("predicted by a probe;")
        assert part.ratio == pytest.approx(0.25)
    with engine_on(*places) as engine:
        for queue in engine._resources.queues["nvme"]:
            assert queue.bandwidth.rate(Direction.WRITE) == pytest.approx(10e6)
            assert queue.bandwidth.round_trip() is not None
    assert probe.call_count == len(places)


@pytest.mark.parametrize("trouble", ["no folder", "no cache"])
def test_figures_that_cannot_be_kept_change_nothing_else(disk, rates_cache, monkeypatch, trouble):
    if trouble == "no folder":
        rates_cache.write_text("a file where the folder should be")
    else:
        monkeypatch.setenv(CACHE_VARIABLE, "")
    observe(monkeypatch, read=10e6, write=5e6)
    for _ in range(2):
        with engine_on(disk) as engine:
            (queue,) = engine._resources.queues["nvme"]
            assert queue.bandwidth.rate(Direction.WRITE) is None
            train(engine, steps=1)
    assert load_all_rates() == []
    assert rates_cache.exists() == (trouble == "no folder")
