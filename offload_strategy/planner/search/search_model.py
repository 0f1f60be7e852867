"""The time of a step for given settings, on a GPU or on the CPU.

Fuyou's equations (`planner.step_time`), extended by host memory as a tier, by micro-batches, and by
updates where the model computes; docs/planning.md has the stages under "What takes time when".
"""

from __future__ import annotations

from collections.abc import Mapping

from offload_strategy.config.value_types import StateType
from offload_strategy.plan_runtime.space_requirements import optimizer_need
from offload_strategy.planner.request import HOOK_SECONDS, CpuRequest, Request
from offload_strategy.planner.saved_tensor_bytes import Workload, layer_tensors
from offload_strategy.planner.search.settings import OffloadedKind, Placement, Settings, TierSplit
from offload_strategy.planner.step_time import BACKWARD_OVER_FORWARD, StageLoad, StepTime

#: Copies of all weights: one before the update and one after it, with a comparison of their bits.
_COPIES_OF_COMMIT = 1.5
#: Copies of all weights: two moments, upcast and rounded.
_COPIES_OF_ROUNDING = 1.0
_COPIES_OF_ADDING = 1.5


class SearchModel:
    """Training on a machine: the time of a step by its stages."""

    dtype_bytes: int  # Of a weight, of a gradient and of an activation
    state_bytes: Mapping[StateType, int]  # Per parameter, by the type in which states are stored

    def __init__(self, request: Request | CpuRequest) -> None:
        self.request, self.on_cpu = request, request.on_cpu
        self.shape, self.rates, self.cores = request.shape, request.rates, request.cores
        #: Parameters that this rank keeps and updates: all of them, or its shard.
        self.own_parameters = -(-self.shape.parameters // request.ranks)

    def micro_batch(self, settings: Settings) -> Workload:
        """Return the work of a micro-batch."""
        return Workload(settings.micro_batch, settings.sequence, self.dtype_bytes)

    def leaving(self, settings: Settings, activations: int) -> dict[OffloadedKind, int]:
        """Return the bytes that leave the device by kind, if so many bytes of activations do."""
        weights = self.dtype_bytes * self.own_parameters
        found: dict[OffloadedKind, int] = {}
        if settings.streams_weights:
            found["weights"] = weights
        if activations:
            found["activations"] = activations
        if settings.offloads_optimizer:
            if settings.overlap == "commit":
                found["waiting"] = 2 * weights
            states = self.state_bytes[settings.state_dtype] * self.own_parameters
            # `optimizer_need` counts new weights with the updates; here they are among what waits.
            found["states"] = optimizer_need(states, 0, settings.overlap)
        return found

    def step_time(self, placement: Placement) -> StepTime:
        """Predict the time of a step."""
        settings, passes = placement.settings, placement.settings.micro_batches
        activations, weights = placement.split("activations"), placement.split("weights")
        forward_seconds, backward_seconds = self._pass_seconds(placement)
        weights_in = self._fetch(weights.total_bytes, weights)
        gathered = self.shape.parameters
        gathered_again = gathered - self.shape.end_parameters
        forward = StageLoad(forward_seconds) + weights_in + self._exchange(gathered)
        forward += self._send(activations.total_bytes, activations)
        backward = StageLoad(backward_seconds) + weights_in
        backward += self._exchange(gathered_again + self.shape.parameters)
        backward += self._fetch(activations.total_bytes, activations)
        loads = [("forward", forward, passes)]
        if passes > 1:
            adding = StageLoad(_COPIES_OF_ADDING * self.cores.copy_seconds(self.own_parameters))
            loads.append(("backward", backward + adding, passes - 1))
        update, commit = self._update_loads(placement)
        in_backward = settings.overlap != "off" if settings.offloads_optimizer else not self.on_cpu
        if in_backward:
            loads += [("backward, update", backward + update, 1), ("step()", commit, 1)]
        else:
            loads += [("backward", backward, 1), ("step()" if self.on_cpu else "update", update, 1)]
        return StepTime(tuple(self.rates.stage(*load) for load in loads))

    def _pass_seconds(self, placement: Placement) -> tuple[float, float]:
        """Return the seconds that forward and backward of a micro-batch compute."""
        shape, cores, settings = self.shape, self.cores, placement.settings
        work, recomputed_layers = self.micro_batch(settings), settings.recomputed_layers
        passes = 1 + BACKWARD_OVER_FORWARD
        weights = shape.layers * shape.layer_parameters * cores.pass_seconds / passes
        ends = cores.copy_seconds(shape.vocabulary * shape.hidden)
        forward = shape.forward_flops(work.batch, work.sequence) / cores.flops + weights
        recomputed = recomputed_layers * shape.layer_flops(work.batch, work.sequence)
        again = recomputed / cores.flops + recomputed_layers / shape.layers * weights
        hooks = 0.0
        if self.on_cpu and placement.split("activations").total_bytes:
            tensors = (shape.layers - recomputed_layers) * len(layer_tensors(shape, work))
            hooks = HOOK_SECONDS * (tensors + recomputed_layers) / 2
        return forward + hooks, BACKWARD_OVER_FORWARD * forward + ends + again + hooks

    def _update_loads(self, placement: Placement) -> tuple[StageLoad, StageLoad]:
        """Return the load of the update, and of `step()` after an update that ran in backward."""
        settings, parameters = placement.settings, self.own_parameters
        copy = self.cores.copy_seconds(parameters)
        update, commit = StageLoad(parameters / self.cores.update_rate), StageLoad()
        if not settings.offloads_optimizer:
            return update, commit
        if settings.state_dtype != "float32":
            update += StageLoad(_COPIES_OF_ROUNDING * copy)
        states = self.state_bytes[settings.state_dtype] * parameters
        weights = self.dtype_bytes * parameters
        placed, streamed = placement.split("states"), placement.split("weights")
        update += self._fetch(states, placed) + self._send(states, placed)
        if settings.overlap == "commit":
            waiting = placement.split("waiting")  # gradients and new weights
            # Those of streamed weights on the drives are written to where they belong.
            stored = int(weights * streamed.ssd_share)
            copied = weights - stored
            gradients = placement.gradient_memory if self.on_cpu else waiting.host_bytes // 2
            in_memory = min(copied, waiting.host_bytes - gradients)
            copies = StageLoad(_COPIES_OF_COMMIT * copy)
            update += copies + self._send(weights + copied, waiting)
            update += self._send(stored, TierSplit(0, stored))
            if copied:
                arrives = 0 if self.on_cpu or settings.streams_weights else weights
                commit = copies + StageLoad(to_device=arrives, read=copied - in_memory)
        elif settings.streams_weights:
            update += self._send(weights, streamed)
            if settings.overlap == "off":
                # In backward they are there anyway; afterwards they are fetched once more.
                update += self._fetch(weights, streamed)
        return update, commit

    def _exchange(self, parameters: int) -> StageLoad:
        """Gather all of these from the ranks, or reduce and scatter their gradients."""
        request, ranks = self.request, self.request.ranks
        nbytes = self.dtype_bytes * parameters * (ranks - 1) / ranks
        # Without an interconnect, devices of a machine exchange over their links to the host.
        over_link = nbytes if request.devices > 1 and request.interconnect is None else 0.0
        return StageLoad(to_device=over_link, from_device=over_link, exchanged=nbytes)

    def _fetch(self, nbytes: float, where: TierSplit) -> StageLoad:
        return StageLoad(to_device=0 if self.on_cpu else nbytes, read=nbytes * where.ssd_share)

    def _send(self, nbytes: float, where: TierSplit) -> StageLoad:
        return StageLoad(from_device=0 if self.on_cpu else nbytes, written=nbytes * where.ssd_share)
