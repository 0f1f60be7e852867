"""`ssd-offload` in a process that also does other things: its garbage collector stays as it was."""

import gc
import sys

import pytest

from offload_strategy import cli


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("imports_fail", [False, True])
def test_garbage_collection_is_as_before(enabled, imports_fail, ssd_offload, monkeypatch):
    monkeypatch.setattr(gc, "freeze", lambda: pytest.fail("what the process has is frozen"))
    if imports_fail:
        monkeypatch.delattr(cli, "plan", raising=False)
        monkeypatch.setitem(sys.modules, "offload_strategy.cli.plan", None)
    try:
        if not enabled:
            gc.disable()
        if imports_fail:
            with pytest.raises(ImportError):
                cli.main(["config", "schema"])
        else:
            ssd_offload("config", "schema")
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


def test_the_program_of_a_process_of_its_own_keeps_what_was_imported_from_collection(
    monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["ssd-offload", "config", "schema"])
    frozen = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    assert cli.program() == 0
    assert frozen == [True]
    assert capsys.readouterr().out.startswith("{")
