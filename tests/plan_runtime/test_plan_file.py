"""Plans as files that people read and change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offload_strategy.errors import ConfigError
from offload_strategy.plan_runtime.lifetime_plan import plan_lifetimes
from offload_strategy.plan_runtime.plan_file import GivenPlan, PlannedItem, load_plan, save_plan
from offload_strategy.plan_runtime.profile import PathRates, Profile, TensorLife

MB = 1_000_000


@pytest.fixture
def profile() -> Profile:
    tensors = tuple(
        TensorLife(f"layer {number}", 100 * MB, (1.0 + number, 20.0 - number))
        for number in range(8)
    )
    path = PathRates("path", 200.0 * MB, 200.0 * MB)
    return Profile(9.0, 20.0, tensors, paths=(path,))


def test_a_file_says_of_every_tensor_what_is_to_become_of_it(
    profile: Profile, tmp_path: Path
) -> None:
    plan = plan_lifetimes(profile, 500 * MB)
    file = tmp_path / "plan.json"
    save_plan(plan, profile, file)
    left = {move.tensor for move in plan.moves}
    assert 0 < len(left) < 8
    items = tuple(
        PlannedItem(number, 100 * MB, "leaves" if number in left else "stays")
        for number in range(8)
    )
    assert load_plan(file) == GivenPlan(items)
    lines = file.read_text().splitlines()
    assert sum('"name": "layer' in line for line in lines) == 8, "a line for each"
    assert json.loads(file.read_text())["limit"] == 500 * MB
    file.write_text(file.read_text().replace("leaves", "stays"))  # changed by hand
    assert not any(item.leaves for item in load_plan(file).items)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            '"does": "leaves"',
            '"does": "goes"',
            "Input should be 'leaves' or 'stays', not 'goes'",
        ),
        (
            '"bytes": 100000000',
            '"bytes": "100 MB"',
            "items.0.bytes: Input should",
        ),
        ('"item": 3', '"item": 4', "item 3 is missing, or not in its place"),
        ('"format": 1', '"format": 7', "not of format 1"),
        ('"items"', '"rows"', "items: Field required"),
        ("{", "", "Write one with"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(
    profile: Profile, tmp_path: Path, old: str, new: str, said: str
) -> None:
    file = tmp_path / "plan.json"
    save_plan(plan_lifetimes(profile, 500 * MB), profile, file)
    file.write_text(file.read_text().replace(old, new, 1))
    with pytest.raises(ConfigError, match=said):
        load_plan(file)


def test_a_file_that_is_not_there_is_an_error(profile: Profile, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read as a plan"):
        load_plan(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="cannot be written"):
        save_plan(plan_lifetimes(profile, 500 * MB), profile, tmp_path / "no" / "plan.json")
