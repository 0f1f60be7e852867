"""`step()`: commits updates that ran ahead, runs the others, and sends new weights to all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from offload_strategy.optimizer.overlap.ahead_update import with_gradient
from offload_strategy.optimizer.overlap.backward_overlap import (
    PREFETCHED_SUBGROUPS,
    BackwardOverlap,
)
from offload_strategy.optimizer.ranks.data_parallel_group import Deliveries, Team
from offload_strategy.optimizer.states.subgroups import Subgroup
from offload_strategy.optimizer.subgroup_update import Updater


def run_step(
    subgroups: Sequence[Subgroup],
    own: Sequence[Subgroup],
    updater: Updater,
    overlap: BackwardOverlap | None,
    team: Team | None,
) -> None:
    """Update every parameter that has a gradient.

    Args:
        subgroups: of all ranks, in the same order on each.
        own: those that this rank updates.
        updater: updates them.
        overlap: has run updates during backward; None without overlap.
        team: the data-parallel ranks; None if there is only this one.
    """
    deliveries = None
    to_update: list[Subgroup] = []
    done: set[int] = set()
    try:
        if team is not None and team.shares:
            # Before `finish` frees the gradients that updates during backward have used.
            has_gradient = team.agreed(
                [any(each.parameter.grad is not None for each in s.slices) for s in subgroups]
            )
            changing = [s for s, has in zip(subgroups, has_gradient, strict=True) if has]
            deliveries = Deliveries(team, changing)
        ahead_updates = overlap.finish() if overlap is not None else []
        to_update = [s for s in own if with_gradient(s)]
        if deliveries is not None:  # send what `eager` has updated already
            pending = {id(s) for s in to_update} | {id(a.subgroup) for a in ahead_updates}
            deliveries.ready(*[s for s in own if id(s) not in pending])
        for position, ahead_update in enumerate(ahead_updates, start=1):
            for coming in ahead_updates[position : position + PREFETCHED_SUBGROUPS]:
                updater.prefetch_weights(coming)
            if updater.commit(ahead_update):
                done.add(id(ahead_update.subgroup))
                if deliveries is not None:
                    deliveries.ready(ahead_update.subgroup)
        if overlap is not None:
            overlap.note_commits(len(done))
        remaining = [s for s in to_update if id(s) not in done]
        for position, subgroup in enumerate(remaining, start=1):
            for next_one in remaining[position : position + PREFETCHED_SUBGROUPS]:
                updater.prefetch_states(next_one)
            updater.update_in_place(subgroup)
            done.add(id(subgroup))
            if deliveries is not None:
                deliveries.ready(subgroup)
        if deliveries is not None:
            deliveries.ready(*own)
            deliveries.wait()
    except BaseException as error:
        if team is not None:
            team.explain(error)
        if deliveries is not None:
            deliveries.abandon()
        if done or deliveries is not None:
            received = "" if deliveries is None else ", and may have some of other ranks"
            error.add_note(
                f"optimizer.step() had updated {len(done)} of {len(to_update)} subgroups{received}:"
                f" the weights are not those of any one step. Go on from the last checkpoint."
            )
        raise
