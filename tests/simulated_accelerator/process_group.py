"""A process group for simulated devices, with the semantics of NCCL's: backend ``simccl``.

A collective is queued on a communication stream behind what the current stream was given, and
returns at once. Its future is done when it is queued, and waiting for it makes the current stream
wait, not the host. The bytes are moved by gloo when the stream reaches the collective.
"""

import ctypes
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.utils._pytree import tree_leaves, tree_map_only

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


def at_once(collective: Callable[[], None], number: int) -> None:
    """Run a collective when its stream comes to it."""
    collective()


BACKEND = "simccl"


class SimulatedProcessGroup(dist.ProcessGroup):
    """Collectives of tensors of one simulated device, and of host tensors, through gloo."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        # The host and the stream's thread may have a collective under way at the same time.
        self._gloo, self._gloo_of_host = (
            dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, timeout)
            for name in ("device", "host")
        )
        self._stream: torch.Stream | None = None
        self._name = ""
        #: Called with each collective and its number, on the thread of the stream; tests set it.
        self.delayed: Callable[[Callable[[], None], int], None] = at_once
        self.number = 0

    def _run(self, result: Any, collective: Callable[..., Any], *given: Any) -> Any:
        """Run a collective, given gloo's group and the tensors in `given`, on the host."""
        tensors = tree_leaves(given)
        device = tensors[0].device
        if device.type == "cpu":
            collective(self._gloo_of_host, *given)
            future: torch.futures.Future[Any] = torch.futures.Future()
            future.set_result(result)
            return _create_work_from_future(future)
        if self._stream is None:
            self._stream = torch.Stream(device)
        self._stream.wait_stream(torch.accelerator.current_stream(device))
        future = torch.futures.Future(devices=[device])
        with using_stream(self._stream):
            number, self.number = self.number, self.number + 1
            sim.launch_python(partial(self._execute, collective, number, given))
            for tensor in tensors:
                tensor.record_stream(self._stream)
            future.set_result(result)
        return _create_work_from_future(future)

    def _execute(self, collective: Callable[..., Any], number: int, given: Any) -> None:
        on_host = partial(collective, self._gloo, *tree_map_only(torch.Tensor, _on_host, given))
        self.delayed(on_host, number)

    # ------------------------------------------------------------------ collectives
    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        return self._run(tensors, partial(self._reduce, opts=opts), tensors)

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
        return self._run(tensors, lambda gloo, ours: gloo.broadcast(ours, opts).wait(), tensors)

    def allgather(self, out: list[list[torch.Tensor]], given: Any, opts: Any = None) -> Any:
        return self._run(out, lambda gloo, *both: gloo.allgather(*both).wait(), out, given)

    def _allgather_base(self, out: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        def collective(gloo: Any, out: torch.Tensor, given: torch.Tensor) -> None:
            gloo.allgather([list(out.view(-1).chunk(self.size()))], [given.view(-1)]).wait()

        return self._run(out, collective, out, given)

    all_gather_single = _allgather_base

    def _reduce_scatter_base(self, out: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        def collective(gloo: Any, out: torch.Tensor, given: torch.Tensor) -> None:
            whole = given.clone()
            self._reduce(gloo, [whole], opts)
            out.view(-1).copy_(whole.view(-1).chunk(self.size())[self.rank()])

        return self._run(out, collective, out, given)

    reduce_scatter_single = _reduce_scatter_base

    def scatter(self, out: list[torch.Tensor], given: list[list[torch.Tensor]], opts: Any) -> Any:
        return self._run(out, lambda gloo, *both: gloo.scatter(*both, opts).wait(), out, given)

    def barrier(self, opts: Any = None) -> Any:
        torch.accelerator.synchronize()
        return self._gloo_of_host.barrier()

    # ------------------------------------------------------------------ what torch asks
    def getBackendName(self) -> str:
        return BACKEND

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name


def default_group() -> SimulatedProcessGroup:
    """The process group that `init_process_group` has made."""
    group = dist.group.WORLD
    assert isinstance(group, SimulatedProcessGroup)
    return group


dist.Backend.register_backend(BACKEND, SimulatedProcessGroup, devices=["sim", "cpu"])
