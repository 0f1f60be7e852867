"""Bytes that autograd saves, against SSDTrain's table III and against autograd itself."""

import dataclasses

import pytest

from benchmarks.planning.papers import SSDTRAIN_TABLE_3, bert, mask_bytes, part
from offload_strategy.planner.saved_tensor_bytes import (
    Workload,
    activation_bytes,
    layer_activation_bytes,
    layer_tensors,
)
from offload_strategy.planner.transformer_shape import TransformerShape


def test_the_steps_that_table_3_implies_run_at_one_rate():
    # Bytes / (step / 2) is the rate it requires: steps of 1.15, 1.86 and 2.45 s. By our FLOP each
    # device does as much in a second in all three, as matrices of these sizes do: 151, 155
    # and 140 TFLOPS each.
    flops = []
    for hidden, layers, measured, _, rate in SSDTRAIN_TABLE_3:
        step = 2 * measured / rate
        flops.append(3 * bert(hidden, layers).forward_flops(16, 1024) / step / 2)
    assert max(flops) < 1.12 * min(flops)
    assert 100e12 < min(flops) < max(flops) < 312e12


def test_a_layer_saves_megatrons_34_bytes_less_what_is_said():
    # s b h (10 + 24/t) with masks (Korthikanti et al., equation 2, without scores of attention).
    for t in (1, 2, 8):
        work, shape = Workload(2, 2048), TransformerShape("gpt", 1, 4096, 32, 50257)
        statistics, embedding = 4 * 2 * 2048 * 32 // t, 2 * 2048 * 4096
        masks = mask_bytes(shape, work) - embedding
        expected = 2 * 2048 * 4096 * (10 + 24 / t) + statistics
        assert layer_activation_bytes(part(shape, t), work) + masks == expected


def test_small_tensors_stay_and_decoders_attend_twice():
    encoder, work = TransformerShape("t5", 4, 64, 4, 100), Workload(2, 32)
    assert activation_bytes(encoder, work) == 0
    both = dataclasses.replace(encoder, decoder_layers=2)
    tensors = layer_tensors(both, work, crosses=True)
    crossing = [t for t in 2 * tensors if t.name.startswith("cross")]
    more = activation_bytes(both, work, 0) - activation_bytes(encoder, work, 0)
    assert more == sum(tensor.nbytes for tensor in crossing) > 0


def test_a_layer_of_torch_saves_what_is_counted():
    torch = pytest.importorskip("torch")
    from torch import nn
    from torch.nn import functional

    b, s, h, heads = 2, 16, 32, 4

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.LayerNorm(h), nn.LayerNorm(h)
            self.qkv, self.projection = nn.Linear(h, 3 * h), nn.Linear(h, h)
            self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

        def forward(self, x):
            q, k, v = self.qkv(self.first(x)).view(b, s, 3, heads, h // heads).unbind(2)
            scores = torch.softmax(q.transpose(1, 2) @ k.permute(0, 2, 3, 1), -1)
            mixed = (scores @ v.transpose(1, 2)).transpose(1, 2).reshape(b, s, h)
            x = x + self.projection(mixed)
            return x + self.down(functional.gelu(self.up(self.second(x))))

    layer = Layer()
    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.numel() > 2 * b * s:
            seen[storage.data_ptr()] = (storage, storage.nbytes())  # kept, so no address is reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(torch.randn(b, s, h, requires_grad=True)).sum().backward()
    saved = sum(nbytes for _, nbytes in seen.values())

    shape = TransformerShape("gpt", 1, h, heads, 100)
    counted = layer_activation_bytes(shape, Workload(b, s, dtype_bytes=4))
    counted += 4 * b * heads * (s * s - s)  # scores instead of flash attention's statistics
    # Matrix products copy queries, keys and values, which come as views of one result: copies are
    # saved where they are made, as many bytes as are counted.
    assert saved == pytest.approx(counted, rel=0.02)
