"""Changes of what was saved, in place or hidden: errors as without offload, or no harm."""

import re
import threading
import time
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from offload_strategy import OffloadEngine, OffloadError
from offload_strategy.io.backends.posix import PosixBackend
from offload_strategy.store.tensor_store import TensorStore
from tests.activations.support import Calls, Saves, X, compare, noise, with_gradients
from tests.training import activations_only, assert_same_bits, gradients, moved, on_disk, settings


# ---------------------------------------------------------------------- what autograd notices
class _ChangesSaved(torch.autograd.Function):
    """Its backward computes in place in what it saved."""

    @staticmethod
    def forward(ctx, y):
        ctx.save_for_backward(y)
        return y.sin()

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * y.cos_()


def _squares(w):
    x = noise(8, 8)
    base = torch.tanh(torch.tanh(x @ w) @ w)
    y = base[2:]
    return {"loss": (y * y).exp().sum(), "y": y, "base": base, "x": x, "w": w}


def _base_of_views(w):
    y = (X @ w) * 2
    return (y[2:] * y[:6]).sum() + _ChangesSaved.apply(y[1:]).sum()


def _twice(w):
    loss = _ChangesSaved.apply((X @ w).tanh()).sum()
    loss.backward(retain_graph=True)
    return loss


#: What is changed between the forward and the backward pass of `_squares`.
BETWEEN = {
    "the tensor": lambda t: t["y"].mul_(2),
    "a view of it": lambda t: t["y"][0].zero_(),
    "what it is a view of": lambda t: t["base"].add_(1),
    "the input": lambda t: t["x"].copy_(t["x"] + 1),
    "the weight": lambda t: t["w"].add_(1),
    "a detached alias": lambda t: t["y"].detach().zero_(),
}
#: What a backward pass changes itself, although others need it.
IN_BACKWARD = {
    "shared with an operator": lambda w: _ChangesSaved.apply((X @ w).exp()).sum(),
    "a view of what is shared": lambda w: _ChangesSaved.apply((X @ w).exp()[2:, ::2]).sum(),
    "a base of what is shared": _base_of_views,
    "a second backward": _twice,
}


def refusal(name, attach, between):
    """What autograd's error says of the tensor that was changed, and of its versions."""
    function = IN_BACKWARD.get(name)
    model = Calls(_squares if function is None else lambda w: {"loss": function(w)})
    attach(model)

    def step():
        tensors = model()
        between()
        with torch.no_grad():
            BETWEEN.get(name, lambda tensors: None)(tensors)
        tensors["loss"].backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation") as error:
        step()
    said = re.search(r"\[(\S+ \[.*?\])\].* version (\d+); expected version (\d+)", str(error.value))
    return said and said.groups()


@pytest.mark.parametrize("where", ["in a batch", "being written", "on the disk", "host", "kept"])
@pytest.mark.parametrize("name", [*BETWEEN, *IN_BACKWARD])
def test_a_change_of_a_saved_tensor_is_an_error_as_without_offload(name, where, disk, monkeypatch):
    """The same tensor, at the same versions."""
    expected = refusal(name, lambda model: None, lambda: None)
    go = threading.Event()
    if where == "being written":
        move = PosixBackend.move
        monkeypatch.setattr(PosixBackend, "move", lambda *args: (go.wait(60), move(*args))[1])
    options = {"host": {"host": "1MiB"}, "kept": {"min_size": 10_000}}.get(where, {})
    with activations_only(None if where == "host" else disk, **options) as engine:
        try:
            with engine.forward() if where == "in a batch" else nullcontext():
                wait = where == "on the disk"
                got = refusal(name, engine.attach, lambda: wait and on_disk(engine))
        finally:
            go.set()
    assert got == expected is not None


def test_a_backward_may_change_what_it_alone_has_saved(engine):
    compare(engine, Calls(lambda w: _ChangesSaved.apply(X @ w).sum()))


