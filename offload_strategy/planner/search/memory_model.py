"""Memory of training on a GPU or on a CPU, for given settings.

docs/planning.md tells under "What is in memory when" what is counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from offload_strategy.host_memory.idle_memory import IN_USE_SHARE, WAITING_SHARE
from offload_strategy.plan_runtime.space_requirements import (
    MOST_PARAMETERS,
    MOST_TO_COMMIT_ON_CPU,
    SUBGROUPS_IN_FLIGHT,
    subgroup_size,
)
from offload_strategy.planner.request import (
    DEVICE_SHARE,
    ELEMENT_BYTES,
    STATE_BYTES,
    WEIGHT_BYTES,
    CpuRequest,
    Request,
)
from offload_strategy.planner.saved_tensor_bytes import ModelSizes, model_sizes
from offload_strategy.planner.search.search_model import SearchModel
from offload_strategy.planner.search.settings import (
    Fit,
    OffloadedKind,
    Placement,
    Settings,
    TierSplit,
    weights_in_flight_bytes,
)
from offload_strategy.units import GiB, MiB

#: Subgroups in flight may take one part in so many of the memory that training may take.
_SUBGROUPS_SHARE = 8
#: Bytes of staging buffers if there is memory for them, and the part of it that they take at most.
_STAGING_BYTES = 4 * GiB
_STAGING_SHARE = 8
_LEAST_STAGING_BYTES = 64 * MiB
#: Host memory is assigned in multiples of this, or all that is asked for.
_GPU_GRAIN = 256 * MiB
#: Tensors of logits at a time.
_LOGITS = 3
#: Bytes that may wait to be written, or be read ahead, besides what is counted one by one.
_SLACK_BYTES = 64 * MiB
#: A tier of fewer bytes would hold next to nothing.
_CPU_GRAIN = 16 * MiB
#: Bytes of both moments per parameter; float32 weights need no further copy.
_MOMENT_BYTES = {dtype: nbytes - ELEMENT_BYTES for dtype, nbytes in STATE_BYTES.items()}


# ---------------------------------------------------------------------- on a GPU
class GpuModel(SearchModel):
    """Training on a GPU in half precision."""

    request: Request
    dtype_bytes = WEIGHT_BYTES
    state_bytes = STATE_BYTES
    #: Micro-batches of fewer tokens may not reach the FLOP/s that a device sustains.
    busy_tokens = 4096

    def competing(self, placement: Placement) -> tuple[OffloadedKind, ...]:
        """Return what has left the device, if host memory has no room for all of it."""
        return tuple(placement.offloaded) if placement.uses_drives else ()

    def place(self, settings: Settings) -> Placement:
        """Return where the tensors of a run are, and the memory that this needs."""
        request, shape, devices = self.request, self.shape, self.request.devices
        sizes = model_sizes(shape, self.micro_batch(settings))
        host_room = request.room_bytes
        subgroup, in_flight = None, 0
        if settings.offloads_optimizer:
            each = STATE_BYTES[settings.state_dtype] + WEIGHT_BYTES
            subgroup = subgroup_size(self.own_parameters, each, host_room // _SUBGROUPS_SHARE)
            in_flight = SUBGROUPS_IN_FLIGHT * subgroup * each
        left, device = self._on_device(settings, sizes, in_flight)
        staging = 0
        if settings.offloads_optimizer or left:
            # Host buffers without which nothing can be offloaded; more if there is memory for them.
            staging = in_flight + min(left, sizes.saved_layer) + _LEAST_STAGING_BYTES
            if settings.offloads_optimizer:
                staging += WEIGHT_BYTES * shape.layer_parameters // request.ranks
            if settings.streams_weights:
                blocks = settings.blocks_in_flight
                staging += weights_in_flight_bytes(shape, blocks) // request.ranks
            staging = max(staging, min(_STAGING_BYTES, host_room // _STAGING_SHARE))
        leaving, room = self.leaving(settings, left), max(0, host_room - staging)
        offloaded: dict[OffloadedKind, TierSplit] = {}
        for kind in settings.host_priority:
            if nbytes := leaving.get(kind):
                # A tier of a few bytes would hold nothing.
                taken = nbytes if nbytes <= room else room // _GPU_GRAIN * _GPU_GRAIN
                room -= taken
                offloaded[kind] = TierSplit(taken, nbytes - taken)
        waiting = offloaded.get("waiting", TierSplit(0, 0)).host_bytes
        host = staging + sum(split.host_bytes for split in offloaded.values())
        disk = sum(split.ssd_bytes for split in offloaded.values())
        return Placement(
            settings=settings,
            offloaded=offloaded,
            fits=(
                Fit("device memory", device, request.device.memory_bytes),
                Fit("host memory", devices * host, devices * max(0, host_room)),
                Fit("disk", devices * disk, request.drives.capacity_bytes),
            ),
            subgroup_size=subgroup,
            # Gradients and new weights of a device wait in buffers as well.
            pinned_bytes=staging + waiting,
            gradient_memory=waiting,
        )

    def _on_device(self, settings: Settings, sizes: ModelSizes, in_flight: int) -> tuple[int, int]:
        """Return the bytes of what layers save that leave, and the device's peak."""
        shape, recomputed_layers = self.shape, settings.recomputed_layers
        share = recomputed_layers / shape.layers
        saved = int(sizes.saved * (1 - share)) + recomputed_layers * sizes.layer_input
        last = sizes.saved_layer if recomputed_layers < shape.layers else sizes.layer_input
        movable = int(sizes.movable * (1 - share)) + recomputed_layers * sizes.movable_input
        parameters, one_rank = self.own_parameters, self.request.ranks == 1
        whole = settings.blocks_in_flight * shape.layer_parameters + shape.end_parameters
        weights = whole if settings.streams_weights or not one_rank else 0
        weights += 0 if settings.streams_weights else parameters
        gradients, states = parameters, STATE_BYTES[settings.state_dtype] * parameters
        if settings.offloads_optimizer:
            states = in_flight
            if settings.overlap != "off" and settings.micro_batches == 1:
                gradients = 0
        if not one_rank:
            gradients += shape.layer_parameters + shape.end_parameters
        elif not gradients:
            gradients = shape.layer_parameters
        base = WEIGHT_BYTES * (weights + gradients) + states
        base += sizes.saved_layer + 2 * sizes.layer_input + 2 * sizes.logits
        limit = DEVICE_SHARE * self.request.device.memory_bytes
        if base + saved <= limit:
            return 0, base + saved
        # The last layer's tensors are needed at once; another layer's are on their way.
        left = min(max(0, movable - last), math.ceil(base + saved + last - limit))
        return left, base + saved + (last - left if left else 0)


