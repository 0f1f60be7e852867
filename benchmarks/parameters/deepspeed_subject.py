"""One training run of DeepSpeed in its own process: ZeRO-3, all that it can put on NVMe there.

    python -m benchmarks.parameters.deepspeed_subject JSON    (started by `running.run`)
    python -m benchmarks.parameters.deepspeed_subject         builds its extensions and ends

Takes the jobs and prints the events of `subject`. Runs on the CPU accelerator; needs libaio, ninja
and a compiler. Initial weights are those of PyTorch's own modules: what `GPT` does to them in the
end finds them gone already, which changes the loss and nothing else.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.gpt import GPT
from benchmarks.machine import fix_allocator
from benchmarks.optimizer.deepspeed_peer import Aio, be_alone, remove_stale_locks
from benchmarks.parameters.job import Job
from benchmarks.turns import answers


def run(job: Job) -> Iterator[dict[str, Any]]:
    """Train; what happened, event by event."""
    fix_allocator()
    torch.manual_seed(0)
    begin = time.perf_counter()
    deepspeed = _deepspeed()
    config = _config(job)
    deepspeed.init_distributed()
    with deepspeed.zero.Init(config_dict_or_path=config):  # weights leave as soon as they are made
        model = GPT(job.shape)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    count = sum(parameter.ds_numel for parameter in model.parameters())
    yield {"event": "start", "seconds": time.perf_counter() - begin, "parameters": count}
    tokens = job.tokens()
    for step in range(job.steps):
        begin, cpu = time.perf_counter(), time.process_time()
        loss = engine(tokens)
        forward = time.perf_counter()
        engine.backward(loss)
        backward = time.perf_counter()
        engine.step()
        end = time.perf_counter()
        yield {
            "event": "step",
            "step": step,
            "loss": loss.item(),
            "seconds": end - begin,
            "forward": forward - begin,
            "backward": backward - forward,
            "update": end - backward,
            "cpu_seconds": time.process_time() - cpu,
        }
        del loss
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    yield {"event": "end", "peak_bytes": peak}
    engine.destroy()


def _deepspeed() -> Any:
    """The package, in a process group of one."""
    be_alone()
    remove_stale_locks()
    import deepspeed

    return deepspeed


def _build() -> None:
    """Compile its extensions, where they are not yet."""
    _deepspeed()
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, ShareMemCommBuilder

    AsyncIOBuilder().load(verbose=False)
    CPUAdamBuilder().load(verbose=False)
    ShareMemCommBuilder().load(verbose=False)


def _config(job: Job) -> dict[str, Any]:
    """With as little in memory as its settings allow: by default its buffers alone take 4 GB."""
    largest = max(4 * job.width, job.vocabulary) * job.width  # elements of a parameter
    return {
        "train_micro_batch_size_per_gpu": job.batch,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**9,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-3, "torch_adam": False, "adam_w_mode": True},
        },
        "zero_optimization": {
            "stage": 3,
            "contiguous_gradients": True,
            "reduce_bucket_size": largest,
            "sub_group_size": largest,
            "stage3_max_live_parameters": 2 * largest,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": largest,
            "offload_param": {
                "device": "nvme",
                "nvme_path": job.directory,
                "buffer_count": 5,
                "buffer_size": largest,
                "max_in_cpu": 0,
            },
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": job.directory,
                # A weight, its gradient and two moments at a time; pipelined it would need 12.
                "buffer_count": 5,
                "pipeline_read": False,
                "pipeline_write": False,
            },
        },
        "aio": asdict(Aio()),
    }


def main() -> None:
    """Build, or run a job."""
    if len(sys.argv) == 1:
        _build()
        return
    with answers() as answer:
        for event in run(Job(**json.loads(sys.argv[1]))):
            answer(event)


if __name__ == "__main__":
    main()
