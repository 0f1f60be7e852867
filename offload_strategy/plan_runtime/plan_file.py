"""A lifetime plan as a file that people can read and change."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from offload_strategy.plan_runtime.lifetime_plan import LifetimePlan
from offload_strategy.plan_runtime.profile import FORMAT, Profile, load_json, write_text

_HOW = "Write one with `ssd-offload plan --profile FILE --write-plan FILE`."


@dataclass(frozen=True, slots=True)
class PlannedItem:
    """What a plan file says about a saved tensor, by its number in the order of saving."""

    item: int
    bytes: Annotated[int, Field(ge=0)]
    does: Literal["leaves", "stays"]

    @property
    def leaves(self) -> bool:
        """Whether the tensor is offloaded."""
        return self.does == "leaves"


@dataclass(frozen=True, slots=True)
class GivenPlan:
    """The content of a plan file: all saved tensors."""

    items: Annotated[tuple[PlannedItem, ...], Field(min_length=1)]

    def __post_init__(self) -> None:
        for number, item in enumerate(self.items):
            if item.item != number:
                raise ValueError(f"item {number} is missing, or not in its place")


def save_plan(plan: LifetimePlan, profile: Profile, file: Path) -> None:
    """Write a plan for a profile as JSON, one line per tensor in the order of saving.

    Raises:
        ConfigError: If the file cannot be written.
    """
    moves = {move.tensor: move for move in plan.moves}
    lines = []
    for number, tensor in enumerate(profile.tensors):
        row: dict[str, Any] = {"item": number, "name": tensor.name, "bytes": tensor.nbytes}
        move = moves.get(number)
        row["does"] = "stays" if move is None else "leaves"
        row["saved at"] = round(tensor.uses[0], 4)
        if move is not None:
            row["gone at"], row["fetched at"] = round(move.gone_at, 4), round(move.fetch_at, 4)
        row["used at"] = round(tensor.uses[-1], 4)
        lines.append(json.dumps(row))
    head = f'"format": {FORMAT},\n"limit": {plan.limit},\n"peak": {plan.peak_bytes},\n'
    write_text(file, "{\n" + head + '"items": [\n' + ",\n".join(lines) + "\n]\n}\n")


def load_plan(file: Path) -> GivenPlan:
    """Read which tensors are offloaded; times are ignored.

    Raises:
        ConfigError: If the file is no plan; the message says what is wrong.
    """
    return load_json(file, GivenPlan, "a plan", _HOW)
