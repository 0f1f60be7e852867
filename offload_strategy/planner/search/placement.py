"""Finds out where the tensors of a run lie for a choice of settings, and what memory that needs.

[Note: device memory of a choice]
As in `memory_needs`, and for what is not moved all of it: weights, gradients, states, what layers
save. Gradients leave at once where the update runs in backward; those of several micro-batches add
up on the device. Of what layers save only as much leaves as it takes to stay within a share of the
device's memory: moving more is never faster.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from offload_strategy.errors import ConfigError
from offload_strategy.plan_runtime.space_requirements import optimizer_need
from offload_strategy.plan_runtime.subgroup_size import SUBGROUPS_IN_FLIGHT, subgroup_size
from offload_strategy.planner.host_memory_needs import weight_buffers
from offload_strategy.planner.memory_needs import Fit
from offload_strategy.planner.request import Request
from offload_strategy.planner.saved_tensor_bytes import (
    Workload,
    activation_bytes,
    checkpoint_bytes,
    layer_activation_bytes,
)
from offload_strategy.planner.search.choice import Choice, Held, Placed, Split
from offload_strategy.planner.search.cores import CpuRequest
from offload_strategy.planner.step_estimate import WEIGHT_BYTES
from offload_strategy.planner.transformer_shape import TransformerShape
from offload_strategy.units import GiB, MiB

#: Share of device memory up to which activations stay: the count is not exact, and allocators
#: leave gaps.
_DEVICE_SHARE = 0.9
#: Share of host memory that training may take; the rest is for the system and the data.
_HOST_SHARE = 0.9
#: Interpreter, libraries, contexts of the device: at most 1.8 GiB in MemAscend's measurements.
_PROCESS_BYTES = 2 * GiB
#: Storages below stay on the device (`activations.min_size`).
_MIN_SIZE = 1 * MiB
#: Of the memory that training may take, what subgroups may.
SUBGROUPS_SHARE = 8
#: Staging buffers where there is memory for them, and the part of it that they take at most.
_STAGING_BYTES = 4 * GiB
_STAGING_SHARE = 8
_LEAST_STAGING_BYTES = 64 * MiB
#: Host memory is dealt out in multiples of this, or all that is asked for.
_GRAIN = 256 * MiB


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes that follow from the model and the work of a micro-batch alone."""

    parameters: int
    layer_parameters: int
    ends: int
    saved: int
    movable: int
    saved_layer: int
    layer_input: int
    logits: int


