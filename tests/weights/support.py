"""What is in memory of streamed weights, and tests of runs with and without them."""

from collections.abc import Callable, Iterable
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload_strategy import OffloadEngine
from offload_strategy.weights.guarded_parameter import GuardedParameter
from tests.training import Numbers, assert_same_history, settings, weights
from tests.weights.nets import adamw, net

OVERLAPS = ["eager", "commit", "off"]


def streaming(disk: Path, **sections: Any) -> OffloadEngine:
    sections = {"parameters": {"enabled": True, "min_size": 1}, **sections}
    return OffloadEngine(settings(disk, **sections))


def away(model: Any) -> list[str]:
    """Names of the weights that are not in memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return [
            name
            for name, parameter in model.named_parameters()
            if type(parameter) is GuardedParameter
            and parameter.untyped_storage().nbytes() <= parameter.element_size()
        ]


def nearly_all_left(model: nn.Module) -> bool:
    return len(away(model)) > len(list(model.parameters())) // 2


def open_turns(engine: OffloadEngine) -> list[str]:
    """Names of the weights that something holds in memory as if their block still computed."""
    assert engine._stream is not None
    return [weight.name for weight in engine._stream._weights.values() if weight.users]


def all_plain(model: nn.Module) -> bool:
    return all(type(parameter) is nn.Parameter for parameter in model.parameters())


def the_same(run: Callable[..., Any], names: Iterable[str] | None = None) -> Callable[..., None]:
    """Make a test of a run: the same numbers and weights without and with streamed weights.

    The run returns what it saw, and models. It is called with an engine, or None, and its other
    arguments, or those of these names, are parameters of the test and may be fixtures.
    """
    names = list(signature(run).parameters)[1:] if names is None else names

    def test(disk: Path, sections: dict[str, Any], **options: Any) -> None:
        history, *models = run(None, **options)
        expected = [*history, *map(weights, models)]
        with streaming(disk, **sections) as engine:
            history, *models = run(engine, **options)
            assert open_turns(engine) == []
        assert not any(type(p) is GuardedParameter for m in models for p in m.parameters())
        assert_same_history([*history, *map(weights, models)], expected)
        for value in (value for values in expected for value in values.values()):
            assert not value.is_floating_point() or bool(value.double().isfinite().all())

    all_names = dict.fromkeys(["disk", "sections", *names])
    parameters = [Parameter(name, Parameter.KEYWORD_ONLY) for name in all_names]
    test.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return test


def compared(
    make: Callable[..., Any] = net, optimizer_of: Callable[[Any], Any] | None = adamw
) -> Callable[[Callable[..., Iterable[Numbers]]], Callable[..., None]]:
    """Make a test of a use of a model and its optimizer, as `the_same` does.

    `make` builds the same model every time. Its required arguments, and those of the use after the
    model and the optimizer, are parameters of the test. One that is named `engine` is the engine.
    """
    made_of = [name for name, p in signature(make).parameters.items() if p.default is p.empty]

    def decorate(use: Callable[..., Iterable[Numbers]]) -> Callable[..., None]:
        own = list(signature(use).parameters)[2:]

        def run(engine: OffloadEngine | None, **options: Any) -> tuple[Any, Any]:
            model = make(**{name: options[name] for name in made_of})
            optimizer = None if optimizer_of is None else optimizer_of(model)
            if engine is not None:
                optimizer = engine.attach(model, optimizer)
                assert away(model)
            torch.manual_seed(11)
            options["engine"] = engine
            return use(model, optimizer, **{name: options[name] for name in own}), model

        return the_same(run, [name for name in (*own, *made_of) if name != "engine"])

    return decorate
