"""How the bytes of a ticket are dealt to the paths of a tier: pure functions over numbers."""

from __future__ import annotations

from collections.abc import Sequence

from offload_strategy.units import MiB

#: Smaller tickets go to one path as a whole: two requests would cost more than they share.
STRIPE_BYTES = 8 * MiB
#: Parts of a striped ticket are multiples of this, except for the last.
STRIPE_UNIT = 1 * MiB


def deal(nbytes: int, live: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Split a ticket so that the bytes alive on each path are in proportion to its bandwidth.

    Then reading all of them takes each path the same time. MLP-Offload deals T_i = M·B_i/ΣB of M
    subgroups to path i once; looking at what is alive gives the same for a tier that is filled at
    once, and moves a tier to new shares by itself when a path slows down.

    Args:
        nbytes: of the ticket.
        live: bytes that each path holds now.
        weights: bandwidth of each path, all positive, in any unit.

    Returns:
        Bytes for each path; they add up to `nbytes`.
    """
    if nbytes < STRIPE_BYTES:
        lightest = min(range(len(live)), key=lambda i: (live[i] + nbytes) / weights[i])
        return [nbytes if i == lightest else 0 for i in range(len(live))]
    # Water filling: raise the level live/weight of the lowest paths until the ticket is used up.
    order = sorted(range(len(live)), key=lambda i: live[i] / weights[i])
    level = 0.0
    for count in range(1, len(order) + 1):
        filled = order[:count]
        level = (nbytes + sum(live[i] for i in filled)) / sum(weights[i] for i in filled)
        if count == len(order) or level <= live[order[count]] / weights[order[count]]:
            break
    wanted = [max(0.0, level * weights[i] - live[i]) for i in range(len(live))]
    parts = [int(want // STRIPE_UNIT) * STRIPE_UNIT for want in wanted]
    # What rounding left goes to those who lost most by it.
    left = nbytes - sum(parts)
    for i in sorted(range(len(live)), key=lambda i: parts[i] - wanted[i]):
        more = min(left, STRIPE_UNIT)
        parts[i] += more
        left -= more
    parts[order[0]] += left
    return parts
