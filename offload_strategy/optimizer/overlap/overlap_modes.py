"""The modes of `optimizer.overlap` that update during backward: ``commit`` and ``eager``.

[Note: predicted scaling]
An update ahead of `step()` must know how gradients will be scaled after backward: not at all
without clipping or where the limit is not reached, by the inverse loss scale under GradScaler. An
update that predicted wrongly is dropped and runs again, so running ahead is worthwhile only if
predictions are right most of the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from offload_strategy.errors import OffloadError
from offload_strategy.optimizer.gradients.gradient_backing import (
    ConsumedGradient,
    GradientBacking,
    StoredGradient,
    TensorMetadata,
    norm_of,
)
from offload_strategy.optimizer.gradients.offloaded_gradient import OffloadedGradient
from offload_strategy.optimizer.gradients.recorded_edits import EditHistory
from offload_strategy.optimizer.overlap.ahead_update import AheadUpdate, Settings
from offload_strategy.optimizer.overlap.backward_overlap import BackwardOverlap
from offload_strategy.optimizer.states.subgroups import Subgroup
from offload_strategy.optimizer.subgroup_update import Updater
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Tier
from offload_strategy.store.tiers import HostTier
from offload_strategy.torch_support.accelerator import (
    allocated_bytes,
    has_memory_statistics,
    peak_allocated_bytes,
)
from offload_strategy.torch_support.dtensors import local_tensor
from offload_strategy.units import MiB

#: Steps from which the next one is predicted.
_WINDOW = 16
#: Share of them that must have been predicted right for running ahead to be worthwhile.
_WORTHWHILE = 0.75
#: Smaller gradients stay where they are: moving them costs more than their memory is worth.
_SMALLEST_BYTES = 1 * MiB


# ---------------------------------------------------------------------- commit
class ScalingPrediction:
    """Predicts the scaling of gradients from the last steps; see [Note: predicted scaling]."""

    def __init__(self) -> None:
        self._scalings: deque[EditHistory | None] = deque(maxlen=_WINDOW)
        self._right: deque[bool] = deque(maxlen=_WINDOW)
        #: At first, gradients are expected to stay as they are.
        self.predicted = EditHistory()

    @property
    def is_worthwhile(self) -> bool:
        """Whether enough of the last predictions were right."""
        return sum(self._right) >= _WORTHWHILE * len(self._right)

    def record(self, scaling: EditHistory | None) -> None:
        """Learn the scaling of a step; None for a change that cannot be predicted."""
        self._right.append(scaling is not None and scaling == self.predicted)
        self._scalings.append(scaling)
        known = [each for each in self._scalings if each is not None]
        # The latest, unless others come back and this one does not: a clipping limit that is
        # exceeded now and then scales by another factor each time.
        repeated = [each for each in known if known.count(each) > 1]
        self.predicted = [self.predicted, *known, *repeated][-1]


class RetainedGradients:
    """Gradients that are kept until `step()` although no update during backward needs them.

    Those of an accelerator leave it unless backward has freed as much. What does not fit into
    `host` goes to the tiers.
    """

    def __init__(self, store: TensorStore, tiers: Sequence[Tier], host: HostTier) -> None:
        self._store, self._host = store, host
        #: Whether those of the last update ahead of `step()` may stay on their device.
        self._fit = False
        self._tiers = [tier for tier in tiers if not tier.is_own_device]
        # Of gradients on the host, which are not in the store while they stay in memory.
        self._in_memory_bytes = 0
        # Bytes in use and the peak at the first update of a backward, by device; whether something
        # has stayed since, and by how much that has ever raised the peak.
        self._first: dict[torch.device, tuple[int, int]] = {}
        self._has_stayed, self._excess = False, 0

    def retain(self, backing: GradientBacking, *, is_read: bool = False) -> None:
        """Keep a gradient in memory if it fits, else move it to the tiers.

        One that the update in `step()` is certain to read has the room of new weights, as there
        are none.
        """
        metadata, pool = backing.metadata, self._store.pool
        on_host = metadata.device.type == "cpu"
        if self._stays(metadata):
            self._in_memory_bytes += metadata.nbytes
        elif metadata.nbytes >= _SMALLEST_BYTES:
            if is_read and on_host and pool.may_wait(metadata.nbytes):
                backing.relocate(pool.count_waiting)
                return
            tiers = self._tiers if on_host else [self._host, *self._tiers]
            backing.relocate(lambda gradient: StoredGradient(self._store, gradient, tiers))

    def _stays(self, gradient: TensorMetadata) -> bool:
        fits = self._host.has_room(self._in_memory_bytes + gradient.nbytes)
        return fits if gradient.device.type == "cpu" else self._fit

    def memory_on_device(self, weights: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return memory for new weights on an accelerator if backward has freed as much."""
        device, nbytes = weights[0].device, 2 * sum(weight.nbytes for weight in weights)
        self._fit = has_memory_statistics(device) and self._store.pool.device_may_wait
        if not self._fit:
            return None
        used, peak = allocated_bytes(device), peak_allocated_bytes(device)
        # What is computed between two updates takes memory on top of what is in use at both.
        first, before = self._first.get(device, (used, peak))
        self._first[device] = first, peak
        self._excess += peak - before if self._has_stayed else 0
        self._fit = used + nbytes + self._excess <= first
        self._has_stayed |= self._fit
        return [torch.empty_like(each) for each in weights] if self._fit else None

    def memory_of(
        self, gradients: Sequence[tuple[torch.Tensor, GradientBacking]]
    ) -> list[torch.Tensor] | None:
        """Move gradients that are to leave to buffers; return memory for their new weights.

        None if there is no room for those until `step()`, or if a gradient is not like its weight.
        New memory would lie between that of gradients, which come and go, and fragment the heap.
        """
        for weight, backing in gradients:
            metadata = backing.metadata
            is_alike = metadata == TensorMetadata.of(weight)._replace(offset=metadata.offset)
            if metadata.device.type != "cpu" or not is_alike or self._stays(metadata):
                return None
        if not self._store.pool.may_wait(sum(backing.metadata.nbytes for _, backing in gradients)):
            return None
        memory: list[torch.Tensor] = []

        def move(gradient: torch.Tensor) -> torch.Tensor:
            if not gradient.untyped_storage().resizable():  # of another library or process
                return gradient
            storage = self._store.borrow("optimizer", gradient.nbytes).untyped_storage()
            # Not a view, which would keep the tensor that it is a view of.
            values = torch.empty(0, dtype=gradient.dtype)
            values.set_(storage, 0, gradient.shape, gradient.stride()).copy_(gradient)
            memory.append(gradient)
            return values

        for number, (_, backing) in enumerate(gradients, start=1):
            if backing.metadata.nbytes >= _SMALLEST_BYTES:
                backing.relocate(move)
            if len(memory) < number:  # it is small, or needs its memory
                memory.append(backing.metadata.empty())
        return [self._store.pool.count_waiting(each) for each in memory]

    def clear(self) -> None:
        """Count from zero: the gradients of the last backward are gone."""
        self._in_memory_bytes, self._fit, self._has_stayed = 0, False, False
        self._first.clear()


