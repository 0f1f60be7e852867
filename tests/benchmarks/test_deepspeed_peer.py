"""A build of DeepSpeed's extensions that was killed does not hold up the next one."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.optimizer.deepspeed_peer import remove_stale_locks


def test_locks_that_nobody_holds_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "none"))
    remove_stale_locks()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    left, held = tmp_path / "async_io" / "lock", tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    for lock in (left, held):
        lock.parent.mkdir(parents=True)
        lock.touch()
    (tmp_path / "async_io" / "build.ninja").touch()
    with held.open():
        remove_stale_locks()
        assert not left.exists()
        assert held.exists()
    assert (tmp_path / "async_io" / "build.ninja").exists()
    remove_stale_locks()
    assert not held.exists()
