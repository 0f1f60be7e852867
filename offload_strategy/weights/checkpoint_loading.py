"""Loading a checkpoint into a model whose weights are on tiers, a few tensors in memory at a time.

[Note: where loaded weights are]
Each tensor is read from its file, and goes on to the tiers as soon as it is there; the files may go
afterwards. Or the files are adopted: the bytes stay where they are, a weight is read from its shard
whenever it is needed, and the first update of a weight is the first time that it is written, to the
tiers. Frozen weights then never are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from offload_strategy.errors import ConfigError
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Ticket
from offload_strategy.store.tiers import Tier
from offload_strategy.units import MiB
from offload_strategy.weights.model_building import materialise
from offload_strategy.weights.safetensors_index import StoredTensor
from offload_strategy.weights.safetensors_saving import named_tensors
from offload_strategy.weights.weight_stream import WeightStream

_CLIENT = "parameters"
#: Bytes on their way in and out together, if no two tensors are larger.
_WINDOW_BYTES = 64 * MiB

OpenFile = Callable[[Path], PathQueue]


@dataclass(frozen=True)
class LoadedWeights:
    """What `load_weights` found.

    Args:
        missing: names in the model that the checkpoint has not; tied ones count as one tensor.
        unexpected: names in the checkpoint that the model has not.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Match:
    """A tensor of the model, and where its new values are."""

    name: str
    tensor: torch.Tensor
    stored: StoredTensor


