"""The choice of what leaves, and the files that say it."""

import json
import random
from dataclasses import replace
from itertools import pairwise, product

import pytest

from offload_strategy.errors import ConfigError
from offload_strategy.plan_runtime.lifetime_plan import (
    GivenPlan,
    PlannedItem,
    load_plan,
    plan_lifetimes,
    save_plan,
)
from offload_strategy.plan_runtime.profile import (
    MemoryCurve,
    PathRates,
    Profile,
    TensorLife,
    Update,
)
from tests.plan_runtime.profiles import random_step, stack

MB = 1_000_000
LARGE_STACK = stack(8, nbytes=100 * MB, path=200.0 * MB)
LIVES = (
    TensorLife("short", 1000, (1.0, 1.5)),
    TensorLife("long", 100, (0.0, 9.0)),
    TensorLife("peak", 500, (1.0, 2.0)),
)


@pytest.mark.parametrize(
    ("profile", "limit", "leaving", "peak"),
    [
        (stack(4), 400, [], 400),
        (stack(8), 600, ["layer 0", "layer 1"], 600),
        (Profile(2.0, 10.0, LIVES, paths=(PathRates("disk", 100.0, 100.0),)), 1500, ["long"], 1500),
    ],
    ids=["all of it fits", "those that lie longest", "a small one that lies long"],
)
def test_as_few_leave_as_possible_and_those_first_that_lie_longest(profile, limit, leaving, peak):
    plan = plan_lifetimes(profile, limit)
    assert [move.name for move in plan.moves] == leaving
    assert (plan.fits, plan.hidden, plan.peak_bytes) == (True, True, peak)


def test_what_cannot_be_hidden_is_said_to_be_waited_for_and_what_never_leaves_may_not_fit():
    plan = plan_lifetimes(stack(10, path=20.0), 300)
    assert plan.fits
    assert not plan.hidden
    assert any(move.hidden for move in plan.moves)
    assert "waited for" in str(plan)
    assert not plan_lifetimes(stack(4, other_bytes=1000), 900).fits


