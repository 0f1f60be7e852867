"""Finds out what of a choice stays in memory, where a machine has but one, and what leaves it.

[Note: memory of a step on the CPU]
Weights, states and buffers are there all the time. What autograd saves becomes less while backward
goes on, and gradients become more, so the worst moment is one of these:

    head        all is saved, and there are three tensors of logits: what the loss saves, and two
                gradients. A head's weight has its gradient when one of them is left.
    layers      the last, and the last and the first of those that are computed again: what is saved
                up to this one, what it needs while it computes, gradients of those above it
    embedding   all gradients; that of a tied embedding comes in two
    step()      all gradients, and nothing that was saved

Gradients are cleared in `step()`, and those of several micro-batches are there in all passes but
the first. With `overlap: commit` they wait for `step()` up to `optimizer.gradient_memory`, with
`eager` an update uses them up at once.

[Note: what gets memory that is left]
What leaves competes for it, in an order that is part of the choice: `states` stay in part, in a
tier of host memory (twice with commit, as old and new ones wait for `step()`); `waiting` are
gradients first, as they cost nothing else, then new weights, which wait in half of
`memory.pinned`; `activations` are saved tensors, of which a plan lets no more leave than it must
(`planning.device_memory`). Of weights that are streamed none stay.

The other half of `memory.pinned` fills with states that wait to be written, where backward is over
before the drives have taken them in: that is a backlog, which counts as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from offload_strategy.plan_runtime.subgroup_size import SUBGROUPS_IN_FLIGHT, subgroup_size
from offload_strategy.planner.memory_needs import Fit
from offload_strategy.planner.search.choice import Choice, Held, Placed, Split
from offload_strategy.planner.search.core_steps import computing_seconds
from offload_strategy.planner.search.cores import ELEMENT_BYTES, CpuRequest, moment_bytes
from offload_strategy.planner.search.placement import (
    SUBGROUPS_SHARE,
    Sizes,
    check_layers,
    micro_work,
    sizes,
    weights_in_flight,
)
from offload_strategy.units import MiB

#: Tensors of logits at a time.
_LOGITS = 3
#: Bytes that may wait to be written, or be read ahead, beside what is counted one by one.
_SLACK_BYTES = 64 * MiB
#: A tier of fewer bytes is not worth its name.
_GRAIN = 16 * MiB


#: Of no matter but that states are of float32.
_PLAIN = Choice(1, 1, 1)


@dataclass(frozen=True, slots=True)
class _Moment:
    """A moment of backward; see [Note: memory of a step on the CPU].

    Args:
        others: bytes in use that are neither saved before nor finished gradients.
        saved: bytes that layers have saved, and backward still needs.
        away: of them, what may be on the drives at this moment.
        done: bytes of gradients that are complete.
    """

    others: float
    saved: float
    away: float
    done: float


@dataclass(slots=True)
class _Kept:
    """Bytes that stay in memory, or leave it, of what may leave."""

    states: int = 0
    gradients: int = 0
    new_weights: int = 0
    left: int = 0


def place_in_memory(request: CpuRequest, choice: Choice) -> Placed:
    """Find out what stays, what leaves, and what that needs.

    Args:
        request: model and machine.
        choice: of the settings.

    Raises:
        ConfigError: if more layers are computed again than there are.
    """
    check_layers(request.shape, choice)
    counted = sizes(request.shape, micro_work(request, choice))
    room = request.room_bytes - request.cores.process_bytes
    return _Placement(request, choice, counted, room).place()


class _Placement:
    """Deals memory out for one choice."""

    def __init__(self, request: CpuRequest, choice: Choice, counted: Sizes, room: int) -> None:
        self._request, self._choice, self._counted, self._room = request, choice, counted, room
        self._weights = ELEMENT_BYTES * counted.parameters
        # Where they stay they are as the optimizer makes them.
        self._each = moment_bytes(choice) if choice.moves_optimizer else moment_bytes(_PLAIN)
        self._states = self._each * counted.parameters
        self._copies = 2 if choice.overlap == "commit" else 1
        self._subgroup = 0
        #: Buffers of states and weights on their way.
        self._staging = 0
        if choice.moves_optimizer:
            self._subgroup = subgroup_size(
                counted.parameters, self._each + ELEMENT_BYTES, room // SUBGROUPS_SHARE
            )
            each = self._each
            if choice.overlap == "commit" or choice.moves_parameters:
                each += ELEMENT_BYTES
            self._staging = SUBGROUPS_IN_FLIGHT * self._subgroup * each + _SLACK_BYTES
        if choice.moves_parameters:
            # Which is counted for weights of half precision.
            in_flight = weights_in_flight(request.shape, choice.blocks_in_flight)
            self._staging += ELEMENT_BYTES // 2 * in_flight
        self._moments = tuple(self._all_moments())
        self._late = self._late_share()

    def place(self) -> Placed:
        most = max(moment.away for moment in self._moments)
        # With as little in memory as there can be; what is left of it is dealt out.
        kept = _Kept(left=max(0, math.ceil(most)))
        if self._needed(kept) <= self._room:
            for kind in self._choice.host_first:
                self._deal(kind, kept)
        process = self._request.cores.process_bytes
        held = self._held(kept)
        disk = sum(split.ssd_bytes for split in held.values())
        choice = self._choice
        return Placed(
            choice=choice,
            held=held,
            fits=(
                Fit("memory", process + self._needed(kept), self._request.room_bytes),
                Fit("disk", disk, self._request.drives.capacity_bytes),
            ),
            saved_bytes=math.ceil(self._saved(self._request.shape.layers)),
            subgroup_size=self._subgroup or None,
            pinned_bytes=self._pinned(kept) + self._read_ahead(kept),
            gradient_bytes=kept.gradients,
        )

    # ------------------------------------------------------------------ what is needed
    def _needed(self, kept: _Kept) -> int:
        """Bytes at the worst moment, without the process."""
        return math.ceil(
            max(self._at(moment, kept) for moment in self._moments) + self._all_the_time(kept)
        )

    def _all_the_time(self, kept: _Kept) -> float:
        choice = self._choice
        nbytes = _SLACK_BYTES if kept.left else 0
        if not choice.moves_parameters:
            nbytes += self._weights
        if not choice.moves_optimizer:
            return nbytes + self._states
        backlog = self._late * (self._states - kept.states)
        buffers = min(self._pinned(kept), self._staging + kept.new_weights + backlog)
        return nbytes + self._copies * kept.states + buffers

    def _at(self, moment: _Moment, kept: _Kept) -> float:
        saved = moment.saved - min(kept.left, moment.away)
        return moment.others + saved + self._gradients(moment, kept.gradients)

    def _gradients(self, moment: _Moment, in_memory: int) -> float:
        """Complete ones, and those of micro-batches before."""
        choice = self._choice
        before = self._weights - moment.done if choice.micro_batches > 1 else 0.0
        done = moment.done
        if choice.moves_optimizer and choice.overlap == "commit":
            done = min(done, in_memory)
        elif choice.moves_optimizer and choice.overlap == "eager":
            done = 0.0
        return before + done

    def _pinned(self, kept: _Kept) -> int:
        """All buffers at most; new weights may wait in half of them."""
        return max(self._staging + kept.new_weights, 2 * kept.new_weights)

    def _late_share(self) -> float:
        """Share of the states that moves which is still to be written when backward is over."""
        choice = self._choice
        if not choice.moves_optimizer or choice.overlap == "off":
            return 0.0
        _, backward = computing_seconds(self._request, choice)
        moving = self._request.paths_seconds(self._states, self._states)
        return max(0.0, 1 - backward / moving)

    def _read_ahead(self, kept: _Kept) -> int:
        """Buffers that saved tensors come back into; then they are these tensors."""
        if not kept.left:
            return 0
        return min(kept.left, 2 * self._counted.saved_layer) + _SLACK_BYTES

    # ------------------------------------------------------------------ dealing out
    def _deal(self, kind: Held, kept: _Kept) -> None:
        """Give as much memory as there is to one that wants it."""
        choice = self._choice
        if kind == "activations":
            over = 0
            if kept.left:
                stay = _Kept(kept.states, kept.gradients, kept.new_weights)
                over = self._needed(stay) - self._room
            kept.left = min(kept.left, over + _SLACK_BYTES) if over > 0 else 0
        elif kind == "states" and choice.moves_optimizer:
            free = (self._room - self._needed(kept)) // self._copies
            kept.states = self._states if free >= self._states else free // _GRAIN * _GRAIN
        elif kind == "waiting" and choice.moves_optimizer and choice.overlap == "commit":
            kept.gradients = self._gradients_that_fit(kept)
            self._let_weights_wait(kept)

    def _gradients_that_fit(self, kept: _Kept) -> int:
        """Bytes of `optimizer.gradient_memory`: where it is used up, there must be so much."""
        room = self._room - self._all_the_time(kept)
        most = self._weights
        for moment in self._moments:
            free = int(room - self._at(moment, kept))
            if free < min(moment.done, self._weights):
                most = min(most, free)
        return most

    def _let_weights_wait(self, kept: _Kept) -> None:
        free = self._room - self._needed(kept)
        backlog = math.ceil(self._late * (self._states - kept.states))
        # Beyond as many as the other buffers, they bring a backlog with them, of as many at most.
        most = max((self._staging + free) // 2, free - backlog) if free > self._staging else free
        kept.new_weights = max(0, min(self._weights, most))

    # ------------------------------------------------------------------ what is where
    def _held(self, kept: _Kept) -> dict[Held, Split]:
        choice, held = self._choice, dict[Held, Split]()
        if choice.moves_parameters:
            held["weights"] = Split(0, self._weights)
        if kept.left:
            held["activations"] = Split(0, kept.left)
        if not choice.moves_optimizer:
            return held
        if choice.overlap == "commit":
            waits = kept.gradients + kept.new_weights
            held["waiting"] = Split(waits, 2 * self._weights - waits)
        copies = self._copies
        held["states"] = Split(copies * kept.states, copies * (self._states - kept.states))
        return held

    # ------------------------------------------------------------------ moments
    def _saved(self, layers: int) -> float:
        """Bytes that the first layers have saved; of those that are computed again their input."""
        counted, again = self._counted, self._choice.recomputed_layers
        inputs = min(layers, again)
        each = counted.saved / self._request.shape.layers
        return inputs * counted.layer_input + (layers - inputs) * each

    def _movable(self, layers: int) -> float:
        """What of it may leave."""
        counted, again = self._counted, self._choice.recomputed_layers
        inputs = min(layers, again) if counted.layer_input >= MiB else 0
        each = counted.movable / self._request.shape.layers
        return inputs * counted.layer_input + (layers - min(layers, again)) * each

    def _all_moments(self) -> Iterator[_Moment]:
        shape, counted, choice = self._request.shape, self._counted, self._choice
        layers, again = shape.layers, choice.recomputed_layers
        logits = counted.logits * choice.batch // choice.micro_batches
        ends = ELEMENT_BYTES * shape.vocabulary * shape.hidden
        saved, away = self._saved(layers), self._away(layers)
        yield _Moment(_LOGITS * logits, saved, away, 0)
        yield _Moment(logits + ends, saved, away, 0)
        # A pass over a layer: gradients of what is wide in it, and of its input and result.
        wide = 2 * counted.layer_input * (1 + shape.inner / shape.hidden)
        arriving = ELEMENT_BYTES * counted.layer_parameters
        each = (self._weights - ends) / layers
        for layer in sorted({layers, again + 1, again, 1} & set(range(1, layers + 1))):
            others = wide + arriving + (counted.saved_layer if layer <= again else 0)
            done = ends + (layers - layer) * each
            yield _Moment(others, self._saved(layer), self._away(layer), min(done, self._weights))
        tied = ends if shape.tied else 0
        yield _Moment(counted.layer_input + ends + tied, 0, 0, self._weights - ends)
        yield _Moment(0, 0, 0, self._weights)

    def _away(self, layer: int) -> float:
        """What may be away while a layer computes backward: the one before it is on its way."""
        below = self._movable(layer - 1)
        return max(0.0, 2 * below - self._movable(layer))
