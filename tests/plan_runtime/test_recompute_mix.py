"""Keep, move or compute again: reckoned by hand, and never worse than moving alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from offload_strategy.plan_runtime.profile import Block, Profile, TensorLife, Update
from offload_strategy.plan_runtime.recompute_mix import choose_mix
from offload_strategy.plan_runtime.recompute_mix import with_recomputed as again
from offload_strategy.plan_runtime.replay import replay
from tests.plan_runtime.profiles import stack

LAYERS = 10


def blocks(profile: Profile, *, share: float = 1.0, inside: int = 10) -> Profile:
    """Each layer of a stack is a block, that saves one tensor of 100 bytes.

    Args:
        profile: the stack.
        share: of a layer's second that is the block's.
        inside: bytes of its input.
    """
    found = tuple(
        Block(f"block {number}", number, number + 1, number + 1 - share, number + 1.0, inside)
        for number in range(len(profile.tensors))
    )
    return replace(profile, blocks=found)


# ---------------------------------------------------------------- the step that it makes
def test_a_block_is_made_anew_before_backward_uses_it() -> None:
    plain = blocks(stack(4))
    assert [life.uses[1] for life in plain.tensors] == [12.0, 10.0, 8.0, 6.0]
    found = again(plain, ["block 1"])
    assert found.step_seconds == plain.step_seconds + 1
    assert found.forward_seconds == plain.forward_seconds
    lives = {life.name: life.uses for life in found.tensors}
    # What comes before is where it was, what comes after is later by what it takes.
    assert lives["layer 3"] == (4.0, 6.0)
    assert lives["layer 2"] == (3.0, 8.0)
    assert lives["block 1 input"] == (1.0, 10.0)
    assert lives["layer 1"] == (11.0, 11.0)
    assert lives["layer 0"] == (1.0, 13.0)
    assert [life.name for life in found.tensors][:3] == ["layer 0", "block 1 input", "layer 2"]
    assert found.blocks == ()


def test_several_blocks_make_all_that_follows_later() -> None:
    found = again(blocks(stack(4)), [f"block {number}" for number in range(4)])
    lives = {life.name: life.uses for life in found.tensors}
    assert found.step_seconds == 16
    assert lives["layer 3"] == (7.0, 7.0)
    assert lives["layer 0"] == (16.0, 16.0)
    assert lives["block 0 input"] == (0.0, 15.0)
    # From then on a block's input is among what it has made anew.
    assert found.peak_bytes == 3 * 10 + 100


def test_what_is_made_anew_does_not_leave() -> None:
    found = again(blocks(stack(LAYERS, path=1e9)), ["block 3"])
    mix = choose_mix(found, 300)
    moved = {mix.profile.tensors[move.tensor].name for move in mix.plan.moves}
    assert moved
    assert "layer 3" not in moved


def test_what_a_block_needs_beside_it_needs_again() -> None:
    others = ((0.0, 5), (1.5, 70), (2.0, 5), (3.0, 5), (8.5, 20))
    found = again(blocks(replace(stack(4), others=others, other_bytes=70)), ["block 1"])
    assert found.others == ((0.0, 5), (1.5, 70), (2.0, 5), (3.0, 5), (8.5, 20), (10.0, 70))


def test_updates_come_later_as_well() -> None:
    plain = blocks(replace(stack(4), updates=(Update(7.0, 1.0, 0, 0), Update(12.0, 1.0, 0, 0))))
    assert [one.ready_at for one in again(plain, ["block 2"]).updates] == [7.0, 13.0]


def test_names_that_are_none_change_nothing() -> None:
    plain = blocks(stack(4))
    assert again(plain, []) is plain
    assert again(plain, ["block 9"]) is plain


# ---------------------------------------------------------------- the choice
def test_nothing_is_computed_again_while_moves_are_hidden() -> None:
    profile = blocks(stack(LAYERS, path=1000.0), share=0.001)
    mix = choose_mix(profile, 600)
    assert mix.recomputed == ()
    assert mix.plan.moves
    assert mix.plan.hidden


def test_blocks_are_computed_again_where_the_path_is_slow() -> None:
    profile = blocks(stack(LAYERS, path=10.0), share=0.5)
    mix = choose_mix(profile, 400)
    moved = choose_mix(replace(profile, blocks=()), 400)
    assert mix.recomputed
    assert mix.plan.fits
    assert mix.replay.peak_bytes <= 400
    assert mix.replay.step_seconds < 0.7 * moved.replay.step_seconds


def test_the_cheapest_for_its_bytes_comes_first() -> None:
    profile = blocks(stack(LAYERS, path=10.0), share=0.9)
    cheap = {2, 5, 7}
    changed = tuple(
        replace(one, begins_at=one.ends_at - 0.05) if one.first in cheap else one
        for one in profile.blocks
    )
    mix = choose_mix(replace(profile, blocks=changed), 750)
    assert {f"block {number}" for number in cheap} <= set(mix.recomputed)


def test_a_block_whose_input_is_as_large_as_what_it_saves_is_moved() -> None:
    profile = blocks(stack(LAYERS, path=40.0), inside=100)
    mix = choose_mix(profile, 300)
    assert not mix.plan.hidden
    assert mix.recomputed == ()


def test_what_cannot_fit_by_moving_may_fit_by_computing() -> None:
    """Something holds on to what has left, but not to what was never kept."""
    plain = stack(LAYERS, path=100.0)
    held = tuple(replace(life, held_until=life.uses[1] - 0.01) for life in plain.tensors)
    profile = blocks(replace(plain, tensors=held), share=0.1)
    assert not choose_mix(replace(profile, blocks=()), 500).plan.fits
    assert choose_mix(profile, 500).plan.fits


def test_a_step_without_blocks_or_paths_is_planned_as_ever() -> None:
    assert choose_mix(stack(LAYERS), 1200).recomputed == ()
    alone = choose_mix(blocks(replace(stack(LAYERS), paths=()), share=0.1), 500)
    assert alone.recomputed
    assert alone.plan.fits


@pytest.mark.parametrize("seed", range(40))
def test_a_mix_is_never_worse_than_moving_alone(seed: int) -> None:
    dice = random.Random(seed)
    layers = dice.randint(2, 12)
    profile = stack(layers, path=10 ** dice.uniform(0.5, 3))
    lives = tuple(
        TensorLife(life.name, dice.randint(1, 200), life.uses) for life in profile.tensors
    )
    profile = blocks(
        replace(profile, tensors=lives), share=dice.random(), inside=dice.randint(0, 30)
    )
    limit = int(profile.peak_bytes * dice.uniform(0.2, 1.0))
    alone = choose_mix(replace(profile, blocks=()), limit)
    mix = choose_mix(profile, limit)
    assert mix.plan.fits or not alone.plan.fits
    if mix.plan.fits and alone.plan.fits:
        assert mix.replay.step_seconds <= alone.replay.step_seconds * 1.0001
    assert mix.replay == replay(mix.profile, mix.plan)
    names = [block.name for block in profile.blocks if block.name in mix.recomputed]
    assert list(mix.recomputed) == names, "in the order of the forward pass"
