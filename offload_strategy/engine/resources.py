"""What an engine opens and must close: regions, backends, queues, the pool and the store."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from offload_strategy.checkpoints import scratch_directories
from offload_strategy.config import Client, OffloadConfig, TierConfig
from offload_strategy.errors import ConfigError
from offload_strategy.host_memory.pool import BufferPool
from offload_strategy.io.backends.protocol import Backend, create_backend
from offload_strategy.io.bandwidth.measured_paths import MeasuredPaths
from offload_strategy.io.queues.checksums import Checksum, create_checksum
from offload_strategy.io.queues.path_lock import PathLock
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.io.regions.directory_check import check_capacities, make_process_directory
from offload_strategy.io.regions.region import ExternalFile, Region
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Tier
from offload_strategy.store.tiers import HostTier, PathTier, Quota
from offload_strategy.telemetry import CLIENTS, Recorder
from offload_strategy.units import MiB, format_size

#: Block size in bytes for reads of external files.
_FILE_BLOCK_BYTES = 32 * MiB


class _OpenFiles:
    """External files that are opened once each and read by a backend of their own.

    Args:
        recorder: records the reads.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._backend: Backend | None = None
        self._queues: dict[Path, PathQueue] = {}

    def queue(self, file: Path) -> PathQueue:
        """Return the queue that reads a file.

        Raises:
            ConfigError: the file cannot be opened.
        """
        if file not in self._queues:
            if self._backend is None:
                self._backend = create_backend("posix", threads=2, block_size=_FILE_BLOCK_BYTES)
            place = ExternalFile(file, "checkpoint")
            self._queues[file] = PathQueue(place, self._backend, self._recorder)
        return self._queues[file]

    def close(self) -> None:
        """Close all files; no read may be in flight."""
        for queue in self._queues.values():
            queue.close()
        if self._backend is not None:
            self._backend.close()  # what is under way ends first
        for queue in self._queues.values():
            assert isinstance(queue.region, ExternalFile)
            queue.region.close()
        self._queues.clear()


