"""The space of a search for settings, and its result as objects, a table and JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from offload_strategy.errors import ConfigError
from offload_strategy.planner.request import Request
from offload_strategy.planner.search.cpu_request import CpuRequest
from offload_strategy.planner.search.settings import (
    OffloadedKind,
    Overlap,
    Placement,
    Settings,
    StateType,
    state_bytes,
)
from offload_strategy.planner.step_time import StepTime
from offload_strategy.planner.transformer_shape import positive
from offload_strategy.units import format_size

#: Largest number of tokens of a step if no bound is given.
USUAL_TOKENS = 1 << 20
#: Share of the tokens in a second that a smaller batch may cost.
USUAL_TOLERANCE = 0.03
_GB = 1e9


@dataclass(frozen=True, slots=True)
class Space:
    """The settings that a search may choose.

    Args:
        sequences: Tokens of a sequence, one or several to choose from.
        batch: Sequences of a step; None to search it.
        max_batch: Largest batch if it is searched; None for no bound.
        max_tokens: Largest number of tokens of a step if the batch is searched.
        overlaps: When the update may run; "eager" only if gradients are not clipped or read.
        state_dtypes: Types in which states may be stored; "bfloat16" changes numbers.
        tolerance: Share of the tokens per second that a smaller batch may cost.
        keep: How many candidates are kept, each of another kind.

    Raises:
        ConfigError: If a number is not above 0, or nothing is left to choose from.
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
        """Return the largest batch that is searched."""
        of_tokens = self.max_tokens // sequence
        return of_tokens if self.max_batch is None else min(of_tokens, self.max_batch)

    def bound(self) -> str:
        """Return a description of the batches that are searched."""
        if self.batch is not None:
            return f"a batch of {self.batch} sequences, as given"
        bound = f"batches up to {self.max_tokens:,} tokens a step"
        if self.max_batch is not None:
            bound += f" and {self.max_batch} sequences"
        return (
            f"{bound}; the smallest batch within {self.tolerance:.0%} of the highest throughput is "
            f"taken. The batch changes how a model trains: check that it is one you want"
        )


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings that fit, and the time of their step.

    Args:
        placement: The settings, and where tensors are with them.
        step: Time of a step, by stage.
    """

    placement: Placement
    step: StepTime

    @property
    def settings(self) -> Settings:
        """The settings."""
        return self.placement.settings

    @property
    def tokens_per_second(self) -> float:
        """Throughput in tokens per second."""
        return self.settings.tokens / self.step.seconds

    @property
    def offloads(self) -> tuple[str, ...]:
        """What is offloaded, of "activations", "optimizer" and "parameters"."""
        names = {
            "activations": self.placement.split("activations").total_bytes > 0,
            "optimizer": self.settings.offloads_optimizer,
            "parameters": self.settings.streams_weights,
        }
        return tuple(name for name, offloaded in names.items() if offloaded)

    @property
    def update(self) -> str:
        """When states are updated, and in which precision they are stored."""
        if not self.settings.offloads_optimizer:
            return "plain"
        narrow = self.settings.state_dtype != "float32"
        return self.settings.overlap + (f", {self.settings.state_dtype}" if narrow else "")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Settings that do not fit because of one resource.

    Args:
        what: "device memory", "host memory" or "disk"; on the CPU "memory" or "disk".
        count: Number of settings, each counted for the first resource that it lacks.
        needed_bytes: Needed bytes of the settings that come nearest.
        available_bytes: Available bytes.
    """

    what: str
    count: int
    needed_bytes: int
    available_bytes: int

    def __str__(self) -> str:
        """One sentence."""
        return (
            f"{self.count} settings need more {self.what} than there is: the nearest "
            f"{format_size(self.needed_bytes)} of {format_size(self.available_bytes)}"
        )


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search.

    Args:
        request: Model and machine.
        space: The space that was searched.
        candidates: The best settings of each kind (what is offloaded, whether layers are
            recomputed, when the update runs), the best first.
        refused: Why other settings do not fit.
        tried: How many settings were tried.
    """

    request: Request | CpuRequest
    space: Space
    candidates: tuple[Candidate, ...]
    refused: tuple[Refusal, ...]
    tried: int

    @property
    def best(self) -> Candidate:
        """The best candidate.

        Raises:
            ConfigError: If nothing fits; the message says what is missing.
        """
        if not self.candidates:
            raise ConfigError(
                f"search: none of {self.tried} settings fits: {'; '.join(map(str, self.refused))}. "
                f"Take more of that, a smaller model, or shorter sequences"
            )
        return self.candidates[0]

    def as_dict(self) -> dict[str, Any]:
        """Return the figures with units in their names, ready for JSON."""
        return {
            "candidates": [_as_dict(one) for one in self.candidates],
            "refused": {
                one.what: {
                    "settings": one.count,
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
        """Return what the figures rest on, a sentence each."""
        if isinstance(self.request, CpuRequest):
            return self.request.assumptions()
        of_machine = ("device:", "link:", "drive:")
        return [
            *(line for line in self.request.assumptions() if line.startswith(of_machine)),
            "everything overlaps as well as it can; measured steps are longer",
            f"states of {' or '.join(map(str, self._state_bytes()))} bytes a parameter, a float32 "
            f"copy of the weights among them; weights, gradients and activations of 2 bytes",
            "states are updated on the device, whose time for that does not count: `plan` without "
            "--search models Fuyou's update on the host",
            "activations stay up to 90 % of device memory; 90 % of host memory less 2 GiB is used",
        ]

    def __str__(self) -> str:
        """Tables in Markdown."""
        title = f"{self.request.shape.parameters / _GB:.2f} billion parameters {self.machine()}"
        notes = [f"{self.tried} settings were tried", f"among them: {self.space.bound()}"]
        notes += [str(one) for one in self.refused]
        lists = ["Searched:\n\n" + "\n".join(f"- {line}" for line in notes)]
        lists.append("Assumed:\n\n" + "\n".join(f"- {line}" for line in self.assumptions()))
        if not self.candidates:
            return "\n\n".join([title, "Nothing fits.", *lists])
        return "\n\n".join([title, self._table(), self._places(), *lists])

    def machine(self) -> str:
        """Return the machine, as the end of a sentence about a model."""
        request = self.request
        if isinstance(request, CpuRequest):
            memory = f"{format_size(request.memory_bytes)} of memory"
            return f"on the CPU with {request.drives} and {memory}"
        memory = f"{format_size(request.host_memory_bytes)} of host memory"
        return f"on {request.device.name} with {request.drives} and {memory}"

    @property
    def _place(self) -> str:
        """The memory that tensors leave."""
        return "memory" if isinstance(self.request, CpuRequest) else "the device"

    def _state_bytes(self) -> list[int]:
        return [state_bytes(dtype) for dtype in self.space.state_dtypes]

    def _table(self) -> str:
        head = (
            "tokens/s | step | limits | batch | micro-batches | sequence | leaves "
            f"{self._place} | recomputed layers | update"
        )
        head = " | ".join([head, *(fit.what for fit in self.best.placement.fits)])
        lines = [f"| {head} |", "|---" * (head.count("|") + 1) + "|"]
        for one in self.candidates:
            settings = one.settings
            cells = [
                rounded(one.tokens_per_second),
                f"{one.step.seconds:.2f} s",
                one.step.limit,
                settings.batch,
                settings.micro_batches,
                settings.sequence,
                ", ".join(one.offloads) or "nothing",
                f"{settings.recomputed_layers} of {self.request.shape.layers}",
                one.update,
                *(format_size(fit.needed_bytes) for fit in one.placement.fits),
            ]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
        return "\n".join(lines)

    def _places(self) -> str:
        offloaded = self.best.placement.offloaded
        if not offloaded:
            where = "in memory" if self._place == "memory" else "on the device"
            return f"The first row offloads nothing: everything fits {where}."
        of_memory = "in memory" if self._place == "memory" else "in host memory"
        lines = [f"| first row | {of_memory} | on the drives |", "|---|---|---|"]
        for kind, split in offloaded.items():
            host, ssd = format_size(split.host_bytes), format_size(split.ssd_bytes)
            lines.append(f"| {_KINDS[kind]} | {host} | {ssd} |")
        return "\n".join(lines)


_KINDS: dict[OffloadedKind, str] = {
    "weights": "weights",
    "activations": "activations of a micro-batch",
    "waiting": "gradients and new weights until `step()`",
    "states": "states",
}


def rounded(number: float) -> str:
    """Return three significant digits, or a whole number."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def _as_dict(one: Candidate) -> dict[str, Any]:
    settings, placement = one.settings, one.placement
    return {
        "tokens_per_second": one.tokens_per_second,
        "step_seconds": one.step.seconds,
        "limits_seconds": one.step.limited_seconds,
        "batch": settings.batch,
        "micro_batches": settings.micro_batches,
        "sequence": settings.sequence,
        "offloads": list(one.offloads),
        "recomputed_layers": settings.recomputed_layers,
        "overlap": settings.overlap,
        "state_dtype": settings.state_dtype,
        "blocks_in_flight": settings.blocks_in_flight,
        "subgroup_size": placement.subgroup_size,
        "needs_bytes": {fit.what: fit.needed_bytes for fit in placement.fits},
        "host_bytes": {kind: split.host_bytes for kind, split in placement.offloaded.items()},
        "ssd_bytes": {kind: split.ssd_bytes for kind, split in placement.offloaded.items()},
        "written_bytes_per_step": one.step.written_bytes,
    }
