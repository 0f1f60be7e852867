"""The space of a search for settings, and its result: objects, a table, JSON, and a config file."""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import yaml

from offload_strategy.config import OffloadConfig
from offload_strategy.config.value_types import Overlap, StateType
from offload_strategy.errors import ConfigError
from offload_strategy.planner.request import LIMIT_SHARE, CpuRequest, Request
from offload_strategy.planner.search.settings import Fit, OffloadedKind, Placement, Settings
from offload_strategy.planner.step_time import StepTime
from offload_strategy.planner.transformer_shape import positive, require_positive
from offload_strategy.units import SECONDS_PER_DAY, MiB, format_size, markdown_list, markdown_table

#: Largest number of tokens of a step if no bound is given.
USUAL_TOKENS = 1 << 20
#: Share of the tokens in a second that a smaller batch may cost.
USUAL_TOLERANCE = 0.03
#: How the comments of a config file are broken into lines.
_WRAP: Any = {"initial_indent": "# ", "subsequent_indent": "#   ", "break_on_hyphens": False}
_KINDS: dict[OffloadedKind, str] = {
    "weights": "weights",
    "activations": "activations of a micro-batch",
    "waiting": "gradients and new weights until `step()`",
    "states": "states",
}
#: Sections of the config, and the bytes that the host tier of each holds.
_CLIENTS: dict[str, OffloadedKind] = {
    "parameters": "weights",
    "activations": "activations",
    "optimizer": "states",
}


@dataclass(frozen=True, slots=True)
class Space:
    """The settings that a search may choose."""

    sequences: tuple[int, ...]  # Tokens of a sequence, one or several to choose from
    batch: int | None = None  # Sequences of a step; None to search it
    max_batch: int | None = None  # Largest batch if it is searched; None for no bound
    max_tokens: int = USUAL_TOKENS  # Largest number of tokens of a step if the batch is searched
    # When the update may run; "eager" only if gradients are not clipped or read
    overlaps: tuple[Overlap, ...] = ("commit", "off")
    state_dtypes: tuple[StateType, ...] = ("float32",)  # "bfloat16" changes numbers
    tolerance: float = USUAL_TOLERANCE  # Share of tokens per second that a smaller batch may cost

    def __post_init__(self) -> None:
        for name in ("sequences", "overlaps", "state_dtypes"):
            if not getattr(self, name):
                raise ConfigError(f"search: {name} is empty; give at least one")
        if not 0 <= self.tolerance < 1:
            raise ConfigError(f"search: tolerance is {self.tolerance}; give 0 or more, below 1")
        for sequence in self.sequences:
            positive("search: sequence", sequence)
        require_positive(self, "search: ", "max_tokens", "batch", "max_batch")
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


