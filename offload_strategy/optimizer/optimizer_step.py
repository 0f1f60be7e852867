"""What happens at `step()`: what ran ahead is committed, the rest is updated, the team is told."""

from __future__ import annotations

from collections.abc import Sequence

from offload_strategy.optimizer.overlap.backward_overlap import (
    PREFETCHED_SUBGROUPS,
    BackwardOverlap,
)
from offload_strategy.optimizer.ranks.data_parallel_group import Deliveries, Team
from offload_strategy.optimizer.states.subgroups import Subgroup
from offload_strategy.optimizer.subgroup_update import Updater, with_gradient


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
        own: those of them that this rank updates.
        updater: updates these.
        overlap: what ran ahead; None if nothing does.
        team: the ranks that share the work; None if there is no other.
    """
    deliveries = None
    concerned: list[Subgroup] = []
    done: set[int] = set()
    try:
        if team is not None and team.shares:
            # Before what was done in backward is tidied away.
            marks = team.agreed([_took_part(subgroup) for subgroup in subgroups])
            deliveries = Deliveries(
                team, [s for s, mark in zip(subgroups, marks, strict=True) if mark]
            )
        ahead = overlap.finish() if overlap is not None else []
        concerned = [s for s in own if with_gradient(s)]
        waiting = set(map(id, concerned)) | {id(speculation.subgroup) for speculation in ahead}
        if deliveries is not None:  # what `eager` has updated already
            deliveries.ready(*[s for s in own if id(s) not in waiting])
        for position, speculation in enumerate(ahead):
            for coming in ahead[position + 1 : position + 1 + PREFETCHED_SUBGROUPS]:
                updater.fetch_weights(coming)
            if updater.commit(speculation):
                done.add(id(speculation.subgroup))
                if deliveries is not None:
                    deliveries.ready(speculation.subgroup)
        if overlap is not None:
            overlap.settled(len(done))
        rest = [s for s in concerned if id(s) not in done]
        for position, subgroup in enumerate(rest):
            for next_one in rest[position + 1 : position + 1 + PREFETCHED_SUBGROUPS]:
                updater.fetch(next_one)
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
                f"optimizer.step() had updated {len(done)} of {len(concerned)} subgroups{received}:"
                f" the weights are not those of any one step. Go on from the last checkpoint."
            )
        raise


def _took_part(subgroup: Subgroup) -> bool:
    """Whether any of its parameters has a gradient, one that an update has used included."""
    return any(piece.parameter.grad is not None for piece in subgroup.pieces)
