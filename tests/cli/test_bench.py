from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from offload_strategy.cli import bench, main
from offload_strategy.cli.bench import _percentile
from tests.io.backends import SimulatedBackend
from tests.io.loop_devices import loop_device, loop_disk

QUICK = ["--seconds", "0.1", "--size", "16MiB", "--threads", "2"]
MBps = 1_000_000


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSD_OFFLOAD_CONFIG", raising=False)


def test_a_table_and_json_tell_what_a_path_can_do(
    disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bench.json"
    assert main(["bench", str(disk), *QUICK, "--json", str(file)]) == 0
    first, heading, row = capsys.readouterr().out.splitlines()
    assert first == "auto backend, 2 threads, blocks of 32 MiB"
    assert heading.split()[0] == "path"
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
    for shown, name in ((write, "write"), (read, "read")):
        rate = found[f"{name}_bytes_per_second"]
        assert rate > 0
        assert shown == f"{rate / 1e9:.2f}"


def test_json_on_the_output_takes_the_place_of_the_table_and_the_config_gives_the_rest(
    disk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSD_OFFLOAD_CONFIG", '{"io": {"threads": 3, "block_size": "1MiB"}}')
    assert main(["bench", str(disk), "--seconds", "0.1", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"backend", "threads", "block_size", "seconds", "paths"}
    assert (report["threads"], report["block_size"]) == (3, 1 << 20)


def test_a_sweep_tries_threads_and_block_sizes(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--seconds", "0.02", "--size", "8MiB", "--sweep"]
    assert main(["bench", str(disk), *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = lines.index(f"{disk}: write / read in GB/s by threads and block size")
    assert re.split(r"  +", lines[start + 1]) == ["threads", "1 MiB", "4 MiB", "16 MiB", "32 MiB"]
    assert [line.split()[0] for line in lines[start + 2 :]] == ["1", "2", "4", "8"]


def test_two_paths_of_different_speed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    backends = iter(SimulatedBackend(rate, rate, monkeypatch) for rate in (200 * MBps, 100 * MBps))
    monkeypatch.setattr(bench, "create_backend", lambda *_, **__: next(backends))
    with (
        loop_disk(tmp_path / "fast", 300 << 20) as fast,
        loop_disk(tmp_path / "slow", 300 << 20) as slow,
    ):
        paths = [str(fast.directory), str(slow.directory)]
        assert main(["bench", *paths, "--seconds", "0.4", "--json", "-"]) == 0
        assert [list(Path(path).iterdir()) for path in paths] == [
            [Path(path) / "lost+found"] for path in paths
        ]
    found = json.loads(capsys.readouterr().out)["paths"]
    assert [path["file_system"] for path in found] == ["ext4", "ext4"]
    assert [path["write_bytes_per_second"] for path in found] == pytest.approx([2e8, 1e8])
    assert [path["read_bytes_per_second"] for path in found] == pytest.approx([2e8, 1e8])
    assert [path["share"] for path in found] == pytest.approx([2 / 3, 1 / 3])


def test_a_block_device_is_measured_unless_something_is_on_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with loop_device(tmp_path / "empty.img", 64 << 20) as device:
        assert main(["bench", str(device), *QUICK]) == 0
        assert "block device" in capsys.readouterr().out
    file = tmp_path / "full.img"
    with loop_device(file, 64 << 20) as device:
        subprocess.run(["mkfs.ext4", "-q", str(device)], check=True)
        before = file.read_bytes()
        assert main(["bench", str(device), *QUICK]) == 1
        assert "ext4" in capsys.readouterr().err
        assert file.read_bytes() == before
        assert main(["bench", str(device), "--overwrite", *QUICK]) == 0


def test_a_path_that_fails_does_not_hide_the_others(
    disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing"
    assert main(["bench", str(missing), str(disk), *QUICK]) == 1
    output = capsys.readouterr()
    assert output.out.splitlines()[-1].startswith(str(disk))
    assert output.err.startswith(f"ssd-offload: {missing}: ")
    assert "there is no directory" in output.err
    assert main(["bench", str(missing), *QUICK, "--json", "-"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["paths"]
    assert set(found) == {"path", "error"}


def test_a_json_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = time.monotonic()
    file = tmp_path / "nowhere" / "bench.json"
    assert main(["bench", str(disk), "--seconds", "30", "--json", str(file)]) == 2
    assert time.monotonic() - started < 10
    assert f"--json: {str(file)!r} cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--seconds", "0"],
        ["--seconds", "soon"],
        ["--size", "1"],
        ["--size", "12 parsecs"],
        ["--threads", "0"],
        ["--threads", "1.5"],
        ["--block-size", "5000"],
    ],
)
def test_wrong_options_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "/tmp", *words])
    assert caught.value.code == 2
    assert f"argument {words[0]}" in capsys.readouterr().err


def test_an_unknown_backend_is_refused(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(disk), "--backend", "carrier-pigeon", *QUICK]) == 1
    assert "carrier-pigeon" in capsys.readouterr().err


def test_the_99th_percentile_is_a_value_that_was_seen() -> None:
    assert _percentile([1.0], 0.99) == 1.0
    assert _percentile([float(i) for i in range(100, 0, -1)], 0.99) == 99.0
    assert _percentile([float(i) for i in range(1000)], 0.99) == 989.0


def test_ctrl_c_ends_it_on_a_terminal_and_nothing_is_left(disk: Path) -> None:
    terminal, child_side = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 200))
    program = subprocess.Popen(
        [sys.executable, "-m", "offload_strategy.cli", "bench", str(disk), "--seconds", "60"],
        stdout=subprocess.PIPE,
        stderr=child_side,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )
    os.close(child_side)
    try:
        shown = _read_until(terminal, rb"[1-9]%", seconds=30)  # the progress bar moves
        assert str(disk).encode() in shown
        program.send_signal(signal.SIGINT)
        out, _ = program.communicate(timeout=20)
        rest = _read_until(terminal, rb"(?!)", seconds=2)  # all that is left
    finally:
        program.kill()
        program.wait(10)
        os.close(terminal)
    assert program.returncode == 130
    assert out == b""
    assert b"ssd-offload: interrupted" in rest
    assert b"Traceback" not in rest
    assert list(disk.iterdir()) == []


def _read_until(terminal: int, pattern: bytes, seconds: float) -> bytes:
    """What a terminal shows until the pattern appears, time is up, or its other side closes."""
    text, deadline = b"", time.monotonic() + seconds
    with contextlib.suppress(OSError):  # EIO: the other side is closed
        while not re.search(pattern, text) and time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.1)[0]:
                text += os.read(terminal, 4096)
    return text
