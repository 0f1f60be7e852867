"""The optimizer that the user gets back: theirs, with its states elsewhere."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from offload_strategy.errors import ConfigError, OffloadError
from offload_strategy.optimizer.gradients.retained_gradients import WaitingGradients
from offload_strategy.optimizer.optimizer_step import run_step
from offload_strategy.optimizer.overlap.backward_overlap import BackwardOverlap
from offload_strategy.optimizer.overlap.commit import CommittedUpdates
from offload_strategy.optimizer.overlap.eager import EagerUpdates
from offload_strategy.optimizer.ranks.data_parallel_group import TeamBook
from offload_strategy.optimizer.ranks.rank_shards import Shares
from offload_strategy.optimizer.state_dicts import (
    absorb_states,
    sealed,
    unsealed,
)
from offload_strategy.optimizer.state_view import StateView
from offload_strategy.optimizer.states.precision import Precision
from offload_strategy.optimizer.states.subgroups import Subgroup, plan_subgroups
from offload_strategy.optimizer.subgroup_update import Updater
from offload_strategy.optimizer.update_timings import Timings
from offload_strategy.optimizer.user_class.compatibility import check_group
from offload_strategy.optimizer.user_class.compatibility_trial import can_be_cut, edits_gradients
from offload_strategy.optimizer.weight_residency import Residence
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.tiers import Tier
from offload_strategy.telemetry import get_logger
from offload_strategy.torch_support.grad_mode import keeps_grad_mode

logger = get_logger(__name__)

# Attributes of the inner optimizer that must not be seen through the wrapper. GradScaler hands
# unscaling over to optimizers that say they support it inside step(); gradients here may have been
# used before, so it must do it itself.
_HIDDEN = frozenset({"inner", "_step_supports_amp_scaling"})


class OffloadedOptimizer(Optimizer):
    """A `torch.optim.Optimizer` around the user's own, whose states live in the store.

    Groups, defaults, hooks and hyper-parameters are the inner optimizer's; nothing is copied, as
    frameworks replace them when they load a state.

    Args:
        inner: the user's optimizer.
        store: where states go.
        tiers: where they may go, in order.
        overlap: ``"commit"`` updates during backward, ``"off"`` at `step()`; both show nothing
            before `step()`. ``"eager"`` updates weights as gradients are complete.
        subgroup_size: parameters per subgroup, given how many there are in all.
        is_last: whether the backward that runs is the last before `step()`.
        state_bytes: what the states will take, once every parameter was updated.
        precision: of states; None for what a plain optimizer has.
        waiting_room: where new weights wait for `step()`, as long as there is room.
        gradient_memory: bytes of host memory in which gradients wait for `step()`, with
            ``"commit"``; others wait in the tiers.
        directories: where state dicts may lie; none for ordinary memory.
        residence: of the weights; None if they never leave.
        teams: knows which ranks train which parameters; None if this process trains by itself.
    """

    def __init__(
        self,
        inner: Optimizer,
        store: TensorStore,
        tiers: Sequence[Tier],
        *,
        overlap: Literal["commit", "eager", "off"],
        subgroup_size: Callable[[int], int],
        is_last: Callable[[], bool],
        state_bytes: int = 0,
        precision: Precision | None = None,
        waiting_room: Sequence[Tier] = (),
        gradient_memory: int,
        directories: Sequence[Path] = (),
        residence: Residence | None = None,
        teams: TeamBook | None = None,
    ) -> None:
        # Not Optimizer.__init__: it would make groups, defaults and hooks of its own.
        self.inner = inner
        self.state_bytes = state_bytes
        self._updater = Updater(
            inner, store, tiers, waiting_room, precision, residence, self._can_be_cut
        )
        self._subgroup_size = subgroup_size
        self._shares = Shares(teams, self._updater, directories)
        self._overlap: BackwardOverlap | None = None
        if overlap == "commit" and self._edits_gradients():
            logger.info(
                "%s changes gradients while it updates, so it updates at step() and not during "
                "backward.",
                type(inner).__name__,
            )
        elif overlap == "eager":
            self._overlap = EagerUpdates(self._updater, is_last)
        elif overlap == "commit":
            waiting = WaitingGradients(store, tiers, gradient_memory)
            self._overlap = CommittedUpdates(self._updater, is_last, waiting)
        self._may_cut: dict[int, bool] = {}
        self._numbered = 0
        self._subgroups: list[Subgroup] = []
        self._planned_parameters = 0
        self._hooks: dict[int, Any] = {}
        self._closed = False
        self._state = StateView(self._updater, self._planned_as_of_now, self._shares)
        self._watch_parameters()
        if any(inner.state.values()):
            self._absorb_inner_state()

    # ------------------------------------------------------------------ what the inner one has
    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups themselves."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.inner.param_groups = value

    @property
    def defaults(self) -> dict[str, Any]:
        """The inner optimizer's defaults themselves."""
        return self.inner.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self.inner.defaults = value

    @property
    def state(self) -> Any:
        """Parameter -> state dict; every look loads copies."""
        return self._state

    @state.setter
    def state(self, value: Any) -> None:
        self.inner.state = defaultdict(dict, value)
        self._absorb_inner_state()

    @property
    def timings(self) -> Timings:
        """Of the latest updates, for profiles."""
        return self._updater.timings

    def __getattr__(self, name: str) -> Any:
        if name in _HIDDEN or "inner" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an OffloadedOptimizer cannot be copied or pickled: its states are on a tier. Copy or "
            "save optimizer.state_dict() instead."
        )

    def __repr__(self) -> str:
        return f"OffloadedOptimizer({self.inner!r})"

    # ------------------------------------------------------------------ the step
    @keeps_grad_mode
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: evaluates the model and returns the loss, as for the plain optimizer.

        Returns:
            What the closure returned, or None.

        Raises:
            OffloadError: the engine is closed.
            StorageError: states could not be read or written.
        """
        self._check_open()
        own = self.inner
        # As torch calls them: the arguments include the optimizer, which has the states to look at.
        arguments = (self,) if closure is None else (self, closure)
        for hook in chain(
            torch_optimizer._global_optimizer_pre_hooks.values(),
            own._optimizer_step_pre_hooks.values(),
        ):
            hook(self, arguments, {})
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        phase = f"OffloadedOptimizer.step#{type(own).__name__}"
        with torch.autograd.profiler.record_function(phase):
            self._shares.states_change()
            subgroups = self._planned_as_of_now()
            here = self._shares.own(subgroups)
            run_step(subgroups, here, self._updater, self._overlap, self._shares.team)
        self._updater.step_over()
        # A scheduler that was made with the inner optimizer asks whether it has stepped.
        own._opt_called = True  # type: ignore[attr-defined]
        for hook in chain(
            own._optimizer_step_post_hooks.values(),
            torch_optimizer._global_optimizer_post_hooks.values(),
        ):
            hook(self, arguments, {})
        return loss

    def figures(self) -> dict[str, float]:
        """Counts since it was attached: steps that ran ahead, and how many of them in vain."""
        ahead = self._overlap if isinstance(self._overlap, CommittedUpdates) else None
        return {
            "speculated_steps": 0.0 if ahead is None else float(ahead.speculated_steps),
            "redone_steps": 0.0 if ahead is None else float(ahead.redone_steps),
        }

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as the plain optimizer does.

        Raises:
            OffloadError: with ``overlap: eager``, weights were updated and no `step()` followed.
        """
        if self._overlap is not None:
            self._overlap.cleared()
        self.inner.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as the plain optimizer does.

        Raises:
            ConfigError: with the settings of this group the optimizer cannot be swapped.
        """
        self._check_open()
        self.inner.add_param_group(param_group)
        groups = self.inner.param_groups
        try:
            self.state_bytes += check_group(self.inner, groups[-1], self._updater.precision)
        except ConfigError:
            groups.pop()
            raise
        self._watch_parameters()

    # ------------------------------------------------------------------ state dicts
    def state_dict(self) -> dict[str, Any]:
        """The plain optimizer's state dict: same keys, shapes, dtypes and values.

        Where ranks share updates, all of them must call it, as each has a part; or all of them
        `consolidate_state_dict` before.

        Large tensors are ordinary ones over private maps of an unlinked file beside the tier, so
        that saving them streams; the file is gone with the last of them.

        Raises:
            OffloadError: the engine is closed, and the states with it; other ranks did not call
                it, or have the states that were consolidated.
            TierFullError: there is no room for the file.
            StorageError: states could not be read.
        """
        self._check_open()
        subgroups = self._planned_as_of_now()
        states = self._shares.states(subgroups, "optimizer.state_dict()")
        own = self.inner.state
        try:
            # In the order of the groups, as the plain optimizer would have made them.
            own.update((p, states[p]) for p in self.parameters() if states[p])
            return self.inner.state_dict()
        finally:
            for parameter in states:
                own.pop(parameter, None)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the states of all ranks on one, which alone can take `state_dict` then.

        Until the next step or load. For code that saves on one rank and asks only that one, as
        with torch's `ZeroRedundancyOptimizer`. All ranks have to call it. Without shares it does
        nothing.

        Args:
            to: the rank among those that train these parameters.

        Raises:
            OffloadError: other ranks did not call it.
            TierFullError: there is no room for a copy of all states.
            StorageError: states could not be read.
        """
        self._check_open()
        where = "optimizer.consolidate_state_dict()"
        self._shares.consolidate(self._planned_as_of_now(), to, where)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict, of a plain optimizer or of this one."""
        self._check_open()
        states = state_dict.get("state")
        if isinstance(states, Mapping) and not self._looks_into_states():
            state_dict = {**state_dict, "state": sealed(states)}
        self.inner.load_state_dict(state_dict)
        self._absorb_inner_state()

    def _looks_into_states(self) -> bool:
        """Whether code that is not torch's sees states while they are loaded."""
        inner = self.inner
        methods = (type(inner).load_state_dict, type(inner).__setstate__)
        return bool(
            any(not method.__module__.startswith("torch.optim.") for method in methods)
            or inner._optimizer_load_state_dict_pre_hooks
            or inner._optimizer_load_state_dict_post_hooks
        )

    def _absorb_inner_state(self) -> None:
        if self._overlap is not None:
            self._overlap.forget()
        self._shares.states_change()
        subgroups = self._planned_as_of_now()
        absorb_states(self.inner.state, self._shares.own(subgroups), self._updater)
        own = self.inner.state
        for parameter in self.parameters():
            own.pop(parameter, None)
        # Of parameters that are not there: kept, as by a plain optimizer.
        own.update((k, unsealed(state)) for k, state in own.items() if isinstance(state, dict))

    # ------------------------------------------------------------------ parameters and life
    def parameters(self) -> list[torch.Tensor]:
        """Every parameter of every group."""
        return [p for group in self.inner.param_groups for p in group["params"]]

    def _watch_parameters(self) -> None:
        if self._overlap is None:
            return
        # Weak: the parameters' hooks must not keep the engine alive.
        notify = weakref.WeakMethod(self._gradient_ready)

        def gradient_ready(parameter: torch.Tensor) -> None:
            if (method := notify()) is not None:
                method(parameter)

        for parameter in self.parameters():
            if parameter.requires_grad and id(parameter) not in self._hooks:
                self._hooks[id(parameter)] = parameter.register_post_accumulate_grad_hook(
                    gradient_ready
                )

    def _gradient_ready(self, parameter: torch.Tensor) -> None:
        if self._overlap is None or self._closed:
            return
        self._shares.first_gradient()
        self._planned()
        if not self._shares.awaits_reduction(parameter):
            self._overlap.gradient_ready(parameter)

    def _planned(self) -> list[Subgroup]:
        """The subgroups; made when first needed, as a model may move to its device before that."""
        count = sum(len(group["params"]) for group in self.inner.param_groups)
        if self._shares.join(self.parameters, self._overlap) and self._subgroups:
            # Each rank had all states; from now on it has its share.
            for subgroup in self._subgroups:
                self._shares.deal(subgroup)
            absorb_states({}, self._shares.others(self._subgroups), self._updater)
            if self._overlap is not None:
                self._overlap.watch(self._shares.own(self._subgroups))
        if self._planned_parameters < count:
            self._planned_parameters = count
            known = {id(p.parameter) for subgroup in self._subgroups for p in subgroup.pieces}
            self._subgroups.extend(self._plan(known))
            if self._overlap is not None:
                self._overlap.watch(self._shares.own(self._subgroups))
        return self._subgroups

    def largest_subgroup_bytes(self) -> int:
        """Bytes of the weights that are updated at a time, at most."""
        return max(
            (
                sum(piece.numel * piece.parameter.element_size() for piece in subgroup.pieces)
                for subgroup in self._planned()
            ),
            default=0,
        )

    def _edits_gradients(self) -> bool:
        groups = [group for group in self.inner.param_groups if group["params"]]
        return any(edits_gradients(self.inner, group, self._updater.precision) for group in groups)

    def _plan(self, known: Collection[int]) -> Iterator[Subgroup]:
        planned = plan_subgroups(self.inner, known, self._subgroup_size, self._can_be_cut)
        for subgroup in planned:
            self._numbered += 1
            subgroup.number = self._numbered
            self._shares.deal(subgroup)
            yield subgroup

    def _can_be_cut(self, group_index: int) -> bool:
        if group_index not in self._may_cut:
            group = self.inner.param_groups[group_index]
            self._may_cut[group_index] = can_be_cut(self.inner, group, self._updater.precision)
        return self._may_cut[group_index]

    def _planned_as_of_now(self) -> list[Subgroup]:
        """The subgroups, planned anew if somebody has edited the groups' lists since."""
        subgroups = self._planned()
        groups = [{id(p) for p in group["params"]} for group in self.inner.param_groups]
        in_place = all(
            subgroup.group_index < len(groups)
            and all(
                id(piece.parameter) in groups[subgroup.group_index] for piece in subgroup.pieces
            )
            for subgroup in subgroups
        )
        planned = {id(piece.parameter) for subgroup in subgroups for piece in subgroup.pieces}
        if in_place and len(planned) == sum(map(len, groups)):
            return subgroups
        if self._overlap is not None:
            self._overlap.forget()
        self._shares.states_change()
        states = self._shares.states(subgroups, "optimizer.step() with other parameters")
        absorb_states({}, self._shares.own(subgroups), self._updater)
        self._may_cut.clear()
        self._shares.deal_anew()
        subgroups[:] = self._plan(())
        self._planned_parameters = sum(map(len, groups))
        absorb_states(states, self._shares.own(subgroups), self._updater)
        for gone in self._hooks.keys() - set().union(*groups):
            self._hooks.pop(gone).remove()
        self._watch_parameters()
        if self._overlap is not None:
            self._overlap.watch(self._shares.own(self._subgroups))
        return subgroups

    def close(self) -> None:
        """Take every hook off the parameters and forget the states. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._shares.states_change()
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        if self._overlap is not None:
            self._overlap.forget()
            self._overlap.watch([])
        absorb_states({}, self._shares.own(self._subgroups), self._updater)

    def _check_open(self) -> None:
        if self._closed:
            raise OffloadError(
                "the offload engine of this optimizer is closed, and its states are gone. Take "
                "optimizer.state_dict() before engine.close(), or close the engine after training."
            )
