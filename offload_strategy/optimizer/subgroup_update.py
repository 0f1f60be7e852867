"""The update of one subgroup: in place, or ahead of `step()` and committed there.

See [Note: commit] in overlap/ahead_update.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from timeit import default_timer as perf_counter
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _default_to_fused_or_foreach

from offload_strategy.errors import OffloadError
from offload_strategy.optimizer.gradients.offloaded_gradient import gradient_values
from offload_strategy.optimizer.inner_guard import guard_of
from offload_strategy.optimizer.overlap.ahead_update import (
    AheadUpdate,
    Settings,
    StoredWeight,
    sums_of_bits,
    with_gradient,
)
from offload_strategy.optimizer.overlap.update_stream import UpdateStreams
from offload_strategy.optimizer.states.precision import Precision, master_weights_of
from offload_strategy.optimizer.states.subgroups import (
    ALIGNMENT_BYTES,
    State,
    StateSet,
    Subgroup,
    UnpackedStates,
    lay_out,
    own_state,
    stands_for_plain,
    views_of,
)
from offload_strategy.optimizer.updated_weights import UpdatedWeights, WeightResidency
from offload_strategy.optimizer.user_class import inner_step, trial
from offload_strategy.optimizer.user_class.side_effects import UnfitUpdateError, switches
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Ticket, TicketState, Tier
from offload_strategy.telemetry import UpdateRecord
from offload_strategy.torch_support.accelerator import Autocast, current_stream, is_asynchronous


class Updater:
    """Runs updates of subgroups whose states are in the store, by the user's own class."""

    def __init__(
        self,
        optimizer: Optimizer,
        store: TensorStore,
        tiers: Sequence[Tier],
        waiting: Tier,
        precision: Precision,
        residency: WeightResidency | None,
    ) -> None:
        self._optimizer = optimizer
        self._store = store
        self._all_tiers = sorted(tiers, key=lambda tier: not tier.is_own_device)
        self._device_tiers = [tier for tier in tiers if tier.is_own_device]
        self._tiers = [tier for tier in tiers if not tier.is_own_device] or list(tiers)
        self._new_weight_tiers = [waiting, *self._tiers]
        self.weights = UpdatedWeights(store, self._tiers, residency)
        self._residency = self.weights.residency
        self.streams = UpdateStreams(enabled=residency is None)
        #: What trials have told, by index of a group and what may switch a part of its update on.
        self.tried: dict[tuple[Any, ...], bool] = {}
        #: Indices of the groups whose update has been rehearsed in this step.
        self._rehearsed: set[int] = set()
        # Whether the user's instance selects foreach by itself, by group.
        self._foreach: dict[int, bool] = {}
        self.precision = precision
        # Of the last step, by type of device.
        self._autocast: dict[str, Autocast] = {}
        #: Whether an update has changed weights and is not over, or ended by an error.
        self.has_begun = False

    def group_at(self, index: int) -> dict[str, Any]:
        """The parameter group of this index as it is now; an empty one if it was deleted."""
        groups = self._optimizer.param_groups
        return groups[index] if index < len(groups) else {}

    def settings_of(self, index: int) -> Settings:
        """What an update of this group reads now besides weights, gradients and states."""
        return Settings(self._optimizer, self.group_at(index))

    def is_elementwise(self, index: int) -> bool:
        """Whether weights of the group of this index may be updated in slices, as it is set now."""
        optimizer, group = self._optimizer, self.group_at(index)
        key = index, *switches({**vars(optimizer), **group})
        if key not in self.tried:
            self.tried[key] = trial.is_elementwise(optimizer, group, self.precision)
        return self.tried[key]

    def place_states(self, subgroups: Sequence[Subgroup], state_bytes: int) -> None:
        """Decide of which subgroups the states stay in a tier of the device.

        Of the last ones that backward completes: it hides the transfers of the first ones.
        """
        elements = {s: sum(each.numel for each in s.slices) for s in subgroups}
        per_element = state_bytes / max(1, sum(elements.values()))
        room = float(sum(tier.capacity for tier in self._device_tiers))
        for subgroup in reversed(subgroups):
            room -= elements[subgroup] * per_element + ALIGNMENT_BYTES * len(subgroup.slices)
            subgroup.stays_on_device = room >= 0

    @contextmanager
    def _measured(self) -> Iterator[UpdateRecord]:
        """Record an update, unless it raises."""
        record = UpdateRecord(perf_counter())
        yield record
        self._store.recorder.updated(record)

    def autocast_of_step(self, subgroup: Subgroup) -> AbstractContextManager[object]:
        """Run an update during backward under the autocast of the last `step()`, at first none."""
        kind = subgroup.slices[0].parameter.device.type
        return self._autocast.setdefault(kind, Autocast(kind)).entered()

    # ------------------------------------------------------------------ updates
    @torch.no_grad()
    def update_in_place(
        self, subgroup: Subgroup, gradients: Mapping[int, torch.Tensor] | None = None
    ) -> None:
        """Update the weights and states of the slices that have a gradient.

        `gradients` are those of whole parameters by the index of their slice, not in ``.grad``.
        """
        if gradients is None:
            gradients = {
                index: gradient_values(subgroup.slices[index].parameter)
                for index in with_gradient(subgroup)
            }
        with self._measured() as record:
            old = subgroup.states
            unpacked = self._load_states(subgroup, self._store.writable, record)
            # Keep the states in memory until the new ones are stored, so that nothing is lost if
            # the update is interrupted or fails.
            subgroup.states = replace(old, small=unpacked.states, ticket=None)
            if old.ticket is not None:
                self._store.free(old.ticket, keeps_buffer=True)
            parameters = [subgroup.slices[index].parameter for index in gradients]
            with self._residency.resident(parameters, changes=True):
                weights = []
                for index, gradient in gradients.items():
                    param_slice = subgroup.slices[index]
                    weight = param_slice.values
                    # The parameter itself, unless PyTorch would take its class for another's.
                    if weight.grad is not gradient or stands_for_plain(type(weight)):
                        weight = weight.detach()
                        weight.grad_dtype = gradient.dtype
                        weight.grad = param_slice.of(gradient)
                    weights.append(weight)
                self._run(subgroup, weights, unpacked, gradients)
                del weight, weights  # references keep streamed weights in memory
            subgroup.states = self._pack(subgroup, unpacked)
            record.written_bytes = subgroup.states.nbytes
        self.has_begun = False

    @torch.no_grad()
    def update_ahead(
        self,
        subgroup: Subgroup,
        gradients: Mapping[int, torch.Tensor],
        memory: Sequence[torch.Tensor] | None,
    ) -> AheadUpdate:
        """Run the update on copies, with the gradients that are expected at `step()` by slice.

        In `memory` for the copies, where there is some: a tensor for each gradient.
        """
        with self._measured() as record:
            indices = list(gradients)
            settings = self.settings_of(subgroup.group_index)
            parameters = [subgroup.slices[index].parameter for index in indices]
            with self._residency.resident(parameters, changes=False):
                current = [subgroup.slices[index].values for index in indices]
                versions, bits = [weight._version for weight in current], sums_of_bits(current)
                contents = self.weights.contents([subgroup.slices[index] for index in indices])
                rest = [weight for place, weight in enumerate(current) if place not in contents]
                device, segments, pool = current[0].device, lay_out(rest), self._store.pool
                flat = None
                if not rest:
                    memory = []
                elif (  # copies on the CPU may wait in memory while there is room
                    memory is None
                    and device.type == "cpu"
                    and pool.may_wait(sum(weight.nbytes for weight in rest))
                ):
                    memory = [pool.count_waiting(torch.empty_like(weight)) for weight in rest]
                if memory is None:
                    flat = self._store.borrow("optimizer", segments[-1].end, device)
                    memory = views_of(flat, segments)
                others = iter(memory)
                copies = [
                    self.weights.buffer_like(weight, device) if place in contents else next(others)
                    for place, weight in enumerate(current)
                ]
                for copy, weight, gradient in zip(copies, current, gradients.values(), strict=True):
                    copy.copy_(weight).grad_dtype = gradient.dtype
                    copy.grad = gradient
                del current, rest, weight  # references keep streamed weights in memory
            old = subgroup.states
            unpacked = self._load_states(subgroup, self._store.private, record)
            gradient_versions = [gradient._version for gradient in gradients.values()]
            self._run(subgroup, copies, unpacked, indices)
            if gradient_versions != [gradient._version for gradient in gradients.values()]:
                raise self._unfit(subgroup, "changes gradients, which it did not when it was tried")
            for copy in copies:
                copy.grad = None
            new = self._pack(subgroup, unpacked)
            record.written_bytes = new.nbytes
            inputs = versions, bits, settings, Autocast.current(device.type), old
            ahead = AheadUpdate(subgroup, indices, *inputs, new, memory)
            for place, content in contents.items():
                ticket = self._residency.store_new(parameters[place], copies[place], self._tiers)
                ahead.stored[place] = StoredWeight(ticket, content)
            if flat is not None:
                tiers = self._tiers if device.type == "cpu" else self._new_weight_tiers
                ahead.ticket = self._store.put(flat, "optimizer", tiers)
                ahead.segments, ahead.new_weights = segments, ()
            return ahead

    @torch.no_grad()
    def compare_weights(self, ahead_updates: Sequence[AheadUpdate]) -> None:
        """Find out which updates have the weights that there are still, waiting once for a device.

        On the CPU, `commit` finds the weights that it has compared in the processor's caches.
        """
        there = [each for each in ahead_updates if is_asynchronous(each.bits.device)]
        if there and not self.weights.streams:
            device = there[0].bits.device
            same = [each.bits_match(range(len(each.indices))).to(device) for each in there]
            for each, unchanged in zip(there, torch.stack(same).tolist(), strict=True):
                each.unchanged = unchanged

    @torch.no_grad()
    def commit(self, ahead_update: AheadUpdate) -> bool:
        """Make an update visible that `may_be_valid`: copy the weights, swap the states' tickets.

        Returns False, and drops the update, if the weights have changed since.
        """
        parameters, stored = ahead_update.parameters(), ahead_update.stored
        # Without those of which nobody can have changed the values.
        places = [
            place
            for place, parameter in enumerate(parameters)
            if place not in stored
            or not self._residency.is_untouched(parameter, stored[place].content)
        ]
        with self._measured():
            with self._residency.resident([parameters[place] for place in places], changes=True):
                unchanged = ahead_update.unchanged
                if unchanged is None:
                    unchanged = not places or bool(ahead_update.bits_match(places))
                if not unchanged:
                    self.drop(ahead_update)
                    return False
                new_weights, ahead_update.new_weights = ahead_update.new_weights, ()
                if ahead_update.ticket is not None:
                    flat = self._store.take(ahead_update.ticket)
                    new_weights = views_of(flat, ahead_update.segments)
                self.has_begun = True
                copied = [place for place in places if place not in stored]
                for place, new in zip(copied, new_weights, strict=True):
                    ahead_update.weight(place).copy_(new)
                    if is_asynchronous(new.device):  # another stream may own its memory
                        new.record_stream(current_stream(new.device))
            for place, each in stored.items():
                if not self._residency.replace(parameters[place], each.ticket):
                    weight = ahead_update.weight(place)
                    weight.copy_(lay_out([weight])[0].view(self._store.take(each.ticket)))
            self._set_states(ahead_update.subgroup, ahead_update.states)
            self.has_begun = False
            return True

    def drop(self, ahead_update: AheadUpdate) -> None:
        """Free an update that will not be committed."""
        ahead_update.new_weights = ()
        stored = [each.ticket for each in ahead_update.stored.values()]
        for ticket in (ahead_update.ticket, ahead_update.states.ticket, *stored):
            if ticket is not None:
                self._store.free(ticket)

    def prefetch_states(self, subgroup: Subgroup) -> None:
        """Begin to load a subgroup's states, and its weights if they are streamed."""
        ticket = subgroup.states.ticket
        if ticket is not None and ticket.state is TicketState.STORED:
            self._store.prefetch(ticket)
        self._residency.prefetch(each.parameter for each in subgroup.slices)

    def prefetch_weights(self, ahead_update: AheadUpdate) -> None:
        """Begin to load the new weights of an update that is about to be committed."""
        if ahead_update.ticket is not None:
            self._store.prefetch(ahead_update.ticket)
        stored, parameters = ahead_update.stored, enumerate(ahead_update.parameters())
        self._residency.prefetch(each for place, each in parameters if place not in stored)

    def step_ended(self) -> None:
        """Tell the store that all subgroups are updated and a forward pass comes next."""
        self._autocast = {kind: Autocast.current(kind) for kind in self._autocast}
        self._rehearsed.clear()
        self._foreach.clear()
        self._store.pass_begins()

    # ------------------------------------------------------------------ running the user's class
    def _load_states(
        self, subgroup: Subgroup, load: Callable[[Ticket], torch.Tensor], record: UpdateRecord
    ) -> UnpackedStates:
        states = subgroup.states
        flat = None
        if states.ticket is not None:
            record.read_bytes = states.nbytes
            begin = perf_counter()
            flat = load(states.ticket)
            record.waited += perf_counter() - begin
        return UnpackedStates.of(states, flat)

    def _run(
        self,
        subgroup: Subgroup,
        weights: Sequence[torch.Tensor],
        unpacked: UnpackedStates,
        indices: Iterable[int],
    ) -> None:
        """Update weights that have gradients, and the states of their slices."""
        states = [unpacked.states[index] for index in indices]
        parameters = [subgroup.slices[index].parameter for index in indices]
        run = partial(self._run_inner_step, subgroup, parameters)
        source = unpacked.source
        rounded = source.rounded_names()
        masters = self.precision.has_master(subgroup.slices[0].parameter)
        if (
            unpacked.flat is not None  # else states may be in memory in their stored dtypes
            and (masters or any(rounded))
            and self.is_elementwise(subgroup.group_index)
            and inner_step.can_update_in_chunks(weights, states)
        ):
            has_new_states = inner_step.update_in_chunks(
                run,
                weights,
                states,
                [rounded[index] for index in indices],
                self._generator(subgroup, source),
            )
            if has_new_states:  # the layout changes: everything is packed again
                source.upcast(unpacked.states)
        else:
            source.upcast(unpacked.states)
            run(weights, states)

    def _run_inner_step(
        self,
        subgroup: Subgroup,
        parameters: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        states: Sequence[State],
    ) -> None:
        group = self._with_foreach(subgroup)
        try:
            with master_weights_of(weights, states, self.precision) as weights:
                if subgroup.group_index not in self._rehearsed and inner_step.rehearse(
                    self._optimizer, group, weights, states
                ):
                    self._rehearsed.add(subgroup.group_index)
                optimizer = inner_step.with_overrides(self._optimizer, parameters, weights)
                self.has_begun = True
                inner_step.run_update(optimizer, group, weights, states)
        except UnfitUpdateError as reason:
            raise self._unfit(subgroup, reason) from None

    def _with_foreach(self, subgroup: Subgroup) -> dict[str, Any]:
        """Return the parameter group with what the user's instance selects for all of it.

        Without a setting, PyTorch uses foreach if all parameters of a group are plain tensors on
        accelerators. A subgroup has those of one device, and local tensors instead of DTensors.
        """
        group, index = self.group_at(subgroup.group_index), subgroup.group_index
        settings = group.get("fused"), group.get("foreach")
        if subgroup.slices[0].parameter.is_cpu or settings != (None, None):
            return group
        if index not in self._foreach:
            # PyTorch asks for the type, and streamed weights have one of their own.
            as_without_offload = [
                torch.empty(0, device=each.device) if stands_for_plain(type(each)) else each
                for each in group["params"]
                if each.requires_grad
            ]
            _, self._foreach[index] = _default_to_fused_or_foreach(as_without_offload, False)
        return group if self._foreach[index] else {**group, "foreach": False}

    def _unfit(self, subgroup: Subgroup, reason: object) -> OffloadError:
        kind = type(self._optimizer)
        return OffloadError(
            f"step {subgroup.states.updates + 1}: the states of {kind.__module__}."
            f"{kind.__qualname__} cannot be offloaded: it {reason}. Set optimizer.enabled: false, "
            f"which keeps its states in memory, and train from the last checkpoint."
        )

    def _pack(self, subgroup: Subgroup, updated: UnpackedStates) -> StateSet:
        generator = self._generator(subgroup, updated.source)
        tiers = self._all_tiers if subgroup.stays_on_device else self._tiers
        return updated.pack(self._store, tiers, self.precision, generator)

    def _generator(self, subgroup: Subgroup, old: StateSet) -> torch.Generator | None:
        """The generator for stochastic rounding of the next states."""
        if not self.precision.stochastic_rounding:
            return None
        generator = torch.Generator(subgroup.slices[0].parameter.device)
        return generator.manual_seed(subgroup.number << 32 | old.updates)

    # ------------------------------------------------------------------ states as a whole
    def replace_states(
        self, states: Mapping[torch.Tensor, State], subgroups: Iterable[Subgroup]
    ) -> None:
        """Replace the states of all parameters, subgroup by subgroup; missing ones are cleared."""
        for subgroup in subgroups:
            given = [(each, states.get(each.parameter, {})) for each in subgroup.slices]
            own = [own_state(each, state, self.precision) for each, state in given]
            # Where the optimizer counts steps, a resumed run goes on with the same random numbers.
            done = max(int(inner_step.numbers_of(state).get("step", 0)) for state in own)
            unpacked = UnpackedStates(StateSet([], updates=max(0, done - 1)), own)
            self._set_states(subgroup, self._pack(subgroup, unpacked))

    def values(self, subgroup: Subgroup) -> Iterator[torch.Tensor]:
        """Yield the stored tensors of a subgroup in order, not to be changed or kept."""
        ticket = subgroup.states.ticket
        if ticket is None:
            held = subgroup.states.metadata()
            yield from [held.small[each.slice_index][each.name] for each in held.stored]
        else:
            flat = self._store.get(ticket)
            yield from views_of(flat, [each.segment for each in subgroup.states.stored])
            self._store.evict(ticket)

    def _set_states(self, subgroup: Subgroup, new: StateSet) -> None:
        old, subgroup.states = subgroup.states, new
        if new.ticket is not None or any(new.small):
            guard_of(self._optimizer).has_stored = True
        if old.ticket is not None:
            self._store.free(old.ticket)