# ---------------------------------------------------------------------- what kernels change
#: Operators that write an argument which is neither changed in place (by its name) nor an `out=`,
#: and that have a derivative.
FILLED_LATE = {
    "rrelu_with_noise": lambda y: F.rrelu(y, training=True),
    "rrelu_with_noise_": lambda y: F.rrelu(y * 1, training=True, inplace=True),
    "_native_batch_norm_legit": lambda y: torch.ops.aten._native_batch_norm_legit(
        y, None, None, torch.zeros(8), torch.ones(8), True, 0.1, 1e-5
    )[0],
    "_batch_norm_with_update": lambda y: torch.ops.aten._batch_norm_with_update(
        y, torch.ones(8), torch.zeros(8), torch.zeros(8), torch.ones(8), 0.1, 1e-5
    )[0],
    "fused_moving_avg_obs_fake_quant": lambda y: _observed(y),
}


def _observed(y):
    on, low, high = torch.ones(1, dtype=torch.long), torch.tensor([-9.0]), torch.tensor([9.0])
    scale, zero = torch.ones(1), torch.zeros(1, dtype=torch.int)
    return torch.fused_moving_avg_obs_fake_quant(
        y, on, on, low, high, scale, zero, 0.01, -128, 127, 0
    )


@pytest.fixture
def written_at_once(monkeypatch):
    """What the store gets is on the disk before training goes on."""
    put_all = TensorStore.put_all

    def put_and_wait(self, *args, **options):
        tickets = put_all(self, *args, **options)
        self.wait_for_writes()
        return tickets

    monkeypatch.setattr(TensorStore, "put_all", put_and_wait)


@pytest.mark.parametrize("kind", FILLED_LATE)
@pytest.mark.usefixtures("written_at_once")
def test_what_a_kernel_fills_after_it_was_saved(kind, engine):
    compare(engine, Calls(lambda w: (FILLED_LATE[kind](X @ w) * X).exp().sum()))


# ---------------------------------------------------------------------- neighbours
def _halves(w):
    with torch.no_grad():
        return (w @ X).unsafe_chunk(2, 1)


@pytest.mark.parametrize("checksum", ["full", "sampled"])
def test_a_neighbour_that_changes_while_bytes_are_written_is_no_error(disk, monkeypatch, checksum):
    """A recurrent layer saves a strided part of its gates, and changes the next one in place."""
    begun, changed = threading.Event(), threading.Event()
    move = PosixBackend.move

    def move_late(*args):
        begun.set()
        changed.wait(60)
        move(*args)

    def function(w):
        first, second = _halves(w)
        loss = Saves.apply(w * 1, first).sum()
        loss = Saves.apply(w * 2, noise(8)).sum() + loss  # the first is being written now
        assert begun.wait(60)
        second.detach_().mul_(3)
        changed.set()
        return Saves.apply(w * 1, second).sum() + loss

    begun.set()
    model, expected = with_gradients(function)
    begun.clear()
    changed.clear()
    monkeypatch.setattr(PosixBackend, "move", move_late)
    config = settings(disk, optimizer={"enabled": False}, io={"checksum": checksum, "threads": 1})
    with OffloadEngine(config) as engine:
        engine.attach(model)
        loss = model()
        on_disk(engine)
        loss.backward()
        assert_same_bits(gradients(model), expected)
        assert moved(engine, verb="read") > 0


@pytest.mark.usefixtures("written_at_once")
def test_a_neighbour_at_the_same_version_has_its_own_bytes(engine):
    def function(w):
        first, second = _halves(w)
        with torch.no_grad():
            first.mul_(2)
        loss = Saves.apply(w * 1, first).sum()  # its reach has all of `second` but the last row
        with torch.no_grad():
            second.mul_(3)
        return Saves.apply(w * 1, second[:-1]).sum() + loss

    compare(engine, Calls(function))


# ---------------------------------------------------------------------- storages emptied
def _emptied(w, when, refills=True):
    """Saves what is emptied, and computed again before backward needs it; as Megatron does."""
    x = w @ X
    with torch.no_grad():
        kept = torch.tanh(x.detach())
    storage = kept.untyped_storage()
    nbytes = storage.nbytes()
    y = kept * w
    if when == "in a batch":
        storage.resize_(0)
    z = y.sin().exp().sin() * X
    if when == "given away":
        storage.resize_(0)

    def refill(_):
        storage.resize_(nbytes)
        with torch.no_grad():
            torch.empty(0).set_(storage, 0, x.shape, x.stride()).copy_(torch.tanh(x.detach()))

    if refills:
        y.register_hook(refill)
    return z.sum()