@dataclass(frozen=True)
class Candidate:
    """Settings, where tensors are with them, and the time of their step.

    Of several ranks all have the same: batch and tensors are those of one, throughput that of all.
    """

    placement: Placement
    step: StepTime
    request: Request | CpuRequest  # Model and machine

    @property
    def settings(self) -> Settings:
        """The settings."""
        return self.placement.settings

    @cached_property
    def tokens_per_second(self) -> float:
        """Throughput in tokens per second."""
        return self.request.ranks * self.settings.tokens / self.step.seconds

    @property
    def read_bytes(self) -> float:
        """Bytes that a step reads from the drives of a machine."""
        return self.request.devices * self.step.moved_bytes("read")

    @property
    def written_bytes(self) -> float:
        """Bytes that a step writes to the drives of a machine."""
        return self.request.devices * self.step.moved_bytes("written")

    @property
    def offloads(self) -> tuple[str, ...]:
        """What is offloaded, of "activations", "optimizer" and "parameters"."""
        offloaded = self.placement.offloaded
        return tuple(sorted(client for client, kind in _CLIENTS.items() if kind in offloaded))

    @property
    def update(self) -> str:
        """When states are updated, and in which precision they are stored."""
        if not self.settings.offloads_optimizer:
            return "plain"
        narrow = self.settings.state_dtype != "float32"
        return self.settings.overlap + (f", {self.settings.state_dtype}" if narrow else "")

    def as_dict(self) -> dict[str, Any]:
        """Return the figures with units in their names.

        Of several ranks `needs_bytes` are of a device and of a machine, and so is what the drives
        read and write; `host_bytes`, `ssd_bytes`, and what links and collectives move, of a rank.
        """
        placement = self.placement
        return {
            "tokens_per_second": self.tokens_per_second,
            "step_seconds": self.step.seconds,
            "limits_seconds": self.step.limited_seconds,
            **asdict(self.settings),
            "offloads": list(self.offloads),
            "subgroup_size": placement.subgroup_size,
            "needs_bytes": {fit.what: fit.needed_bytes for fit in placement.fits},
            "host_bytes": {kind: split.host_bytes for kind, split in placement.offloaded.items()},
            "ssd_bytes": {kind: split.ssd_bytes for kind, split in placement.offloaded.items()},
            "link_bytes_per_step": self.step.moved_bytes("to_device", "from_device"),
            "exchanged_bytes_per_step": self.step.moved_bytes("exchanged"),
            "read_bytes_per_step": self.read_bytes,
            "written_bytes_per_step": self.written_bytes,
        }


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search; `str` gives tables in Markdown."""

    request: Request | CpuRequest  # Model and machine
    space: Space  # The space that was searched
    # The best of each kind (what is offloaded, whether layers are recomputed, overlap), best first
    candidates: tuple[Candidate, ...]
    refused: tuple[Placement, ...]  # The settings that do not fit
    tried: int  # How many settings were tried

    @property
    def best(self) -> Candidate:
        """The best candidate; raises a ConfigError that says what is missing if nothing fits."""
        if not self.candidates:
            raise ConfigError(
                f"search: none of {self.tried} settings fits: {'; '.join(self._refusals())}. "
                f"Take more of that, a smaller model, or shorter sequences"
            )
        return self.candidates[0]

    def lacking(self) -> dict[str, list[Fit]]:
        """Return the first thing that each of the refused settings lacks, by resource."""
        found: dict[str, list[Fit]] = defaultdict(list)
        for placement in self.refused:
            fit = next(fit for fit in placement.fits if not fit.ok)
            found[fit.what].append(fit)
        return found

    def _refusals(self) -> Iterator[str]:
        for what, fits in self.lacking().items():
            nearest = min(fits)
            sizes = f"{format_size(nearest.needed_bytes)} of {format_size(nearest.available_bytes)}"
            yield f"{len(fits)} settings need more {what} than there is: the nearest {sizes}"

    def assumptions(self) -> list[str]:
        """Return what the figures rest on, a line each."""
        return self.request.assumptions(self.space.state_dtypes)

    @property
    def lifespans(self) -> dict[str, float]:
        """Years of training that the drives last with the best settings, by assumption."""
        if not self.candidates:
            return {}
        best = self.best
        return self.request.drives.lifespan_years(best.step.seconds, best.written_bytes)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures with units in their names, ready for JSON."""
        return {
            "parameters": self.request.shape.parameters,
            "machines": self.request.machines,
            "devices": self.request.devices,
            "candidates": [one.as_dict() for one in self.candidates],
            # Of the best settings; None if they write nothing.
            "lifespan_years": {
                name: years if math.isfinite(years) else None
                for name, years in self.lifespans.items()
            },
            "refused": {
                what: {
                    "settings": len(fits),
                    "nearest_needed_bytes": min(fit.needed_bytes for fit in fits),
                    "available_bytes": fits[0].available_bytes,
                }
                for what, fits in self.lacking().items()
            },
            "tried": self.tried,
            "searched": self.space.bound(),
            "assumptions": self.assumptions(),
        }

    def __str__(self) -> str:
        billions = self.request.shape.parameters / 1e9
        title = f"{billions:.2f} billion parameters {self.request.machine}"
        tried = [f"{self.tried} settings were tried", f"among them: {self.space.bound()}"]
        found = ["Nothing fits."]
        if self.candidates:
            found = [self._table(), self._places(), self._stages(), self._drives()]
        searched = markdown_list("Searched", [*tried, *self._refusals()])
        return "\n\n".join([title, *found, searched, markdown_list("Assumed", self.assumptions())])

    def _table(self) -> str:
        of_each = " of a device" if self.request.ranks > 1 else ""
        head = (
            f"tokens/s | step | limits | batch{of_each} | micro-batches | sequence | leaves "
            f"{'memory' if self.request.on_cpu else 'the device'} | recomputed layers | update"
        )
        rows = (
            (
                rounded(one.tokens_per_second),
                f"{one.step.seconds:.2f} s",
                one.step.limit,
                one.settings.batch,
                one.settings.micro_batches,
                one.settings.sequence,
                ", ".join(one.offloads) or "nothing",
                f"{one.settings.recomputed_layers} of {self.request.shape.layers}",
                one.update,
                *(format_size(fit.needed_bytes) for fit in one.placement.fits),
            )
            for one in self.candidates
        )
        heads = [head, *(fit.what for fit in self.best.placement.fits)]
        return markdown_table(" | ".join(heads), rows)

    def _places(self) -> str:
        """Return where the tensors of the best settings are that have left the device."""
        if not (offloaded := self.best.placement.offloaded):
            where = "in memory" if self.request.on_cpu else "on the device"
            return f"The first row offloads nothing: everything fits {where}."
        memory = "in memory" if self.request.on_cpu else "in host memory"
        rows = ((_KINDS[kind], *map(format_size, split)) for kind, split in offloaded.items())
        whose = " of a rank" if self.request.ranks > 1 else ""
        return markdown_table(f"first row{whose} | {memory} | on the drives", rows)

    def _stages(self) -> str:
        """Return the seconds of the best step, by stage and by what takes them."""
        step = self.best.step
        rows = [
            (
                f"{stage.times} x {stage.name}" if stage.times > 1 else stage.name,
                *(f"{stage.times * seconds:.2f}" for seconds in stage.limits.values()),
                f"{stage.times * stage.seconds:.2f}",
                stage.limit,
            )
            for stage in step.stages
            if stage.seconds
        ]
        resources = step.stages[0].limits
        whole = ("the step", *[""] * len(resources), f"{step.seconds:.2f}", step.limit)
        head = ["seconds of the first row", *resources, "all", "limits"]
        return markdown_table(" | ".join(head), [*rows, whole])

    def _drives(self) -> str:
        """Return what the best settings write, and how long the drives last."""
        step, written = self.best.step, self.best.written_bytes
        per_day = written / step.seconds * SECONDS_PER_DAY
        rows = [
            ("written in a step", f"{written / 1e9:.1f} GB"),
            ("written in a day", f"{per_day / 1e12:.1f} TB"),
        ]
        if (budget := self.request.drives.writes_per_day) is not None:
            # What stays in memory to keep to the budget are activations.
            activations = self.best.placement.split("activations").ssd_bytes
            activations *= self.best.settings.micro_batches * self.request.devices
            others = max(0.0, per_day - activations / step.seconds * SECONDS_PER_DAY)
            shares = f"{per_day / budget:.0%}, without activations {others / budget:.0%}"
            rows.append(("of the budget for a day", shares))
        lifespans = self.lifespans.items()
        rows += [(f"lifespan, {name}", f"{years:.2g} years") for name, years in lifespans]
        if self.request.drives.endurance_bytes is None:
            rows.append(("lifespan", "the drive's rating is not known"))
        whose = " of a machine" if self.request.machines > 1 else ""
        return markdown_table(f"drives{whose} | first row", rows)


