"""Cells of a notebook that are interrupted, and run again."""

import gc
import sys
import weakref
from code import InteractiveInterpreter
from contextlib import suppress

import pytest
import torch
from torch import nn

from tests.training import activations_only, assert_same_bits, gradients, settings

SET_UP = """
import torch
from torch import nn
from offload_strategy import OffloadEngine

torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
engine = OffloadEngine(config)
optimizer = engine.attach(model, torch.optim.AdamW(model.parameters()))
"""
TRAIN = """
for _ in range(3):
    model(torch.ones(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
# Inside a hook of autograd, inside an update of the optimizer, and inside a forward pass.
INTERRUPTIONS = {
    "backward": "model[0].weight.register_hook(interrupt)",
    "update": "optimizer.register_step_pre_hook(interrupt)",
    "forward": "model[2].register_forward_hook(interrupt)",
}


@pytest.mark.parametrize("overlap", ["commit", "eager", "off"])
@pytest.mark.parametrize("place", INTERRUPTIONS)
def test_the_engine_of_an_interrupted_cell_ends_when_the_cells_are_run_again(
    disk, place, overlap, monkeypatch
):
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        monkeypatch.setattr(sys, name, None, raising=False)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    notebook = InteractiveInterpreter(
        {"config": settings(disk, optimizer={"overlap": overlap}), "interrupt": interrupt}
    )
    monkeypatch.setattr(notebook, "write", lambda text: None)
    cells, shown = notebook.locals, "<cell>"
    for cell in (SET_UP, TRAIN, INTERRUPTIONS[place]):
        notebook.runcode(compile(cell, shown, "exec"))
        assert sys.last_value is None
    notebook.runcode(compile(TRAIN, shown, "exec"))
    assert isinstance(sys.last_value, KeyboardInterrupt)
    sys.last_value = sys.last_value.with_traceback(sys.last_traceback)  # as notebooks keep it
    earlier = weakref.ref(cells["engine"])
    store = weakref.ref(cells["engine"]._resources.store)
    for cell in (SET_UP, TRAIN):
        notebook.runcode(compile(cell, shown, "exec"))
        gc.collect()
        assert earlier() is store() is None
    assert isinstance(sys.last_value, KeyboardInterrupt)  # the message stays
    cells["engine"].close()


class Interrupted(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt


class Catching(nn.Module):
    """Goes on after a module inside of it was interrupted."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), Interrupted(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).exp()
        with suppress(KeyboardInterrupt):
            self.inner(x)
        return self.last(x).exp()


def hooks_in_force() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@pytest.mark.parametrize("inner", ["another engine", "the same engine"])
def test_a_forward_pass_that_catches_an_interruption_ends_as_it_would(disk, inner):
    torch.manual_seed(0)
    model, x = Catching(), torch.ones(2, 4)
    expected = gradients_after(model, x)
    with activations_only(disk) as engine, activations_only(disk) as other:
        engine.attach(model)
        (other if inner == "another engine" else engine).attach(model.inner)
        assert_same_bits(gradients_after(model, x), expected)
        assert not hooks_in_force()


def gradients_after(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(x).sum().backward()
    return gradients(model)


def test_an_interrupted_model_and_its_engine_are_freed_as_before(disk):
    model = nn.Sequential(nn.Linear(4, 4), Interrupted(4, 4))
    engine = activations_only(disk)
    engine.attach(model)
    with suppress(KeyboardInterrupt):
        model(torch.ones(2, 4))
    seen = [weakref.ref(model), weakref.ref(engine)]
    del model, engine
    gc.collect()
    assert [reference() for reference in seen] == [None, None]
    with activations_only(disk):
        assert not hooks_in_force()
