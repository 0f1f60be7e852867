"""Every case of torch's databases is tested, each in one part."""

from __future__ import annotations

import pytest

from tests.conformance import selection


def test_the_parts_have_every_case_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [f"case {number}" for number in range(200)]
    found = []
    for number in range(1, 11):
        monkeypatch.setattr(selection, "part", lambda number=number: (number - 1, 10))
        found.extend(selection.selected(cases))
    assert sorted(found) == sorted(cases)


def test_the_part_is_of_the_environment_or_of_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = selection.part.__wrapped__
    monkeypatch.setenv("CONFORMANCE_PART", "3/10")
    assert parts() == (2, 10)
    monkeypatch.delenv("CONFORMANCE_PART")
    index, count = parts()
    assert 0 <= index < count == 20
