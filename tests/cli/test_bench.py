"""`ssd-offload bench` measures paths, prints what it found, and leaves nothing on them."""

import json
import re
import signal
import subprocess
import sys

import pytest

from offload_strategy import OffloadEngine, StorageError
from offload_strategy.cli import bench
from offload_strategy.cli.this_machine import known_path
from tests.io.backends import SimulatedBackend
from tests.io.loop_devices import loop_device, loop_disk
from tests.training import settings

QUICK = ["--seconds", "0.1", "--size", "16MiB", "--threads", "2"]
MBps = 1_000_000


def test_a_table_and_json_tell_what_a_path_can_do(disk, tmp_path, ssd_offload):
    file = tmp_path / "bench.json"
    first, heading, row = ssd_offload("bench", disk, *QUICK, "--json", file).out.splitlines()
    assert (first, heading.split()[0]) == ("auto backend, 2 threads, blocks of 32 MiB", "path")
    path, _, how, write, read, median, most, share = row.split()
    assert (path, share) == (str(disk), "100%")
    assert how in ("direct", "buffered")
    assert 0 < float(median) <= float(most)
    report = json.loads(file.read_text())
    assert (report["backend"], report["threads"], report["block_size"]) == ("auto", 2, 32 << 20)
    (found,) = report["paths"]
    assert (found["path"], found["error"], found["share"]) == (str(disk), None, 1)
    assert found["write_latency"]["bytes"] == 2 << 20
    assert 0 < found["write_latency"]["median_seconds"] <= found["write_latency"]["p99_seconds"]
    rates = [found[f"{way}_bytes_per_second"] for way in ("write", "read")]
    assert min(rates) > 0
    assert [write, read] == [f"{rate / 1e9:.2f}" for rate in rates]


def test_a_sweep_tries_threads_and_block_sizes(disk, ssd_offload):
    words = ["--seconds", "0.02", "--size", "8MiB", "--sweep"]
    lines = ssd_offload("bench", disk, *words).out.splitlines()
    start = lines.index(f"{disk}: write / read in GB/s by threads and block size")
    assert re.split(r"  +", lines[start + 1]) == ["threads", "1 MiB", "4 MiB", "16 MiB", "32 MiB"]
    assert [line.split()[0] for line in lines[start + 2 :]] == ["1", "2", "4", "8"]


def test_two_paths_of_different_speed(tmp_path, ssd_offload, monkeypatch):
    backends = iter(SimulatedBackend(rate, rate, monkeypatch) for rate in (200 * MBps, 100 * MBps))
    monkeypatch.setattr(bench, "create_backend", lambda *_, **__: next(backends))
    latencies = [float(n) for n in range(1000, 0, -1)]
    monkeypatch.setattr(bench, "write_latencies", lambda *_, **__: latencies)
    size = 300 << 20
    with loop_disk(tmp_path / "fast", size) as fast, loop_disk(tmp_path / "slow", size) as slow:
        paths = [fast.directory, slow.directory]
        monkeypatch.setenv("SSD_OFFLOAD_CONFIG", '{"io": {"threads": 3, "block_size": "1MiB"}}')
        output = ssd_offload("bench", *paths, "--seconds", "0.4", "--json", "-").out
        assert [list(path.iterdir()) for path in paths] == [[path / "lost+found"] for path in paths]
    report = json.loads(output)
    assert set(report) == {"backend", "threads", "block_size", "seconds", "paths"}
    assert (report["threads"], report["block_size"]) == (3, 1 << 20)  # the config gives them
    for path, rate, share in zip(report["paths"], (2e8, 1e8), (2 / 3, 1 / 3), strict=True):
        assert path["file_system"] == "ext4"
        assert path["write_latency"]["p99_seconds"] == 990
        rates = [path[f"{way}_bytes_per_second"] for way in ("write", "read")]
        assert [*rates, path["share"]] == pytest.approx([rate, rate, share])


def test_a_block_device_is_measured_unless_something_is_on_it(tmp_path, ssd_offload):
    file = tmp_path / "device.img"
    with loop_device(file, 64 << 20) as device:
        assert "block device" in ssd_offload("bench", device, *QUICK).out
        subprocess.run(["mkfs.ext4", "-q", str(device)], check=True)
        before = file.read_bytes()
        assert "ext4" in ssd_offload("bench", device, *QUICK, status=1).err
        assert file.read_bytes() == before
        ssd_offload("bench", device, "--overwrite", *QUICK)