def rounded(number: float) -> str:
    """Return three significant digits, or a whole number."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


# ---------------------------------------------------------------------- the config file
def config_yaml(found: SearchResult, directories: Sequence[str]) -> str:
    """Return the best candidate as a config file, or raise a ConfigError that says why not."""
    if not directories:
        raise ConfigError("search: the config needs a directory on the drives; name at least one")
    sections = _sections(found, directories)
    OffloadConfig.load(sections)
    comments = "\n".join(textwrap.fill(line, 98, **_WRAP) or "#" for line in _comments(found))
    return f"{comments}\n\n{yaml.safe_dump(sections, sort_keys=False)}"


def _sections(found: SearchResult, directories: Sequence[str]) -> dict[str, Any]:
    best, request = found.best, found.request
    placement, settings = best.placement, best.settings
    sections: dict[str, Any] = {}
    tiers: list[dict[str, Any]] = []
    for client, kind in _CLIENTS.items():
        if client not in best.offloads:
            sections[client] = {"enabled": False}
            continue
        names = ["ssd"]
        # The processes of a machine share a tier.
        capacity = request.devices * placement.split(kind).host_bytes
        if kind == "states" and settings.overlap == "commit":
            # Old and new states were both counted; the tier holds both for a while.
            capacity //= 2
        if capacity:
            names.insert(0, f"host-{kind}")
            tiers.append({"name": names[0], "kind": "dram", "capacity": _size(capacity)})
        sections[client] = {"enabled": True, "tiers": names}
    if not best.offloads:
        return sections
    paths = directories[0] if len(directories) == 1 else list(directories)
    drives: dict[str, Any] = {"name": "ssd", "kind": "ssd", "path": paths}
    if request.drives.endurance_bytes is not None:
        drives["endurance_tbw"] = round(request.drives.endurance_bytes / 1e12)
    if request.drives.writes_per_day is not None:
        drives["writes_per_day"] = request.drives.writes_per_day
    sections = {"tiers": [*tiers, drives], **sections}
    if "optimizer" in best.offloads:
        sections["optimizer"] |= {
            "subgroup_size": placement.subgroup_size,
            "state_dtype": settings.state_dtype,
            "overlap": settings.overlap,
        }
        if settings.overlap == "commit":
            sections["optimizer"]["gradient_memory"] = _size(max(MiB, placement.gradient_memory))
    if "parameters" in best.offloads:
        sections["parameters"]["blocks_in_flight"] = settings.blocks_in_flight
    sections["memory"] = {"pinned": _size(placement.pinned_bytes)}
    if "activations" in best.offloads:
        # The search counted what leaves; the run measures in its first steps what has to leave.
        sections["planning"] = {"device_memory": "auto"}
        if isinstance(request, CpuRequest):
            sections["planning"]["device_memory"] = _size(int(LIMIT_SHARE * request.memory_bytes))
    return sections


def _comments(found: SearchResult) -> Iterator[str]:
    best, request, settings = found.best, found.request, found.best.settings
    measured = "no step was measured" if request.on_cpu else "nothing was measured"
    yield f"Found by `ssd-offload plan --search`, by the analytical model: {measured}."
    yield f"For {request.shape.parameters:,} parameters {request.machine}."
    yield ""
    yield (
        f"Predicted: {rounded(best.tokens_per_second)} tokens/s, {best.step.seconds:.2f} s a step; "
        f"{best.step.limit} limits."
    )
    for fit in best.placement.fits:
        needed, available = format_size(fit.needed_bytes), format_size(fit.available_bytes)
        yield f"Needs {needed} of {fit.what}, has {available}."
    yield ""
    yield "Your training script has to do the rest:"
    passes = f"{settings.micro_batches} micro-batch{'es' if settings.micro_batches > 1 else ''}"
    yield f"- {passes} of {settings.micro_batch} x {settings.sequence} tokens a step"
    again, layers = settings.recomputed_layers, request.shape.layers
    if again == layers:
        yield "- checkpointing of all layers, such as model.gradient_checkpointing_enable()"
    elif again:
        yield f"- checkpointing of {again} of the {layers} layers with torch.utils.checkpoint"
    else:
        yield "- no checkpointing"
    if settings.overlap == "eager" and settings.offloads_optimizer:
        yield "- no clipping and no loss scale, because overlap is eager"
    if best.offloads and request.on_cpu:
        yield (
            "- MALLOC_MMAP_THRESHOLD_=65536 in the environment of its process, so that freed "
            "memory returns to the system"
        )
    if settings.offloads_optimizer and not request.on_cpu:
        yield ""
        yield (
            "States are counted with a float32 copy of half-precision weights. The package keeps "
            "one with optimizer.master_weights: true, which changes numbers: it is not set here."
        )
    yield ""
    yield "Assumed:"
    yield from (f"- {line}" for line in found.assumptions())


def _size(nbytes: int) -> str:
    return f"{math.ceil(nbytes / MiB)}MiB"
