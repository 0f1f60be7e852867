"""The choice of what leaves."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from offload_strategy.errors import ConfigError
from offload_strategy.plan_runtime.lifetime_plan import (
    GivenPlan,
    PlannedItem,
    Timeline,
    load_plan,
    plan_lifetimes,
    save_plan,
)
from offload_strategy.plan_runtime.profile import PathRates, Profile, TensorLife, Update
from tests.plan_runtime.profiles import random_step, stack


def test_what_lies_longest_leaves_first_and_no_more_than_needed() -> None:
    plan = plan_lifetimes(stack(8), 600)
    assert plan.fits
    assert plan.hidden
    assert [move.name for move in plan.moves] == ["layer 0", "layer 1"]
    assert plan.peak_bytes == 600


def test_large_tensors_that_lie_long_go_before_small_and_short_ones() -> None:
    tensors = (
        TensorLife("short", 1000, (1.0, 1.5)),
        TensorLife("long", 100, (0.0, 9.0)),
        TensorLife("peak", 500, (1.0, 2.0)),
    )
    profile = Profile(2.0, 10.0, tensors, paths=(PathRates("disk", 100.0, 100.0),))
    plan = plan_lifetimes(profile, 1500)
    assert [move.name for move in plan.moves] == ["long"]


def test_no_path_is_booked_twice_and_all_is_back_in_time() -> None:
    plan = plan_lifetimes(stack(20, path=120.0), 800)
    assert plan.fits
    assert plan.hidden
    for move in plan.moves:
        assert move.leaves_at + move.nbytes / 120.0 <= move.gone_at + 1e-9
        assert move.gone_at < move.fetch_at
        assert move.fetch_at + move.nbytes / 120.0 <= move.needed_at + 1e-9
    for edge in ("gone_at", "fetch_at"):
        moments = sorted(getattr(move, edge) for move in plan.moves)
        assert len(set(moments)) == len(moments)


def test_what_cannot_be_hidden_is_said_to_be_waited_for() -> None:
    plan = plan_lifetimes(stack(10, path=20.0), 300)
    assert plan.fits
    assert not plan.hidden
    assert any(move.hidden for move in plan.moves)
    assert "waited for" in str(plan)


def test_what_fits_moves_nothing_and_what_never_leaves_may_not_fit() -> None:
    plan = plan_lifetimes(stack(4), 400)
    assert plan.fits
    assert plan.moves == ()
    assert not plan_lifetimes(stack(4, other_bytes=1000), 900).fits


def _peak(spans: list[tuple[float, float, int]]) -> int:
    """The most bytes at any moment of a step of 20 s, added up moment by moment."""
    moments = {moment for begin, end, _ in spans for moment in (begin, end) if moment < 20.0}
    return max(sum(n for begin, end, n in spans if begin <= at < end) for at in {0.0, *moments})


def test_of_random_steps_the_plan_says_truly_what_is_required() -> None:
    chance = random.Random(3)
    for _ in range(60):
        path = PathRates("disk", chance.uniform(20, 400), 200.0)
        profile = random_step(chance, paths=(path,))
        plan = plan_lifetimes(profile, int(profile.peak_bytes * chance.uniform(0.3, 1.0)))
        spans = [(*tensor.uses, tensor.nbytes) for tensor in profile.tensors]
        assert _peak(spans) == plan.unplanned_bytes
        for move in plan.moves:
            gone = move.gone_at if move.hidden else move.leaves_at
            spans.append((gone, move.fetch_at, -move.nbytes))
        assert _peak(spans) == plan.peak_bytes <= plan.unplanned_bytes
        assert len({move.tensor for move in plan.moves}) == len(plan.moves)


def test_any_bookings_take_exactly_the_seconds_they_need() -> None:
    chance = random.Random(0)
    for _ in range(200):
        line, total = Timeline(), 0.0
        for _ in range(30):
            at, seconds = chance.uniform(0, 50), chance.uniform(0.1, 3)
            if chance.random() < 0.5:
                begin, end = at, line.after(at, seconds)
            else:
                begin, end = line.before(at, seconds), at
            line.book(begin, end)
            total += seconds
            booked = zip(line._begins, line._ends, strict=True)
            assert abs(sum(end - begin for begin, end in booked) - total) < 1e-9
            assert line._begins == sorted(line._begins)
            assert all(
                end <= begin for end, begin in zip(line._ends, line._begins[1:], strict=False)
            )


def test_a_profile_is_the_same_after_it_was_saved(tmp_path: Path) -> None:
    profile = stack(3, updates=(Update(1.0, 0.5, 10, 20),), about={"model": "stack"})
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    with pytest.raises(ValueError, match="paths must be one at most"):
        replace(profile, paths=2 * profile.paths)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 1}', "nonsense"])
def test_what_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"profile\.json cannot be read as a profile"):
        Profile.load(path)


# ---------------------------------------------------------------------- files
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