class CommittedUpdates(BackwardOverlap):
    """``overlap: commit``: updates run ahead on copies, and `step()` makes them current."""

    def __init__(
        self,
        updater: Updater,
        is_last: Callable[[], bool],
        is_ready: Callable[[], bool],
        retained: RetainedGradients,
    ) -> None:
        super().__init__(updater, is_last, is_ready)
        self._retained = retained
        self._done: dict[Subgroup, AheadUpdate] = {}
        self._prediction = ScalingPrediction()
        self._requested_norms: set[float] = set()
        #: Whether another backward came after the one that was said to be the last.
        self._accumulates = False

    def set_subgroups(self, subgroups: Sequence[Subgroup]) -> None:
        """Update these ahead, but for those whose states need no transfer that this would hide."""
        super().set_subgroups([each for each in subgroups if not each.stays_on_device])

    def _runs_ahead(self) -> bool:
        return self._prediction.is_worthwhile and not self._accumulates

    def _begin_backward(self) -> None:
        self._accumulates = bool(self._taken)
        super()._begin_backward()

    def _collect(self, parameter: torch.Tensor, gradient: torch.Tensor) -> OffloadedGradient:
        offloaded = OffloadedGradient.of(gradient, gradient)
        for order in self._requested_norms:
            offloaded.backing.cache_norm(order, norm_of(gradient, order))
        return offloaded

    def _keep(self, backing: GradientBacking) -> None:
        self._retained.retain(backing, is_read=True)

    def _update(self, subgroup: Subgroup) -> None:
        edits = self._prediction.predicted
        ready = {index: subgroup.slices[index] for index in sorted(subgroup.ready)}
        memory = None
        if not self._updater.weights.streams:
            weights = [each.values for each in ready.values()]
            backings = [self._taken[each.parameter] for each in ready.values()]
            memory = self._retained.memory_of(list(zip(weights, backings, strict=True)))
            memory = memory or self._retained.memory_on_device(weights)
        gradients = {}
        for index, param_slice in ready.items():
            gradient = param_slice.of(self._taken[param_slice.parameter].raw())
            gradients[index] = edits.apply_(gradient.clone()) if edits else gradient
            del gradient
        with self.streams.updating(list(gradients.values()), memory or ()):
            self._done[subgroup] = self._updater.update_ahead(subgroup, gradients, memory)
        gradients.clear()
        for parameter in {param_slice.parameter for param_slice in ready.values()}:
            # A sliced parameter may have slices in subgroups that are still to be updated.
            if all(other in self._done for other, _ in self._subgroups_of[id(parameter)]):
                self._retained.retain(self._taken[parameter])

    def finish(self) -> list[AheadUpdate]:
        """Return the updates that are still valid for the gradients as they are; drop the rest."""
        scalings = {each: _scaling(each, backing) for each, backing in self._taken.items()}
        predicted = self._prediction.predicted
        done, valid = self._done, []
        for ahead_update in done.values():
            as_expected = [scalings.get(p) == predicted for p in ahead_update.parameters()]
            settings = self._updater.settings_of(ahead_update.subgroup.group_index)
            if all(as_expected) and ahead_update.may_be_valid(settings):
                valid.append(ahead_update)
            else:
                self._updater.drop(ahead_update)
        if self._taken:
            different = set(scalings.values())
            foreseeable = len(different) == 1 and not self._accumulates
            self._prediction.record(different.pop() if foreseeable else None)
            requested = (backing.requested_norms for backing in self._taken.values())
            self._requested_norms = set().union(*requested)
        self._ran_ahead = len(done)
        self._done = {}
        self.reset()
        return valid

    def _drop_all(self) -> None:
        for ahead_update in self._done.values():
            self._updater.drop(ahead_update)
        self._done = {}
        self._retained.clear()
        super()._drop_all()


