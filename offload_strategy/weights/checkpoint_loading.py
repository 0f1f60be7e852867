"""Loading a checkpoint into a model with streamed weights, a few tensors in memory at a time.

[Note: copied and adopted weights]
By default each tensor is read from its file and written to the tiers at once; the files may be
deleted afterwards. With `adopt` the bytes stay in the files: a weight is read from its shard
whenever it is needed, and written to the tiers with its first update. Frozen weights are then never
written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from offload_strategy.errors import ConfigError
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Ticket, Tier
from offload_strategy.telemetry import Progress
from offload_strategy.torch_support.dtensors import is_sharded, local_rows, local_tensor
from offload_strategy.units import MiB
from offload_strategy.weights.model_building import materialize, refuse_hooks
from offload_strategy.weights.safetensors_files import StoredTensor, named_tensors
from offload_strategy.weights.weight_stream import WeightStream

_CLIENT = "parameters"
#: Bytes of reads and writes in flight together, unless two tensors are larger.
_WINDOW_BYTES = 64 * MiB


@dataclass(frozen=True)
class LoadedWeights:
    """Names that only one of model and loaded checkpoint has."""

    missing: list[str]  # In the model and not in the checkpoint; tied tensors count once
    unexpected: list[str]  # In the checkpoint and not in the model


@dataclass(frozen=True)
class _Match:
    name: str
    tensor: torch.Tensor
    stored: StoredTensor


@dataclass(frozen=True)
class Loader:
    """Loads checkpoints into models.

    `device` is that of parameters on the meta device. `open_file` returns the queue that reads a
    file; to adopt weights it must stay open while they are streamed.
    """

    store: TensorStore
    stream: WeightStream | None
    tiers: Sequence[Tier]
    device: torch.device
    open_file: Callable[[Path], PathQueue]

    def load(
        self, model: nn.Module, checkpoint: Mapping[str, StoredTensor], *, adopt: bool, strict: bool
    ) -> LoadedWeights:
        """Check everything, then load the checkpoint; see `OffloadEngine.load_weights`."""
        refuse_hooks("load_weights", model)
        tie = getattr(model, "tie_weights", None)
        if callable(tie) and any(parameter.is_meta for parameter in model.parameters()):
            # Contexts for empty models create a new parameter at every registration, also for
            # shared ones. Transformers' loaders tie them again too.
            tie()
        matches, found = match(model, checkpoint, strict=strict)
        stream, streamed = self.stream, []
        total = sum(one.stored.nbytes for one in matches)
        with torch.no_grad(), Progress("loading weights", total) as bar:
            for one in matches:
                plain = isinstance(one.tensor, nn.Parameter) and not is_sharded(one.tensor)
                same = one.tensor.dtype == one.stored.dtype
                # The bytes of a file are contiguous; memory that was replaced need not be.
                same = same and plain and one.tensor.is_contiguous()
                if same and stream is not None and stream.is_streamed(one.tensor):
                    streamed.append(one)
                else:
                    self._copy_values(model, one)
                    bar.update(one.stored.nbytes)
            adopted = ((m, self._file_ticket(m, self._device_of(m.tensor))) for m in streamed)
            for one, ticket in adopted if adopt else self._copied(streamed):
                assert stream is not None
                assert isinstance(one.tensor, nn.Parameter)
                if one.tensor.is_meta:
                    materialize(one.tensor, self.device)
                stream.stream_parameter(one.name, one.tensor)
                stream.replace(one.tensor, ticket)
                bar.update(one.stored.nbytes)
        return found

    def _copy_values(self, model: nn.Module, one: _Match) -> None:
        """Copy values into a tensor that is not streamed."""
        tensor, stream = one.tensor, self.stream
        if tensor.is_meta:
            materialize(tensor, self.device)
        if one.stored.nbytes:  # the last ranks may have no rows of a small tensor
            ticket = self._file_ticket(one, torch.device("cpu"))
            flat = self.store.get(ticket)
            values = flat.view(one.stored.dtype).view(one.stored.shape)
            with nullcontext() if stream is None else stream.resident([tensor], changes=True):
                local_tensor(tensor).copy_(values)
            del flat, values
            self.store.free(ticket)
        if stream is not None and isinstance(tensor, nn.Parameter):
            stream.stream_parameter(one.name, tensor, model)

    def _copied(self, matches: Sequence[_Match]) -> Iterator[tuple[_Match, Ticket]]:
        """Yield tickets of copies on the tiers, with a window of reads and writes in flight."""
        store, half = self.store, max([_WINDOW_BYTES // 2, *(m.stored.nbytes for m in matches)])
        files = [self._file_ticket(one, torch.device("cpu")) for one in matches]
        begun = ahead = 0  # tickets that are read, and their bytes that were not taken yet
        for one, file in zip(matches, files, strict=True):
            while begun < len(files) and ahead + files[begun].nbytes <= half:
                store.prefetch(files[begun])
                ahead += files[begun].nbytes
                begun += 1
            ahead -= file.nbytes
            payload, device = store.take(file), self._device_of(one.tensor)
            store.await_writes(_CLIENT, half - file.nbytes, seconds=math.inf)
            yield one, store.put(payload.to(device), _CLIENT, self.tiers)

    def _device_of(self, tensor: torch.Tensor) -> torch.device:
        return self.device if tensor.is_meta else tensor.device

    def _file_ticket(self, one: _Match, device: torch.device) -> Ticket:
        stored = one.stored
        queue = self.open_file(stored.file)
        return self.store.adopt(queue, stored.offset, stored.nbytes, _CLIENT, device)


def match(
    model: nn.Module, checkpoint: Mapping[str, StoredTensor], *, strict: bool
) -> tuple[list[_Match], LoadedWeights]:
    """Match the tensors of a model and a checkpoint, in the order of the files' bytes."""
    targets = named_tensors(model)
    names: dict[int, list[str]] = {}
    for target, tensor in targets.items():
        names.setdefault(id(tensor), []).append(target)
    matches: list[_Match] = []
    missing: list[str] = []
    wrong: list[str] = []
    for alike in names.values():
        name = next((name for name in alike if name in checkpoint), None)
        if name is None:
            missing.append(alike[0])
            continue
        shape, stored = targets[name].shape, checkpoint[name]
        if tuple(shape) != stored.shape:
            there, here = list(stored.shape), list(shape)
            wrong.append(f"{name} has shape {there} in the checkpoint and {here} in the model")
        elif is_sharded(targets[name]):
            if (rows := local_rows(targets[name])) is None:
                wrong.append(f"{name} is not sharded by rows; load it before it is sharded")
            else:
                stored = stored.rows(*rows)
        matches.append(_Match(name, targets[name], stored))
    found = LoadedWeights(missing, [name for name in checkpoint if name not in targets])
    complaints = [*wrong]
    if strict:
        complaints += [f"the checkpoint has no {name}" for name in found.missing]
        complaints += [f"the model has no {name}" for name in found.unexpected]
    if complaints:
        more = f"; and {len(complaints) - 8} more" if len(complaints) > 8 else ""
        hint = "" if wrong else " Pass strict=False if this is intended."
        if hasattr(model, "from_pretrained"):
            hint += (
                f" {type(model).__name__}.from_pretrained within engine.building() translates "
                f"names of other versions."
            )
        raise ConfigError(f"load_weights: {'; '.join(complaints[:8])}{more}.{hint}")
    _check_whole(model, {id(one.tensor) for one in matches})
    return sorted(matches, key=lambda one: (one.stored.file, one.stored.offset)), found


def _check_whole(model: nn.Module, loaded: set[int]) -> None:
    """Check that no module on the meta device is loaded partly: it is initialized as a whole."""
    for name, module in model.named_modules():
        own = [p for p in module._parameters.values() if p is not None]
        filled = [id(p) in loaded or not p.is_meta for p in own]
        if any(filled) and not all(filled):
            raise ConfigError(
                f"load_weights: the checkpoint has some of the parameters of {name!r} "
                f"({type(module).__name__}), which is on the meta device, but not all. Build "
                f"the model within engine.building() instead, then load with strict=False."
            )
