"""torch's own samples of operators and modules, and its optimizers with every option.

Operators and modules run under activation offload on a slow path, whose writes begin late and whose
reads end late.
"""

import itertools
import logging
from functools import partial

import pytest
import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_optimizers import (
    _get_optim_inputs_including_global_cliquey_kwargs,
    optim_db,
)

from offload_strategy import OffloadEngine
from tests.conformance.saved_tensors import Call, Comparison, engine
from tests.conformance.selection import selected
from tests.training import Numbers, assert_same_history, moved, settings

__all__ = ["engine"]


# ---------------------------------------------------------------------- operators
OPERATORS = {
    op.full_name: op
    for op in op_db
    # The solutions of plain PyTorch's `lstsq` differ from call to call.
    if op.supports_autograd and not op.full_name.startswith("linalg.lstsq")
}


def dtypes(op):
    """float32, and one more for what is different there: lazy conjugates, other kernels."""
    backward = op.supported_backward_dtypes("cpu")
    others = [d for d in (torch.complex64, torch.bfloat16, torch.float64) if d in backward]
    return [d for d in (torch.float32, *others[:1]) if d in backward]


def add_operator(comparison, label, op, args, kwargs, twice):
    """Compare a call, and one of the operator's form that changes its input in place."""
    comparison.add(label, Call(lambda: op(*args, **kwargs), (args, kwargs), twice))
    in_place = op.inplace_variant
    if in_place is not None and isinstance(args[0], torch.Tensor):
        call = Call(lambda: in_place(args[0].clone(), *args[1:], **kwargs), (args, kwargs), twice)
        comparison.add(f"{label} in place", call)


@pytest.mark.parametrize("name", selected(OPERATORS))
def test_every_sample_of_an_operator_is_the_same(name, engine):
    op, comparison = OPERATORS[name], Comparison(engine)
    for dtype in dtypes(op):
        for number, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=True)):
            label, args = f"{dtype}, sample {number}", (sample.input, *sample.args)
            twice = op.supports_gradgrad and number < 3
            add_operator(comparison, label, op, args, sample.kwargs, twice)
    assert comparison.different == []


# ---------------------------------------------------------------------- modules
MODULES = {info.name: info for info in module_db}


@pytest.mark.parametrize("name", selected(MODULES))
def test_every_sample_of_a_module_is_the_same(name, engine):
    info, comparison = MODULES[name], Comparison(engine)
    for dtype in (torch.float32, torch.float64):
        samples = info.module_inputs_func(info, "cpu", dtype, requires_grad=True, training=True)
        for number, sample in enumerate(samples):
            if sample.forward_input is not None:
                add_module(comparison, f"{dtype}, sample {number}", info.module_cls, sample, dtype)
    assert comparison.different == []


def add_module(comparison, label, kind, sample, dtype):
    made, given = sample.constructor_input, sample.forward_input
    torch.manual_seed(0)
    module = kind(*made.args, **made.kwargs).to(dtype).train()
    if any(map(is_lazy, (*module.parameters(), *module.buffers()))):
        with torch.no_grad():
            module(*given.args, **given.kwargs)
    before = {key: value.clone() for key, value in module.state_dict().items()}

    def call():
        module.load_state_dict(before)  # running statistics
        return module(*given.args, **given.kwargs)

    comparison.add(label, Call(call, (given.args, given.kwargs, list(module.parameters()))))


# ---------------------------------------------------------------------- optimizers
#: Parameters per subgroup: each its own and the largest in slices, some together, and all.
_SUBGROUP_SIZES = (1, 300, 10**6)
_SHAPES = ((), (3,), (0,), (5, 7), (1, 1), (2, 3, 4), (64, 80))
_MATRICES = ((5, 7), (1, 1), (33, 20), (64, 80))
_IN_MEMORY = ("LBFGS", "SparseAdam")


def _name(case):
    info, given, overlap, size = case
    return f"{info.name}-{given.desc}-{overlap}-{size}".replace(" ", "_")


def _cases():
    inputs_of = partial(_get_optim_inputs_including_global_cliquey_kwargs, "cpu", torch.float32)
    inputs = [(info, given) for info in optim_db for given in inputs_of(info)]
    everything = itertools.product(inputs, ("commit", "eager", "off"), _SUBGROUP_SIZES)
    return selected([(*pair, overlap, size) for pair, overlap, size in everything], _name)


def _parameters(info, differentiable):
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(shape, generator=generator).requires_grad_()
        for shape in (_MATRICES if info.name == "Muon" else _SHAPES)
        if info.name != "Adafactor" or shape != (0,)  # by which torch's divides
    ]
    return [leaf.clone() for leaf in leaves] if differentiable else leaves


def _train(info, given, engine):
    """Parameters and states after each of five steps; one parameter has its first gradient late.

    Not with fused kernels, of which torch's own fail then.
    """
    late = None if given.kwargs.get("fused") or info.name == "LBFGS" else 1
    differentiable = bool(given.kwargs.get("differentiable"))
    parameters = _parameters(info, differentiable)
    halves = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.03}]
    one_group = not info.supports_param_groups or info.name == "LBFGS"
    kwargs = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in given.kwargs.items()}
    optimizer: Optimizer = info.optim_cls(parameters if one_group else halves, **kwargs)
    if engine is not None:
        optimizer = engine.attach(None, optimizer)

    def closure(step):
        optimizer.zero_grad()
        used = [p for i, p in enumerate(parameters) if step or i != late]
        if info.only_supports_sparse_grads:
            for p in used:
                p.grad = p.detach().cos().to_sparse()
            return torch.zeros(())
        loss = sum((p * (step + 1)).sin().sum() for p in used)
        if differentiable:
            for p, gradient in zip(used, torch.autograd.grad(loss, used), strict=True):
                p.grad = gradient.detach()
        else:
            loss.backward()
        return loss.detach()

    history = []
    for step in range(5):
        if info.step_requires_closure:
            optimizer.step(lambda step=step: closure(step))  # type: ignore[misc]
        else:
            closure(step)
            optimizer.step()
        numbers: Numbers = {}
        for i, p in enumerate(parameters):
            for name, value in {"": p, **optimizer.state.get(p, {})}.items():
                if isinstance(value, torch.Tensor):
                    numbers[f"{i}.{name}"] = value.detach().clone()
        history.append(numbers)
    return history


@pytest.mark.parametrize("case", _cases(), ids=_name)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_an_optimizer_is_the_same(case, disk, caplog):
    info, given, overlap, size = case
    plain = _train(info, given, None)
    options = {"overlap": overlap, "subgroup_size": size}
    with OffloadEngine(settings(disk, optimizer=options)) as engine:
        with caplog.at_level(logging.WARNING):
            assert_same_history(_train(info, given, engine), plain)
        in_memory = info.name in _IN_MEMORY or given.kwargs.get("differentiable")
        warned = [each for each in caplog.records if "stay in memory" in each.getMessage()]
        assert len(warned) == bool(in_memory)
        has_states = any(
            not name.endswith(".") and value.dim() for name, value in plain[-1].items()
        )
        assert (moved(engine, "optimizer") > 0) == (has_states and not in_memory)