def test_a_path_that_fails_does_not_hide_the_others(disk, tmp_path, ssd_offload):
    missing = tmp_path / "missing"
    output = ssd_offload("bench", missing, disk, *QUICK, "--json", "-", status=1)
    assert output.err.startswith(f"ssd-offload: {missing}: ")
    assert "there is no directory" in output.err
    failed, found = json.loads(output.out)["paths"]
    assert (failed.keys(), found["path"]) == ({"path", "error"}, str(disk))


def test_a_later_phase_that_fails_keeps_earlier_figures(disk, tmp_path, ssd_offload, monkeypatch):
    def fail(*_, **__):
        raise StorageError("the drive is gone")

    file, measure = tmp_path / "bench.json", bench.probe
    words = ["bench", disk, *QUICK, "--sweep", "--json", file]
    probes = iter([measure, measure, fail])
    monkeypatch.setattr(bench, "probe", lambda *given, **more: next(probes)(*given, **more))
    in_sweep = ssd_offload(*words, status=1)
    (found,) = json.loads(file.read_text())["paths"]
    assert (len(found["sweep"]), found["error"], found["share"]) == (1, "the drive is gone", 1)
    assert found["write_latency"]["count"] > 0
    assert found["written_bytes"] > 0
    assert re.search(r"\n1 +[\d.]+ / [\d.]+( +-){3}\n", in_sweep.out)
    assert in_sweep.err == f"ssd-offload: {disk}: the drive is gone\n"

    monkeypatch.setattr(bench, "probe", measure)
    monkeypatch.setattr(bench, "write_latencies", fail)
    row = ssd_offload(*words, status=1).out.splitlines()[-1].split()
    (found,) = json.loads(file.read_text())["paths"]
    assert found["error"] == "the drive is gone"
    assert "write_latency" not in found
    rates = [found[f"{way}_bytes_per_second"] / 1e9 for way in ("write", "read")]
    assert row[3:] == [*(f"{rate:.2f}" for rate in rates), "-", "-", "100%"]


def test_a_file_that_cannot_be_written_is_refused_at_once(disk, tmp_path, ssd_offload, monkeypatch):
    monkeypatch.setattr(bench, "_measure", lambda *_: pytest.fail("it was measured"))
    (tmp_path / "file").touch()
    for folder in ("nowhere", "file"):
        file = str(tmp_path / folder / "bench.json")
        said = ssd_offload("bench", disk, "--json", file, status=2).err
        assert f"{file} cannot be written: its folder does not exist" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *((f"--seconds {value}", "above 0 and at most 3600") for value in (0, "soon", "inf", 3601)),
        *((f"--size {value}", "argument --size") for value in (1, "12parsecs")),
        ("--threads 0", "io.threads: got '0'"),
        ("--threads 1.5", "io.threads: got '1.5'"),
        ("--block-size 5000", "io.block_size: got '5000'"),
        ("--backend carrier-pigeon", "io.backend: got 'carrier-pigeon'"),
    ],
)
def test_wrong_options_are_refused(words, said, ssd_offload):
    assert said in ssd_offload("bench", "/tmp", *words.split(), status=2).err


def test_ctrl_c_ends_it_on_a_terminal_and_nothing_is_left(disk, ssd_offload, monkeypatch):
    usual = bench.Progress.update

    def update(bar, number=1):
        usual(bar, number)
        if bar.last_print_n >= 0.02 * bar.total:  # the bar has moved
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(bench.Progress, "update", update)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    output = ssd_offload("bench", disk, "--seconds", "60", status=130)
    assert re.search(rf"{disk}:? .*[1-9]%", output.err)
    assert output.out == ""
    assert output.err.endswith("ssd-offload: interrupted\n")
    assert "Traceback" not in output.err


@pytest.mark.usefixtures("rates_cache")
def test_runs_and_plans_begin_with_what_was_measured(disk, tmp_path, ssd_offload):
    file = tmp_path / "bench.json"
    config = settings(disk)
    del config["io"]["threads"]
    known_path(disk, 0.02)  # a shorter look of before counts for less
    ssd_offload("bench", disk, *QUICK[:-2], "--block-size", "64KiB", "--json", file)
    (measured,) = json.loads(file.read_text())["paths"]
    with OffloadEngine(config) as engine:
        rates = {row.part: row for row in engine.report().paths}
    found = known_path(disk)
    for way in ("read", "write"):
        row = rates[f"{disk} {way}"]
        assert row.predicted == getattr(found, way) == measured[f"{way}_bytes_per_second"]
        assert "predicted by a probe" in row.remark
    assert found.sources == {"read": "remembered"}
