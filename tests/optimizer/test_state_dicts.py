"""State dicts and states are those of the plain optimizer, both ways, quantized ones as well."""

import copy
import io
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from offload_strategy.errors import ConfigError, OffloadError
from tests.optimizer.custom_optimizers import QUANTIZED
from tests.optimizer.runs import (
    EVERY_OVERLAP,
    OPTIMIZERS,
    OVERLAPS,
    Run,
    WideNet,
    adamw,
    assert_same_state_dict,
    compare,
    make_layers,
    make_net,
    offloading,
    steps,
)
from tests.training import assert_same_bits, assert_same_history, attached, bits, in_turn

MAKE = {
    "AdamW": adamw,
    **{name: OPTIMIZERS[name] for name in ("SGD momentum", "SGD", "Adam amsgrad fused")},
    "of somebody else's": OPTIMIZERS["of somebody else's"],
    "named groups": lambda m: _named_groups([*m.named_parameters()]),
    **QUANTIZED,
}


def _named_groups(named):
    return AdamW([{"params": named[:3], "lr": 0.1}, {"params": named[3:]}], 1e-2)


def test_a_state_dict_is_a_copy_and_one_of_another_model_is_refused(disk):
    with offloading(disk) as engine:
        run = Run(adamw, engine)
        steps(run, 1)
        saved = run.optimizer.state_dict()
        kept = copy.deepcopy(saved)
        for state in saved["state"].values():
            state["exp_avg"].zero_()
        with pytest.raises(ValueError, match="doesn't match"):
            run.optimizer.load_state_dict(AdamW(nn.Linear(2, 2).parameters()).state_dict())
        assert_same_state_dict(run.optimizer.state_dict(), kept)
        kept["state"][170] = {"exp_avg": torch.ones(3)}  # of an unknown parameter: it is kept
        loaded = copy.deepcopy(kept)
        run.optimizer.load_state_dict(loaded)
        kept_for_good = run.optimizer.state_dict()
        assert torch.equal(kept_for_good["state"][170]["exp_avg"], torch.ones(3))
        kept = copy.deepcopy(kept_for_good)
        steps(run, 2, start=1)
    assert_same_state_dict(loaded, kept, in_order=False)  # what was loaded does not change, either
    assert_same_state_dict(kept_for_good, kept)  # also after the engine is closed


@pytest.mark.parametrize(
    ("name", "overlap", "pending", "through_a_file"),
    in_turn(MAKE, EVERY_OVERLAP, [True, *[False] * 4, True], [True, True, False, False]),
)
@pytest.mark.usefixtures("uncompiled")
def test_checkpoints_go_both_ways(name, overlap, pending, through_a_file, disk):
    """Plain, offloaded, and changing over in the middle: all the same."""
    quantized = name in QUANTIZED
    make_model = WideNet if quantized else make_net

    def new_run(engine=None):
        return Run(MAKE[name], engine, overlap == "eager", make_model)

    def handed_over(run, engine):
        state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
        if through_a_file or quantized:
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            state = torch.load(file, weights_only=not quantized)
        else:
            state = copy.deepcopy(state)
        other = new_run(engine)
        if pending:  # what ran ahead must not survive the loading
            other.backward(77)
        other.model.load_state_dict(state["model"])
        other.optimizer.load_state_dict(state["optimizer"])
        other.model.zero_grad()
        assert_same_state_dict(other.optimizer.state_dict(), run.optimizer.state_dict())
        return other

    plain = new_run()
    fresh = plain.optimizer.state_dict()
    steps(plain, 6)
    with offloading(disk, overlap) as engine:
        assert_same_state_dict(new_run(engine).optimizer.state_dict(), fresh)
        run = new_run()
        steps(run, 2)
        run = handed_over(run, engine)
        steps(run, 2, start=2)
        run = handed_over(run, None)
        steps(run, 1, start=4)
        run.optimizer = engine.attach(None, run.optimizer)  # with the states that it has
        steps(run, 1, start=5)
        state = run.optimizer.state[run.model.first.weight]
        run.optimizer.state[run.model.first.weight] = state
        assert_same_bits(run.history[-1], plain.history[-1])
        assert_same_state_dict(run.optimizer.state_dict(), plain.optimizer.state_dict())


