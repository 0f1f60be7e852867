"""What the store has to say when a path fails, fills up or does not answer."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence

import torch

from offload_strategy.errors import CorruptDataError, OffloadError, StorageError, TierFullError
from offload_strategy.io.queues.moves import Move
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.store.ticket import Entry, Tier
from offload_strategy.telemetry import get_logger
from offload_strategy.units import format_size

logger = get_logger(__name__)

#: After this long a wait for a path is reported; training goes on waiting.
PATIENCE_SECONDS = 30.0


def no_room(nbytes: int, client: str, tiers: Sequence[Tier]) -> TierFullError:
    """No tier takes a ticket."""
    usage = ", ".join(
        f"{tier.name}: {format_size(tier.used_bytes)} of {format_size(tier.capacity)} used"
        f"{' at ' if tier.queues else ''}{_paths(tier.queues)}"
        for tier in tiers
    )
    shortages = {region.shortage for tier in tiers for region in tier.regions if region.shortage}
    advice = "Raise a tier's capacity"
    if shortages:
        others = "Others have filled the disk since the start: free some space there"
        advice = f"{'; '.join(sorted(shortages))}. {others}"
    return TierFullError(
        f"no tier has room for {format_size(nbytes)} of {client} ({usage}). {advice}, add a tier, "
        f"or offload less (activations.budget, a smaller batch)."
    )


def failed(entry: Entry, move: Move) -> OffloadError:
    """A read or a write failed."""
    cause = move.error
    why = str(cause) or repr(cause)
    if isinstance(cause, CorruptDataError):
        return again(cause)
    tiers = " and ".join(sorted({repr(stripe.queue.tier) for stripe in entry.stripes}))
    paths = _paths(stripe.queue for stripe in entry.stripes)
    what = f"{move.direction.value} {format_size(entry.nbytes)} of {entry.client} at {paths}"
    kind: type[OffloadError] = StorageError
    advice = ". Check the disk and the system's log; training cannot go on with this path."
    if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
        kind = TierFullError
        advice = (
            ". Others have filled the disk (or the quota) since the start: free some space, and "
            "set tiers[].capacity to what is yours."
        )
    elif isinstance(cause, torch.OutOfMemoryError):
        what += ", because the device is out of memory"
        advice = (
            ". The path is not at fault: offload more (activations.budget), or train with a "
            "smaller batch."
        )
    elif isinstance(cause, OffloadError):  # such as no host memory: its message says what to do
        advice = ""
    error = kind(f"tier {tiers}: could not {what}: {why}{advice}")
    error.__cause__ = cause
    return error


def again(error: OffloadError) -> OffloadError:
    """An error to raise once more: anew, as a kept one collects the frames of all who were told."""
    return type(error)(*error.args)


def _paths(queues: Iterable[PathQueue]) -> str:
    return " and ".join(sorted({str(queue.path) for queue in queues}))


def still_waiting(move: Move, seconds: float) -> None:
    """Say that a path does not answer."""
    logger.warning(
        f"waiting for {move.unfinished_paths()} to {move.direction} {format_size(move.nbytes)} for "
        f"{seconds:.0f} s; the path does not answer, training resumes when it does"
    )


def still_full(waiting_bytes: int, tiers: Sequence[Tier], seconds: float) -> None:
    """Say that writes do not get on."""
    paths = _paths(queue for tier in tiers for queue in tier.queues)
    logger.warning(
        f"{format_size(waiting_bytes)} have been waiting to be written to {paths} for "
        f"{seconds:.0f} s; training resumes when it takes them"
    )
