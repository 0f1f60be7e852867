"""Copies between an accelerator and host buffers, on streams of their own.

On the CPU there is nothing to copy: host memory is the device's memory, and a tensor's own storage
is what gets written.
"""

from __future__ import annotations

import torch


class DeviceCopier:
    """One outgoing and one incoming stream for a device, made when first used.

    Only CUDA (and ROCm, which has the same name in PyTorch) copies asynchronously here; other
    accelerators copy synchronously, which is slower and just as right.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: dict[str, torch.Stream] = {}

    def copy_out(self, source: torch.Tensor, host: torch.Tensor) -> torch.Event | None:
        """Start to copy a flat device tensor into a flat host tensor of the same size.

        Returns:
            The event that ends the copy, or None if it is over. The caller keeps both tensors
            alive until the host has seen the event; then the device memory may be reused on any
            stream, with no record on the tensor.
        """
        if self.device.type != "cuda":
            host.copy_(source)
            return None
        stream = self._stream("out")
        stream.wait_stream(torch.accelerator.current_stream(self.device))
        with stream:
            host.copy_(source, non_blocking=True)
            return stream.record_event()

    def copy_in(self, host: torch.Tensor) -> torch.Tensor:
        """Copy a flat host tensor to the device; returns when the bytes are there.

        Meant for I/O threads, which have nothing else to do: the compute stream is never
        synchronised. The result belongs to the incoming stream; `adopt` it before use.
        """
        if self.device.type != "cuda":
            return host.to(self.device)
        stream = self._stream("in")
        with stream:
            loaded = torch.empty(host.numel(), dtype=torch.uint8, device=self.device)
            loaded.copy_(host, non_blocking=True)
            stream.record_event().synchronize()
        return loaded

    def incoming(self, nbytes: int) -> torch.Tensor:
        """Device memory for a path that fills it without the host; `adopt` it before use."""
        with self._stream("in"):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def adopt(self, loaded: torch.Tensor) -> None:
        """Tell the allocator that the current stream uses a tensor of `copy_in`."""
        if self.device.type == "cuda":
            loaded.record_stream(torch.accelerator.current_stream(self.device))

    def _stream(self, direction: str) -> torch.Stream:
        stream = self._streams.get(direction)
        if stream is None:
            stream = self._streams[direction] = torch.Stream(self.device)
        return stream