def _set_item(states, parameter):
    states[parameter]["exp_avg"] = torch.ones(8, 6)


def _permute(states, parameter):
    state = states[parameter]
    state["exp_avg"].copy_(state["exp_avg"].flip(0))
    state["exp_avg_sq"] = state["exp_avg_sq"].roll(1, 0)


def _keep_a_view(states, parameter):
    row = states[parameter]["exp_avg_sq"][0]
    row.mul_(3)


#: How people change states: ReLoRA prunes moments, schedules reset them.
STATE_CHANGES = {
    "in place": lambda states, parameter: states[parameter]["exp_avg"].mul_(0.5),
    "without a version": lambda states, parameter: states[parameter]["exp_avg"].data.zero_(),
    "by numpy": lambda states, parameter: states[parameter]["exp_avg"].numpy().fill(0.25),
    "the counter": lambda states, parameter: states[parameter]["step"].add_(7),
    "an item": _set_item,
    "permuted": _permute,
    "a view": _keep_a_view,
    "all": lambda states, parameter: [state["exp_avg"].zero_() for state in states.values()],
    "taken out": lambda states, parameter: states.pop(parameter, None),
}


@pytest.mark.parametrize("overlap", EVERY_OVERLAP)
@pytest.mark.parametrize("change", STATE_CHANGES)
def test_copies_of_states_are_written_back_when_they_are_changed(change, overlap, disk):
    def script(run):
        states, parameter = run.optimizer.state, run.model.first.weight
        for number in range(4):
            if number > 1:
                STATE_CHANGES[change](states, parameter)
            run.optimizer.zero_grad()
            run.backward(number)
            if number == 2 and overlap != "eager":
                STATE_CHANGES[change](states, parameter)
            run.step()
        held = {each: states[each] for each in states}
        for each, value in ((run.model.tied.weight, 2), (run.model.scale, 3)):
            held[each]["exp_avg"].fill_(value)
            assert states[each] is held[each]
        run.note()

    compare(script, adamw, disk, overlap)


def test_a_copy_of_a_state_that_is_out_of_date_cannot_be_changed(disk):
    with offloading(disk) as engine:
        run = Run(adamw, engine)
        steps(run, 1)
        states = run.optimizer.state
        kept = states[run.model.first.weight]
        on_its_own = states[run.model.tied.weight]["exp_avg"][0]
        steps(run, 1, start=1)
        assert not torch.equal(states[run.model.first.weight]["exp_avg"], kept["exp_avg"])
        on_its_own.zero_()
        with pytest.raises(OffloadError, match=r"read before the last step.*again after each"):
            run.backward(2)
        run.model.zero_grad()
        run.backward(2)
        run.optimizer.step()
        # Loading replaces states, whatever was done to copies of those before.
        before = run.optimizer.state_dict()
        states[run.model.first.weight]["exp_avg"].zero_()
        run.optimizer.load_state_dict(before)
        assert_same_state_dict(run.optimizer.state_dict(), before)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_the_state_reads_like_a_dictionary(overlap, disk):
    plain = Run(adamw)
    with offloading(disk, overlap) as engine:
        run = Run(adamw, engine)
        assert not run.optimizer.state
        steps(plain, 2)
        steps(run, 2)
        names = {parameter: name for name, parameter in run.model.named_parameters()}
        states, expected = run.optimizer.state, plain.optimizer.state
        assert len(states) == len(expected)
        for parameter, name in names.items():
            twin = plain.model.get_parameter(name)
            assert (parameter in states) == (twin in expected)
            assert_same_state_dict(dict(states[parameter]), dict(expected.get(twin, {})))
        assert {names[p] for p, _ in states.items()} == {names[p] for p in states}
        assert "anything" not in states


