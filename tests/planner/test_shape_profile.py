"""Steps of transformers as profiles, beside what can be reckoned by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from offload_strategy.plan_runtime.lifetime_plan import plan_lifetimes
from offload_strategy.plan_runtime.profile import PathRates, Profile, peak_of
from offload_strategy.plan_runtime.replay import replay
from offload_strategy.planner.saved_tensor_bytes import Workload, activation_bytes
from offload_strategy.planner.transformer_shape import TransformerShape
from tests.planner.shape_profile import StageStep, active_bytes, step_profile

# One token in the vocabulary: embedding and head are next to nothing.
SHAPE = TransformerShape("llama", 4, 1024, 8, 1, feed_forward=4096, gated=True, tied=False)
WORK = Workload(2, 1024, dtype_bytes=4)
STEP = StageStep(SHAPE, WORK, micro_batches=4, flops=1e12, update_rate=1e12)


def saved(profile: Profile):
    return [tensor for tensor in profile.tensors if "micro-batch" in tensor.name]


def named(profile: Profile, name: str):
    (found,) = (tensor for tensor in profile.tensors if tensor.name == name)
    return found


def test_weights_gradients_and_two_states_of_float32_are_16_bytes_a_parameter():
    profile = step_profile(STEP)
    kept = profile.tensors_bytes - sum(tensor.nbytes for tensor in saved(profile))
    assert kept == 16 * sum(weight.elements for weight in SHAPE.weights())
    # Half precision is counted as it is said.
    profile = step_profile(replace(STEP, weight_bytes=2, gradient_bytes=2, state_bytes=12))
    elements = SHAPE.layer_weights(0)[0].elements
    assert named(profile, "layers.0.q").nbytes == 2 * elements
    assert named(profile, "gradient of layers.0.q").nbytes == 2 * elements
    assert named(profile, "states of layers.0.q").nbytes == 12 * elements


def test_each_micro_batch_saves_what_the_layers_save():
    profile = step_profile(STEP)
    last_norm = WORK.tokens * SHAPE.hidden * WORK.dtype_bytes
    of_one = activation_bytes(SHAPE, WORK) - last_norm
    assert sum(tensor.nbytes for tensor in saved(profile)) == 4 * of_one
    assert peak_of(saved(profile), profile.step_seconds) == of_one


def test_the_first_of_two_stages_holds_two_micro_batches_and_the_last_one():
    of_one = activation_bytes(SHAPE, WORK) - WORK.tokens * SHAPE.hidden * WORK.dtype_bytes
    for stage, held in ((0, 2), (1, 1)):
        profile = step_profile(replace(STEP, stages=2, stage=stage))
        peak = peak_of(saved(profile), profile.step_seconds)
        assert peak == held * of_one // 2


@pytest.mark.parametrize(("stages", "slots"), [(1, 4), (2, 5), (4, 7)])
def test_a_step_is_as_long_as_its_micro_batches_and_the_pipelines_bubble(stages, slots):
    # 1F1B: micro-batches + stages - 1 times forward and backward of a stage.
    profile = step_profile(replace(STEP, stages=stages))
    stage = 3 * SHAPE.forward_flops(WORK.batch, WORK.sequence) / STEP.flops / stages
    assert profile.step_seconds == pytest.approx(slots * stage, rel=0.001)


def test_more_stages_than_micro_batches_leave_none_waiting_for_ever():
    for stage in range(4):
        profile = step_profile(replace(STEP, stages=4, stage=stage, micro_batches=1))
        assert profile.step_seconds == pytest.approx(step_profile(
            replace(STEP, micro_batches=1)).step_seconds, rel=0.001)  # fmt: skip


def test_a_tensor_is_used_when_its_products_are():
    profile = step_profile(replace(STEP, micro_batches=1))
    forward = SHAPE.forward_flops(WORK.batch, WORK.sequence) / STEP.flops
    begin = profile.forward_seconds - forward
    made, used = named(profile, "layers.0: queries, micro-batch 0").uses
    parts = {part.name: part.flops / STEP.flops for part in SHAPE.parts(2, 1024, 4)}
    assert made == pytest.approx(begin + parts["qkv"])
    assert used == pytest.approx(profile.step_seconds - 2 * (parts["qkv"] + parts["attention"]))
    update, there, back = named(profile, "layers.0.q").uses
    assert update < there == pytest.approx(begin)
    assert back == pytest.approx(profile.step_seconds - 2 * parts["qkv"])
    gradient = named(profile, "gradient of layers.0.q")
    assert gradient.uses == (back, profile.step_seconds)
    assert named(profile, "states of layers.0.q").uses == (update,)


def test_all_is_used_within_the_step():
    for stage in (0, 1):
        profile = step_profile(replace(STEP, stages=2, stage=stage))
        for tensor in profile.tensors:
            assert 0 <= tensor.uses[0] <= tensor.uses[-1] <= profile.step_seconds


def test_a_tied_head_is_the_embedding_on_one_device_and_a_copy_on_two():
    tied = replace(STEP, shape=replace(SHAPE, tied=True))
    alone = step_profile(tied)
    assert len(named(alone, "embedding").uses) == 1 + 3 * 4, "the update; embedding, head and back"
    assert not any(tensor.name == "head" for tensor in alone.tensors)
    last = step_profile(replace(tied, stages=2, stage=1))
    assert named(last, "head")


def test_the_largest_product_is_counted_once_more():
    # gate and up in backward: input, two matrices, two results, and the gradient of each.
    tokens, hidden, inner = WORK.tokens, SHAPE.hidden, SHAPE.inner
    largest = 2 * 4 * (tokens * hidden + 2 * hidden * inner + 2 * tokens * inner)
    assert max(active_bytes(STEP)) == largest
    assert step_profile(STEP).other_bytes == largest


def test_a_profile_can_be_saved_planned_and_replayed(tmp_path: Path):
    file = tmp_path / "profile.json"
    step_profile(STEP).save(file)
    profile = replace(Profile.load(file), paths=(PathRates("disk", 2e9, 2e9),))
    plan = plan_lifetimes(profile, int(0.7 * profile.peak_bytes))
    assert plan.fits
    assert plan.moves
    found = replay(profile, plan)
    assert found.step_seconds >= profile.step_seconds * (1 - 1e-9)
