"""The config schema: one pydantic model per section."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias

import yaml
from pydantic import (
    BaseModel,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from offload_strategy.config.directories import default_directory
from offload_strategy.config.messages import describe
from offload_strategy.config.sources import read
from offload_strategy.config.tier_config import Section, TierConfig
from offload_strategy.config.value_types import (
    AutoOrBool,
    AutoOrCount,
    AutoOrPositiveSize,
    AutoOrSize,
    BlockSize,
    Budget,
    ChecksumMode,
    Count,
    OptionalFile,
    OverlapMode,
    Size,
    StateType,
)
from offload_strategy.errors import ConfigError
from offload_strategy.units import GiB, KiB, MiB

Client = Literal["activations", "optimizer", "parameters"]
"""A part of the package that offloads tensors, by the name of its config section."""

ConfigSource: TypeAlias = "OffloadConfig | Mapping[str, Any] | str | os.PathLike[str] | None"
"""Anything that `OffloadConfig.load` reads."""

#: Bounds of `memory.pinned: auto` in bytes.
_LEAST_PINNED, _MOST_PINNED, _MOST_UNPINNED = 64 * MiB, 4 * GiB, 512 * MiB


class _Client(Section):
    enabled: AutoOrBool = "auto"
    tiers: list[str] | None = None
    """Names of the tiers to use, in order of preference; null means all tiers in the order in which
    they are listed."""

    @field_validator("tiers")
    @classmethod
    def _some_tier(cls, tiers: list[str] | None) -> list[str] | None:
        if tiers == []:
            raise ValueError(
                "the list is empty: leave it out to use all tiers, or set enabled: false"
            )
        if len(set(tiers or ())) < len(tiers or ()):
            raise ValueError(f"a tier is named twice in {tiers}")
        return tiers

    @property
    def is_demanded(self) -> bool:
        """Whether the user set ``enabled: true``: what cannot be offloaded is an error then."""
        return self.enabled is True and "enabled" in self.model_fields_set

    def resolved(self, *, enabled: bool) -> Self:
        """Return this section with 'auto' replaced, which does not count as set by the user."""
        section = self.model_copy()
        section.__dict__["enabled"] = enabled
        section.model_fields_set.discard("enabled")
        return section


class ActivationsConfig(_Client):
    """Tensors that autograd saves for the backward pass."""

    enabled: AutoOrBool = "auto"
    """Whether saved tensors are offloaded. 'auto': as many as memory requires; all that may be
    where this section has other settings than tiers, or with mode: always."""
    min_size: Size = 1 * MiB
    """Storages below this many bytes are kept on the device."""
    budget: Budget = "auto"
    """How much may be offloaded per forward pass, where no plan decides: 'auto' (what is hidden),
    bytes, or a share such as '70%'."""
    prefetch: AutoOrSize = "auto"
    """Bytes to read ahead of the backward pass: 'auto', or bytes."""
    verify: bool = False
    """Whether saved tensors stay in memory as well, and backward raises an error where one of them
    was changed unnoticed by autograd (`x.data`, `x.numpy()`). For debugging: nothing is saved."""

    def limit(self) -> float | Literal["auto"]:
        """Return the budget: 'auto', an int of bytes a step, or a float as a share from 0 to 1."""
        if self.budget == "auto":
            return "auto"
        return self.budget if isinstance(self.budget, int) else float(self.budget[:-1]) / 100


class OptimizerConfig(_Client):
    """Optimizer states, and the gradients of their updates."""

    enabled: AutoOrBool = "auto"
    """Whether optimizer states are offloaded. 'auto': if memory requires it, and from an
    accelerator as many as that takes; in any case where this section has other settings than tiers,
    or with mode: always. If it is set to true, optimizers whose states cannot be offloaded are
    refused; otherwise their states stay in memory, with a warning."""
    subgroup_size: AutoOrCount = "auto"
    """Parameters per subgroup (updated together): 'auto', or a number such as '100M'."""
    state_dtype: StateType = "float32"
    """dtype in which float32 states are stored between updates; updates compute in float32.
    'bfloat16' halves the bytes read and written, and rounds: numbers change. Master weights stay
    in float32."""
    stochastic_rounding: bool = False
    """Whether states are rounded stochastically to bfloat16, which keeps small changes on average,
    instead of to the nearest value."""
    master_weights: bool = False
    """Whether bfloat16 and float16 weights are updated in float32: a copy of each is stored with
    its states, and rounded into the weight after every update. Numbers change."""
    gradient_memory: AutoOrSize = "auto"
    """Maximum host memory for gradients, and new weights of an accelerator, that wait for step()
    with overlap: commit. An accelerator keeps as much as backward frees, unless a plan limits it;
    others wait on the tiers. 'auto': memory.pinned; on the CPU none, or all of several ranks."""
    sharding: bool = True
    """Whether data-parallel processes shard the optimizer states: each updates its shard and sends
    the new weights to the others. Otherwise every process holds all states."""
    overlap: OverlapMode = "commit"
    """When the update runs: 'commit' during backward, visible at step(); 'eager' during backward,
    visible at once, with the least memory, but gradients cannot be read, clipped or scaled, and
    the last micro-batch must be announced; 'off' in step()."""


class ParametersConfig(_Client):
    """The weights, streamed through the device block by block."""

    enabled: AutoOrBool = "auto"
    """Whether weights are streamed. 'auto': if one process trains, and the weights, with all else
    offloaded, do not fit in memory; never with mode: always."""
    blocks_in_flight: Count = Field(default=2, ge=1)
    """Blocks of the model in memory at a time: the one that computes and those being loaded."""
    blocks: list[str] = Field(default_factory=list)
    """Names of module classes whose instances are blocks. Repeated layers, and large parameters
    outside of them, are found automatically."""
    min_size: Size = 256 * KiB
    """Bytes below which a parameter (a norm, a bias) stays in memory."""


class IOConfig(Section):
    """How bytes reach a path."""

    backend: Literal["auto", "posix", "kvikio", "deepnvme"] = "auto"
    """What moves the bytes: 'posix' is direct I/O on threads and runs everywhere; 'kvikio' is
    GPUDirect Storage (package kvikio, NVIDIA GPUs); 'deepnvme' is DeepSpeed's aio (package
    deepspeed, libaio and a compiler), which does not report errors and therefore needs
    checksum: full. 'auto' is posix: what kvikio moves is not paced by the device."""
    threads: Count = Field(default=4, ge=1, le=256)
    """Threads per path and direction. The default is lower on machines with fewer cores, but at
    least two."""
    block_size: BlockSize = 32 * MiB
    """Maximum bytes of one system call, a multiple of 4096. The requests in flight on a path carry
    together what it moves in about 20 ms, so urgent requests never wait long."""
    direct: AutoOrBool = "auto"
    """Whether to bypass the page cache: 'auto' does so where the file system supports it, true
    refuses a file system that does not."""
    checksum: ChecksumMode = "auto"
    """How what is read from a path is checked against what was written there (XXH3): 'full' hashes
    every byte, 'sampled' one line of 64 bytes in 63, so at least one of each page of 4 KiB, and
    'off' nothing. 'auto' is sampled, but full with backend deepnvme, and off where kvikio moves the
    bytes, because the host does not see them. true and false stand for full and off."""
    encryption: bool = False
    """Whether ssd tiers hold only what this run can read (AES-256-GCM, package cryptography): the
    key is in memory and gone with the process. Every read is checked too, without a checksum.
    Optimizer state dicts are in memory then, and not in a scratch file."""

    @model_validator(mode="after")
    def _errors_are_noticed(self) -> Self:
        if self.encryption and self.backend not in ("auto", "posix"):
            raise ValueError(
                f"encryption: true needs backend: posix, as {self.backend} moves bytes past the "
                f"host's memory, where they are encrypted; leave out one of the two"
            )
        if self.backend == "deepnvme" and self.checksum not in ("auto", "full"):
            raise ValueError(
                "backend: deepnvme needs checksum: full, as DeepSpeed does not say when a read or "
                "a write has failed; set it, or use backend: auto"
            )
        return self

    def threads_to_use(self) -> int:
        """Return `threads` if it was given, else its default or the number of usable cores."""
        if "threads" in self.model_fields_set:
            return self.threads
        has_affinity = hasattr(os, "sched_getaffinity")
        cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
        return min(self.threads, max(2, cores))


class MemoryConfig(Section):
    """Memory that training may use. A size, as in ``memory: 6GiB``, stands for its `limit`."""

    limit: AutoOrSize = "auto"
    """Maximum memory of training on the device, or of the process when it computes on the CPU, for
    what is decided automatically. 'auto' is the memory that is free when it is decided, minus a
    margin."""
    pinned: AutoOrPositiveSize = "auto"
    """Maximum bytes of staging buffers, pinned if there is a device. Dram tiers come on top. 'auto'
    is an eighth of the host memory that is available, at most 4 GiB with an accelerator and 512 MiB
    without, where more was not faster."""

    @model_validator(mode="before")
    @classmethod
    def _limit_alone(cls, section: Any) -> Any:
        return {"limit": section} if isinstance(section, str | int) else section

    def pinned_bytes(self, available: int = sys.maxsize, *, accelerated: bool = True) -> int:
        """Return the maximum bytes of buffers, given the available bytes of host memory."""
        if self.pinned != "auto":
            return int(self.pinned)
        if self.limit != "auto":
            available = min(available, int(self.limit))
        most = _MOST_PINNED if accelerated else _MOST_UNPINNED
        return min(most, max(_LEAST_PINNED, available // 8))


class PlanningConfig(Section):
    """Planning, in the first steps, which saved tensors are offloaded and when."""

    device_memory: Annotated[AutoOrSize | None, Field()] = None
    """Maximum memory of training on the device, or of the process when it computes on the CPU.
    As many saved tensors are offloaded, by a plan, as this limit requires. 'auto' is the memory
    that is free when training begins, minus a margin; null means no limit and no plan."""
    profile_steps: Count = Field(default=2, ge=1, le=1000)
    """Forward passes to profile before the plan is made; they offload everything they may."""
    plan: OptionalFile = None
    """Path of a plan written by `ssd-offload plan --write-plan`, possibly edited. It decides for
    each saved tensor within device_memory; null means to make a plan. '~' and '$VARIABLES' are
    expanded."""


class OffloadConfig(Section):
    """The whole configuration. Every section is optional."""

    tiers: list[TierConfig] = Field(
        default_factory=lambda: [TierConfig(name="ssd", kind="ssd", path=default_directory())],
        min_length=1,
    )
    """Tiers, fastest first. Default: one ssd tier named 'ssd' in $SSD_OFFLOAD_DIR, else in the
    temporary directory, or in /var/tmp if the temporary directory is kept in memory. Where an
    accelerator trains, half of the host memory that is available comes first, as tier 'host'."""
    mode: Literal["auto", "always"] = "auto"
    """What happens to a section whose ``enabled`` is 'auto': with 'auto' the engine offloads what
    memory requires; with 'always' all activations and optimizer states that may be."""
    activations: ActivationsConfig = ActivationsConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    parameters: ParametersConfig = ParametersConfig()
    io: IOConfig = IOConfig()
    memory: MemoryConfig = MemoryConfig()
    planning: PlanningConfig = PlanningConfig()
    report: OptionalFile = None
    """File into which the engine writes its report when training ends, for `ssd-offload report`;
    further processes add their rank to its name. '~' and '$VARIABLES' are expanded, and its folder
    must exist."""
    prometheus_port: Count | None = Field(default=None, ge=1, le=65535)
    """Port of every metric for Prometheus, on all addresses; a process adds its local rank."""

    def __init__(self, /, **sections: Any) -> None:
        # One message here as well, for a config written in code.
        self._check(sections, "OffloadConfig")

    @model_validator(mode="before")
    @classmethod
    def _empty_sections(cls, sections: Any) -> Any:
        # A section whose lines are all commented out arrives from YAML as None.
        if isinstance(sections, dict):
            return {name: value for name, value in sections.items() if value is not None}
        return sections

    @field_validator("tiers")
    @classmethod
    def _unique_names(cls, tiers: list[TierConfig]) -> list[TierConfig]:
        for name, count in Counter(tier.name for tier in tiers).items():
            if count > 1:
                raise ValueError(f"two tiers are named {name!r}: give each its own name")
        return tiers

    @field_validator("activations", "optimizer", "parameters")
    @classmethod
    def _known_tiers(cls, section: Any, info: ValidationInfo) -> Any:
        if section.tiers is None or "tiers" not in info.data:
            return section
        kinds = {tier.name: tier.kind for tier in info.data["tiers"]}
        for name in section.tiers:
            if name not in kinds:
                raise ValueError(
                    f"tiers names {name!r}, but the configured tiers are: {', '.join(kinds)}"
                )
            if kinds[name] == "device" and info.field_name != "optimizer":
                raise ValueError(
                    f"tiers names {name!r}, but memory of the device (kind: device) is for "
                    f"optimizer states only: name a dram or ssd tier"
                )
        return section

    @model_validator(mode="after")
    def _sections_with_settings_are_on(self) -> Self:
        for client in ("activations", "optimizer", "parameters"):
            section = getattr(self, client)
            given, is_optional = section.model_fields_set, client == "parameters"
            has_settings = "enabled" not in given and bool(given - {"tiers"})
            always = self.mode == "always"
            if section.enabled == "auto" and (always or (has_settings and not is_optional)):
                self.__dict__[client] = section.resolved(enabled=not is_optional)
        return self

    @model_validator(mode="after")
    def _tiers_outside_the_device(self) -> Self:
        clients: tuple[tuple[Client, bool], ...] = (
            ("activations", bool(self.activations.enabled)),
            ("parameters", self.parameters.enabled is True),
        )
        for client, asked in clients:
            if asked and not self.tiers_for(client):
                raise ValueError(
                    f"{client} need a dram or ssd tier, but all tiers are memory of the device "
                    f"(kind: device): add one, or set {client}: {{enabled: false}}"
                )
        return self

    @model_validator(mode="after")
    def _plan_decides_alone(self) -> Self:
        if self.planning.device_memory is None and self.planning.plan is None:
            return self
        if self.planning.device_memory is None:
            raise ValueError(
                "planning.plan needs planning.device_memory, the limit within which it holds"
            )
        if not self.activations.enabled:
            raise ValueError(
                "planning.device_memory needs activations.enabled: true, as saved tensors are what "
                "leaves by the plan"
            )
        for name in ("budget", "prefetch"):
            if getattr(self.activations, name) != "auto":
                raise ValueError(
                    f"planning.device_memory decides what leaves and when it comes back: leave out "
                    f"activations.{name}"
                )
        return self

    def check_gradients_untouched(self, by: str) -> None:
        """Raise a ConfigError if updates are eager: `by` would read or scale gradients too late."""
        if self.optimizer.enabled and self.optimizer.overlap == "eager":
            raise ConfigError(
                f"{by} reads gradients after backward, and with optimizer.overlap: eager the "
                f"update has used them by then. Set optimizer.overlap: commit, or leave it out."
            )

    def tiers_for(self, client: Client) -> list[TierConfig]:
        """Return the tiers that a client may use, in its order of preference."""
        names = getattr(self, client).tiers
        if names is None:
            return [tier for tier in self.tiers if client == "optimizer" or tier.kind != "device"]
        by_name = {tier.name: tier for tier in self.tiers}
        return [by_name[name] for name in names]

    def divided(self, among: int) -> OffloadConfig:
        """Return the config of one of so many processes, with its part of what a tier may take."""
        if among == 1:
            return self
        tiers = []
        for tier in self.tiers:
            shared = {"capacity": tier.capacity, "writes_per_day": tier.writes_per_day}
            parts = {name: size and max(1, size // among) for name, size in shared.items()}
            rated = tier.endurance_tbw and tier.endurance_tbw / among
            tiers.append(tier.model_copy(update={**parts, "endurance_tbw": rated}))
        return self.model_copy(update={"tiers": tiers})

    def to_yaml(self) -> str:
        """Return the whole config as YAML that `load` reads back as an equal config."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    @classmethod
    def load(cls, source: ConfigSource = None) -> OffloadConfig:
        """Read a config from anything that can stand for one.

        Args:
            source: A config (returned as it is); a mapping of sections; the path of a YAML or JSON
                file, which may be an Accelerate launch file with an `ssd_offload_config` section;
                JSON text; the name of a preset; or None for what $SSD_OFFLOAD_CONFIG says (a path,
                preset or JSON text), else the defaults.

        Raises:
            ConfigError: it cannot be read or is wrong: one message with every problem, where it is,
                what was given and what is allowed.
        """
        if isinstance(source, OffloadConfig):
            return source
        sections, label = read(source)
        config = cls.__new__(cls)
        config._check(sections, label)
        return config

    def _check(self, sections: Mapping[str, Any], label: str) -> None:
        try:
            BaseModel.__init__(self, **sections)
        except ValidationError as error:
            raise ConfigError(describe(error, OffloadConfig, label)) from None