# ---------------------------------------------------------------------- on the CPU
class CpuModel(SearchModel):
    """Training on the CPU in float32."""

    request: CpuRequest
    busy_tokens = 0
    dtype_bytes = ELEMENT_BYTES
    state_bytes = _MOMENT_BYTES

    def competing(self, placement: Placement) -> tuple[OffloadedKind, ...]:
        """Return all but streamed weights; what stays in this order may leave in another."""
        settings = placement.settings
        if not (settings.offloads_optimizer and placement.uses_drives):
            return ()
        never = {"weights"} if settings.overlap == "commit" else {"weights", "waiting"}
        return tuple(kind for kind in settings.host_priority if kind not in never)

    def place(self, settings: Settings) -> Placement:
        """Return what stays in memory, what is offloaded, and the memory that this needs."""
        return _CpuPlacement(self, settings).place()


class _Moment(NamedTuple):
    """Bytes at a moment of backward: the head, a layer, or the embedding."""

    others: float  # In use besides saved tensors and finished gradients
    saved: float  # Saved and still needed
    away: float  # Of these what may be on the drives at this moment
    done: float  # Finished gradients


@dataclass(slots=True)
class _InMemory:
    """Bytes that stay in memory of what may be offloaded, and saved tensors that leave (`left`)."""

    states: int = 0
    gradients: int = 0
    new_weights: int = 0
    left: int = 0