def _scaling(parameter: torch.Tensor, backing: GradientBacking) -> EditHistory | None:
    """The scaling of a gradient since backward; None for any other change."""
    gradient = None if parameter.grad is None else local_tensor(parameter.grad)
    in_place = isinstance(gradient, OffloadedGradient) and gradient.backing is backing
    return backing.history if in_place and not backing.edited else None


# ---------------------------------------------------------------------- eager
class EagerUpdates(BackwardOverlap):
    """``overlap: eager``: weights change as soon as their gradients are complete."""

    def __init__(
        self, updater: Updater, is_last: Callable[[], bool], is_ready: Callable[[], bool]
    ) -> None:
        super().__init__(updater, is_last, is_ready)
        #: By subgroup, and index of a slice that is not yet updated, the parameter's gradient.
        self._gradients: dict[tuple[Subgroup, int], torch.Tensor] = {}
        #: Whether a backward has updated weights and no step() has followed, and whether states
        #: were replaced meanwhile.
        self._unstepped = self._states_replaced = False
        #: With which weights were updated in this backward, by index of their group.
        self._settings: dict[int, Settings] = {}
        #: Version counters of the weights after their updates.
        self._versions: dict[torch.Tensor, int] = {}

    def _begin_backward(self) -> None:
        self._check_stepped()
        super()._begin_backward()

    def _collect(self, parameter: torch.Tensor, gradient: torch.Tensor) -> OffloadedGradient:
        self._gradients.update(dict.fromkeys(self._subgroups_of[id(parameter)], gradient))
        what = f"a parameter of shape {tuple(parameter.shape)}"
        copy = gradient.clone() if parameter is self.compared else None
        return OffloadedGradient.of(ConsumedGradient(what, copy), gradient)

    def _update(self, subgroup: Subgroup) -> None:
        ready = sorted(subgroup.ready)
        gradients = {index: self._gradients.pop((subgroup, index)) for index in ready}
        self._unstepped = True
        if (group := subgroup.group_index) not in self._settings:
            self._settings[group] = self._updater.settings_of(group)
        # A streamed weight is held and written once, when all of its slices have been updated:
        # gradients of the other parameters of a subgroup may come much later.
        slices = [subgroup.slices[index] for index in ready]
        for parameter in {each.parameter for each in slices if each.rows is not None}:
            is_left = any(each in self._gradients for each in self._subgroups_of[id(parameter)])
            self._updater.weights.residency.set_held(parameter, is_left)
        with self.streams.updating(list(gradients.values())):
            self._updater.update_in_place(subgroup, gradients)
        self._versions.update((each.parameter, each.parameter._version) for each in slices)

    def finish(self) -> list[AheadUpdate]:
        """Update the subgroups whose gradients are left; there is nothing to commit.

        Raises `OffloadError` if what `step()` would have used differs from what was used.
        """
        changed = self._changed()
        if changed is not None:
            self._states_replaced = self._unstepped = False
            self.reset()
            raise OffloadError(
                f"with optimizer.overlap: eager weights are updated during backward, before "
                f"{changed}. So the weights are not those of any step: go on from the last "
                f"checkpoint, and change nothing between backward and step(), or use "
                f"optimizer.overlap: commit."
            )
        while self._waiting:
            self._prefetch_upcoming()
            self._update(self._waiting.popleft())
        # Subgroups of which some parameters took no part in the loss.
        for subgroup in [s for s in self._incomplete() if s.ready]:
            self._update(subgroup)
        self.reset()
        self._unstepped = False
        return []

    def _changed(self) -> str | None:
        """What was changed since weights were updated, if anything."""
        if self._states_replaced:
            return "states of the optimizer were replaced"
        for index, settings in self._settings.items():
            if not settings.are_same(self._updater.settings_of(index)):
                return "settings of a parameter group or of the optimizer were changed"
        if any(weight._version != version for weight, version in self._versions.items()):
            return "weights were changed"
        if self._settings and not self._is_ready():
            return "parameters were added to a group or taken from it"
        for subgroup in self._order:
            for parameter in {each.parameter for each in subgroup.slices}:
                gradient = None if parameter.grad is None else local_tensor(parameter.grad)
                backing = gradient.backing if isinstance(gradient, OffloadedGradient) else None
                consumed = backing is not None and backing.is_consumed
                taken = self._taken.get(parameter)
                if taken is not None and not (consumed and backing is taken):
                    return "a gradient was replaced, cleared or changed"
                if taken is None and consumed and not self._finished_early:
                    return "step() was called again with a gradient that it has used"
        return None

    def gradients_cleared(self) -> None:
        """Raise `OffloadError` if no `step()` has followed an update of weights."""
        self.reset()
        self._check_stepped()

    def states_replaced(self) -> None:
        """Note it if the states before were used, or will be: `step()` will refuse."""
        self._states_replaced = self._unstepped or bool(self._gradients)

    def check_saveable(self) -> None:
        """See `BackwardOverlap.check_saveable`."""
        if self._unstepped:
            raise OffloadError(
                "with optimizer.overlap: eager a backward pass has updated weights of this "
                "optimizer, and no step() followed: the pass failed, its gradients were meant to "
                "be thrown away, or it was the loss of another optimizer's parameters. The weights "
                "are not those of any step: go on from the last checkpoint, with "
                "optimizer.overlap: commit. (Exclude parameters that a loss shall not train by "
                "requires_grad_(False), micro-batches by engine.microbatch(index, last=False).)"
            )

    def _check_stepped(self) -> None:
        try:
            self.check_saveable()
        finally:
            self._states_replaced = self._unstepped = False

    def _drop_all(self) -> None:
        for subgroup, index in self._gradients:
            parameter = subgroup.slices[index].parameter
            self._updater.weights.residency.set_held(parameter, False)
        self._gradients.clear()
        self._settings.clear()
        self._versions.clear()
        super()._drop_all()