@functools.lru_cache(maxsize=4096)
def sizes(shape: TransformerShape, work: Workload) -> Sizes:
    """Count what does not depend on settings.

    Args:
        shape: of the model.
        work: of a micro-batch.
    """
    large = activation_bytes(shape, work, _MIN_SIZE // work.dtype_bytes)
    return Sizes(
        parameters=shape.parameters,
        layer_parameters=shape.layer_parameters,
        ends=(1 if shape.tied else 2) * shape.vocabulary * shape.hidden,
        saved=activation_bytes(shape, work, 0),
        movable=large,
        saved_layer=layer_activation_bytes(shape, work),
        layer_input=checkpoint_bytes(shape, work) // shape.layers,
        logits=work.sequence * shape.vocabulary * work.dtype_bytes,
    )


def micro_work(request: Request | CpuRequest, choice: Choice) -> Workload:
    """The work of one micro-batch."""
    return replace(
        request.work, batch=choice.batch // choice.micro_batches, sequence=choice.sequence
    )


def check_layers(shape: TransformerShape, choice: Choice) -> None:
    """See that a model has the layers that a choice computes again.

    Raises:
        ConfigError: if it has not.
    """
    if not 0 <= choice.recomputed_layers <= shape.layers:
        raise ConfigError(
            f"choice: {choice.recomputed_layers} layers are to be computed again; the model has "
            f"{shape.layers}: give 0 to {shape.layers}"
        )


def place(request: Request, choice: Choice) -> Placed:
    """Find out where everything lies, and what that needs.

    Args:
        request: model and machine; of its work all but batch and sequence counts.
        choice: of the settings.

    Raises:
        ConfigError: if more layers are computed again than there are.
    """
    check_layers(request.shape, choice)
    counted = sizes(request.shape, micro_work(request, choice))
    host_room = int(_HOST_SHARE * request.host_memory_bytes) - _PROCESS_BYTES
    subgroup = None
    if choice.moves_optimizer:
        each = choice.state_bytes + WEIGHT_BYTES
        subgroup = subgroup_size(counted.parameters, each, host_room // SUBGROUPS_SHARE)
    saved, left, device = _device(request, choice, counted, subgroup or 0)
    staging = _staging(request, choice, counted, subgroup or 0, left)
    staging = max(staging, min(_STAGING_BYTES, host_room // _STAGING_SHARE)) if staging else 0
    held = _share_out(_leaving(counted, choice, left), choice, host_room - staging)
    waiting = held["waiting"].host_bytes if "waiting" in held else 0
    host = staging + sum(split.host_bytes for split in held.values())
    disk = sum(split.ssd_bytes for split in held.values())
    return Placed(
        choice=choice,
        held=held,
        fits=(
            Fit("device memory", device, request.device.memory_bytes),
            Fit("host memory", host, max(0, host_room)),
            Fit("disk", disk, request.drives.capacity_bytes),
        ),
        saved_bytes=saved,
        subgroup_size=subgroup,
        # Gradients of a device wait in buffers as well; new weights may take half of the buffers.
        pinned_bytes=staging + waiting,
        gradient_bytes=waiting // 2,
    )


def _device(
    request: Request, choice: Choice, counted: Sizes, subgroup: int
) -> tuple[int, int, int]:
    """What is saved, what of it leaves, and device memory; all in bytes."""
    layers = request.shape.layers
    share = choice.recomputed_layers / layers
    inputs = choice.recomputed_layers * counted.layer_input
    saved = int(counted.saved * (1 - share)) + inputs
    whole = choice.recomputed_layers < layers
    last = counted.saved_layer if whole else counted.layer_input
    movable = int(counted.movable * (1 - share))
    movable += inputs if counted.layer_input >= _MIN_SIZE else 0
    parameters = counted.parameters
    if choice.moves_parameters:
        weights = choice.blocks_in_flight * counted.layer_parameters + counted.ends
    else:
        weights = parameters
    leaves = choice.moves_optimizer and choice.overlap != "off" and choice.micro_batches == 1
    gradients = counted.layer_parameters if leaves else parameters
    if choice.moves_optimizer:
        states = SUBGROUPS_IN_FLIGHT * subgroup * (choice.state_bytes + WEIGHT_BYTES)
    else:
        states = choice.state_bytes * parameters
    base = WEIGHT_BYTES * (weights + gradients) + states
    base += counted.saved_layer + 2 * counted.layer_input + 2 * counted.logits
    limit = _DEVICE_SHARE * request.device.memory_bytes
    if base + saved <= limit:
        return saved, 0, base + saved
    # The last layer's are needed as soon as they are made; another layer's are on their way.
    left = min(max(0, movable - last), math.ceil(base + saved + last - limit))
    if not left:
        return saved, 0, base + saved
    return saved, left, base + saved + last - left


def _staging(request: Request, choice: Choice, counted: Sizes, subgroup: int, left: int) -> int:
    """Host buffers without which nothing moves; 0 where nothing does."""
    if not (choice.moves_optimizer or left):
        return 0
    buffers = SUBGROUPS_IN_FLIGHT * subgroup * (choice.state_bytes + WEIGHT_BYTES)
    if choice.moves_optimizer:
        buffers += WEIGHT_BYTES * counted.layer_parameters
    if choice.moves_parameters:
        buffers += weights_in_flight(request.shape, choice.blocks_in_flight)
    return buffers + min(left, counted.saved_layer) + _LEAST_STAGING_BYTES


@functools.lru_cache(maxsize=64)
def weights_in_flight(shape: TransformerShape, blocks: int) -> int:
    """Bytes of buffers in which weights of half precision pass through.

    Args:
        shape: of the model.
        blocks: layers on their way at a time.
    """
    return weight_buffers(shape, blocks).exact_bytes


def _leaving(counted: Sizes, choice: Choice, left: int) -> dict[Held, int]:
    """Bytes that leave the device, by kind."""
    weights = WEIGHT_BYTES * counted.parameters
    found: dict[Held, int] = {"activations": left}
    if choice.moves_optimizer:
        states = choice.state_bytes * counted.parameters
        # `optimizer_need` counts new weights with the updates; here they are among what waits.
        need = optimizer_need(states, 0, choice.overlap)
        found["states"] = need.total_bytes
        if choice.overlap == "commit":
            found["waiting"] = 2 * weights
    if choice.moves_parameters:
        found["weights"] = weights
    return {kind: nbytes for kind, nbytes in found.items() if nbytes}


def _share_out(leaving: Mapping[Held, int], choice: Choice, room: int) -> dict[Held, Split]:
    """Deal host memory out in the order of the choice."""
    held: dict[Held, Split] = {}
    room = max(0, room)
    for kind in choice.host_first:
        nbytes = leaving.get(kind, 0)
        if not nbytes:
            continue
        taken = min(nbytes, room)
        if taken < nbytes:
            # A tier of a few bytes would hold nothing.
            taken -= taken % _GRAIN
        room -= taken
        held[kind] = Split(taken, nbytes - taken)
    return held
