"""`step()`: commits updates that ran ahead, runs the others, and sends new weights to all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from offload_strategy.optimizer.overlap.ahead_update import with_gradient
from offload_strategy.optimizer.overlap.backward_overlap import (
    PREFETCHED_SUBGROUPS,
    BackwardOverlap,
)
from offload_strategy.optimizer.ranks.data_parallel_group import DataParallelGroup
from offload_strategy.optimizer.ranks.weight_broadcasts import StepBroadcasts
from offload_strategy.optimizer.states.subgroups import Subgroup
from offload_strategy.optimizer.subgroup_update import Updater


def run_step(
    subgroups: Sequence[Subgroup],
    own: Sequence[Subgroup],
    updater: Updater,
    overlap: BackwardOverlap | None,
    dp_group: DataParallelGroup | None,
) -> None:
    """Update every parameter that has a gradient.

    Args:
        subgroups: of all ranks, in the same order on each.
        own: those that this rank updates.
        updater: updates them.
        overlap: has run updates during backward; None without overlap.
        dp_group: the data-parallel ranks; None if there is only this one.
    """
    broadcasts = None
    to_update: list[Subgroup] = []
    done: set[int] = set()
    try:
        if dp_group is not None and dp_group.shards_states:
            # Before `finish` frees the gradients that updates during backward have used.
            has_gradient = dp_group.any_rank(
                [any(each.parameter.grad is not None for each in s.slices) for s in subgroups]
            )
            changing = [s for s, has in zip(subgroups, has_gradient, strict=True) if has]
            broadcasts = StepBroadcasts(dp_group, changing)
        ahead_updates = overlap.finish() if overlap is not None else []
        to_update = [s for s in own if with_gradient(s)]
        if broadcasts is not None:  # send what `eager` has updated already
            pending = {id(s) for s in to_update} | {id(a.subgroup) for a in ahead_updates}
            broadcasts.ready(*[s for s in own if id(s) not in pending])
        for position, ahead_update in enumerate(ahead_updates, start=1):
            for coming in ahead_updates[position : position + PREFETCHED_SUBGROUPS]:
                updater.prefetch_weights(coming)
            if updater.commit(ahead_update):
                done.add(id(ahead_update.subgroup))
                if broadcasts is not None:
                    broadcasts.ready(ahead_update.subgroup)
        if overlap is not None:
            overlap.note_commits(len(done))
        remaining = [s for s in to_update if id(s) not in done]
        for position, subgroup in enumerate(remaining, start=1):
            for next_one in remaining[position : position + PREFETCHED_SUBGROUPS]:
                updater.prefetch_states(next_one)
            updater.update_in_place(subgroup)
            done.add(id(subgroup))
            if broadcasts is not None:
                broadcasts.ready(subgroup)
        if broadcasts is not None:
            broadcasts.ready(*own)
            broadcasts.wait()
    except BaseException as error:
        if dp_group is not None:
            dp_group.add_rank_note(error)
        if broadcasts is not None:
            broadcasts.allow_forced_exit()
        if done or broadcasts is not None:
            received = "" if broadcasts is None else ", and may have some of other ranks"
            error.add_note(
                f"optimizer.step() had updated {len(done)} of {len(to_update)} subgroups{received}:"
                f" the weights are not those of any one step. Go on from the last checkpoint."
            )
        raise
