"""A process group for simulated devices, with the semantics of NCCL's: backend ``simccl``.

A collective is queued on a communication stream behind what the current stream was given, and
returns at once. Its future is done when it is queued, and waiting for it makes the current stream
wait, not the host. The bytes are moved by gloo when the stream reaches the collective.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future

from offload_strategy.torch_support.accelerator import using_stream
from tests.simulated_accelerator import sim


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous device tensor as a host tensor, for use on a stream's thread."""
    assert tensor.is_contiguous()
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    memory = (ctypes.c_uint8 * nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


BACKEND = "simccl"
_ToHost = Callable[[torch.Tensor], torch.Tensor]
_Collective = Callable[[Any, _ToHost], None]


class SimulatedProcessGroup(dist.ProcessGroup):
    """Collectives of tensors of one simulated device, and of host tensors, through gloo."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        # The host and the stream's thread may have a collective under way at the same time.
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("device", store), rank, size, timeout)
        self._gloo_of_host = dist.ProcessGroupGloo(
            dist.PrefixStore("host", store), rank, size, timeout
        )
        self._stream: torch.Stream | None = None
        self._name = ""
        #: Called with each collective and its number, on the thread of the stream; tests set it.
        self.delayed: Callable[[Callable[[], None], int], None] | None = None
        self.number = 0

    def _run(
        self,
        result: Any,
        tensors: Sequence[torch.Tensor],
        collective: _Collective,
    ) -> Any:
        """Run a collective, given gloo's group and a function from a tensor to one on the host."""
        device = tensors[0].device
        if device.type == "cpu":
            collective(self._gloo_of_host, lambda tensor: tensor)
            future: torch.futures.Future[Any] = torch.futures.Future()
            future.set_result(result)
            return _create_work_from_future(future)
        if self._stream is None:
            self._stream = torch.Stream(device)
        self._stream.wait_stream(torch.accelerator.current_stream(device))
        future = torch.futures.Future(devices=[device])
        with using_stream(self._stream):
            number, self.number = self.number, self.number + 1
            sim.launch_python(
                partial(self._execute, partial(collective, self._gloo, _on_host), number)
            )
            for tensor in tensors:
                tensor.record_stream(self._stream)
            future.set_result(result)
        return _create_work_from_future(future)

    def _execute(self, collective: Callable[[], None], number: int) -> None:
        if self.delayed is None:
            collective()
        else:
            self.delayed(collective, number)

    # ------------------------------------------------------------------ collectives
    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        def collective(gloo: Any, of: _ToHost) -> None:
            self._reduce(gloo, [of(tensor) for tensor in tensors], opts)

        return self._run(tensors, tensors, collective)

    allreduce_coalesced = allreduce

    def _reduce(self, gloo: Any, on_host: list[torch.Tensor], opts: Any) -> None:
        """Reduce tensors of the host in place; gloo has no average."""
        operation = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        average = operation == dist.ReduceOp.AVG
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if average else operation
        gloo.allreduce(on_host, options).wait()
        if average:
            for tensor in on_host:
                tensor.div_(self.size())

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        def collective(gloo: Any, of: _ToHost) -> None:
            gloo.broadcast([of(tensor) for tensor in tensors], opts).wait()

        return self._run(tensors, tensors, collective)

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        def collective(gloo: Any, of: _ToHost) -> None:
            on_host = [[of(tensor) for tensor in each] for each in outputs]
            gloo.allgather(on_host, [of(tensor) for tensor in inputs]).wait()

        return self._run(outputs, [*inputs, *chain(*outputs)], collective)

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        def collective(gloo: Any, of: _ToHost) -> None:
            parts = list(of(output).view(-1).chunk(self.size()))
            gloo.allgather([parts], [of(given).view(-1)]).wait()

        return self._run(output, [given, output], collective)

    all_gather_single = _allgather_base

    def _reduce_scatter_base(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> Any:
        def collective(gloo: Any, of: _ToHost) -> None:
            whole = of(given).clone()
            self._reduce(gloo, [whole], opts)
            of(output).view(-1).copy_(whole.view(-1).chunk(self.size())[self.rank()])

        return self._run(output, [given, output], collective)

    reduce_scatter_single = _reduce_scatter_base

    def scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any
    ) -> Any:
        def collective(gloo: Any, of: _ToHost) -> None:
            on_host = [[of(tensor) for tensor in each] for each in inputs]
            gloo.scatter([of(tensor) for tensor in outputs], on_host, opts).wait()

        return self._run(outputs, [*outputs, *chain(*inputs)], collective)

    def barrier(self, opts: Any = None) -> Any:
        torch.accelerator.synchronize()
        return self._gloo_of_host.barrier()

    # ------------------------------------------------------------------ what torch asks
    def getBackendName(self) -> str:
        return "simccl"

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def __repr__(self) -> str:
        return f"SimulatedProcessGroup({self.rank()} of {self.size()})"


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> SimulatedProcessGroup:
    return SimulatedProcessGroup(store, rank, size, timeout)


def default_group() -> SimulatedProcessGroup:
    """The process group that `init_process_group` has made."""
    group = dist.group.WORLD
    assert isinstance(group, SimulatedProcessGroup)
    return group


dist.Backend.register_backend(BACKEND, _create, devices=["sim", "cpu"])