@pytest.mark.parametrize("seed", range(5))
def test_relief_is_the_memory_above_the_limit_that_would_be_gone(seed):
    chance = random.Random(seed)
    curve = MemoryCurve(random_step(chance))
    limit, end = curve.peak_bytes // 2, curve.moments[-1]
    for _ in range(20):
        begin, until = sorted(chance.uniform(0.0, 1.1 * end) for _ in range(2))
        nbytes = chance.choice([1, limit // 10, 2 * limit])
        above = [
            min(max(0, level - limit), nbytes) * max(0.0, min(until, after) - max(begin, before))
            for level, (before, after) in zip(curve.levels, pairwise(curve.moments), strict=True)
        ]
        assert curve.relief(begin, until, nbytes, limit) == pytest.approx(sum(above))
        curve.add(begin, until, -(nbytes // 2))
    assert curve.relief(0.0, end, nbytes, curve.peak_bytes) == 0


def peak_of(spans):
    """The most bytes at any moment of a step of 20 s, added up moment by moment."""
    moments = {moment for begin, end, _ in spans for moment in (begin, end) if moment < 20.0}
    return max(sum(n for begin, end, n in spans if begin <= at < end) for at in {0.0, *moments})


def assert_fits_in_its_time(transfers, rate):
    """Fail if within any two moments more bytes have to be moved than a path can move."""
    for begin, end in product(*({moments[way] for moments in transfers} for way in (0, 1))):
        within = [n for first, last, n in transfers if begin <= first and last <= end]
        assert sum(within) / rate <= max(0.0, end - begin) + 1e-9


def test_of_random_steps_the_plan_says_truly_what_is_required():
    chance = random.Random(3)
    for _ in range(60):
        path = PathRates("disk", chance.uniform(20, 400), 200.0)
        profile = random_step(chance, paths=(path,))
        plan = plan_lifetimes(profile, int(profile.peak_bytes * chance.uniform(0.3, 1.0)))
        spans = [(*tensor.uses, tensor.nbytes) for tensor in profile.tensors]
        assert peak_of(spans) == plan.unplanned_bytes
        for move in plan.moves:
            gone = move.gone_at if move.hidden else move.leaves_at
            spans.append((gone, move.fetch_at, -move.nbytes))
        assert peak_of(spans) == plan.peak_bytes <= plan.unplanned_bytes
        assert len({move.tensor for move in plan.moves}) == len(plan.moves)
        hidden = [move for move in plan.moves if move.hidden]
        assert all(move.gone_at < move.fetch_at for move in hidden)
        writes = [(move.leaves_at, move.gone_at, move.nbytes) for move in hidden]
        reads = [(move.fetch_at, move.needed_at, move.nbytes) for move in hidden]
        assert_fits_in_its_time(writes, path.write)
        assert_fits_in_its_time(reads, path.read)


# ---------------------------------------------------------------------- files
def test_a_profile_is_the_same_after_it_was_saved(tmp_path):
    profile = stack(3, updates=(Update(1.0, 0.5, 10, 20),))
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    with pytest.raises(ValueError, match="paths must be one at most"):
        replace(profile, paths=2 * profile.paths)


def test_a_file_says_of_every_tensor_what_is_to_become_of_it(tmp_path):
    plan, file = plan_lifetimes(LARGE_STACK, 500 * MB), tmp_path / "plan.json"
    save_plan(plan, LARGE_STACK, file)
    left = {move.tensor for move in plan.moves}
    assert 0 < len(left) < 8
    does = ["leaves" if number in left else "stays" for number in range(8)]
    items = [PlannedItem(number, 100 * MB, what) for number, what in enumerate(does)]
    assert load_plan(file) == GivenPlan(tuple(items))
    lines = file.read_text().splitlines()
    assert sum('"name": "layer' in line for line in lines) == 8, "a line for each"
    assert json.loads(file.read_text())["limit"] == 500 * MB
    file.write_text(file.read_text().replace("leaves", "stays"))  # changed by hand
    assert all(item.does == "stays" for item in load_plan(file).items)


def a_profile(file):
    stack(3).save(file)


def a_plan(file):
    save_plan(plan_lifetimes(LARGE_STACK, 500 * MB), LARGE_STACK, file)


@pytest.mark.parametrize(
    ("write", "old", "new", "said"),
    [
        *(
            (a_profile, None, text, "profile: ")
            for text in ("", "[]", "{}", '{"format": 2}', '{"format": 1}', "nonsense")
        ),
        (a_profile, '"nbytes": 100', '"nbytes": -1', "tensors.0.nbytes: Input should be greater"),
        (a_profile, '"read": 100.0', '"read": 0', "paths.0.read: .* greater than 0, not 0"),
        (a_profile, '"write": 100.0', '"write": -1', "paths.0.write: .* greater than 0, not -1"),
        (a_profile, '"step_seconds": 9.0', '"step_seconds": 1', "forward_seconds must lie within"),
        (a_plan, '"does": "leaves"', '"does": "goes"', "be 'leaves' or 'stays', not 'goes'"),
        (a_plan, '"bytes": 100000000', '"bytes": "100 MB"', "items.0.bytes: Input should"),
        (a_plan, '"item": 3', '"item": 4', "item 3 is missing, or not in its place"),
        (a_plan, '"format": 1', '"format": 7', "not of format 1"),
        (a_plan, '"items"', '"rows"', "items: Field required"),
        (a_plan, "{", "", "plan: .* Write one with"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path, write, old, new, said):
    load, file = Profile.load if write is a_profile else load_plan, tmp_path / "given.json"
    write(file)
    text = file.read_text()
    assert old is None or old in text
    file.write_text(new if old is None else text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=rf"given\.json cannot be read as a .*{said}"):
        load(file)
    with pytest.raises(ConfigError, match="cannot be read as a"):
        load(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="cannot be written"):
        write(tmp_path / "no" / "given.json")
