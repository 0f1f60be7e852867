"""A Llama-shaped model whose weights alone exceed the device memory that the process may use.

    python -m benchmarks.gpu.weights --dir /mnt/nvme0 --json docs/results/gpu-weights.json

Plain training of the same model is tried first, under the same limit, and must run out of memory.
The roofline of a step is the longest of computing alone (6 operations for each weight and token, at
the rate of a large matrix product), copying its bytes over the link, and what the disk has to move
(read bytes over what it reads, plus written bytes over what it writes).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.io.results import Result, table, write_json
from benchmarks.machine import describe_machine
from benchmarks.parameters.running import bandwidth
from benchmarks.parameters.subject import moved
from offload_strategy import OffloadEngine
from offload_strategy.units import GiB, parse_size

_VOCABULARY = 32000
_WARM_UP = 2


@dataclass(frozen=True)
class Rates:
    """What the machine can do.

    Args:
        operations: per second, of a large matrix product in the model's dtype.
        link: bytes per second between host and device, one way.
        read: bytes per second from the disk.
        write: likewise, to it.
    """

    operations: float
    link: float
    read: float
    write: float

    def least_seconds(self, operations: float, read: float, written: float, disk: bool) -> float:
        """Of a step.

        Args:
            operations: that it computes.
            read: bytes that come from the tiers.
            written: bytes that go there.
            disk: whether the tiers are on the disk, or in host memory.
        """
        path = read / self.read + written / self.write if disk else 0.0
        link = max(read, written) / self.link
        return max(operations / self.operations, link, path)


def main() -> int:
    """Parse the options, run, print and write the outcome."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.weights", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--limit", default="8GiB", help="of device memory")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=1024, help="of a sequence")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--host", help="capacity of a dram tier before the disk")
    parser.add_argument("--json", type=Path, help="write everything there, too")
    parser.add_argument("--device", default="cuda", help="cpu to see that everything runs")
    options = parser.parse_args()
    if options.device != "cpu" and not torch.accelerator.is_available():
        print("there is no accelerator that torch can use", file=sys.stderr)
        return 2
    machine = describe_machine(options.dir)
    print("\n".join(f"{name}: {value}" for name, value in machine.items()), flush=True)
    limit = parse_size(options.limit)
    results = []
    if options.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(limit / total)
        failed = float(_runs_out_of_memory(options))
        results.append(Result("weights: plain runs out of memory", failed, 1, "runs", failed, 1))
    steps, count = _train(options)
    rates = _rates(options.device, options.dir)
    operations = 6.0 * count * options.batch * options.tokens
    least = [
        rates.least_seconds(operations, s["read_bytes"], s["written_bytes"], options.host is None)
        for s in steps
    ]
    seconds = [step["seconds"] for step in steps]
    for number, (step, bound) in enumerate(zip(steps, least, strict=True)):
        print(
            f"step {number}: loss {step['loss']:.4f}, {step['seconds']:.2f} s, at least "
            f"{bound:.2f}; read {step['read_bytes'] / GiB:.2f} GiB, written "
            f"{step['written_bytes'] / GiB:.2f} GiB"
        )
    tokens = options.batch * options.tokens
    share = statistics.median(b / s for s, b in zip(seconds, least, strict=True))
    results.append(
        Result(
            f"weights: {count:,} parameters, tokens/s beside the roofline",
            tokens / statistics.median(seconds), tokens / statistics.median(least), "tokens/s",
            share, 0.0, judged=False,
        )
    )  # fmt: skip
    fell = steps[-1]["loss"] / steps[0]["loss"]
    results.append(
        Result(
            "weights: last loss beside the first",
            steps[-1]["loss"], steps[0]["loss"], "nats", fell, 0.999, at_least=False,
        )
    )  # fmt: skip
    print("\n" + table(results))
    if options.json is not None:
        outcome = {
            "options": {key: str(value) for key, value in vars(options).items()},
            "rates": vars(rates),
            "steps": steps,
            "results": [result.as_dict() for result in results],
        }
        write_json(options.json, machine, outcome)
    return int(any(result.judged and not result.held for result in results))


def _model(options: argparse.Namespace) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 11 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=max(1, options.hidden // 128),
        num_key_value_heads=max(1, options.hidden // 128),
        vocab_size=_VOCABULARY,
        max_position_embeddings=options.tokens,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(options.device):
            return LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)


def _runs_out_of_memory(options: argparse.Namespace) -> bool:
    try:
        _model(options)
    except torch.OutOfMemoryError:
        return True
    finally:
        torch.cuda.empty_cache()
    return False


def _train(options: argparse.Namespace) -> tuple[list[dict[str, Any]], int]:
    """What happened in each step but the first ones, and how many parameters there are."""
    steps = []
    with tempfile.TemporaryDirectory(prefix="benchmarks-weights-", dir=options.dir) as place:
        tiers: list[dict[str, Any]] = [{"name": "disk", "kind": "ssd", "path": place}]
        if options.host is not None:
            tiers.insert(0, {"name": "host", "kind": "dram", "capacity": options.host})
        engine = OffloadEngine(
            {
                "tiers": tiers,
                "parameters": {"enabled": True},
                "optimizer": {"overlap": "eager", "state_dtype": "bfloat16"},
            }
        )
        with engine.building():
            model = _model(options)
        optimizer: Any = engine.attach(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(
            _VOCABULARY, (options.batch, options.tokens), generator=generator
        ).to(options.device)
        before = moved(engine)
        for _ in range(options.steps + _WARM_UP):
            begin = time.perf_counter()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            value = loss.item()  # waits for the device
            del loss
            now = moved(engine)
            steps.append(
                {
                    "loss": value,
                    "seconds": time.perf_counter() - begin,
                    **{name: now[name] - before[name] for name in now},
                }
            )
            before = now
        count = sum(parameter.numel() for parameter in model.parameters())
        if options.device == "cuda":  # `close` brings the weights back
            torch.cuda.set_per_process_memory_fraction(1.0)
        engine.close()
    return steps[_WARM_UP:], count


def _rates(device: str, directory: Path) -> Rates:
    size, dtype = (8192, torch.bfloat16) if device != "cpu" else (1024, torch.float32)
    one = torch.randn(size, size, device=device).to(dtype)
    operations = 2.0 * size**3 / _seconds(lambda: one @ one, device)
    link = float("inf")
    if device != "cpu":
        host = torch.empty(GiB, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(GiB, dtype=torch.uint8, device=device)
        link = GiB / _seconds(lambda: there.copy_(host, non_blocking=True), device)
    path = bandwidth(directory)
    return Rates(operations, link, path.read, path.write)


def _seconds(work: Any, device: str) -> float:
    """The least of a few times."""
    times = []
    for _ in range(6):
        begin = time.perf_counter()
        work()
        if device != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times)


if __name__ == "__main__":
    sys.exit(main())
