"""What an engine opens and must close: regions, backends, queues, the pool and the store."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import torch

from offload_strategy.config import Client, OffloadConfig, TierConfig
from offload_strategy.errors import ConfigError
from offload_strategy.host_memory.memory_limits import available_bytes
from offload_strategy.host_memory.pool import BufferPool
from offload_strategy.io.backends.protocol import create_backend
from offload_strategy.io.bandwidth.measured_paths import MeasuredPaths
from offload_strategy.io.queues.checksums import create_checksum
from offload_strategy.io.queues.encryption import BlockCipher
from offload_strategy.io.queues.path_lock import PathLock
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.io.regions.directory_check import check_capacities, make_process_directory
from offload_strategy.io.regions.region import ExternalFile, Region
from offload_strategy.store.shared_tickets import FileIdentity, SharedFile, SharedFiles
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Tier
from offload_strategy.store.tiers import DeviceTier, HostTier, MemoryTier, PathTier, Quota
from offload_strategy.telemetry import CLIENTS, Recorder
from offload_strategy.telemetry.prometheus import PrometheusMetrics
from offload_strategy.torch_support.accelerator import has_memory_statistics
from offload_strategy.units import MiB, format_size

#: Block size in bytes for reads of external files.
_FILE_BLOCK_BYTES = 32 * MiB

#: By what an external file is opened: its path, or what another process says of it.
_Place = TypeVar("_Place", bound=Hashable)


class Resources:
    """Everything that must be closed; holds no reference to the engine.

    It opens the tiers that enabled sections use, which so many processes share; the config has this
    process's share of every capacity.
    """

    def __init__(self, config: OffloadConfig, processes: int) -> None:
        enabled = [client for client in CLIENTS if getattr(config, client).enabled]
        wanted = {client: config.tiers_for(client) for client in enabled}
        if config.parameters.enabled == "auto":  # in tiers that others use anyway
            in_tiers = wanted.pop("parameters")
            others = {tier.name for tiers in wanted.values() for tier in tiers}
            wanted["parameters"] = [tier for tier in in_tiers if tier.name in others]
        used = {tier.name for tiers in wanted.values() for tier in tiers}
        tiers = [tier for tier in config.tiers if tier.name in used]
        check_capacities(
            [
                (tier.name, path, tier.capacity if len(tier.paths) == 1 else None)
                for tier in tiers
                for path in tier.paths
            ],
            processes if processes > 1 else None,
        )
        # It notices what a checksum would.
        cipher = BlockCipher(config.io.block_size) if config.io.encryption else None
        self.pid = os.getpid()
        self.config = config
        self.recorder = Recorder()
        self.has_default_tiers = False  # whether nobody has asked for these tiers
        #: Bytes of the pool that do not belong to dram tiers.
        self.pinned_bytes = config.memory.pinned_bytes(
            available_bytes() // processes, accelerated=torch.accelerator.is_available()
        )
        # Tickets from a device that stay in a dram tier are held in buffers too.
        host_bytes = sum(tier.capacity or 0 for tier in tiers if tier.kind == "dram")
        self.pool = BufferPool(self.pinned_bytes + host_bytes)
        self.store = TensorStore(self.pool, self.recorder, write_behind=self.pinned_bytes)
        #: Bandwidth of the paths from earlier runs or a probe, updated by this run.
        self.measured_paths = MeasuredPaths(processes)
        self.memory_tiers: dict[str, MemoryTier] = {}
        self.queues: dict[str, list[PathQueue]] = {}
        self.regions: list[Region] = []
        #: Paths where files with optimizer states may be; none if what is there is encrypted.
        readable = [] if config.io.encryption else wanted.get("optimizer", [])
        self.state_paths = [path for tier in readable for path in tier.paths]
        self._quotas: dict[PathQueue, Quota] = {}
        self._file_queues: list[PathQueue] = []
        self._stack = ExitStack()
        self._stack.callback(self.measured_paths.save)
        self._stack.callback(self.pool.close)
        try:
            for tier in tiers:
                if tier.kind != "ssd":
                    kind = DeviceTier if tier.kind == "device" else HostTier
                    assert tier.capacity is not None
                    self.memory_tiers[tier.name] = kind(tier.name, tier.capacity)
                    continue
                try:
                    self._open_paths(tier, cipher)
                except OSError as error:
                    raise ConfigError(
                        f"tier {tier.name!r}: {', '.join(map(str, tier.paths))}: {error}. "
                        f"Check the disk and the system's log, or name another directory."
                    ) from error
            self.clients: dict[Client, list[Tier]] = {
                client: self._tiers_of(of_client) for client, of_client in wanted.items()
            }
            # Probe unknown paths briefly where a tier must divide its bytes over several paths.
            every = itertools.chain(*self.clients.values())
            together = {queue for tier in every if len(tier.queues) > 1 for queue in tier.queues}
            for queue in sorted(together, key=lambda queue: str(queue.path)):
                self.measured_paths.probe(queue)
        except BaseException:
            self.close()
            raise

    def note_device(self, device: torch.device) -> None:
        """Find out which tiers are in host memory, now that it is known which device trains.

        Default tiers are kept out of it if the CPU trains, which has all else there.
        """
        on_host = device.type == "cpu"
        for tier in self.memory_tiers.values() if self.has_default_tiers and on_host else ():
            tier.capacity = 0
        tiers = self.memory_tiers.values()
        host_bytes = sum(tier.capacity for tier in tiers if on_host or tier.is_host_memory)
        self.pool.budget = self.pinned_bytes + host_bytes

    def room(self, client: Client) -> int:
        """Return the bytes that the tiers of a client have left."""
        return sum(tier.capacity - tier.used_bytes for tier in self.clients[client])

    def check_room(self, client: Client, needed: int, message: str, advice: str) -> None:
        """Raise a ConfigError unless the tiers of a client have so many bytes left."""
        room = self.room(client)
        if needed > room:
            raise ConfigError(
                f"{message}, but the tiers have {format_size(room)}: {format_size(needed - room)} "
                f"too little. Raise a tier's capacity, {advice}."
            )

    def tier_used_bytes(self) -> dict[str, int]:
        """Return the bytes in use per configured tier."""
        used = {name: tier.used_bytes for name, tier in self.memory_tiers.items()}
        for region in self.regions:
            used[region.tier] = used.get(region.tier, 0) + region.used_bytes
        return used

    @contextmanager
    def files(
        self, open_file: Callable[[_Place], ExternalFile], *, keep: bool
    ) -> Iterator[Callable[[_Place], PathQueue]]:
        """Yield a function that returns the queue that reads an external file, opened once.

        The files are closed with the context, or by `close` if they are to be kept.
        """
        queues: dict[_Place, PathQueue] = {}
        with ExitStack() as stack:
            files = stack.enter_context(ExitStack())
            backend = create_backend("posix", threads=2, block_size=_FILE_BLOCK_BYTES)
            stack.callback(backend.close)  # what is under way ends before the files are closed

            def queue(place: _Place) -> PathQueue:
                if place not in queues:
                    file = open_file(place)
                    files.callback(file.close)
                    queues[place] = PathQueue(file, backend, self.recorder)
                    stack.callback(queues[place].close)
                return queues[place]

            yield queue
            if keep:
                self._file_queues += queues.values()
                self._stack.enter_context(stack.pop_all())

    def shared_files(self) -> SharedFiles:
        """Return the files of streamed weights, which other processes on this machine may read.

        Those of encrypted tiers are of no use to them: the key never leaves its process.
        """
        tiers = self.clients["parameters"] if not self.config.io.encryption else []
        regions = [region for tier in tiers for region in tier.regions]
        return SharedFiles(self.store, regions, self._open_shared)

    def _open_shared(self, identity: FileIdentity) -> PathQueue:
        with self.files(SharedFile, keep=True) as queue:
            return queue(identity)

    def end_threads(self) -> None:
        """Let transfers finish and end all threads; later transfers start them again."""
        for engine in tuple(self.store.copies.values()):  # which may still submit writes
            engine.end_threads()
        for queue in itertools.chain(*self.queues.values(), self._file_queues):
            queue.end_threads()

    def serve_metrics(self, port: int, read: Callable[[], Mapping[str, float]]) -> None:
        """Serve metrics for Prometheus until these resources are closed, at once if it fails."""
        try:
            self._stack.callback(PrometheusMetrics(port, read).close)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close everything. Idempotent; does nothing in a forked child."""
        if os.getpid() == self.pid:  # in a child, threads and files belong to the parent
            self.store.close()
            self._stack.close()

    def _open_paths(self, tier: TierConfig, cipher: BlockCipher | None) -> None:
        several, close, io = len(tier.paths) > 1, self._stack.callback, self.config.io
        kind = "posix" if io.encryption else io.backend
        queues = self.queues[tier.name] = []
        for place in tier.paths:
            path = make_process_directory(place) if tier.shared else place
            if tier.shared:
                close(_remove_empty, path)
            capacity = None if several else tier.capacity
            region = Region(path, tier.name, capacity, io.direct, overwrite=tier.overwrite)
            close(region.close)
            self.regions.append(region)
            lock = PathLock(region.path)
            close(lock.close)
            backend = create_backend(kind, threads=io.threads_to_use(), block_size=io.block_size)
            close(backend.close)
            checksum = cipher or create_checksum(io.checksum, backend)
            queue = PathQueue(region, backend, self.recorder, path_lock=lock, checksum=checksum)
            close(queue.close)
            self.measured_paths.add(queue, place)
            queues.append(queue)
        if several and tier.capacity is not None:
            room = sum(region.capacity for region in self.regions if region.tier == tier.name)
            if room < tier.capacity:
                raise ConfigError(
                    f"tier {tier.name!r}: capacity is {format_size(tier.capacity)}, but its paths "
                    f"have only {format_size(room)} to give. Lower the capacity, free some space, "
                    f"or add a path."
                )
            self._quotas.update(dict.fromkeys(queues, Quota(tier.capacity)))

    def _tiers_of(self, tiers: list[TierConfig]) -> list[Tier]:
        """Return the tiers of a client; consecutive ssd tiers work as one."""
        found: list[Tier] = []
        for kind, group in itertools.groupby(tiers, key=lambda tier: tier.kind):
            names = [tier.name for tier in group]
            if kind == "ssd":
                queues = [queue for name in names for queue in self.queues[name]]
                found.append(PathTier("+".join(names), queues, self._quotas))
            else:
                found.extend(self.memory_tiers[name] for name in names)
        return found


def with_default_tiers(config: OffloadConfig) -> OffloadConfig:
    """Return a config whose tiers, if nobody gave any, are those for the accelerator there is."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if "tiers" in config.model_fields_set or not kind or not has_memory_statistics(kind):
        return config  # no host memory if the accelerator shares it
    host = TierConfig(name="host", kind="dram", capacity=available_bytes() // 2)
    return config.model_copy(update={"tiers": [host, *config.tiers]})


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # another process has put a file there
        folder.rmdir()
