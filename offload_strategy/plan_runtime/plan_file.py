"""A plan as a file that a person can read and change."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload_strategy.errors import ConfigError
from offload_strategy.plan_runtime.lifetime_plan import LifetimePlan
from offload_strategy.plan_runtime.profile import Profile

#: Of the file; another one is refused.
FORMAT = 1
_LEAVES, _STAYS = "leaves", "stays"


@dataclass(frozen=True, slots=True)
class PlannedItem:
    """What is to become of a saved tensor.

    Args:
        nbytes: of it.
        leaves: whether it leaves between its uses.
    """

    nbytes: int
    leaves: bool


@dataclass(frozen=True, slots=True)
class GivenPlan:
    """What a file says.

    Args:
        items: saved tensors, in the order in which they are saved.
        recomputed: names of blocks that are computed again.
    """

    items: tuple[PlannedItem, ...]
    recomputed: tuple[str, ...] = ()


def save_plan(
    plan: LifetimePlan, profile: Profile, file: Path, recomputed: Sequence[str] = ()
) -> None:
    """Write a plan as JSON, a line for each tensor in the order in which they are saved.

    Args:
        plan: to write.
        profile: that it was made from.
        file: to write to.
        recomputed: names of blocks that are computed again; the profile is that of such a step.

    Raises:
        ConfigError: it cannot be written.
    """
    moves = {move.tensor: move for move in plan.moves}
    lines = []
    # What is computed again is not saved in the forward pass.
    saved = [one for one in profile.tensors if one.uses[0] <= profile.forward_seconds]
    for number, tensor in enumerate(saved):
        row: dict[str, Any] = {"item": number, "name": tensor.name, "bytes": tensor.nbytes}
        move = moves.get(number)
        row["does"] = _STAYS if move is None else _LEAVES
        row["saved at"] = round(tensor.uses[0], 4)
        if move is not None:
            row["gone at"], row["fetched at"] = round(move.gone_at, 4), round(move.fetch_at, 4)
        row["used at"] = round(tensor.uses[-1], 4)
        lines.append(json.dumps(row))
    head = f'"format": {FORMAT},\n"limit": {plan.limit},\n"peak": {plan.peak_bytes},\n'
    head += f'"recomputed": {json.dumps(list(recomputed))},\n'
    text = "{\n" + head + '"items": [\n' + ",\n".join(lines) + "\n]\n}\n"
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror or error}") from error


def load_plan(file: Path) -> GivenPlan:
    """Read what leaves, stays and is computed again; times are for people, and not read.

    Raises:
        ConfigError: it is no plan, and what is wrong with it.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError(f"it is not of format {FORMAT}")
        rows = found["items"]
        if not isinstance(rows, list) or not rows:
            raise ValueError("items must be a list, and not empty")
        names = found.get("recomputed", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("recomputed must be a list of names of blocks")
        return GivenPlan(tuple(_item(number, row) for number, row in enumerate(rows)), tuple(names))
    except KeyError as error:
        raise ConfigError(f"{file} cannot be read as a plan: it has no {error}. {_HOW}") from error
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{file} cannot be read as a plan: {error}. {_HOW}") from error


_HOW = "Write one with `ssd-offload plan --profile FILE --write-plan FILE`."


def _item(number: int, row: Any) -> PlannedItem:
    if not isinstance(row, dict):
        raise ValueError(f"item {number} is {row!r}, not an object")
    does, nbytes = row.get("does"), row.get("bytes")
    if does not in (_LEAVES, _STAYS):
        raise ValueError(f'item {number}: "does" is {does!r}; give "{_LEAVES}" or "{_STAYS}"')
    if row.get("item", number) != number:
        raise ValueError(f"item {number} is missing, or not in its place")
    if not isinstance(nbytes, int) or nbytes < 0:
        raise ValueError(f'item {number}: "bytes" is {nbytes!r}; give a whole number')
    return PlannedItem(nbytes, does == _LEAVES)