@pytest.mark.parametrize("host", [None, "1KiB", "1MiB"])
@pytest.mark.parametrize("seconds", [0, 0.1])
def test_a_storage_may_be_emptied_while_its_bytes_leave(disk, monkeypatch, host, seconds):
    """Writes take so long, and host memory has room for some of what is saved, or for all."""
    move = PosixBackend.move
    monkeypatch.setattr(PosixBackend, "move", lambda *args: (time.sleep(seconds), move(*args))[1])
    with activations_only(disk, host=host) as engine:
        model, expected = with_gradients(lambda w: _emptied(w, "given away"), engine)
        for _ in range(2):
            loss = model()
            torch.full((8, 8), float("nan"))  # in the memory that was freed
            loss.backward()
            assert_same_bits(gradients(model), expected)
            model.zero_grad()


def test_a_storage_that_is_emptied_before_its_bytes_leave_is_read_where_it_is_filled(engine):
    compare(engine, Calls(lambda w: _emptied(w, "in a batch")))


def test_a_storage_that_is_emptied_and_not_filled_again_is_an_error(engine):
    model = Calls(lambda w: _emptied(w, "in a batch", refills=False))
    engine.attach(model)
    loss = model()
    with pytest.raises(OffloadError, match="emptied after forward, and not filled again"):
        loss.backward()


# ---------------------------------------------------------------------- what nobody can see
HIDDEN = {
    "data": lambda y: y.data.add_(1),
    "numpy": lambda y: y.detach().numpy().fill(2),
    "storage": lambda y: y.untyped_storage().fill_(1),
}


@pytest.mark.parametrize("name", [*HIDDEN, None])
@pytest.mark.parametrize("host", [None, "1MiB"])
def test_a_hidden_change_is_found_on_request(name, host, disk):
    layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8, bias=False))
    with activations_only(disk, host=host, verify=True) as engine:
        engine.attach(layer)
        hidden = []
        layer[1].register_forward_hook(lambda module, args, output: hidden.append(output))
        loss = layer(X).exp().sum()
        on_disk(engine)
        if name is None:
            loss.backward()
            return
        HIDDEN[name](hidden[0])
        with pytest.raises(OffloadError, match=r"1 float32\[8, 8\].*unnoticed by autograd"):
            loss.backward()


class _Replaces(nn.Module):
    """Gives its weight other data after using it; plain autograd has saved the weight itself."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))

    def forward(self, x):
        y = torch.tanh(x) * self.weight
        self.weight.data = self.weight.data * 0.9
        return y


def test_data_of_a_weight_that_is_replaced_in_forward(disk):
    def run(engine):
        torch.manual_seed(0)
        model = nn.Sequential(*(_Replaces() for _ in range(3)))
        if engine is not None:
            engine.attach(model)
        x = noise(4, 8).requires_grad_()
        model(x).sum().backward()
        return {"x": x.grad, **gradients(model)}

    expected = run(None)
    with activations_only(disk) as engine:
        assert_same_bits(run(engine), expected)


MOVES = {
    "shared, as by a queue of multiprocessing": lambda t: t.share_memory_(),
    "resized": lambda t: t.resize_(640, 256),
    "resized as another": lambda t: t.resize_as_(torch.empty(640, 256)),
}


@pytest.mark.parametrize("moves", MOVES)
def test_the_memory_of_a_tensor_moves_while_it_leaves(disk, monkeypatch, moves):
    move = PosixBackend.move

    def late(*args):
        time.sleep(0.05)
        return move(*args)

    monkeypatch.setattr(PosixBackend, "move", late)

    def run(engine):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
        if engine is not None:
            engine.attach(model)
        outputs = []
        for layer in model:
            layer.register_forward_hook(lambda *args: outputs.append(args[2]))
        loss = model(noise(64, 256)).square().sum()
        for output in outputs[:-1]:
            MOVES[moves](torch.empty(0).set_(output.detach()))
        waste = [torch.full((64, 256), float("nan")) for _ in range(64)]
        if engine is not None:
            on_disk(engine)
        loss.backward()
        del waste
        return gradients(model)

    expected = run(None)
    with activations_only(disk) as engine:
        assert_same_bits(run(engine), expected)
