"""Streamed weights of models that are sharded by FSDP2 (`fully_shard`).

[Note: sharded weights]
Each rank streams its own shard. FSDP2 reads a shard in one place, the all-gather before a module
computes, and lets a tensor subclass supply what is gathered (`fsdp_pre_all_gather`). So the local
tensor of a streamed DTensor parameter is a `StreamedShard`: it has no bytes of its own, hands FSDP2
those of the streamed weight, and loads them for any other operation. What autograd saves are
unsharded parameters, which FSDP2 frees and gathers again itself.

While an optimizer updates the parameter, its local tensor is a plain tensor with the bytes.

[Note: streams of FSDP2]
On an accelerator FSDP2 gathers, computes and reduces on different streams, and updates in backward
run on the one that reduces. So whoever uses the bytes next waits for the stream that used them
last, and their memory is not used again before either is done.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map, tree_map_only

from offload_strategy.errors import OffloadError
from offload_strategy.store.ticket import Ticket
from offload_strategy.torch_support.accelerator import current_stream, is_asynchronous
from offload_strategy.torch_support.dtensors import fsdp_groups
from offload_strategy.weights.guarded_parameter import nan_placeholder
from offload_strategy.weights.streamed_weight import StreamedWeight, Streaming

_aten = torch.ops.aten


class StreamedShard(torch.Tensor):
    """The local tensor of a streamed DTensor parameter; see [Note: sharded weights]."""

    __slots__ = ("flat", "weight")
    #: Its updates are those of a plain tensor.
    stands_for_plain = True
    weight: ShardedWeight
    #: The streamed parameter, which must live as long as this tensor.
    flat: nn.Parameter

    def __new__(cls, weight: ShardedWeight) -> StreamedShard:
        """Make a tensor with the shape, strides, dtype and device of the shard."""
        form = weight.local_form
        shard: StreamedShard = torch.Tensor._make_wrapper_subclass(
            cls, form.shape, strides=form.stride(), dtype=form.dtype, device=weight.device
        )
        shard.weight, shard.flat = weight, weight.live_parameter()
        return shard

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Load the bytes of all shards among the arguments, and run the operation on them."""
        if func in (_aten.detach.default, _aten.alias.default):
            return cls(args[0].weight)
        loaded: dict[int, StreamedShard] = {}
        accesses = ExitStack()

        def load(shard: StreamedShard) -> torch.Tensor:
            if not shard.weight.closed:
                shard.weight.begin_access()
                accesses.callback(shard.weight.end_access)
            values = shard.weight.local_values()
            loaded[id(values)] = shard
            return values

        with accesses:
            plain = tree_map_only(StreamedShard, load, (args, kwargs or {}))
            result = func(*plain[0], **plain[1])
            # An operation in place returns its argument.
            return tree_map(lambda each: loaded.get(id(each), each), result)

    def fsdp_pre_all_gather(
        self,
        mesh: Any,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[torch.Tensor], None]:
        """Return what FSDP2 gathers: this rank's padded shard, in the dtype to compute in."""
        return (self.weight.all_gather_input(),), None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[()]] | None:
        """Return the gathered weight, which is FSDP2's own memory."""
        return None if out is not None else (all_gather_outputs[0], ())

    def numpy(self, *, force: bool = False) -> Any:
        """Return an array that shares the bytes."""
        return self.view(self.shape).numpy(force=force)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a plain tensor with a copy of the values."""
        return self.clone()

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.clone())


class ShardedWeight(StreamedWeight):
    """This rank's shard of a parameter that FSDP2 manages.

    Its bytes are the padded ones that FSDP2 gathers, so the streamed parameter is a flat one that
    takes the place of FSDP2's own flat tensor.
    """

    def __init__(self, name: str, fsdp_param: Any, stream: Streaming) -> None:
        sharded = fsdp_param.sharded_param
        flat = nn.Parameter(fsdp_param._sharded_param_data, requires_grad=False)
        self.local_form = torch.empty_like(sharded._local_tensor, device="meta")
        super().__init__(name, flat, stream)
        self._fsdp_param = weakref.ref(fsdp_param)
        self.key = weakref.ref(sharded)
        # Stream of the last use, and an event after it; see [Note: streams of FSDP2].
        self._last_use: tuple[torch.Stream, torch.Event] | None = None
        #: Whether the model has its plain tensors back; what was taken from it before shares them.
        self.closed = False
        fsdp_param._sharded_param_data = flat  # keeps it alive
        sharded._local_tensor = StreamedShard(self)
        fsdp_param._init_extensions()
        fsdp_param.reset_sharded_param = self._on_reset

    @property
    def content(self) -> Ticket | None:
        """The ticket of the values of now, unless one of new values would lack the padding."""
        local = self.local_form
        whole = local.numel() == self.form.numel() and local.is_contiguous()
        return super().content if whole else None

    def local_values(self) -> torch.Tensor:
        """Return the resident values in the shape of the local tensor, without the padding."""
        return self.values().as_strided(self.local_form.shape, self.local_form.stride())

    def all_gather_input(self) -> torch.Tensor:
        """Return the padded values in the dtype to compute in, loaded if necessary."""
        fsdp_param: Any = self._fsdp_param()
        with self.stream.lock:
            values = self.stream.load_now(self).view(fsdp_param.padded_sharded_param_size)
        return values if fsdp_param.param_dtype is None else values.to(fsdp_param.param_dtype)

    def load(self) -> None:
        """Load the bytes, or wait for the stream that used them last."""
        if self.is_resident:
            self._await_last_use()
        super().load()
        self._note_use()

    def offload(self) -> None:
        """Offload the bytes as they are after their last use."""
        self._await_last_use()
        super().offload()
        self._last_use = None

    def _await_last_use(self) -> None:
        if self._last_use is None:
            return
        (stream, event), now = self._last_use, current_stream(self.device)
        if now != stream:
            now.wait_event(event)
            self.values().record_stream(now)

    def _note_use(self) -> None:
        if self.is_resident and is_asynchronous(self.device):
            stream = current_stream(self.device)
            self._last_use = stream, stream.record_event()

    def end_access(self) -> None:
        """Undo one `begin_access`."""
        with self.stream.lock:
            self._note_use()
            super().end_access()

    def acquire(self) -> None:
        """Load the bytes, and make them the local tensor until `release`."""
        super().acquire()
        if self._unguarded == 1:
            self._set_local(self.local_values())

    def release(self) -> None:
        """Undo one `acquire`."""
        self._note_use()
        if self._unguarded == 1:
            self._set_local(None)
        super().release()

    def _set_local(self, local: torch.Tensor | None) -> None:
        """Make a tensor the local one; None for one without bytes."""
        if (sharded := self.key()) is not None:
            sharded._local_tensor = StreamedShard(self) if local is None else local

    def _on_reset(self) -> None:
        """Take over values that replace the local tensor; FSDP2 calls this to look for some."""
        fsdp_param = self._fsdp_param()
        if fsdp_param is None:
            return
        info, sharded = fsdp_param._module_info, self.key()
        given = getattr(info.module, info.param_name)
        new = given._local_tensor
        if (isinstance(new, StreamedShard) and new.weight is self) or self.users:
            return
        form, device = self.local_form, self.device
        if (new.shape, new.dtype, new.device) != (form.shape, form.dtype, device):
            raise OffloadError(
                f"the shard of {self.name!r} was replaced by one of shape {tuple(new.shape)}, "
                f"{new.dtype} on {new.device}; it was {tuple(form.shape)}, {form.dtype} on "
                f"{device}. Move or convert a model before it is attached."
            )
        self.begin_access()
        try:
            with torch.no_grad():
                self.local_values().copy_(new)
        finally:
            self.end_access()
        if given is not sharded:  # of load_state_dict(assign=True); the optimizer has the other one
            fsdp_param._setattr_on_modules(sharded)
        self._set_local(None)

    def close(self, *, restore: bool) -> None:
        """Free the ticket, and give FSDP2 its tensors back."""
        super().close(restore=restore)
        self.closed = True
        fsdp_param = self._fsdp_param()
        if fsdp_param is None or self.parameter() is None:
            return
        fsdp_param._sharded_param_data = self.values()
        if restore or self.is_resident:
            self._set_local(self.local_values())
        else:
            self._set_local(nan_placeholder(self.local_form, self.device))
        del fsdp_param.reset_sharded_param


def sharded_blocks(model: nn.Module, min_bytes: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what FSDP2 gathers together: the name of a module, and FSDPParams by name.

    Those whose shard is below `min_bytes`, or of a class of its own, are left out.
    """
    names = {module: name for name, module in model.named_modules()}
    for module, name in names.items():
        for group in fsdp_groups(module):
            found = {}
            for each in group.fsdp_params:
                is_plain = type(each.sharded_param._local_tensor) in (torch.Tensor, StreamedShard)
                if is_plain and each._sharded_param_data.nbytes >= max(1, min_bytes):
                    info = each._module_info
                    found[f"{names[info.module]}.{info.param_name}".lstrip(".")] = each
            if found:
                yield name or type(module).__name__, found
