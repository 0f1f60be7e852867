"""What a search of settings looks for, and what it found: as objects, a table and JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from offload_strategy.errors import ConfigError
from offload_strategy.planner.request import Request
from offload_strategy.planner.search.choice import (
    Choice,
    Held,
    Overlap,
    Placed,
    StateType,
    state_bytes,
)
from offload_strategy.planner.search.cores import CpuRequest
from offload_strategy.planner.search.placed_steps import PlacedStep
from offload_strategy.planner.transformer_shape import positive
from offload_strategy.units import format_size

#: Tokens of a step up to which batches are searched where no bound is given.
USUAL_TOKENS = 1 << 20
#: Share of the tokens in a second that a smaller batch may cost.
USUAL_TOLERANCE = 0.03
_GB = 1e9


@dataclass(frozen=True, slots=True)
class Space:
    """What is searched.

    Args:
        sequences: tokens of a sequence, one or several to choose from.
        batch: sequences of a step; None to search it.
        max_batch: sequences of a step at most, where the batch is searched; None for no bound.
        max_tokens: of a step, likewise.
        overlaps: when the update may run; "eager" only where gradients are not clipped or read.
        state_dtypes: that are allowed; "bfloat16" changes numbers.
        tolerance: share of the tokens in a second that a smaller batch may cost.
        keep: how many candidates are kept, each of another kind.

    Raises:
        ConfigError: if a number is not above 0, or nothing is left to choose from.
    """

    sequences: tuple[int, ...]
    batch: int | None = None
    max_batch: int | None = None
    max_tokens: int = USUAL_TOKENS
    overlaps: tuple[Overlap, ...] = ("commit", "off")
    state_dtypes: tuple[StateType, ...] = ("float32",)
    tolerance: float = USUAL_TOLERANCE
    keep: int = 5

    def __post_init__(self) -> None:
        for name in ("sequences", "overlaps", "state_dtypes"):
            if not getattr(self, name):
                raise ConfigError(f"search: {name} is empty; give at least one")
        if not 0 <= self.tolerance < 1:
            raise ConfigError(f"search: tolerance is {self.tolerance}; give 0 or more, below 1")
        for sequence in self.sequences:
            positive("search: sequence", sequence)
        for name in ("max_tokens", "keep"):
            positive(f"search: {name}", getattr(self, name))
        for name in ("batch", "max_batch"):
            if getattr(self, name) is not None:
                positive(f"search: {name}", getattr(self, name))
        if self.batch is None and self.max_tokens < min(self.sequences):
            raise ConfigError(
                f"search: max_tokens is {self.max_tokens}, less than one sequence of "
                f"{min(self.sequences)} tokens; give at least as many"
            )

    def most(self, sequence: int) -> int:
        """Sequences of a step at most, where the batch is searched."""
        of_tokens = self.max_tokens // sequence
        return of_tokens if self.max_batch is None else min(of_tokens, self.max_batch)

    def bound(self) -> str:
        """What a step may hold, for people."""
        if self.batch is not None:
            return f"a batch of {self.batch} sequences, as given"
        bound = f"batches up to {self.max_tokens:,} tokens a step"
        if self.max_batch is not None:
            bound += f" and {self.max_batch} sequences"
        return (
            f"{bound}; of those that come within {self.tolerance:.0%} of the most tokens in a "
            f"second the smallest is taken. The batch changes how a model trains: see that it is "
            f"one you want"
        )


@dataclass(frozen=True, slots=True)
class Candidate:
    """A choice that fits, and its step.

    Args:
        placed: the choice, and where its tensors lie.
        step: its time, by stage.
    """

    placed: Placed
    step: PlacedStep

    @property
    def choice(self) -> Choice:
        """The settings."""
        return self.placed.choice

    @property
    def tokens_per_second(self) -> float:
        """Tokens that are trained on in a second."""
        return self.choice.tokens / self.step.seconds

    @property
    def moves(self) -> tuple[str, ...]:
        """What leaves the device: of "activations", "optimizer" and "parameters"."""
        names = {
            "activations": self.placed.split("activations").total_bytes > 0,
            "optimizer": self.choice.moves_optimizer,
            "parameters": self.choice.moves_parameters,
        }
        return tuple(name for name, moves in names.items() if moves)

    @property
    def update(self) -> str:
        """When states are updated, and in which precision they are kept."""
        if not self.choice.moves_optimizer:
            return "plain"
        narrow = self.choice.state_dtype != "float32"
        return self.choice.overlap + (f", {self.choice.state_dtype}" if narrow else "")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Choices for which there is too little of something.

    Args:
        what: "device memory", "host memory" or "disk"; on the CPU "memory" or "disk".
        count: how many choices, each counted by the first that it lacks.
        needed_bytes: of the one that comes nearest.
        available_bytes: what there is.
    """

    what: str
    count: int
    needed_bytes: int
    available_bytes: int

    def __str__(self) -> str:
        """A sentence."""
        return (
            f"{self.count} choices need more {self.what} than there is: the nearest "
            f"{format_size(self.needed_bytes)} of {format_size(self.available_bytes)}"
        )


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found.

    Args:
        request: model and machine.
        space: that was searched.
        candidates: the best of each kind (what moves, whether layers are computed again, when the
            update runs), the best first.
        refused: why others do not fit.
        tried: choices that were looked at.
    """

    request: Request | CpuRequest
    space: Space
    candidates: tuple[Candidate, ...]
    refused: tuple[Refusal, ...]
    tried: int

    @property
    def best(self) -> Candidate:
        """The one to use.

        Raises:
            ConfigError: if nothing fits; the message says what is missing.
        """
        if not self.candidates:
            raise ConfigError(
                f"search: none of {self.tried} choices fits: {'; '.join(map(str, self.refused))}. "
                f"Take more of that, a smaller model, or shorter sequences"
            )
        return self.candidates[0]

    def as_dict(self) -> dict[str, Any]:
        """Give the figures with units in their names, ready for JSON."""
        return {
            "candidates": [_as_dict(one) for one in self.candidates],
            "refused": {
                one.what: {
                    "choices": one.count,
                    "nearest_needed_bytes": one.needed_bytes,
                    "available_bytes": one.available_bytes,
                }
                for one in self.refused
            },
            "tried": self.tried,
            "searched": self.space.bound(),
            "assumptions": self.assumptions(),
        }

    def assumptions(self) -> list[str]:
        """What the figures rest on, a sentence each."""
        if isinstance(self.request, CpuRequest):
            return self.request.assumptions()
        of_machine = ("device:", "link:", "drive:")
        return [
            *(line for line in self.request.assumptions() if line.startswith(of_machine)),
            "everything overlaps as well as it can; measured steps are longer",
            f"states of {' or '.join(map(str, self._state_bytes()))} bytes a parameter, a float32 "
            f"copy of the weights among them; weights, gradients and activations of 2 bytes",
            "states are updated on the device, in no time beside moving them: `plan` without "
            "--search looks at Fuyou's update on the host",
            "activations stay up to 90 % of device memory; of host memory 90 % less 2 GiB is used",
        ]

    def __str__(self) -> str:
        """Tables in Markdown."""
        title = f"{self.request.shape.parameters / _GB:.2f} billion parameters {self.machine()}"
        notes = [f"{self.tried} choices were looked at", f"among them: {self.space.bound()}"]
        notes += [str(one) for one in self.refused]
        lists = ["Searched:\n\n" + "\n".join(f"- {line}" for line in notes)]
        lists.append("Assumed:\n\n" + "\n".join(f"- {line}" for line in self.assumptions()))
        if not self.candidates:
            return "\n\n".join([title, "Nothing fits.", *lists])
        return "\n\n".join([title, self._table(), self._places(), *lists])

    def machine(self) -> str:
        """What was searched for, after a model."""
        request = self.request
        if isinstance(request, CpuRequest):
            memory = f"{format_size(request.memory_bytes)} of memory"
            return f"on the CPU with {request.drives} and {memory}"
        memory = f"{format_size(request.host_memory_bytes)} of host memory"
        return f"on {request.device.name} with {request.drives} and {memory}"

    @property
    def _place(self) -> str:
        """What tensors leave."""
        return "memory" if isinstance(self.request, CpuRequest) else "the device"

    def _state_bytes(self) -> list[int]:
        return [state_bytes(dtype) for dtype in self.space.state_dtypes]

    def _table(self) -> str:
        head = (
            "tokens/s | step | limits | batch | micro-batches | tokens of each | leaves "
            f"{self._place} | layers computed again | update"
        )
        head = " | ".join([head, *(fit.what for fit in self.best.placed.fits)])
        lines = [f"| {head} |", "|---" * (head.count("|") + 1) + "|"]
        for one in self.candidates:
            choice = one.choice
            cells = [
                rounded(one.tokens_per_second),
                f"{one.step.seconds:.2f} s",
                one.step.limit,
                choice.batch,
                choice.micro_batches,
                choice.sequence,
                ", ".join(one.moves) or "nothing",
                f"{choice.recomputed_layers} of {self.request.shape.layers}",
                one.update,
                *(format_size(fit.needed_bytes) for fit in one.placed.fits),
            ]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
        return "\n".join(lines)

    def _places(self) -> str:
        held = self.best.placed.held
        if not held:
            where = "in memory" if self._place == "memory" else "on the device"
            return f"The first offloads nothing: all of it fits {where}."
        of_memory = "in memory" if self._place == "memory" else "in host memory"
        lines = [f"| of the first | {of_memory} | on the drives |", "|---|---|---|"]
        for kind, split in held.items():
            host, ssd = format_size(split.host_bytes), format_size(split.ssd_bytes)
            lines.append(f"| {_KINDS[kind]} | {host} | {ssd} |")
        return "\n".join(lines)


_KINDS: dict[Held, str] = {
    "weights": "weights",
    "activations": "activations of a micro-batch",
    "waiting": "gradients and new weights until `step()`",
    "states": "states",
}


def rounded(number: float) -> str:
    """Three digits or whole, for people."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def _as_dict(one: Candidate) -> dict[str, Any]:
    choice, placed = one.choice, one.placed
    return {
        "tokens_per_second": one.tokens_per_second,
        "step_seconds": one.step.seconds,
        "limits_seconds": one.step.limits,
        "batch": choice.batch,
        "micro_batches": choice.micro_batches,
        "sequence": choice.sequence,
        "moves": list(one.moves),
        "recomputed_layers": choice.recomputed_layers,
        "overlap": choice.overlap,
        "state_dtype": choice.state_dtype,
        "blocks_in_flight": choice.blocks_in_flight,
        "subgroup_size": placed.subgroup_size,
        "needs_bytes": {fit.what: fit.needed_bytes for fit in placed.fits},
        "host_bytes": {kind: split.host_bytes for kind, split in placed.held.items()},
        "ssd_bytes": {kind: split.ssd_bytes for kind, split in placed.held.items()},
        "written_bytes_per_step": one.step.written_bytes,
    }
