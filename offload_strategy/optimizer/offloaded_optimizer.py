"""The optimizer that `engine.attach` returns: the user's own, with its states in the store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from offload_strategy.errors import ConfigError, OffloadError
from offload_strategy.optimizer.inner_guard import own_call
from offload_strategy.optimizer.overlap.ahead_update import with_gradient
from offload_strategy.optimizer.overlap.backward_overlap import (
    PREFETCHED_SUBGROUPS,
    BackwardOverlap,
)
from offload_strategy.optimizer.overlap.overlap_modes import (
    CommittedUpdates,
    EagerUpdates,
    RetainedGradients,
)
from offload_strategy.optimizer.ranks.data_parallel_group import GroupRegistry
from offload_strategy.optimizer.ranks.rank_shards import RankShards
from offload_strategy.optimizer.ranks.weight_broadcasts import StepBroadcasts
from offload_strategy.optimizer.state_dicts import StateView, load_wrapped
from offload_strategy.optimizer.states.parameter_slices import may_be_sliced
from offload_strategy.optimizer.states.precision import Precision
from offload_strategy.optimizer.states.subgroups import Subgroup, plan_subgroups, unwrap_tensors
from offload_strategy.optimizer.subgroup_update import Updater
from offload_strategy.optimizer.updated_weights import WeightResidency
from offload_strategy.optimizer.user_class.compatibility import check_supported, of_inner
from offload_strategy.optimizer.user_class.inner_step import refuse_compilation
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Tier
from offload_strategy.store.tiers import HostTier
from offload_strategy.telemetry import get_logger
from offload_strategy.torch_support.dtensors import local_tensor
from offload_strategy.torch_support.keyboard_interrupts import keeps_grad_mode
from offload_strategy.torch_support.modules import WeakHook

logger = get_logger(__name__)

# Attributes of the inner optimizer that must not be seen through the wrapper. GradScaler leaves
# unscaling to optimizers that say they support it inside step(); gradients here may have been used
# before, so GradScaler must unscale them itself.
_HIDDEN = frozenset({"inner", "_step_supports_amp_scaling"})


class OffloadedOptimizer(Optimizer):
    """A `torch.optim.Optimizer` around the user's own, whose states are in the store.

    Groups, defaults, hooks and hyper-parameters are the inner optimizer's; nothing is copied.

    Args:
        subgroup_size: elements of a subgroup, given the number of all elements.
        is_last: whether the running backward is the last before `step()`.
        waiting: for gradients, and new weights of an accelerator, before `tiers`.
        directories: where state dicts may be; none for ordinary memory.
        claim: called with this optimizer when it has new parameters, before it hooks them.
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
        state_bytes: int,
        changes_gradients: bool,
        precision: Precision,
        waiting: HostTier,
        directories: Sequence[Path],
        residency: WeightResidency | None,
        dp_groups: GroupRegistry,
        claim: Callable[[OffloadedOptimizer], None],
    ) -> None:
        # Not Optimizer.__init__: it would make groups, defaults and hooks of its own.
        self.inner = inner
        self.state_bytes = state_bytes
        self._updater = Updater(inner, store, tiers, waiting, precision, residency)
        self._subgroup_size = subgroup_size
        self._rank_shards = RankShards(dp_groups, self._updater, directories)
        self._overlap: BackwardOverlap | None = None
        if overlap == "eager":
            self._overlap = EagerUpdates(self._updater, is_last, self._backward_begins)
        elif overlap == "commit" and changes_gradients:
            logger.info("%s changes gradients, so it updates at step().", type(inner).__name__)
        elif overlap == "commit":
            retained = RetainedGradients(store, tiers, waiting)
            self._overlap = CommittedUpdates(
                self._updater, is_last, self._backward_begins, retained
            )
        self._subgroups: list[Subgroup] = []
        self._hooks: dict[int, Any] = {}
        #: Whether its states are freed.
        self.closed = False
        self._claim = claim
        self._has_lazy = any(map(is_lazy, self.parameters()))
        self._state = StateView(
            inner, self._updater, self._current_subgroups, self._rank_shards, self._states_replaced
        )
        self._register_hooks()
        if any(inner.state.values()):
            self._absorb_inner_state()

    # ------------------------------------------------------------------ the inner optimizer
    # Frameworks replace the groups when they load. Not left to `__getattr__`: from Python 3.12 on,
    # `isinstance` with a runtime protocol, as Lightning has one, looks attributes up statically.
    param_groups = of_inner("param_groups")
    defaults = of_inner("defaults")

    @property
    def state(self) -> Any:
        """Parameter -> state dict; reading loads copies, whose changes are written back."""
        return self._state

    @state.setter
    def state(self, value: Any) -> None:
        self.inner.state = defaultdict(dict, value)
        self._absorb_inner_state()

    def __getattr__(self, name: str) -> Any:
        if name in _HIDDEN or "inner" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        of_inner = "inner" in own and name not in own and name not in _HIDDEN
        if of_inner and name in vars(own["inner"]) and not hasattr(type(self), name):
            setattr(self.inner, name, value)
        else:
            super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an OffloadedOptimizer cannot be copied or pickled: its states are on a tier. Copy or "
            "save optimizer.state_dict() instead."
        )

    def __repr__(self) -> str:
        return f"OffloadedOptimizer({self.inner!r})"

    # ------------------------------------------------------------------ the step
    @keeps_grad_mode
    @Optimizer.profile_hook_step  # runs the hooks of the inner optimizer
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, as the plain optimizer does.

        Raises an OffloadError if the engine is closed, a StorageError if a tier fails.
        """
        self._check_open()
        refuse_compilation()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        phase = f"OffloadedOptimizer.step#{type(self.inner).__name__}"
        with torch.autograd.profiler.record_function(phase), self._updater.streams.stepping():
            self._update_all()
        self._updater.step_ended()
        # Schedulers that were made with the inner optimizer check whether it has stepped.
        self.inner._opt_called = True  # type: ignore[attr-defined]
        return loss

    def _update_all(self) -> None:
        """Commit updates that ran ahead, run the others, and send new weights to all ranks."""
        shards, updater, overlap = self._rank_shards, self._updater, self._overlap
        shards.discard_consolidated()
        self._state.write_back()
        subgroups = self._current_subgroups()
        self._state.states_change()
        own = shards.own(subgroups)
        broadcasts: StepBroadcasts | None = None
        to_update: list[Subgroup] = []
        done: set[Subgroup] = set()
        updater.has_begun = False  # those ahead of `step()` changed copies
        try:
            # Before `finish` frees the gradients that updates during backward have used.
            broadcasts = shards.step_broadcasts(subgroups)
            ahead_updates = overlap.finish() if overlap is not None else []
            to_update = [s for s in own if with_gradient(s)]
            # Those without gradients, and those that `eager` has updated already.
            broadcasts.ready(*set(own).difference(to_update))
            updater.compare_weights(ahead_updates)
            for position, ahead_update in enumerate(ahead_updates, start=1):
                for coming in ahead_updates[position : position + PREFETCHED_SUBGROUPS]:
                    updater.prefetch_weights(coming)
                if updater.commit(ahead_update):
                    done.add(ahead_update.subgroup)
                    broadcasts.ready(ahead_update.subgroup)
            if overlap is not None:
                overlap.note_commits(len(done))
            remaining = [s for s in to_update if s not in done]
            for position, subgroup in enumerate(remaining, start=1):
                for next_one in remaining[position : position + PREFETCHED_SUBGROUPS]:
                    updater.prefetch_states(next_one)
                updater.update_in_place(subgroup)
                done.add(subgroup)
                broadcasts.ready(subgroup)
            broadcasts.wait()
        except BaseException as error:
            if shards.dp_group is not None:
                shards.dp_group.add_rank_note(error)
            received = ""
            if broadcasts is not None and broadcasts.dp_group is not None:
                broadcasts.allow_forced_exit()
                received = ", and may have some of other ranks"
            if done or received or updater.has_begun:
                begun = ", and begun another" if updater.has_begun else ""
                error.add_note(
                    f"optimizer.step() had updated {len(done)} of {len(to_update)} subgroups"
                    f"{begun}{received}: the weights are not those of any one step. Go on from the "
                    f"last checkpoint."
                )
            raise

    def figures(self) -> dict[str, float]:
        """Steps since attach whose updates ran ahead, and those of which some had to run again."""
        ahead = self._overlap
        speculated, redone = (ahead.speculated_steps, ahead.redone_steps) if ahead else (0, 0)
        return {"speculated_steps": float(speculated), "redone_steps": float(redone)}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, like the plain optimizer.

        Raises an OffloadError if ``overlap: eager`` has updated weights and no `step()` followed.
        """
        if self._overlap is not None:
            self._overlap.gradients_cleared()
        self.inner.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; raise a ConfigError if its states cannot be offloaded."""
        self._check_open()
        self.inner.add_param_group(param_group)
        try:
            supported = check_supported(self.inner, self._updater.precision)
            self._register_hooks()
        except ConfigError:
            self.inner.param_groups.pop()
            raise
        self.state_bytes += supported.state_bytes[-1]

    # ------------------------------------------------------------------ state dicts
    def state_dict(self) -> dict[str, Any]:
        """The plain optimizer's state dict: same keys, shapes, dtypes and values.

        Where ranks share updates, all must call it, or `consolidate_state_dict` before.

        Large tensors are ordinary ones over private maps of an unlinked file next to the tier, so
        that saving them streams; the file is gone with the last of them. Raises a TierFullError if
        there is no room for it, an OffloadError if other ranks did not call this, or have them.
        """
        self._check_open()
        if self._overlap is not None:
            self._overlap.check_saveable()
        self._state.write_back()
        states = self._rank_shards.states(self._current_subgroups(), "optimizer.state_dict()")
        own = self.inner.state
        try:
            # In the order of the groups, like the plain optimizer.
            own.update((p, states[p]) for p in self.parameters() if states.get(p))
            with own_call(self.inner):
                return self.inner.state_dict()
        finally:
            for parameter in states:
                own.pop(parameter, None)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the states of all ranks on rank `to` of those that train these parameters.

        There `state_dict` can then be called, until the next step or load, by code that calls it on
        the saving rank only, as with torch's `ZeroRedundancyOptimizer`. All ranks have to call
        this. Without sharding it does nothing. Raises a TierFullError if there is no room.
        """
        self._check_open()
        self._state.write_back()
        self._rank_shards.consolidate(self._current_subgroups(), to)

    def give_states_back(self) -> None:
        """Put the states into the inner optimizer, before this one is closed, for another engine.

        As they are: `load_state_dict` would cast them to the dtypes of the weights.
        """
        self._check_open()
        self._state.write_back()
        states = self._rank_shards.states(self._current_subgroups(), "engine.attach()")
        self.inner.state.update((p, state) for p, state in states.items() if state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of a plain optimizer or of an offloaded one."""
        self._check_open()
        load_wrapped(state_dict, self.inner, self._updater.precision)
        self._absorb_inner_state()

    def _absorb_inner_state(self) -> None:
        self._states_replaced()
        self._state.states_change(replaced=True)
        given, self.inner.state = self.inner.state, defaultdict(dict)
        self._store_states(given, self._current_subgroups(given))

    def _store_states(self, states: dict[Any, Any], subgroups: list[Subgroup]) -> None:
        """Store states; those of other parameters are kept, which may come into a group again."""
        self.inner.state.clear()
        self._updater.replace_states(states, self._rank_shards.own(subgroups))
        for parameter in self.parameters():
            if states.pop(parameter, None) and is_lazy(parameter):
                raise ConfigError(
                    "the optimizer got a state for a parameter of a lazy module that has no shape "
                    "yet. Load the model's weights, or run a forward pass, before the states."
                )
        not_empty = {k: s for k, s in states.items() if not isinstance(s, dict) or s}
        kept = ((k, unwrap_tensors(s) if isinstance(s, dict) else s) for k, s in not_empty.items())
        self.inner.state.update(kept)

    # ------------------------------------------------------------------ parameters and subgroups
    def parameters(self) -> list[torch.Tensor]:
        """Every parameter of every group."""
        return [p for group in self.inner.param_groups for p in group["params"]]

    def _register_hooks(self) -> None:
        self._claim(self)
        if self._overlap is None:
            return
        # Weak: the parameters' hooks must not keep the engine alive.
        hook = WeakHook(self._gradient_ready)
        for parameter in self.parameters():
            known = id(parameter) in self._hooks or is_lazy(parameter)
            if parameter.requires_grad and not known:
                self._hooks[id(parameter)] = parameter.register_post_accumulate_grad_hook(hook)

    def _gradient_ready(self, parameter: torch.Tensor) -> None:
        if self._overlap is None or self.closed:
            return
        self._rank_shards.first_gradient()
        self._planned()
        (self._rank_shards.reductions or self._overlap).gradient_ready(parameter)

    def _planned(self) -> list[Subgroup]:
        """The subgroups, planned when first needed: the model may move to its device before."""
        if self._rank_shards.join_group(self.parameters, self._overlap) and self._subgroups:
            # Each rank had all states; from now on it has those of its own subgroups.
            self._assign_owners()
            self._updater.replace_states({}, self._rank_shards.others(self._subgroups))
        if not self._subgroups:
            self._plan({})
        return self._subgroups

    def _plan(self, states: Mapping[torch.Tensor, Any]) -> None:
        """Divide all parameters into subgroups; those with these states if they may be sliced."""
        size, is_elementwise = self._subgroup_size, self._updater.is_elementwise
        self._subgroups += plan_subgroups(self.inner, size, is_elementwise, states)
        for number, subgroup in enumerate(self._subgroups, start=1):
            subgroup.number = number
        self._assign_owners()
        if self._has_lazy and self._subgroups:  # by now those that are trained have a shape
            self._has_lazy = False
            self.state_bytes = sum(check_supported(self.inner, self._updater.precision).state_bytes)
            self._register_hooks()

    def _assign_owners(self) -> None:
        """Divide subgroups among ranks; this rank's are updated during backward from now on."""
        self._rank_shards.assign_owners(self._subgroups)
        own = self._rank_shards.own(self._subgroups)
        self._updater.place_states(own, self.state_bytes)
        if self._overlap is not None:
            self._overlap.set_subgroups(own)

    def _is_planned(self) -> bool:
        """Whether the groups have the parameters and settings that subgroups were planned for."""
        groups = enumerate(self.inner.param_groups)
        all_of_them = [(index, p) for index, group in groups for p in group["params"]]
        wanted = {(i, id(p), local_tensor(p).shape) for i, p in all_of_them if not is_lazy(p)}
        slices = [(s.group_index, each) for s in self._subgroups for each in s.slices]
        planned = {(i, id(each.parameter), each.shape) for i, each in slices}
        sliced = {index for index, each in slices if each.rows is not None}
        return wanted == planned and all(map(self._updater.is_elementwise, sliced))

    def _current_subgroups(self, given: Mapping[torch.Tensor, Any] = {}) -> list[Subgroup]:
        """The subgroups, planned again if they do not fit any more, or the states to be `given`."""
        subgroups = self._planned()
        sliced = {e.parameter for s in subgroups for e in s.slices if e.rows is not None}
        if self._is_planned() and all(may_be_sliced(p, given.get(p, {})) for p in sliced):
            return subgroups
        for ahead_update in () if self._overlap is None else self._overlap.finish_early():
            self._updater.drop(ahead_update)  # those of `eager` have been made
        self._rank_shards.discard_consolidated()
        states = self._rank_shards.states(subgroups, "optimizer.step() with other parameters")
        states = {**states, **given}
        self._updater.replace_states({}, self._rank_shards.own(subgroups))
        self._updater.tried.clear()
        subgroups.clear()
        self._plan(states)
        self._store_states({**self.inner.state, **states}, subgroups)
        for gone in self._hooks.keys() - set(map(id, self.parameters())):
            self._hooks.pop(gone).remove()
        self._register_hooks()
        return subgroups

    def _backward_begins(self) -> bool:
        """Write back what users have changed; return whether the subgroups are still right."""
        self._state.write_back()
        return self._is_planned()

    def _states_replaced(self) -> None:
        """Updates ahead of `step()` and consolidated states are out of date."""
        if self._overlap is not None:
            self._overlap.states_replaced()
        self._rank_shards.discard_consolidated()

    def stop_overlap(self) -> bool:
        """Update in `step()` from now on; return whether updates ran during backward before."""
        if self._overlap is None:
            return False
        self._overlap.gradients_cleared()
        self._unhook()
        self._overlap = None
        return True

    def _unhook(self) -> None:
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        self._rank_shards.discard_consolidated()
        if self._overlap is not None:
            self._overlap.reset()
            self._overlap.set_subgroups([])

    def close(self) -> None:
        """Remove all hooks from the parameters and free the states. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._unhook()
        self._updater.replace_states({}, self._rank_shards.own(self._subgroups))

    def _check_open(self) -> None:
        if self.closed:
            raise OffloadError(
                "the offload engine of this optimizer is closed, and its states are gone. Take "
                "optimizer.state_dict() before engine.close(), or close the engine after training."
            )
