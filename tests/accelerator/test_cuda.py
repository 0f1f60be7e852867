"""What only CUDA has: GPUDirect Storage, compiled models, and graphs, which are refused."""

import pytest
import torch

from offload_strategy.errors import OffloadError
from offload_strategy.io.backends.protocol import available_backends
from offload_strategy.units import PAGE_BYTES
from tests.accelerator.support import DEVICE, batch, loss_of, make
from tests.io.conformance import Conformance
from tests.io.conftest import region
from tests.training import activations_only, backward_history, same_with_and_without, settings

__all__ = ["region"]

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")


# ---------------------------------------------------------------------- GPUDirect Storage
class DeviceMemory:
    """Device memory at a chosen distance from a page's start, with a guard on both sides."""

    def __init__(self, nbytes, misalignment=0):
        self.nbytes = nbytes
        size = nbytes + misalignment + 3 * PAGE_BYTES
        whole = torch.full((size,), 0xA5, dtype=torch.uint8, device="cuda")
        start = PAGE_BYTES + -whole.data_ptr() % PAGE_BYTES + misalignment
        self._before, self._part, self._behind = whole.split([start, nbytes, size - start - nbytes])
        self.address = whole.data_ptr() + start
        torch.accelerator.synchronize()

    @property
    def data(self):
        return self._part.cpu().numpy().tobytes()

    @data.setter
    def data(self, value):
        self._part.copy_(torch.frombuffer(bytearray(value), dtype=torch.uint8))
        torch.accelerator.synchronize()

    @property
    def around(self):
        """The values of the bytes before and behind."""
        return {*self._before.tolist(), *self._behind.tolist()}


class TestHostMemory(Conformance):
    @pytest.fixture
    def name(self):
        reason = available_backends()["kvikio"]
        if reason is not None:
            pytest.skip(f"kvikio: {reason}")
        return "kvikio"


class TestDeviceMemory(TestHostMemory):
    def memory(self, nbytes, misalignment=0):
        return DeviceMemory(nbytes, misalignment)


# ---------------------------------------------------------------------- compiled models
def each_block(model):
    for block in model.blocks:
        block.compile()
    return model


WAYS = {"whole": torch.compile, "each block": each_block}


@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_model_is_the_same(disk, way):
    pytest.importorskip("triton", reason="torch.compile needs it on CUDA")

    def run(engine):
        torch.compiler.reset()
        base = make(dropout=False)
        compiled = WAYS[way](base)
        if engine is not None:
            engine.attach(compiled)
        return backward_history(base, lambda step: loss_of(compiled, step))

    figures = same_with_and_without(run, settings(disk, optimizer={"enabled": False}))
    assert figures["offload/activations/written_bytes"] > 0
    torch.compiler.reset()


# ---------------------------------------------------------------------- CUDA graphs
def on_another_stream(run):
    """What CUDA wants before a graph is captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.accelerator.synchronize()


def test_a_cuda_graph_of_a_step_is_refused(disk):
    with activations_only(disk) as engine:
        model = make(engine=engine)
        inputs = batch(0)
        on_another_stream(lambda: model(inputs).sum().backward())
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(OffloadError, match="CUDA graph"), torch.cuda.graph(graph):
            model(inputs)
        torch.accelerator.synchronize()
        loss_of(model, 1).backward()  # it goes on without


def test_a_cuda_graph_without_gradients_is_no_concern(disk):
    with activations_only(disk) as engine, torch.no_grad():
        model = make(engine=engine).eval()
        inputs = torch.zeros_like(batch(0))
        on_another_stream(lambda: model(inputs))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = model(inputs)
        inputs.copy_(batch(3))
        graph.replay()
        torch.accelerator.synchronize()
        assert torch.equal(output, model(batch(3)))
