"""Memory and step time of training on a CPU, for given settings.

[Note: memory of a step on the CPU]
Weights, states and buffers are in memory all the time. What autograd saves becomes less while
backward goes on, and gradients become more, so the peak is at one of these moments:

    head        everything is saved, and there are three tensors of logits: what the loss saves,
                and two gradients. The head's weight has its gradient when one of them is free.
    layers      the last one, and the last and the first of those that are recomputed: what is saved
                up to this layer, what it needs while it computes, and the gradients of those above
    embedding   all gradients; that of a tied embedding arrives in two parts
    step()      all gradients, and nothing that was saved

Gradients are cleared in `step()`, and those of several micro-batches exist in all passes but the
first. With `overlap: commit` they wait for `step()`, in memory up to `optimizer.gradient_memory`;
with `eager` an update uses them at once.

[Note: use of the memory that is left]
What is offloaded competes for it, in an order that is one of the settings: `states` stay in part,
in a tier of host memory (twice with commit, because old and new ones wait for `step()`); `waiting`
are gradients first, because they cost nothing else, then new weights, which wait in half of
`memory.pinned`; `activations` are saved tensors, of which a plan lets no more leave than it must
(`planning.device_memory`). Streamed weights never stay.

The other half of `memory.pinned` fills with states that wait to be written if backward ends before
the drives have written them. This backlog counts as well.

[Note: step time on the CPU]
The stages are those of `planner.search.gpu_model` without a link. With `overlap: commit` an update
runs on copies of the weights, which are compared with the weights and copied back in `step()`: four
passes over the bytes of all weights, two of which only read. States in bfloat16 are upcast and
rounded again within the caches. Gradients of several micro-batches are added up, which reads two
tensors and writes one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from offload_strategy.plan_runtime.space_requirements import SUBGROUPS_IN_FLIGHT, subgroup_size
from offload_strategy.planner.memory_needs import Fit
from offload_strategy.planner.saved_tensor_bytes import layer_tensors
from offload_strategy.planner.search.cpu_request import (
    ELEMENT_BYTES,
    HOOK_SECONDS,
    CpuRequest,
    moment_bytes,
)
from offload_strategy.planner.search.settings import (
    SUBGROUPS_SHARE,
    OffloadedKind,
    Placement,
    Settings,
    TierSplit,
    model_sizes,
    weights_in_flight_bytes,
)
from offload_strategy.planner.step_time import BACKWARD_OVER_FORWARD, StageLoad, StepTime
from offload_strategy.units import MiB

#: Tensors of logits at a time.
_LOGITS = 3
#: Bytes that may wait to be written, or be read ahead, besides what is counted one by one.
_SLACK_BYTES = 64 * MiB
#: A tier of fewer bytes would hold next to nothing.
_GRAIN = 16 * MiB
#: Settings of a run whose states stay in memory; only their type matters here.
_NO_OFFLOAD = Settings(1, 1, 1)
#: Copies of all weights: one before the update and one after it, with a comparison of their bits.
_COPIES_OF_COMMIT = 1.5
#: Copies of all weights: two moments, upcast and rounded.
_COPIES_OF_ROUNDING = 1.0
_COPIES_OF_ADDING = 1.5


# ---------------------------------------------------------------------------- memory
@dataclass(frozen=True, slots=True)
class _Moment:
    """A moment of backward; see [Note: memory of a step on the CPU].

    Args:
        others: Bytes in use that are neither saved tensors nor finished gradients.
        saved: Bytes that layers have saved and backward still needs.
        away: Bytes of these that may be on the drives at this moment.
        done: Bytes of finished gradients.
    """

    others: float
    saved: float
    away: float
    done: float


@dataclass(slots=True)
class _InMemory:
    """Bytes that stay in memory of what may be offloaded, and saved tensors that leave (`left`)."""

    states: int = 0
    gradients: int = 0
    new_weights: int = 0
    left: int = 0


def place_on_cpu(request: CpuRequest, settings: Settings) -> Placement:
    """Return what stays in memory, what is offloaded, and the memory that this needs.

    Args:
        request: Model and machine.
        settings: The settings.

    Raises:
        ConfigError: If more layers are to be recomputed than the model has.
    """
    settings.check_layers(request.shape)
    return _CpuPlacement(request, settings).place()


class _CpuPlacement:
    """Assigns memory for one choice of settings."""

    def __init__(self, request: CpuRequest, settings: Settings) -> None:
        self._request, self._settings = request, settings
        self._sizes = model_sizes(request.shape, settings.micro_batch(request.work))
        self._room = request.room_bytes - request.cores.process_bytes
        self._weights = ELEMENT_BYTES * self._sizes.parameters
        # States that stay are as the optimizer makes them.
        each = moment_bytes(settings if settings.offloads_optimizer else _NO_OFFLOAD)
        self._states = each * self._sizes.parameters
        self._copies = 2 if settings.overlap == "commit" else 1
        self._subgroup = 0
        #: Buffers of states and weights in flight.
        self._staging = 0
        if settings.offloads_optimizer:
            self._subgroup = subgroup_size(
                self._sizes.parameters, each + ELEMENT_BYTES, self._room // SUBGROUPS_SHARE
            )
            if settings.overlap == "commit" or settings.streams_weights:
                each += ELEMENT_BYTES
            self._staging = SUBGROUPS_IN_FLIGHT * self._subgroup * each + _SLACK_BYTES
        if settings.streams_weights:
            # The count is for weights of half precision.
            in_flight = weights_in_flight_bytes(request.shape, settings.blocks_in_flight)
            self._staging += ELEMENT_BYTES // 2 * in_flight
        self._moments = tuple(self._all_moments())
        self._late = self._late_share()

    def place(self) -> Placement:
        most = max(moment.away for moment in self._moments)
        # Start with as little in memory as possible; then assign the memory that is left.
        kept = _InMemory(left=max(0, math.ceil(most)))
        if self._needed(kept) <= self._room:
            for kind in self._settings.host_priority:
                self._assign(kind, kept)
        process = self._request.cores.process_bytes
        offloaded = self._splits(kept)
        disk = sum(split.ssd_bytes for split in offloaded.values())
        return Placement(
            settings=self._settings,
            offloaded=offloaded,
            fits=(
                Fit("memory", process + self._needed(kept), self._request.room_bytes),
                Fit("disk", disk, self._request.drives.capacity_bytes),
            ),
            saved_bytes=math.ceil(self._saved(self._request.shape.layers)),
            subgroup_size=self._subgroup or None,
            pinned_bytes=self._pinned(kept) + self._read_ahead(kept),
            gradient_bytes=kept.gradients,
        )

    # -------------------------------------------------------------- what is needed
    def _needed(self, kept: _InMemory) -> int:
        """Return the bytes at the peak, without the process."""
        peak = max(self._at(moment, kept) for moment in self._moments)
        return math.ceil(peak + self._all_the_time(kept))

    def _all_the_time(self, kept: _InMemory) -> float:
        settings = self._settings
        nbytes = _SLACK_BYTES if kept.left else 0
        if not settings.streams_weights:
            nbytes += self._weights
        if not settings.offloads_optimizer:
            return nbytes + self._states
        backlog = self._late * (self._states - kept.states)
        buffers = min(self._pinned(kept), self._staging + kept.new_weights + backlog)
        return nbytes + self._copies * kept.states + buffers

    def _at(self, moment: _Moment, kept: _InMemory) -> float:
        saved = moment.saved - min(kept.left, moment.away)
        return moment.others + saved + self._gradients(moment, kept.gradients)

    def _gradients(self, moment: _Moment, in_memory: int) -> float:
        """Return the bytes of finished gradients, and of those of earlier micro-batches."""
        settings = self._settings
        before = self._weights - moment.done if settings.micro_batches > 1 else 0.0
        done = moment.done
        if settings.offloads_optimizer and settings.overlap == "commit":
            done = min(done, in_memory)
        elif settings.offloads_optimizer and settings.overlap == "eager":
            done = 0.0
        return before + done

    def _pinned(self, kept: _InMemory) -> int:
        """Return the bytes of all buffers; new weights may wait in half of them."""
        return max(self._staging + kept.new_weights, 2 * kept.new_weights)

    def _late_share(self) -> float:
        """Return the share of the states that is still to be written when backward ends."""
        settings = self._settings
        if not settings.offloads_optimizer or settings.overlap == "off":
            return 0.0
        _, backward = computing_seconds(self._request, settings)
        moving = self._request.rates.paths_seconds(self._states, self._states)
        return max(0.0, 1 - backward / moving)

    def _read_ahead(self, kept: _InMemory) -> int:
        """Return the bytes of buffers into which saved tensors are read ahead."""
        if not kept.left:
            return 0
        return min(kept.left, 2 * self._sizes.saved_layer) + _SLACK_BYTES

    # -------------------------------------------------------------- assigning memory
    def _assign(self, kind: OffloadedKind, kept: _InMemory) -> None:
        """Give a kind of bytes as much memory as it can use and there is."""
        settings = self._settings
        if kind == "activations":
            over = 0
            if kept.left:
                stay = _InMemory(kept.states, kept.gradients, kept.new_weights)
                over = self._needed(stay) - self._room
            kept.left = min(kept.left, over + _SLACK_BYTES) if over > 0 else 0
        elif kind == "states" and settings.offloads_optimizer:
            free = (self._room - self._needed(kept)) // self._copies
            kept.states = self._states if free >= self._states else free // _GRAIN * _GRAIN
        elif kind == "waiting" and settings.offloads_optimizer and settings.overlap == "commit":
            kept.gradients = self._gradients_that_fit(kept)
            self._keep_new_weights(kept)

    def _gradients_that_fit(self, kept: _InMemory) -> int:
        """Return the largest `optimizer.gradient_memory` that fits at every moment."""
        room = self._room - self._all_the_time(kept)
        most = self._weights
        for moment in self._moments:
            free = int(room - self._at(moment, kept))
            if free < min(moment.done, self._weights):
                most = min(most, free)
        return most

    def _keep_new_weights(self, kept: _InMemory) -> None:
        free = self._room - self._needed(kept)
        backlog = math.ceil(self._late * (self._states - kept.states))
        # Beyond as many as the other buffers, they bring a backlog with them, of as many at most.
        most = max((self._staging + free) // 2, free - backlog) if free > self._staging else free
        kept.new_weights = max(0, min(self._weights, most))

    # ------------------------------------------------------------------ what is where
    def _splits(self, kept: _InMemory) -> dict[OffloadedKind, TierSplit]:
        settings, found = self._settings, dict[OffloadedKind, TierSplit]()
        if settings.streams_weights:
            found["weights"] = TierSplit(0, self._weights)
        if kept.left:
            found["activations"] = TierSplit(0, kept.left)
        if not settings.offloads_optimizer:
            return found
        if settings.overlap == "commit":
            waits = kept.gradients + kept.new_weights
            found["waiting"] = TierSplit(waits, 2 * self._weights - waits)
        copies = self._copies
        found["states"] = TierSplit(copies * kept.states, copies * (self._states - kept.states))
        return found

    # ------------------------------------------------------------------ moments
    def _saved(self, layers: int) -> float:
        """Bytes that the first layers have saved; of those that are computed again their input."""
        sizes, again = self._sizes, self._settings.recomputed_layers
        inputs = min(layers, again)
        each = sizes.saved / self._request.shape.layers
        return inputs * sizes.layer_input + (layers - inputs) * each

    def _movable(self, layers: int) -> float:
        """What of it may leave."""
        sizes, again = self._sizes, self._settings.recomputed_layers
        inputs = min(layers, again) if sizes.layer_input >= MiB else 0
        each = sizes.movable / self._request.shape.layers
        return inputs * sizes.layer_input + (layers - min(layers, again)) * each

    def _all_moments(self) -> Iterator[_Moment]:
        shape, sizes, settings = self._request.shape, self._sizes, self._settings
        layers, again = shape.layers, settings.recomputed_layers
        logits = sizes.logits * settings.batch // settings.micro_batches
        ends = ELEMENT_BYTES * shape.vocabulary * shape.hidden
        saved, away = self._saved(layers), self._away(layers)
        yield _Moment(_LOGITS * logits, saved, away, 0)
        yield _Moment(logits + ends, saved, away, 0)
        # A pass over a layer: gradients of what is wide in it, and of its input and result.
        wide = 2 * sizes.layer_input * (1 + shape.inner / shape.hidden)
        arriving = ELEMENT_BYTES * sizes.layer_parameters
        each = (self._weights - ends) / layers
        for layer in sorted({layers, again + 1, again, 1} & set(range(1, layers + 1))):
            others = wide + arriving + (sizes.saved_layer if layer <= again else 0)
            done = ends + (layers - layer) * each
            yield _Moment(others, self._saved(layer), self._away(layer), min(done, self._weights))
        tied = ends if shape.tied else 0
        yield _Moment(sizes.layer_input + ends + tied, 0, 0, self._weights - ends)
        yield _Moment(0, 0, 0, self._weights)

    def _away(self, layer: int) -> float:
        """What may be away while a layer computes backward: the one before it is on its way."""
        below = self._movable(layer - 1)
        return max(0.0, 2 * below - self._movable(layer))


# ---------------------------------------------------------------------------- time
def cpu_step_time(request: CpuRequest, placement: Placement) -> StepTime:
    """Predict the time of a step; see [Note: step time on the CPU].

    Args:
        request: Model and machine.
        placement: What stays in memory and what is offloaded.
    """
    settings, stage = placement.settings, request.rates.stage
    forward, backward = _pass_loads(request, placement)
    update, commit = _update_loads(request, placement)
    adding = StageLoad(_COPIES_OF_ADDING * request.cores.copy_seconds(request.shape.parameters))
    stages = [stage("forward", forward, settings.micro_batches)]
    if settings.micro_batches > 1:
        stages.append(stage("backward", backward + adding, settings.micro_batches - 1))
    if settings.offloads_optimizer and settings.overlap != "off":
        stages.append(stage("backward, update", backward + update))
        stages.append(stage("step()", commit))
    else:
        stages.append(stage("backward", backward))
        stages.append(stage("step()", update))
    written = settings.micro_batches * forward.written + update.written + commit.written
    return StepTime(tuple(stages), written)


def computing_seconds(request: CpuRequest, settings: Settings) -> tuple[float, float]:
    """Return the seconds of forward and backward of a micro-batch if nothing moved.

    Args:
        request: Model and machine.
        settings: The settings.
    """
    shape, cores = request.shape, request.cores
    work = settings.micro_batch(request.work)
    passes = 1 + BACKWARD_OVER_FORWARD
    weights = shape.layers * shape.layer_parameters * cores.pass_seconds / passes
    ends = cores.copy_seconds(shape.vocabulary * shape.hidden)
    forward = shape.forward_flops(work.batch, work.sequence) / cores.flops + weights
    recomputed = settings.recomputed_layers * shape.layer_flops(work.batch, work.sequence)
    again = recomputed / cores.flops + settings.recomputed_layers / shape.layers * weights
    return forward, BACKWARD_OVER_FORWARD * forward + ends + again


def _pass_loads(request: CpuRequest, placement: Placement) -> tuple[StageLoad, StageLoad]:
    """Return the loads of forward and backward of a micro-batch."""
    settings = placement.settings
    forward, backward = computing_seconds(request, settings)
    left = placement.split("activations").ssd_bytes
    hooks = 0.0
    if left:
        whole = request.shape.layers - settings.recomputed_layers
        tensors = whole * len(layer_tensors(request.shape, settings.micro_batch(request.work)))
        hooks = HOOK_SECONDS * (tensors + settings.recomputed_layers) / 2
    weights = placement.split("weights").ssd_bytes
    return (
        StageLoad(forward + hooks, read=weights, written=left),
        StageLoad(backward + hooks, read=weights + left),
    )


def _update_loads(request: CpuRequest, placement: Placement) -> tuple[StageLoad, StageLoad]:
    """Return the load of the update, and of `step()` after an update that ran in backward."""
    settings, cores, parameters = placement.settings, request.cores, request.shape.parameters
    seconds = parameters / cores.update_rate
    if not settings.offloads_optimizer:
        return StageLoad(seconds), StageLoad()
    copy, weights = cores.copy_seconds(parameters), ELEMENT_BYTES * parameters
    if settings.state_dtype != "float32":
        seconds += _COPIES_OF_ROUNDING * copy
    moved = moment_bytes(settings) * parameters * placement.split("states").ssd_share
    update = StageLoad(seconds, read=moved, written=moved)
    streamed = weights if settings.streams_weights else 0.0
    if settings.overlap != "commit":
        # In backward they are in memory anyway; afterwards they are read once more.
        again = streamed if settings.overlap == "off" else 0.0
        return update + StageLoad(read=again, written=streamed), StageLoad()
    gradients = weights - placement.gradient_bytes
    waiting = 2 * weights - placement.split("waiting").host_bytes - gradients
    update += StageLoad(_COPIES_OF_COMMIT * copy, written=gradients + waiting)
    return update, StageLoad(_COPIES_OF_COMMIT * copy, read=waiting, written=streamed)
