"""The update of one subgroup: in place, or ahead of `step()` and committed there.

[Note: commit]
Ahead of `step()` nothing visible may change. So the update runs on copies of the weights and
states, which become new tickets; the old states stay where they are. `step()` checks that what
went in is still what is there (gradients, hyper-parameters, weights). If so, states are swapped by
swapping tickets, and weights are copied into the existing storage (never `p.data = ...`: aliases
would go stale). If not, the new tickets are dropped and the update runs again, in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from offload_strategy.optimizer.gradients.gradient_access import has_gradient, values_of
from offload_strategy.optimizer.overlap.weight_versions import WeightsMark
from offload_strategy.optimizer.states.dtensor_shards import is_sharded, local_part
from offload_strategy.optimizer.states.flat_layout import Layout, Segment, packable
from offload_strategy.optimizer.states.master_weights import masters_of
from offload_strategy.optimizer.states.precision import Precision, seed
from offload_strategy.optimizer.states.subgroups import StateSet, Subgroup, Unpacked, pack_states
from offload_strategy.optimizer.update_timings import Timings, UpdateTiming
from offload_strategy.optimizer.user_class.chunked_update import can_go_by_parts, run_by_parts
from offload_strategy.optimizer.user_class.inner_step import run_update
from offload_strategy.optimizer.weight_residency import Always, Residence
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Ticket, TicketState
from offload_strategy.store.tiers import HostTier, Tier


@dataclass(eq=False)
class Speculation:
    """An update that ran ahead of `step()`; see [Note: commit]."""

    subgroup: Subgroup
    indices: list[int]
    mark: WeightsMark
    hyper: dict[str, Any]
    old_states: StateSet
    states: StateSet
    layout: Layout
    weights: Ticket

    def may_hold(self, group: dict[str, Any]) -> bool:
        """Whether `step()` would compute the very same thing, as far as PyTorch itself knows.

        To be asked before any other update is committed: pieces of one parameter have one version.
        """
        return (
            self.indices == with_gradient(self.subgroup)
            and self.subgroup.states is self.old_states
            and _same(self.hyper, hyper_parameters(group))
            and self.mark.has_versions_of(self.parameters())
        )

    def parameters(self) -> list[torch.Tensor]:
        """Of the pieces that it updated, whole."""
        return [self.subgroup.pieces[index].parameter for index in self.indices]

    def weights_now(self) -> list[torch.Tensor]:
        """Of the pieces that it updated."""
        return [self.subgroup.pieces[index].values for index in self.indices]


@dataclass(frozen=True)
class Outline:
    """What states a subgroup has, piece by piece.

    Args:
        small: for each piece what stays in memory (step counters and the like).
        stored: index of the piece, name, place and dtype in an update, of each that is on a tier.
    """

    small: list[dict[str, Any]]
    stored: list[tuple[int, str, Segment, torch.dtype]]


class Updater:
    """Runs updates of subgroups, with states in the store.

    Args:
        optimizer: the user's; its class does the arithmetic.
        store: where states are between updates.
        tiers: where they may go, in order.
        waiting_room: where new weights wait for `step()`, as long as there is room.
        precision: of states.
        residence: of the weights; None if they never leave.
        may_cut: whether weights of the group of this index may be updated part by part.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        store: TensorStore,
        tiers: Sequence[Tier],
        waiting_room: Sequence[Tier] = (),
        precision: Precision | None = None,
        residence: Residence | None = None,
        may_cut: Callable[[int], bool] = lambda group_index: False,
    ) -> None:
        self._may_cut = may_cut
        self._residence: Residence = residence or Always()
        self._optimizer = optimizer
        self._store = store
        self._tiers = list(tiers)
        self._waiting_room = list(waiting_room)
        self.precision = precision or Precision()
        #: Of the latest updates, for profiles.
        self.timings = Timings()
        self._generators: dict[torch.device, torch.Generator] | None = (
            {} if self.precision.stochastic else None
        )

    def put(self, flat: torch.Tensor, instead_of: Ticket | None = None) -> Ticket:
        """Give a flat buffer of the optimizer's to the store; see `TensorStore.put`."""
        return self._store.put(flat, "optimizer", self._tiers, instead_of=instead_of)

    def group_of(self, subgroup: Subgroup) -> dict[str, Any]:
        """The parameter group of a subgroup; looked up anew, as loading a state replaces it."""
        group: dict[str, Any] = self._optimizer.param_groups[subgroup.group_index]
        return group

    @torch.no_grad()
    def update_in_place(
        self, subgroup: Subgroup, gradients: Mapping[int, torch.Tensor] | None = None
    ) -> None:
        """Update the weights and states of the pieces that have a gradient.

        Args:
            subgroup: to be updated.
            gradients: whole gradients of parameters, by the index of their piece; None to take
                what is in ``.grad`` of all.
        """
        if gradients is None:
            parameters = [piece.parameter for piece in subgroup.pieces]
            gradients = {i: values_of(parameters[i]) for i in with_gradient(subgroup)}
        if gradients:
            with self.timings.update() as timing:
                self._update_in_place(subgroup, gradients, timing)

    def _update_in_place(
        self, subgroup: Subgroup, gradients: Mapping[int, torch.Tensor], timing: UpdateTiming
    ) -> None:
        old = subgroup.states
        flat = None
        if old.ticket is not None:
            timing.read_bytes = old.ticket.nbytes
            with self.timings.waiting(timing):
                flat = self._store.writable(old.ticket)
        unpacked = Unpacked.of(old, flat, as_kept=self._may_go_by_parts(subgroup))
        # Nothing may be lost if the update is interrupted or refused, or cannot be put back: until
        # it is back on a tier the subgroup has it in memory.
        subgroup.states = old.in_memory(unpacked.states)
        if old.ticket is not None:
            self._store.free(old.ticket)
        parameters = [subgroup.pieces[index].parameter for index in gradients]
        with self._residence.held(parameters, changes=True):
            weights = []
            for index, gradient in gradients.items():
                piece = subgroup.pieces[index]
                weight = piece.values
                if weight.grad is not gradient:  # else the parameter itself, as in a plain update
                    weight = weight.detach()
                    weight.grad = piece.of(gradient)
                weights.append(weight)
            self._run(subgroup, weights, unpacked, gradients)
            del weight, weights  # what has their memory keeps them in it
        subgroup.states = self._packed(subgroup, unpacked)
        timing.written_bytes = _bytes_of(subgroup.states)

    @torch.no_grad()
    def speculate(self, subgroup: Subgroup, gradients: Mapping[int, torch.Tensor]) -> Speculation:
        """Run the update ahead of `step()`.

        Args:
            subgroup: to be updated.
            gradients: of the pieces that have one, as they are expected to be at `step()`, by
                index; each as large as its piece.
        """
        with self.timings.update() as timing:
            return self._speculate(subgroup, gradients, timing)

    def _speculate(
        self, subgroup: Subgroup, gradients: Mapping[int, torch.Tensor], timing: UpdateTiming
    ) -> Speculation:
        indices = list(gradients)
        group = self.group_of(subgroup)
        hyper = hyper_parameters(group)
        parameters = [subgroup.pieces[index].parameter for index in indices]
        with self._residence.held(parameters, changes=False):
            chosen = [subgroup.pieces[index].values for index in indices]
            mark = WeightsMark(chosen)
            layout = Layout.of(chosen)
            flat_weights = self._store.borrow("optimizer", layout.nbytes, chosen[0].device)
            weights = layout.views(flat_weights)
            for copy, weight, gradient in zip(weights, chosen, gradients.values(), strict=True):
                copy.copy_(weight)
                copy.grad = gradient
            del chosen, weight
        old = subgroup.states
        flat = None
        if old.ticket is not None:
            timing.read_bytes = old.ticket.nbytes
            with self.timings.waiting(timing):
                flat = self._store.private(old.ticket)
        unpacked = Unpacked.of(old, flat, as_kept=self._may_go_by_parts(subgroup))
        self._run(subgroup, weights, unpacked, indices)
        for copy in weights:
            copy.grad = None
        new = self._packed(subgroup, unpacked)
        timing.written_bytes = _bytes_of(new)
        ticket = self._store.put(flat_weights, "optimizer", [*self._waiting_room, *self._tiers])
        return Speculation(subgroup, indices, mark, hyper, old, new, layout, ticket)

    def expect(self, subgroups: Sequence[Subgroup]) -> None:
        """Keep the buffers in which new weights of these wait for `step()`, as far as they may.

        They are needed in every step, and to map them anew takes longer than to fill them.

        Args:
            subgroups: all that will be updated ahead; none to forget them.
        """
        sizes = []
        for subgroup in subgroups:
            forms = [piece.form for piece in subgroup.pieces]
            on_host = subgroup.pieces[0].parameter.device.type == "cpu"
            if on_host and all(packable(local_part(p.parameter)) for p in subgroup.pieces):
                sizes.append(Layout.of(forms).nbytes)
        room = sum(tier.capacity for tier in self._waiting_room)
        self._store.plan(self, sizes, room)
        if sizes:
            # Of states that stay in memory, step() gives the old ones back together.
            host_tiers = [tier for tier in self._tiers if isinstance(tier, HostTier)]
            self._store.keep_idle_beyond(sum(tier.capacity for tier in host_tiers))

    def _may_go_by_parts(self, subgroup: Subgroup) -> bool:
        """Whether something of a subgroup is computed in another precision than it is kept in."""
        masters = any(self.precision.has_master(piece.parameter) for piece in subgroup.pieces)
        return (masters or any(subgroup.states.narrow())) and self._may_cut(subgroup.group_index)

    def _run(
        self,
        subgroup: Subgroup,
        weights: Sequence[torch.Tensor],
        unpacked: Unpacked,
        indices: Iterable[int],
    ) -> None:
        """Update weights that have a gradient, and their states, by the user's class.

        Args:
            subgroup: whose pieces they are.
            weights: leaf tensors with gradients.
            unpacked: states of all pieces of the subgroup.
            indices: of the pieces of the weights.
        """
        states = [unpacked.states[index] for index in indices]
        run = partial(self._run_kernel, subgroup)
        if not unpacked.as_kept:
            run(weights, states)
            return
        source = unpacked.source
        if can_go_by_parts(weights, states):
            narrow = source.narrow()
            named_anew = run_by_parts(
                run,
                weights,
                states,
                [narrow[index] for index in indices],
                partial(self._store.borrow, "optimizer"),
                self._generator(subgroup, source),
            )
            if named_anew:  # all are laid out anew, from what is computed
                source.widen(unpacked.states)
        else:
            source.widen(unpacked.states)
            run(weights, states)

    def _run_kernel(
        self,
        subgroup: Subgroup,
        weights: Sequence[torch.Tensor],
        states: Sequence[dict[str, Any]],
    ) -> None:
        group = self.group_of(subgroup)
        if is_sharded(subgroup.pieces[0].parameter) and group.get("fused") is None:
            # As for DTensors, for which the user's instance would not choose it by itself.
            group = {"foreach": None, **group}
            group["foreach"] = bool(group["foreach"])
        if self.precision.masters:
            with masters_of(weights, states, self.precision) as weights:
                run_update(self._optimizer, group, weights, states)
        else:
            run_update(self._optimizer, group, weights, states)

    @torch.no_grad()
    def commit(self, speculation: Speculation) -> bool:
        """Make an update visible: weights by copying, states by swapping tickets.

        Args:
            speculation: one that may hold.

        Returns:
            Whether it was. If the weights are others than it began with it is dropped.
        """
        with self.timings.update():
            return self._commit(speculation)

    def _commit(self, speculation: Speculation) -> bool:
        subgroup = speculation.subgroup
        # Not all weights of all subgroups first: these are still in the processor's caches when
        # they are overwritten.
        with self._residence.held(speculation.parameters(), changes=True):
            weights = speculation.weights_now()
            if not speculation.mark.has_bits_of(weights):
                self.drop(speculation)
                return False
            flat = self._store.take(speculation.weights)
            views = speculation.layout.views(flat)
            for weight, view in zip(weights, views, strict=True):
                weight.copy_(view)
            del weight, weights
        self._replace_states(subgroup, speculation.states)
        return True

    def drop(self, speculation: Speculation) -> None:
        """Forget an update that will not be committed."""
        self._store.free(speculation.weights)
        if speculation.states.ticket is not None:
            self._store.free(speculation.states.ticket)

    def fetch(self, subgroup: Subgroup) -> None:
        """Begin to load a subgroup's states."""
        ticket = subgroup.states.ticket
        if ticket is not None and ticket.state is TicketState.STORED:
            self._store.prefetch(ticket)
        self._residence.ahead(piece.parameter for piece in subgroup.pieces)

    def fetch_weights(self, speculation: Speculation) -> None:
        """Begin to load the weights of an update that is about to be committed."""
        self._store.prefetch(speculation.weights)
        self._residence.ahead(speculation.parameters())

    def step_over(self) -> None:
        """All subgroups are updated: a forward pass comes next, of which the store is to know."""
        self._store.pass_begins()

    # ------------------------------------------------------------------ states as a whole
    def absorb(self, subgroup: Subgroup, states: list[dict[str, Any]]) -> None:
        """Replace a subgroup's states by the given ones (a loaded checkpoint), a dict a piece."""
        for piece, state in zip(subgroup.pieces, states, strict=True):
            wide = self.precision.has_master(piece.parameter)
            for name, value in list(state.items()):
                if packable(value):
                    dtype = self.precision.computed(value.dtype) if wide else value.dtype
                    state[name] = value.to(piece.parameter.device, dtype)
        new = self._packed(subgroup, Unpacked(StateSet([]), None, states, []))
        self._replace_states(subgroup, new)

    def copies(self, subgroup: Subgroup) -> list[dict[str, Any]]:
        """Copies of a subgroup's states in ordinary host memory, one dict a piece.

        On the host also for parameters of an accelerator, where all states at once may not fit.
        """
        states = subgroup.states
        if states.ticket is None:
            return states.unpack(None)
        flat = self._store.get(states.ticket)
        loaded = states.unpack(flat)
        for index, name in states.names:
            value = loaded[index][name]
            loaded[index][name] = value.clone() if value.device.type == "cpu" else value.cpu()
        self._store.evict(states.ticket)
        return loaded

    def outline(self, subgroup: Subgroup) -> Outline:
        """What states a subgroup has, without the values of large ones."""
        states = subgroup.states
        if states.ticket is None:
            return Outline(states.unpack(None), [])
        stored = [
            (index, name, segment, dtype)
            for (index, name), segment, dtype in zip(
                states.names, states.layout.segments, states.dtypes, strict=True
            )
        ]
        return Outline(states.unpack_as_kept(None), stored)

    def values(self, subgroup: Subgroup, outline: Outline) -> Iterator[torch.Tensor]:
        """The values of what is stored, one after the other; not to be changed or kept.

        Args:
            subgroup: whose states they are.
            outline: of it.
        """
        ticket = subgroup.states.ticket
        if ticket is not None and outline.stored:
            yield from subgroup.states.layout.views(self._store.get(ticket))
            self._store.evict(ticket)

    def _packed(self, subgroup: Subgroup, updated: Unpacked) -> StateSet:
        old = updated.source
        put = partial(self.put, instead_of=old.ticket)
        generator = self._generator(subgroup, old)
        return pack_states(self._store, updated, put, self.precision, generator)

    def _generator(self, subgroup: Subgroup, old: StateSet) -> torch.Generator | None:
        """Of the random numbers by which the next states are rounded; the same if asked again."""
        if self._generators is None:
            return None
        device = subgroup.pieces[0].parameter.device
        generator = self._generators.setdefault(device, torch.Generator(device))
        seed(generator, subgroup.number, old.updates)
        return generator

    def _replace_states(self, subgroup: Subgroup, new: StateSet) -> None:
        old, subgroup.states = subgroup.states, new
        if old.ticket is not None:
            self._store.free(old.ticket)


def _bytes_of(states: StateSet) -> int:
    """On tiers."""
    return 0 if states.ticket is None else states.ticket.nbytes


def with_gradient(subgroup: Subgroup) -> list[int]:
    """Indices of the pieces that have a gradient now, which no update has used yet."""
    return [i for i, piece in enumerate(subgroup.pieces) if has_gradient(piece.parameter)]


def hyper_parameters(group: dict[str, Any]) -> dict[str, Any]:
    """A snapshot of a parameter group's settings (tensor learning rates by value)."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


def _same(before: dict[str, Any], now: dict[str, Any]) -> bool:
    if before.keys() != now.keys():
        return False
    for name, value in before.items():
        other = now[name]
        if isinstance(value, torch.Tensor) or isinstance(other, torch.Tensor):
            if not (
                isinstance(value, torch.Tensor)
                and isinstance(other, torch.Tensor)
                and torch.equal(value, other)
            ):
                return False
        elif value != other:
            return False
    return True