class Loader:
    """Loads checkpoints into the models of one engine.

    Args:
        store: reads the files.
        stream: takes the weights; None where nothing is streamed.
        tiers: where they may go, in order.
        device: of parameters that are on the meta device so far.
    """

    def __init__(
        self,
        store: TensorStore,
        stream: WeightStream | None,
        tiers: Iterable[Tier],
        device: torch.device,
    ) -> None:
        self._store = store
        self._stream = stream
        self._tiers = list(tiers)
        self._device = device

    def load(
        self,
        model: nn.Module,
        checkpoint: Mapping[str, StoredTensor],
        open_file: OpenFile,
        *,
        adopt: bool,
        strict: bool,
    ) -> LoadedWeights:
        """Give a model the values of a checkpoint; nothing is changed before all of it is checked.

        Args:
            model: attached, not yet attached, or on the meta device.
            checkpoint: its tensors by name.
            open_file: a queue that reads a file. With `adopt` it must stay open for as long as the
                weights are streamed.
            adopt: leave the bytes where they are, where weights are streamed and of one dtype.
            strict: missing and unexpected names are errors.

        Raises:
            ConfigError: names or shapes differ.
            StorageError: a file cannot be read; the model is in part as it was.
        """
        _tie(model)
        matches, found = match(model, checkpoint, strict=strict)
        streamed: list[_Match] = []
        rest: list[_Match] = []
        for one in matches:
            (streamed if self._is_streamed(one) else rest).append(one)
        with torch.no_grad():
            for one in rest:
                self._fill(model, one, open_file)
            arriving = self._adopted if adopt else self._copied
            for one, ticket in arriving(streamed, open_file):
                self._receive(one, ticket)
        return found

    def _is_streamed(self, one: _Match) -> bool:
        return (
            self._stream is not None
            and isinstance(one.tensor, nn.Parameter)
            and one.tensor.dtype == one.stored.dtype
            and self._stream.takes(one.tensor)
        )

    def _receive(self, one: _Match, ticket: Ticket) -> None:
        assert self._stream is not None
        assert isinstance(one.tensor, nn.Parameter)
        if one.tensor.is_meta:
            materialise(one.tensor, self._device)
        self._stream.receive(one.name, one.tensor, ticket)

    # ------------------------------------------------------------------ ways in
    def _fill(self, model: nn.Module, one: _Match, open_file: OpenFile) -> None:
        """Copy values into a tensor where it is."""
        tensor = one.tensor
        if tensor.is_meta:
            tensor = self._made(model, tensor)
        ticket = self._at_its_place(one, open_file, torch.device("cpu"))
        flat = self._store.get(ticket)
        values = flat.view(one.stored.dtype).view(one.stored.shape)
        stream = self._stream
        with nullcontext() if stream is None else stream.held([tensor], changes=True):
            tensor.copy_(values)
        del flat, values
        self._store.free(ticket)
        if stream is not None and isinstance(tensor, nn.Parameter):
            stream.let_go(one.name, tensor)

    def _made(self, model: nn.Module, tensor: torch.Tensor) -> torch.Tensor:
        """A parameter or buffer of the meta device, with a place on another."""
        if isinstance(tensor, nn.Parameter):
            materialise(tensor, self._device)
            return tensor
        values = torch.empty_like(tensor, device=self._device)
        for module in model.modules():
            for key, buffer in module._buffers.items():
                if buffer is tensor:
                    module._buffers[key] = values
        return values

    def _adopted(
        self, matches: Iterable[_Match], open_file: OpenFile
    ) -> Iterator[tuple[_Match, Ticket]]:
        for one in matches:
            yield one, self._at_its_place(one, open_file, self._home_of(one.tensor))

    def _copied(
        self, matches: Iterable[_Match], open_file: OpenFile
    ) -> Iterator[tuple[_Match, Ticket]]:
        matches = list(matches)
        half = max([_WINDOW_BYTES // 2, *(one.stored.nbytes for one in matches)])
        waiting = deque(matches)
        coming: deque[tuple[_Match, Ticket]] = deque()
        ahead = 0
        while waiting or coming:
            while waiting and (not coming or ahead + waiting[0].stored.nbytes <= half):
                one = waiting.popleft()
                ticket = self._at_its_place(one, open_file, torch.device("cpu"))
                self._store.prefetch(ticket)
                coming.append((one, ticket))
                ahead += one.stored.nbytes
            one, ticket = coming.popleft()
            ahead -= one.stored.nbytes
            yield one, self._sent_on(ticket, one.tensor, half)

    def _sent_on(self, ticket: Ticket, tensor: torch.Tensor, most: int) -> Ticket:
        """A ticket of the tiers for what another one reads from a file; frees that one."""
        store, home = self._store, self._home_of(tensor)
        payload = store.take(ticket)
        while store.writing_bytes and store.writing_bytes + payload.numel() > most:
            store.await_writes(_CLIENT, max(0, most - payload.numel()), seconds=1.0)
        return store.put(payload.to(home), _CLIENT, self._tiers, whole_pages=home.type == "cpu")

    def _home_of(self, tensor: torch.Tensor) -> torch.device:
        return self._device if tensor.is_meta else tensor.device

    def _at_its_place(self, one: _Match, open_file: OpenFile, device: torch.device) -> Ticket:
        stored = one.stored
        queue = open_file(stored.file)
        return self._store.adopt(queue, stored.offset, stored.nbytes, _CLIENT, device)


def _tie(model: nn.Module) -> None:
    """Tie what contexts for empty models have torn apart, as Transformers' loaders do.

    Such contexts make each parameter anew when a module registers it, also one that it shares.
    """
    tie = getattr(model, "tie_weights", None)
    if callable(tie) and any(parameter.is_meta for parameter in model.parameters()):
        tie()


def match(
    model: nn.Module, checkpoint: Mapping[str, StoredTensor], *, strict: bool
) -> tuple[list[_Match], LoadedWeights]:
    """Which tensor of a checkpoint is for which of a model, in the order of the files' bytes.

    Raises:
        ConfigError: names (if `strict`) or shapes differ; of a module some tensors would stay on
            the meta device, and some not.
    """
    targets = named_tensors(model)
    names: dict[int, list[str]] = {}
    for name, tensor in targets.items():
        names.setdefault(id(tensor), []).append(name)
    matches: list[_Match] = []
    missing: list[str] = []
    wrong: list[str] = []
    for alike in names.values():
        known = [name for name in alike if name in checkpoint]
        if not known:
            missing.append(alike[0])
            continue
        name = known[0]
        one = _Match(name, targets[name], checkpoint[name])
        if tuple(one.tensor.shape) != one.stored.shape:
            wrong.append(
                f"{name} is {list(one.stored.shape)} there and {list(one.tensor.shape)} here"
            )
        matches.append(one)
    found = LoadedWeights(missing, [name for name in checkpoint if name not in targets])
    complaints = [*wrong]
    if strict:
        complaints += [f"the checkpoint has no {name}" for name in found.missing]
        complaints += [f"the model has no {name}" for name in found.unexpected]
    if complaints:
        more = f"; and {len(complaints) - 8} more" if len(complaints) > 8 else ""
        hint = "" if wrong else " Pass strict=False if that is meant."
        if hasattr(model, "from_pretrained"):
            hint += (
                f" {type(model).__name__}.from_pretrained within engine.building() translates "
                f"names of other versions."
            )
        raise ConfigError(f"load_weights: {'; '.join(complaints[:8])}{more}.{hint}")
    _check_whole(model, {id(one.tensor) for one in matches})
    return sorted(matches, key=lambda one: (one.stored.file, one.stored.offset)), found


def _check_whole(model: nn.Module, loaded: set[int]) -> None:
    """What the checkpoint has not is filled module by module, all of a module at once."""
    for name, module in model.named_modules():
        own = [p for p in module._parameters.values() if p is not None]
        if any(p.is_meta and id(p) not in loaded for p in own) and any(
            id(p) in loaded or not p.is_meta for p in own
        ):
            raise ConfigError(
                f"load_weights: the checkpoint has some of the parameters of {name!r} "
                f"({type(module).__name__}), which is on the meta device, and not the others. Make "
                f"the model within engine.building() instead, then load with strict=False."
            )
