"""Memory of training on a GPU, for given settings.

[Note: device memory]
All that is not offloaded: weights, gradients, states, and what layers save; of streamed weights two
or three layers, embedding and head. While it computes backward, what one layer saves, its input and
the gradient of that; logits and their gradient, for one sequence at a time (a loss that is computed
in chunks). Gradients leave at once if the update runs in backward; those of several micro-batches
accumulate on the device. Of what layers save, only as much leaves as it takes to stay within a
share of the device's memory: offloading more is never faster. Of several ranks each has a part of
weights, gradients and states, and for the layers that it computes the weights of all; of the layer
that computes backward also its whole gradient, and those of embedding and head until backward ends.
"""

from __future__ import annotations

import math

from offload_strategy.plan_runtime.space_requirements import SUBGROUPS_IN_FLIGHT, subgroup_size
from offload_strategy.planner.request import DEVICE_SHARE, STATE_BYTES, WEIGHT_BYTES, Request
from offload_strategy.planner.saved_tensor_bytes import ModelSizes, model_sizes
from offload_strategy.planner.search.search_model import SearchModel
from offload_strategy.planner.search.settings import (
    SUBGROUPS_SHARE,
    Fit,
    OffloadedKind,
    Placement,
    Settings,
    TierSplit,
    weights_in_flight_bytes,
)
from offload_strategy.units import GiB, MiB

#: Bytes of staging buffers if there is memory for them, and the part of it that they take at most.
_STAGING_BYTES = 4 * GiB
_STAGING_SHARE = 8
_LEAST_STAGING_BYTES = 64 * MiB
#: Host memory is assigned in multiples of this, or all that is asked for.
_GRAIN = 256 * MiB


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
            subgroup = subgroup_size(self.own_parameters, each, host_room // SUBGROUPS_SHARE)
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
                taken = nbytes if nbytes <= room else room // _GRAIN * _GRAIN
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
            # Gradients of a device wait in buffers as well; new weights may take half of them.
            pinned_bytes=staging + waiting,
            gradient_bytes=waiting // 2,
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