# ---------------------------------------------------------------------- quantized states
def test_updates_are_compiled_once(disk, monkeypatch):
    # Inductor takes many seconds for each graph.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    compiled = torch._dynamo.utils.counters["stats"]

    def train(engine=None):
        model = make_layers(2, 64)
        optimizer = attached(engine, model, QUANTIZED["torchao AdamW8bit"](model))
        history = []
        for step in range(5):
            model(torch.full((2, 64), 1.0 + step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            history.append([*map(bits, model.parameters()), compiled["unique_graphs"]])
        return history, optimizer

    plain, plain_optimizer = train()
    for overlap in EVERY_OVERLAP:
        with offloading(disk, overlap) as engine:
            offloaded, optimizer = train(engine)
            assert [each[:-1] for each in offloaded] == [each[:-1] for each in plain]
            assert_same_state_dict(optimizer.state_dict(), plain_optimizer.state_dict())
            assert len({each[-1] for each in offloaded[1:]}) == 1  # nothing was compiled again


def _assert_refused(disk, model, optimizer, reason, **section):
    with (
        offloading(disk, optimizer={"enabled": True, **section}) as engine,
        pytest.raises(ConfigError, match=reason),
    ):
        engine.attach(model, optimizer)


@pytest.mark.parametrize("name", ["momentum", "torchao AdamW8bit", "bitsandbytes AdamW8bit"])
def test_quantized_states_are_not_rounded_once_more(name, disk):
    model = WideNet()
    reason = r"quantizes its states itself.*state_dtype.*float32"
    _assert_refused(disk, model, QUANTIZED[name](model), reason, state_dtype="bfloat16")


def test_parameters_that_an_optimizer_moves_are_refused(disk):
    model = nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)
    _assert_refused(disk, model, QUANTIZED["bitsandbytes AdamW8bit"](model), "make them contiguous")


def test_random_rounding_is_refused(disk):
    model = nn.Linear(64, 64).bfloat16()
    optimizer = QUANTIZED["torchao AdamW8bit"](model, bf16_stochastic_round=True)
    _assert_refused(disk, model, optimizer, "draws random numbers")


@pytest.mark.parametrize("overlap", EVERY_OVERLAP)
def test_parameters_may_override_settings(overlap, disk):
    """Transformers does that for embeddings, whose states then have 32 bits."""
    manager = pytest.importorskip("bitsandbytes").optim.GlobalOptimManager.get_instance()

    def overridden(engine=None):
        run = Run(QUANTIZED["bitsandbytes AdamW8bit"], engine, overlap == "eager", WideNet)
        manager.initialize()
        manager.register_module_override(run.model.embedding, "weight", {"optim_bits": 32})
        manager.override_config(run.model.first.weight, "lr", 1e-4)
        manager.register_parameters(run.model.parameters())  # by their places, of other groups
        return run

    plain = overridden()
    steps(plain, 5)
    with offloading(disk, overlap) as engine:
        run = overridden(engine)
        steps(run, 5)
        assert_same_history(run.history, plain.history)
        assert_same_state_dict(run.optimizer.state_dict(), plain.optimizer.state_dict())
        assert run.optimizer.state[run.model.embedding.weight]["state1"].dtype is torch.float32
        assert run.optimizer.state[run.model.first.weight]["state1"].dtype is torch.uint8
    manager.initialize()


class LoadsByItself(AdamW):
    """As torchao's and bitsandbytes' do, it sees what is loaded, and casts it."""

    def __setstate__(self, state):
        super().__setstate__(state)


@pytest.mark.parametrize("name", ["torchao AdamW8bit", "bitsandbytes AdamW8bit", None])
@pytest.mark.usefixtures("uncompiled")
def test_loading_does_not_round_master_weights(name, disk):
    model = nn.Linear(64, 64).bfloat16()
    with offloading(disk, optimizer={"master_weights": True}) as engine:
        inner = QUANTIZED[name](model) if name else LoadsByItself(model.parameters(), lr=1e-3)
        optimizer = engine.attach(model, inner)
        model(torch.ones(2, 64, dtype=torch.bfloat16)).square().sum().backward()
        optimizer.step()
        saved = optimizer.state_dict()
        assert bits(saved["state"][0]["master_weight"].bfloat16()) == bits(model.weight)
        optimizer.load_state_dict(saved)
        assert_same_state_dict(optimizer.state_dict(), saved)
        assert optimizer.param_groups[0]["params"][0] is model.weight