class _CpuPlacement:
    """Assigns memory for one choice of settings."""

    def __init__(self, model: CpuModel, settings: Settings) -> None:
        self._model, self._settings, request = model, settings, model.request
        self._sizes = model_sizes(model.shape, model.micro_batch(settings))
        self._room = request.room_bytes - request.cores.process_bytes
        self._weights = ELEMENT_BYTES * model.shape.parameters
        # States that stay are as the optimizer makes them.
        each = _MOMENT_BYTES[settings.state_dtype if settings.offloads_optimizer else "float32"]
        self._states = each * model.shape.parameters
        self._commits = settings.offloads_optimizer and settings.overlap == "commit"
        self._copies = 2 if self._commits else 1
        self._subgroup = 0
        #: Buffers of states and weights in flight.
        self._staging = 0
        if settings.offloads_optimizer:
            self._subgroup = subgroup_size(
                model.shape.parameters,
                each + ELEMENT_BYTES,
                self._room // _SUBGROUPS_SHARE,
                most=MOST_TO_COMMIT_ON_CPU if self._commits else MOST_PARAMETERS,
            )
            if self._commits or settings.streams_weights:
                each += ELEMENT_BYTES
            self._staging = SUBGROUPS_IN_FLIGHT * self._subgroup * each + _SLACK_BYTES
        if settings.streams_weights:
            # The count is for weights of half precision.
            in_flight = weights_in_flight_bytes(model.shape, settings.blocks_in_flight)
            self._staging += ELEMENT_BYTES // 2 * in_flight
        self._moments = tuple(self._all_moments())

    def place(self) -> Placement:
        # Start with as little in memory as possible; then assign the memory that is left.
        kept = _InMemory(left=max(0, math.ceil(max(moment.away for moment in self._moments))))
        if self._needed(kept) <= self._room:
            for kind in self._settings.host_priority:
                self._assign(kind, kept)
        request = self._model.request
        in_memory: dict[OffloadedKind, int] = {
            "waiting": kept.gradients + kept.new_weights,
            "states": self._copies * kept.states,
        }
        leaving = self._model.leaving(self._settings, kept.left)
        splits = ((kind, in_memory.get(kind, 0), nbytes) for kind, nbytes in leaving.items())
        offloaded = {kind: TierSplit(stays, nbytes - stays) for kind, stays, nbytes in splits}
        disk = sum(split.ssd_bytes for split in offloaded.values())
        read_ahead = min(kept.left, 2 * self._sizes.saved_layer) + _SLACK_BYTES if kept.left else 0
        return Placement(
            settings=self._settings,
            offloaded=offloaded,
            fits=(
                Fit("memory", request.cores.process_bytes + self._needed(kept), request.room_bytes),
                Fit("disk", disk, request.drives.capacity_bytes),
            ),
            subgroup_size=self._subgroup or None,
            pinned_bytes=self._staging + read_ahead,
            gradient_memory=kept.gradients,
        )

    # -------------------------------------------------------------- what is needed
    def _needed(self, kept: _InMemory) -> int:
        """Return the bytes at the peak, without the process."""
        peak = max(self._at(moment, kept) for moment in self._moments)
        return math.ceil(peak + self._all_the_time(kept))

    def _all_the_time(self, kept: _InMemory) -> int:
        settings = self._settings
        weights = 0 if settings.streams_weights else self._weights
        states = self._copies * kept.states if settings.offloads_optimizer else self._states
        return weights + states + self._staging + (_SLACK_BYTES if kept.left else 0)

    def _at(self, moment: _Moment, kept: _InMemory) -> float:
        """Return the bytes at a moment, with gradients of earlier micro-batches."""
        settings, done = self._settings, moment.done
        before = self._weights - done if settings.micro_batches > 1 else 0.0
        if self._commits:
            done = min(done, kept.gradients) + min(done, kept.new_weights)
        elif settings.offloads_optimizer and settings.overlap == "eager":
            done = 0.0
        return moment.others + (moment.saved - min(kept.left, moment.away)) + (before + done)

    # -------------------------------------------------------------- assigning memory
    def _assign(self, kind: OffloadedKind, kept: _InMemory) -> None:
        """Give a kind of bytes as much memory as it can use and there is."""
        if kind == "activations" and kept.left:
            over = self._needed(replace(kept, left=0)) - self._room
            kept.left = min(kept.left, over + _SLACK_BYTES) if over > 0 else 0
        elif kind == "states" and self._settings.offloads_optimizer:
            free = (self._room - self._needed(kept)) // self._copies
            kept.states = self._states if free >= self._states else free // _CPU_GRAIN * _CPU_GRAIN
        elif kind == "waiting" and self._commits:
            process = self._model.request.cores.process_bytes
            # Where memory is not scarce, gradients stay as well.
            needed = self._needed(replace(kept, gradients=self._weights))
            most = (1 + WAITING_SHARE) * (needed + process)
            most = min(most, IN_USE_SHARE * self._model.request.room_bytes) - process
            if not self._settings.streams_weights:
                kept.new_weights = self._waiting_that_fit(kept, min(most, self._room))
            kept.gradients = self._waiting_that_fit(kept, self._room)

    def _waiting_that_fit(self, kept: _InMemory, room: float) -> int:
        """Return how much more may wait in memory for `step()` and fits at every moment.

        The first of what is as large as the gradients, and is finished with them.
        """
        room -= self._all_the_time(kept)
        free = ((int(room - self._at(one, kept)), one.done) for one in self._moments)
        return max(0, min((most for most, done in free if most < done), default=self._weights))

    # ------------------------------------------------------------------ moments
    def _of_layers(self, layers: int, whole: int, layer_input: int) -> float:
        """Bytes of the first layers; of those that are computed again their input."""
        inputs = min(layers, self._settings.recomputed_layers)
        return inputs * layer_input + (layers - inputs) * whole / self._model.shape.layers

    def _saved_and_away(self, layer: int) -> tuple[float, float]:
        """What is saved, and what of it may be away while a layer computes backward.

        The layer before it is on its way.
        """
        sizes = self._sizes
        saved = self._of_layers(layer, sizes.saved, sizes.layer_input)
        now = self._of_layers(layer, sizes.movable, sizes.movable_input)
        before = self._of_layers(layer - 1, sizes.movable, sizes.movable_input)
        return saved, max(0.0, 2 * before - now)

    def _all_moments(self) -> Iterator[_Moment]:
        shape, sizes, settings = self._model.shape, self._sizes, self._settings
        layers, again = shape.layers, settings.recomputed_layers
        logits = sizes.logits * settings.micro_batch
        ends = ELEMENT_BYTES * shape.vocabulary * shape.hidden
        at_head = self._saved_and_away(layers)
        yield _Moment(_LOGITS * logits, *at_head, 0)
        yield _Moment(logits + ends, *at_head, 0)
        # A pass over a layer: gradients of what is wide in it, and of its input and result.
        wide = 2 * sizes.layer_input * (1 + shape.inner / shape.hidden)
        arriving = ELEMENT_BYTES * shape.layer_parameters
        each = (self._weights - ends) / layers
        for layer in sorted({layers, again + 1, again, 1} & set(range(1, layers + 1))):
            others = wide + arriving + (sizes.saved_layer if layer <= again else 0)
            done = ends + (layers - layer) * each
            yield _Moment(others, *self._saved_and_away(layer), min(done, self._weights))
        parts = (2 if shape.tied else 1) * ends
        yield _Moment(sizes.layer_input + parts, 0, 0, self._weights - ends)
        yield _Moment(0, 0, 0, self._weights)
