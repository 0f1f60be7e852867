"""On an accelerator, updates during backward run on a stream of their own.

[Note: the update stream]
An update waits for its states to cross the link, and with several ranks for the reduction of its
gradients. On the stream of backward these waits would stop backward. So updates are launched on a
stream of their own, which waits for the stream that produced the gradients. At the end of the
backward pass the caller's stream waits for the updates: what reads weights or gradients after
`backward()` is ordered behind them.

The memory of a gradient belongs to the stream that produced it, and must not be reused before the
update has read it. As in [Note: the device is behind the host], a gradient is referenced until its
stream has been told to wait for the update, which happens after a bounded number of bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

import torch

from offload_strategy.torch_support.accelerator import ReleaseWindow, is_asynchronous, using_stream
from offload_strategy.units import MiB

#: Bytes of gradients that updates may still have to read before the producing stream waits.
_WINDOW_BYTES = 64 * MiB


class UpdateStreams:
    """The update stream of each accelerator; see [Note: the update stream].

    Not `enabled` where weights are streamed: their memory belongs to the stream of the blocks.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._streams: dict[torch.device, torch.Stream] = {}
        self._windows: dict[tuple[torch.device, int], ReleaseWindow[Collection[torch.Tensor]]] = {}
        self._joined_by = -1  # the backward pass at whose end `join` is called

    @contextlib.contextmanager
    def updating(
        self, gradients: Collection[torch.Tensor], written: Collection[torch.Tensor] = ()
    ) -> Iterator[None]:
        """Run an update during backward on the update stream; what is `written` may be dropped."""
        device = next(iter(gradients)).device
        stream = self._stream(device)
        if stream is None or torch.accelerator.current_stream(device) == stream:
            yield
            if is_asynchronous(device):  # `step()` updates what backward had no time for
                for gradient in gradients:
                    gradient.record_stream(torch.accelerator.current_stream(device))
            return
        producer = torch.accelerator.current_stream(device)
        window = self._windows.setdefault((device, producer.stream_id), ReleaseWindow(producer))
        stream.wait_stream(producer)
        try:
            with using_stream(stream):
                yield
                read = stream.record_event()
        except BaseException:  # what has been launched may still read the gradients
            producer.wait_stream(stream)
            raise
        nbytes = sum(gradient.numel() * gradient.element_size() for gradient in gradients)
        window.add(read, nbytes, [*gradients, *written])
        window.release(max(_WINDOW_BYTES, nbytes))

    def reduced(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        """Wait for a reduction and use its results without stopping backward."""
        stream = self._stream(device)
        if stream is None:
            return contextlib.nullcontext()
        stream.wait_stream(torch.accelerator.current_stream(device))
        return using_stream(stream)

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Run `step()` on the update streams, to which the memory of states belongs."""
        self.join()
        with contextlib.ExitStack() as stack:
            for device, stream in self._streams.items():
                caller = torch.accelerator.current_stream(device)
                stream.wait_stream(caller)
                stack.callback(caller.wait_stream, stream)
                stack.enter_context(using_stream(stream))
            yield

    def join(self) -> None:
        """Let the current streams wait for all updates; nothing is referenced after that."""
        if self._joined_by == -1:  # nothing was launched since: no backward pass has raised
            return
        self._joined_by = -1
        for window in self._windows.values():
            window.release()
        self._windows.clear()
        for device, stream in self._streams.items():
            torch.accelerator.current_stream(device).wait_stream(stream)

    def _stream(self, device: torch.device) -> torch.Stream | None:
        """Return the stream of a device, within a backward pass; otherwise None."""
        task = torch._C._current_graph_task_id()
        if task == -1 or not self._enabled or not is_asynchronous(device):
            return None
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        if self._joined_by != task:
            self._joined_by = task
            torch.autograd.Variable._execution_engine.queue_callback(self.join)
        return self._streams[device]
