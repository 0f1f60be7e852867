"""What one step of streamed training moves, block by block, as a table to read.

While a block computes, the next ones are read; in backward the states of its parameters are read
as well, its gradients become updates, and the new weights and states of the block before it leave
(ZeRO-Infinity, section 5; Fuyou, section on the overlapped optimizer).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload_strategy.units import format_size


@dataclass(frozen=True, slots=True)
class Turn:
    """A block computes.

    Args:
        block: its name.
        backward: whether gradients are computed.
        weights_bytes: streamed weights of the block.
        trained_bytes: those of them that are updated.
        states_bytes: optimizer states of the block's parameters.
    """

    block: str
    backward: bool
    weights_bytes: int
    trained_bytes: int = 0
    states_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PlanRow:
    """What happens while a block computes.

    Args:
        turn: of the block.
        read_ahead: names of the blocks whose weights are read meanwhile.
        read_bytes: of those weights, and in backward of the states that are updated.
        written: name of the block whose new weights and states are written; None for none.
        written_bytes: of them.
    """

    turn: Turn
    read_ahead: tuple[str, ...]
    read_bytes: int
    written: str | None
    written_bytes: int


@dataclass(frozen=True)
class StepPlan:
    """A step, turn by turn; `str` makes a table of it.

    Args:
        rows: in the order in which blocks compute.
        learned: whether that order was seen in a step; else it is that of registration.
    """

    rows: tuple[PlanRow, ...]
    learned: bool

    @property
    def read_bytes(self) -> int:
        """Bytes that a step reads from the tiers."""
        return sum(row.read_bytes for row in self.rows)

    @property
    def written_bytes(self) -> int:
        """Bytes that a step writes to them."""
        return sum(row.written_bytes for row in self.rows)

    def __str__(self) -> str:
        """A table in Markdown."""
        lines = [
            "| pass | computes | its weights | reads meanwhile | bytes | writes | bytes |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in self.rows:
            turn = row.turn
            reads = [f"weights of {name}" for name in row.read_ahead]
            if turn.states_bytes and turn.backward:
                reads.append(f"states of {turn.block}")
            writes = "" if row.written is None else f"weights and states of {row.written}"
            lines.append(
                f"| {'backward' if turn.backward else 'forward'} | {turn.block} "
                f"| {format_size(turn.weights_bytes)} | {', '.join(reads)} "
                f"| {_size(row.read_bytes)} | {writes} | {_size(row.written_bytes)} |"
            )
        order = "as in the last step" if self.learned else "as registered; no step was seen yet"
        lines.append(
            f"\nin all {format_size(self.read_bytes)} read and {format_size(self.written_bytes)} "
            f"written a step; blocks in the order {order}"
        )
        return "\n".join(lines)


def step_plan(
    turns: Sequence[Turn], blocks_in_flight: int, *, learned: bool, updates: bool
) -> StepPlan:
    """Lay out one step.

    Args:
        turns: of all blocks, in order. The step after it begins with the first one again.
        blocks_in_flight: in memory at a time, or on their way there.
        learned: see `StepPlan`.
        updates: whether updates run during backward; else `step()` reads and writes what they need.
    """
    rows: list[PlanRow] = []
    here: list[str] = []  # blocks in memory or on their way, the one needed longest ago first
    before: Turn | None = None
    for count in range(2 * len(turns)):  # the second time as in all steps but the first
        place = count % len(turns)
        turn = turns[place]
        read, names = 0, []
        if turn.block not in here:  # nobody could read it ahead
            read += turn.weights_bytes
        here = [name for name in here if name != turn.block] + [turn.block]
        following = _following(turns, place, blocks_in_flight - 1)
        for later in following:
            if later.block not in here:
                names.append(later.block)
                read += later.weights_bytes
                here.append(later.block)
        wanted = {turn.block, *(later.block for later in following)}
        spare = max(0, blocks_in_flight - len(wanted))
        rest = [name for name in here if name not in wanted]
        here = [name for name in here if name in wanted or name in rest[len(rest) - spare :]]
        if turn.backward and updates:
            read += turn.states_bytes
        written, written_bytes = None, 0
        if updates and before is not None and before.backward and before.trained_bytes:
            written, written_bytes = before.block, before.trained_bytes + before.states_bytes
        row = PlanRow(turn, tuple(names), read, written, written_bytes)
        if count >= len(turns):
            rows.append(row)
        before = turn
    return StepPlan(tuple(rows), learned)


def _following(turns: Sequence[Turn], place: int, count: int) -> list[Turn]:
    """The next turns of other blocks, each block once; around to the beginning of the next step."""
    found: dict[str, Turn] = {}
    for distance in range(1, len(turns)):
        turn = turns[(place + distance) % len(turns)]
        if len(found) == count:
            break
        if turn.block != turns[place].block:
            found.setdefault(turn.block, turn)
    return list(found.values())


def _size(nbytes: int) -> str:
    return format_size(nbytes) if nbytes else ""
