"""The schedule of streamed weights in one step, block by block, as a table.

While a block computes, the weights of the next blocks are read. In backward, the states of its
parameters are read as well, its gradients are used in updates, and new weights and states of the
previous block are written (ZeRO-Infinity, section 5; Fuyou, section 4.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload_strategy.units import format_size, markdown_table


@dataclass(frozen=True, slots=True)
class BlockPass:
    """A forward or backward pass of a block."""

    block: str
    backward: bool
    weights_bytes: int  # Of its streamed weights
    trained_bytes: int = 0  # Of the weights that are updated
    states_bytes: int = 0  # Of their states


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    """I/O while a block computes."""

    block_pass: BlockPass
    read_ahead: tuple[str, ...]  # Blocks whose weights are prefetched
    read_bytes: int  # Of these weights, and of the states for its update
    written: str | None  # The block whose new weights and states are written
    written_bytes: int


@dataclass(frozen=True)
class WeightSchedule:
    """The schedule of a step; `str` gives a table in Markdown."""

    rows: tuple[ScheduleRow, ...]  # In the order in which blocks compute
    learned: bool  # Whether this order was observed; otherwise it is that of registration

    @property
    def read_bytes(self) -> int:
        """Bytes that a step reads from the tiers."""
        return sum(row.read_bytes for row in self.rows)

    @property
    def written_bytes(self) -> int:
        """Bytes that a step writes to them."""
        return sum(row.written_bytes for row in self.rows)

    def __str__(self) -> str:
        rows = []
        for row in self.rows:
            block_pass = row.block_pass
            reads = [f"weights of {name}" for name in row.read_ahead]
            if block_pass.states_bytes and block_pass.backward:
                reads.append(f"states of {block_pass.block}")
            writes = "" if row.written is None else f"weights and states of {row.written}"
            both = (row.read_bytes, row.written_bytes)
            read, written = (format_size(nbytes) if nbytes else "" for nbytes in both)
            direction = "backward" if block_pass.backward else "forward"
            computes = (direction, block_pass.block, format_size(block_pass.weights_bytes))
            rows.append((*computes, ", ".join(reads), read, writes, written))
        order = "as in the last step" if self.learned else "as registered; no step was seen yet"
        head = "pass | computes | its weights | reads meanwhile | bytes | writes | bytes"
        return (
            f"{markdown_table(head, rows)}\n\n{format_size(self.read_bytes)} are read and "
            f"{format_size(self.written_bytes)} written in a step; blocks are in the order {order}"
        )


def weight_schedule(
    passes: Sequence[BlockPass], blocks_in_flight: int, *, learned: bool, updates: bool
) -> WeightSchedule:
    """Return the schedule of a step whose passes begin again with the next one.

    At most so many blocks have their weights in memory or being read at a time. Updates run during
    backward, or `step()` does their I/O.
    """
    rows: list[ScheduleRow] = []
    here: list[str] = []  # blocks in memory or being read
    before: BlockPass | None = None
    # The second round shows a step that is not the first.
    for place, block_pass in [*enumerate(passes)] * 2:
        # The next pass of each block, this one first; they are followed by those of the next step.
        coming: dict[str, BlockPass] = {}
        for each in (*passes[place:], *passes[:place]):
            coming.setdefault(each.block, each)
        wanted = list(coming.values())[:blocks_in_flight]
        # The block that computes is among them if it could not be prefetched.
        missing = [each for each in wanted if each.block not in here]
        read = sum(each.weights_bytes for each in missing)
        ahead = tuple(each.block for each in missing if each is not block_pass)
        # These are as many as may be, or all that there are: nothing else stays.
        here = [each.block for each in wanted]
        written, written_bytes = None, 0
        if updates:
            read += block_pass.states_bytes * block_pass.backward
            if before is not None and before.backward and before.trained_bytes:
                written, written_bytes = before.block, before.trained_bytes + before.states_bytes
        rows.append(ScheduleRow(block_pass, ahead, read, written, written_bytes))
        before = block_pass
    return WeightSchedule(tuple(rows[len(passes) :]), learned)
