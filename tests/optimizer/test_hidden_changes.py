"""What version counters do not tell of: the same as without offload, or refused."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._pytree import tree_leaves

from offload_strategy import OffloadEngine, OffloadError
from offload_strategy.optimizer.offloaded_optimizer import OffloadedOptimizer
from tests.optimizer.runs import EVERY_OVERLAP, OVERLAPS, make_layers
from tests.training import (
    assert_same_history,
    attached,
    same_with_and_without,
    settings,
    weights,
)


def _loss(model, step=0):
    return model(torch.full((2, 8), 1.0 + step)).pow(2).sum()


def _nothing():
    pass


def _trained(model, optimizer, *, before=_nothing, after=_nothing):
    """Weights after each of four steps, with calls before `step()` and after it."""
    found = []
    for step in range(4):
        _loss(model, step).backward()
        before()
        optimizer.step()
        after()
        optimizer.zero_grad()
        found.append(weights(model))
    return found


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_gradient_that_a_hook_keeps_may_be_changed_unseen(overlap, disk):
    def run(engine):
        model, kept = make_layers(4, 8), []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))
        optimizer = attached(engine, model, SGD(model.parameters(), 1e-3, momentum=0.9))

        def halve():  # as a reduction that the hook has begun
            while kept:
                values = kept.pop().detach().numpy()
                np.multiply(values, 0.5, out=values)

        return _trained(model, optimizer, before=halve)

    same_with_and_without(run, settings(disk, optimizer={"overlap": overlap}))


class _OneByOne(Optimizer):
    """Updates each parameter with a gradient by itself."""

    def __init__(self, parameters, **options):
        super().__init__(parameters, {"lr": 1e-2, **options})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group)


class _TrustRatio(_OneByOne):
    """The update of an element depends on the norm of its parameter, as in LAMB."""

    def update(self, p, group):
        p.add_(p.grad * (p.norm() / p.grad.norm()), alpha=-group["lr"])


@pytest.mark.parametrize("overlap", EVERY_OVERLAP)
def test_a_warm_up_from_zero_hides_nothing_of_an_update(overlap, disk):
    def run(engine):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 256), nn.Linear(256, 64))
        plain = _TrustRatio(model.parameters())
        schedule = LambdaLR(plain, lambda step: step / 4)
        return _trained(model, attached(engine, model, plain), after=schedule.step)

    same_with_and_without(run, settings(disk, optimizer={"overlap": overlap}))


def test_states_of_parameters_that_share_memory_stay_in_memory(disk, caplog):
    def make():
        model = make_layers(2, 8)
        model[1].weight = nn.Parameter(model[0].weight.data)
        return model, AdamW(model.parameters())

    plain, expected = make()
    model, optimizer = make()
    with OffloadEngine(settings(disk)) as engine:
        used = engine.attach(model, optimizer)
        assert not isinstance(used, OffloadedOptimizer)
        assert "share memory" in caplog.text
        assert_same_history(_trained(model, used), _trained(plain, expected))


@pytest.mark.parametrize("overlap", EVERY_OVERLAP)
def test_a_parameter_that_replaced_another_is_in_the_state_dict(overlap, disk):
    model = make_layers(2, 8)
    with OffloadEngine(settings(disk, optimizer={"overlap": overlap})) as engine:
        optimizer = engine.attach(model, AdamW(model.parameters()))
        _loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        old = model[0].weight
        model[0].weight = new = nn.Parameter(old.detach().clone())
        state = dict(optimizer.state[old])
        del optimizer.state[old]
        optimizer.param_groups[0]["params"][0] = new
        optimizer.state[new] = state
        _loss(model).backward()
        optimizer.step()
        assert sorted(optimizer.state_dict()["state"]) == [0, 1]


@pytest.mark.parametrize("streams", [False, True], ids=["resident", "streamed"])
def test_within_an_eager_step_nothing_is_saved_and_no_weight_changed(disk, streams):
    model = make_layers(2, 8)
    sections = {"parameters": {"enabled": streams, "min_size": 1}}
    # States in host memory: an update that waits for its own runs in step(), as in plain PyTorch.
    with OffloadEngine(
        settings(disk, "1MiB", optimizer={"overlap": "eager"}, **sections)
    ) as engine:
        optimizer = engine.attach(model, AdamW(model.parameters()))
        _loss(model).backward()
        for _ in range(2):
            with pytest.raises(OffloadError, match="not those of any step"):
                optimizer.state_dict()
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.state_dict()["state"]
        _loss(model).backward()
        with torch.no_grad():
            model[0].weight.clamp_(-0.1, 0.1)
        with pytest.raises(OffloadError, match="before weights were changed"):
            optimizer.step()


def _tensors(*values):
    """Copies of the tensors in some values, by number."""
    return {str(number): leaf.clone() for number, leaf in enumerate(tree_leaves(values))}


def _sliced(disk, overlap, elements=4096):
    """Settings with which a parameter of more elements is updated in slices."""
    return settings(disk, optimizer={"overlap": overlap, "subgroup_size": elements})


@pytest.mark.parametrize("overlap", EVERY_OVERLAP)
@pytest.mark.parametrize("reads", [False, True])
def test_sparse_gradients_of_a_large_parameter_keep_all_rows_of_its_momentum(overlap, reads, disk):
    def run(engine):
        torch.manual_seed(0)
        table = nn.Embedding(256, 64, sparse=True)
        model = nn.ModuleList([table, nn.Linear(64, 1)])
        optimizer = attached(engine, model, SGD(model.parameters(), 0.1, momentum=0.9))
        found = []
        for step in range(4):
            rows = (torch.arange(64) * (step + 3) * 5) % 256
            model[1](table(rows)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if reads:
                optimizer.load_state_dict(optimizer.state_dict())
                found.append(_tensors(optimizer.state[table.weight]["momentum_buffer"].to_dense()))
            found.append(weights(model))
        momentum = optimizer.state_dict()["state"][0]["momentum_buffer"]
        return [*found, _tensors(momentum._indices(), momentum._values())]

    same_with_and_without(run, _sliced(disk, overlap))


def _grows(make, grow_states):
    """A run in which a table of rows, updated in slices, gets more rows after two steps."""

    def run(engine):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Embedding(128, 96)])
        table = model[0].weight
        optimizer = attached(engine, model, make(model.parameters()))
        found = []
        for step in range(4):
            if step == 2:
                grow_states(optimizer.state[table])
                table.data = torch.cat([table.data, torch.ones(64, 96)])
            optimizer.zero_grad()
            (table * (step + 1)).pow(2).sum().backward()
            optimizer.step()
            found.append(_tensors(weights(model), optimizer.state_dict()["state"].get(0, ())))
        assert not torch.equal(table[128:], torch.ones(64, 96))
        return found

    return run


@pytest.mark.parametrize("overlap", EVERY_OVERLAP)
def test_rows_that_are_added_to_a_sliced_parameter_are_trained(overlap, disk):
    def with_zeros(state):
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.cat([state[name], torch.zeros(64, 96)])

    same_with_and_without(
        _grows(lambda p: SGD(p, 0.01), lambda state: None), _sliced(disk, overlap)
    )
    same_with_and_without(_grows(AdamW, with_zeros), _sliced(disk, overlap))


@pytest.mark.parametrize("overlap", EVERY_OVERLAP)
def test_states_that_do_not_fit_added_rows_are_an_error_as_without_offload(overlap, disk):
    with (
        OffloadEngine(_sliced(disk, overlap)) as engine,
        pytest.raises(RuntimeError, match="must match the size"),
    ):
        _grows(AdamW, lambda state: None)(engine)


@pytest.mark.parametrize("overlap", EVERY_OVERLAP)
def test_the_state_of_a_parameter_that_left_its_group_can_be_moved(overlap, disk):
    def run(engine):
        model = make_layers(2, 8)
        optimizer = attached(engine, model, AdamW(model.parameters()))
        _trained(model, optimizer)
        old = model[0].weight
        model[0].weight = new = nn.Parameter(old.detach().clone())
        optimizer.param_groups[0]["params"][0] = new
        assert old in optimizer.state
        assert sum(each is old for each in optimizer.state) == 1
        optimizer.state[new] = optimizer.state.pop(old)
        assert old not in optimizer.state
        found = _trained(model, optimizer)
        return [*found, _tensors(dict(sorted(optimizer.state_dict()["state"].items())))]

    same_with_and_without(run, settings(disk, optimizer={"overlap": overlap}))


class _Adjustable(_OneByOne):
    """Reads an option that couples the elements of a parameter, and attributes of its own."""

    def __init__(self, parameters):
        super().__init__(parameters, centralize=False)
        self.scale, self.factors, self.threshold = 1.0, [1.0], 0

    def update(self, p, group):
        couples = group["centralize"] or self.threshold
        gradient = p.grad - p.grad.mean() if couples else p.grad
        p.add_(gradient * self.scale, alpha=-group["lr"] * self.factors[0])


_SWITCHES = {
    "an option": lambda optimizer: optimizer.param_groups[0].update(centralize=True),
    "an attribute": lambda optimizer: setattr(optimizer, "threshold", 2),
}


@pytest.mark.parametrize("overlap", EVERY_OVERLAP)
@pytest.mark.parametrize("switch", _SWITCHES.values(), ids=_SWITCHES.keys())
def test_what_couples_the_elements_of_parameters_may_be_switched_on_later(switch, overlap, disk):
    def run(engine):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 256), nn.Linear(256, 64))
        optimizer = attached(engine, model, _Adjustable(model.parameters()))
        found = _trained(model, optimizer)
        switch(optimizer)
        return [*found, *_trained(model, optimizer)]

    same_with_and_without(run, _sliced(disk, overlap))


_CHANGES = {
    "a number": lambda optimizer: setattr(optimizer, "scale", optimizer.scale / 2),
    "another tensor": lambda optimizer: setattr(optimizer, "scale", torch.tensor(0.5)),
    "an item of a list": lambda optimizer: optimizer.factors.__setitem__(0, 0.5),
}


@pytest.mark.parametrize("change", _CHANGES.values(), ids=_CHANGES.keys())
def test_attributes_of_the_optimizer_may_change_before_the_step(change, disk):
    def run(engine):
        model = make_layers(2, 8)
        optimizer = attached(engine, model, _Adjustable(model.parameters()))
        return _trained(model, optimizer, before=lambda: change(optimizer))

    same_with_and_without(run, settings(disk))
    with (
        OffloadEngine(settings(disk, "1MiB", optimizer={"overlap": "eager"})) as engine,
        pytest.raises(OffloadError, match="of the optimizer were changed"),
    ):
        run(engine)


@pytest.mark.parametrize("overlap", EVERY_OVERLAP)
def test_a_group_may_be_added_and_saved_before_gradients_are_cleared(overlap, disk):
    def run(engine):
        model = make_layers(2, 8)
        optimizer = attached(engine, model, AdamW(model[1].parameters()))
        found = []
        for step in range(4):
            optimizer.zero_grad()
            _loss(model, step).backward()
            optimizer.step()
            if step == 1:
                optimizer.add_param_group({"params": list(model[0].parameters())})
            found.append(_tensors(weights(model), optimizer.state_dict()["state"]))
        return found

    same_with_and_without(run, settings(disk, optimizer={"overlap": overlap}))


class _Average(_OneByOne):
    """Averages the last two gradients, which it keeps in a list."""

    def update(self, p, group):
        last = [*self.state[p].get("last", [p.grad.clone()]), p.grad.clone()][-2:]
        self.state[p]["last"] = last
        p.add_(last[0] + last[1], alpha=-group["lr"] / 2)


@pytest.mark.parametrize("overlap", EVERY_OVERLAP)
def test_tensors_in_a_list_of_states_are_whole_and_written_back(overlap, disk):
    def run(engine):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 256), nn.Linear(256, 64))
        optimizer = attached(engine, model, _Average(model.parameters()))

        def change():  # of a value that the text of a tensor leaves out
            optimizer.state[model[1].weight]["last"][0][30, 100] = 1.0

        found = _trained(model, optimizer, after=change)
        return [*found, _tensors(optimizer.state_dict()["state"])]

    same_with_and_without(run, _sliced(disk, overlap))