@dataclass
class Resources:
    """Everything that must be closed, in order; holds no reference to the engine."""

    store: TensorStore
    pool: BufferPool
    #: Bytes of the pool that do not belong to dram tiers.
    pinned_bytes: int
    host_tiers: dict[str, HostTier] = field(default_factory=dict)
    queues: dict[str, list[PathQueue]] = field(default_factory=dict)
    quotas: dict[PathQueue, Quota] = field(default_factory=dict)
    backends: list[Backend] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    path_locks: list[PathLock] = field(default_factory=list)
    #: Directories of this process on paths that other machines share.
    folders: list[Path] = field(default_factory=list)
    clients: dict[Client, list[Tier]] = field(default_factory=dict)
    #: Tier for new weights that wait for `step()`.
    new_weight_tiers: list[Tier] = field(default_factory=list)
    paths: dict[Client, list[Path]] = field(default_factory=dict)
    pid: int = field(default_factory=os.getpid)
    #: Bandwidth of the paths from earlier runs or a probe, updated by this run.
    measured_paths: MeasuredPaths = field(default_factory=lambda: MeasuredPaths(1))
    #: External files whose bytes are read in place.
    _files: list[_OpenFiles] = field(default_factory=list)
    _recorder: Recorder = field(default_factory=Recorder)

    @classmethod
    def open(cls, config: OffloadConfig, recorder: Recorder, processes: int = 1) -> Resources:
        """Open the tiers that enabled sections use.

        Args:
            config: the config of this process, with its share of every capacity.
            recorder: records every transfer.
            processes: number of processes that share the tiers.

        Raises:
            ConfigError: a tier cannot be used, or its disk is smaller than its capacity.
        """
        wanted = {
            cast("Client", client): config.tiers_for(cast("Client", client))
            for client in CLIENTS
            if getattr(config, client).enabled
        }
        used = {tier.name for tiers in wanted.values() for tier in tiers}
        tiers = [tier for tier in config.tiers if tier.name in used]
        host = sum(tier.capacity or 0 for tier in tiers if tier.kind == "dram")
        # Tickets from a device that stay in a dram tier are held in buffers too.
        pool = BufferPool(config.memory.pinned + host)
        store = TensorStore(pool, recorder, write_behind=config.memory.pinned)
        resources = cls(
            store,
            pool,
            config.memory.pinned,
            measured_paths=MeasuredPaths(processes),
            _recorder=recorder,
        )
        check_capacities(
            [
                (tier.name, path, tier.capacity if len(tier.paths) == 1 else None)
                for tier in tiers
                for path in tier.paths
            ]
        )
        checksum = create_checksum() if config.io.checksum else None
        try:
            for tier in tiers:
                if tier.kind == "dram":
                    assert tier.capacity is not None
                    resources.host_tiers[tier.name] = HostTier(tier.name, tier.capacity)
                else:
                    resources._open_paths(tier, config, recorder, checksum)
            for client, names in wanted.items():
                resources.clients[client] = resources._tiers_of(names)
                resources.paths[client] = [path for tier in names for path in tier.paths]
            resources.new_weight_tiers = [
                HostTier("new weights in memory.pinned", config.memory.pinned // 2)
            ]
            resources._measure()
        except BaseException:
            resources.close()
            raise
        return resources

    def scratch_directories(self, client: Client) -> list[Path]:
        """Return directories for a client's temporary files outside its tiers, best first."""
        return scratch_directories(self.paths.get(client, []))

    def tier_used_bytes(self) -> dict[str, int]:
        """Return the bytes in use per configured tier."""
        used = {name: tier.used_bytes for name, tier in self.host_tiers.items()}
        for region in self.regions:
            used[region.tier] = used.get(region.tier, 0) + region.used_bytes
        return used

    @contextmanager
    def files(self, *, keep: bool) -> Iterator[Callable[[Path], PathQueue]]:
        """Yield a function that returns the queue that reads an external file.

        Args:
            keep: keep the files open until `close`; otherwise they are closed with the context.
        """
        files = _OpenFiles(self._recorder)
        try:
            yield files.queue
        except BaseException:
            files.close()
            raise
        if keep:
            self._files.append(files)
        else:
            files.close()

    def close(self) -> None:
        """Close everything. Idempotent; does nothing in a forked child."""
        if os.getpid() != self.pid:
            return  # threads and files belong to the parent
        self.store.close()
        for queue in itertools.chain.from_iterable(self.queues.values()):
            queue.close()
        for files in self._files:
            files.close()
        for backend in self.backends:
            backend.close()
        for path_lock in self.path_locks:
            path_lock.close()
        for region in self.regions:
            region.close()
        for folder in self.folders:
            with contextlib.suppress(OSError):  # another process has put a file there
                folder.rmdir()
        self.pool.close()
        self.measured_paths.save()

    def _open_paths(
        self,
        tier: TierConfig,
        config: OffloadConfig,
        recorder: Recorder,
        checksum: Checksum | None,
    ) -> None:
        several = len(tier.paths) > 1
        queues = self.queues[tier.name] = []
        for place in tier.paths:
            path = make_process_directory(place) if tier.shared else place
            if tier.shared:
                self.folders.append(path)
            region = Region(
                path,
                tier.name,
                None if several else tier.capacity,
                config.io.direct,
                overwrite=tier.overwrite,
            )
            self.regions.append(region)
            backend = create_backend(
                config.io.backend,
                threads=config.io.threads_to_use(),
                block_size=config.io.block_size,
            )
            self.backends.append(backend)
            path_lock = PathLock(region.path)
            self.path_locks.append(path_lock)
            queue = PathQueue(region, backend, recorder, path_lock=path_lock, checksum=checksum)
            self.measured_paths.add(queue, place)
            queues.append(queue)
        if several and tier.capacity is not None:
            room = sum(
                queue.region.capacity for queue in queues if isinstance(queue.region, Region)
            )
            if room < tier.capacity:
                raise ConfigError(
                    f"tier {tier.name!r}: capacity is {format_size(tier.capacity)}, but its paths "
                    f"have only {format_size(room)} to give. Lower the capacity, free some space, "
                    f"or add a path."
                )
            quota = Quota(tier.capacity)
            self.quotas.update(dict.fromkeys(queues, quota))

    def _tiers_of(self, tiers: list[TierConfig]) -> list[Tier]:
        """Return the tiers of a client; consecutive ssd tiers work as one."""
        found: list[Tier] = []
        for kind, group in itertools.groupby(tiers, key=lambda tier: tier.kind):
            names = [tier.name for tier in group]
            if kind == "dram":
                found.extend(self.host_tiers[name] for name in names)
            else:
                queues = [queue for name in names for queue in self.queues[name]]
                found.append(PathTier("+".join(names), queues, self.quotas))
        return found

    def _measure(self) -> None:
        """Probe unknown paths briefly where a tier must divide its bytes over several paths."""
        together = {
            queue
            for tiers in self.clients.values()
            for tier in tiers
            if len(tier.queues) > 1
            for queue in tier.queues
        }
        for queue in sorted(together, key=lambda queue: str(queue.path)):
            self.measured_paths.probe(queue)
