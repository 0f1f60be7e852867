"""What is learned of one backward pass for the next, and what is fetched ahead because of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from offload_strategy import OffloadEngine
from offload_strategy.activations.forward_records import Trace
from offload_strategy.activations.prefetch import UseOrderHistory
from tests.training import activations_only, assert_same_bits, gradients, on_disk


def _saved(trace: Trace, *kinds: tuple[int, ...]) -> Trace:
    for shape in kinds:
        trace.saved(trace.prefix_with(torch.empty(shape)), 4)
    return trace


def test_how_long_an_item_lies_unused_is_known_from_what_came_before_it() -> None:
    book = UseOrderHistory()
    trace = _saved(Trace(), (2,), (3,))
    trace.saved_at[:] = [1.0, 2.0]
    trace.uses += [(1, 5.0, 0.0), (0, 9.0, 0.5)]
    book.learn(trace)
    again = Trace()
    assert book.times(again.prefix_with(torch.empty(2)))[0] == 7.5
    _saved(again, (2,))
    assert book.times(again.prefix_with(torch.empty(3)))[0] == 3.0
    assert book.times(again.prefix_with(torch.empty(3, 3))) == (None, None)


def test_which_pass_is_next_is_known_from_those_before_it() -> None:
    book, trace = UseOrderHistory(), _saved(Trace(), (2,))
    assert book.following(trace) is None
    right = 0
    for distance in 4 * [1, -3, 1, 5]:  # passes that look alike, of two stages in turns
        right += book.following(trace) == distance
        book.follows(trace, distance)
    # Round by round what is new is fewer, until eight in a row were seen before.
    for distance in 4 * [1, -3, 1, 5]:
        assert book.following(trace) == distance
        book.follows(trace, distance)
    assert right < 12
    # Elsewhere: what came after such a pass the last time.
    book.follows(trace, 7)
    assert book.following(trace) == 7


class _Crossed(nn.Module):
    """Backward does not go through the branches in the reverse order of forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [torch.tanh(branch(x + number)) for number, branch in enumerate(self.branches)]
        return (made[2] * made[0]).sum() + (made[1] * made[3]).exp().mean()


BATCH = torch.linspace(-1, 1, 64 * 32).reshape(64, 32)


def _step(model: nn.Module, between: Callable[[], None] = lambda: None) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = model(BATCH)
    between()
    loss.backward()
    return {"loss": loss.detach().clone(), **gradients(model)}


def figures(engine: OffloadEngine) -> dict[str, float]:
    prefix = "offload/activations/"
    return {
        key.removeprefix(prefix): value
        for key, value in engine.metrics().items()
        if key.startswith(prefix)
    }


def test_a_learned_order_has_no_misses(disk: Path) -> None:
    model = _Crossed()
    expected = _step(model)
    with activations_only(disk) as engine:
        engine.attach(model)
        misses = []
        for _ in range(6):
            before = figures(engine)["missed_loads"]
            assert_same_bits(_step(model, lambda: on_disk(engine)), expected)
            misses.append(figures(engine)["missed_loads"] - before)
    # What is asked for first cannot have been fetched ahead of anything.
    assert misses[0] >= 1
    assert misses[-3:] == [1, 1, 1]


def test_a_distance_in_bytes_is_kept_to(disk: Path) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)])
    with activations_only(disk, prefetch=64 * 32 * 4) as engine:
        engine.attach(model)
        store = engine._resources.store
        loss = model(torch.randn(64, 32)).sum()
        on_disk(engine)
        most = 0

        def look(_: torch.Tensor) -> None:
            nonlocal most
            most = max(most, engine._resources.pool.usage().lent_bytes)

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(look)
        loss.backward()
        assert store.live_tickets == 0
        assert 0 < most <= 3 * 64 * 32 * 4


def test_forward_passes_under_one_hint_are_one_record(disk: Path) -> None:
    model = _Crossed()
    with activations_only(disk) as engine:
        engine.attach(model)
        sizes = []
        for hinted in (False, True):
            if hinted:
                engine.microbatch(0, last=True)
            (model(BATCH) + model(2 * BATCH)).backward()
            sizes.append(figures(engine)["step_saved_bytes"])
        assert sizes[1] == 2 * sizes[0]


def test_a_step_without_all_of_its_backward_is_learned_from_as_well(disk: Path) -> None:
    model = _Crossed()
    with activations_only(disk) as engine:
        engine.attach(model)
        for _ in range(3):
            out = model(BATCH)
            on_disk(engine)
            torch.autograd.grad(out, list(model.branches[0].parameters()))
            del out
        assert engine._activations is not None
        assert engine._activations._prefetcher.history._plans
