"""Predicted and measured steps within a limit, on models that nobody tuned for.

    python -m benchmarks.automatic.predictions [--families GPT-2 BERT] [--steps 12] [--json FILE]

Small random models of Transformers, each trained by plain PyTorch and within two limits: what the
process has before the first step, and a share of what a step of plain PyTorch adds. The prediction
is made by the engine in the middle of the run; the second half is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import cores, describe_machine, forget_peak, say, status_bytes
from benchmarks.optimizer.contenders import ADAMW
from offload_strategy.units import MiB, markdown_table

_SIZES = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8}
_WORDS = {**_SIZES, "intermediate_size": 1024, "vocab_size": 4096, "use_cache": False}
#: By name: class of the config, class of the model, and what the config is made of.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "GPT-2": ("GPT2Config", "GPT2LMHeadModel", {
        "n_embd": 512, "n_layer": 6, "n_head": 8, "vocab_size": 4096, "use_cache": False,
    }),
    "Llama": ("LlamaConfig", "LlamaForCausalLM", _WORDS),
    "BERT": ("BertConfig", "BertForMaskedLM", _WORDS),
    "T5": ("T5Config", "T5ForConditionalGeneration", {
        "d_model": 512, "d_ff": 1024, "num_layers": 3, "num_heads": 8, "vocab_size": 4096,
        "decoder_start_token_id": 0, "use_cache": False,
    }),
    "ViT": ("ViTConfig", "ViTForImageClassification", {
        **_SIZES, "intermediate_size": 1024, "image_size": 96, "patch_size": 8, "num_labels": 10,
    }),
    "Mixtral": ("MixtralConfig", "MixtralForCausalLM", {
        **_WORDS, "num_hidden_layers": 3, "num_key_value_heads": 4, "num_local_experts": 4,
    }),
}  # fmt: skip
#: Shares of what a step of plain PyTorch adds to the process.
_SHARES = (0.7, 0.45)


def train(options: dict[str, Any]) -> None:
    """Train in this process; print the figures of each step, and what was predicted."""
    import transformers

    from offload_strategy import OffloadEngine

    torch.set_num_threads(options["threads"])
    config, kind, sizes = FAMILIES[options["family"]]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**sizes)).train()
    optimizer: Any = torch.optim.AdamW(model.parameters(), **ADAMW)
    engine = None
    begin_bytes = status_bytes("VmRSS")
    if options["limit"] is not None:
        engine = OffloadEngine({"memory": options["limit"]})
        optimizer = engine.attach(model, optimizer)
    forget_peak()
    for number in range(options["steps"]):
        torch.manual_seed(number)
        tokens = torch.randint(4096, (16, 128))
        inputs = {"input_ids": tokens, "labels": tokens}
        if options["family"] == "ViT":
            inputs = {"pixel_values": torch.randn(16, 3, 96, 96), "labels": tokens[:, 0] % 10}
        begin = time.perf_counter()
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - begin
        figures = {"seconds": seconds, "loss": loss.item().hex(), "begin_bytes": begin_bytes}
        figures["peak_bytes"] = status_bytes("VmHWM")
        del loss
        if engine is not None and number == options["steps"] // 2:
            found = engine.report().comparison
            assert found is not None, "too few steps"
            figures["predicted"] = {
                name: found.part(name).predicted for name in ("step", "peak of memory")
            }
        print(json.dumps(figures), flush=True)
    if engine is not None:
        engine.close()


def _run(family: str, limit: int | None, steps: int) -> list[dict[str, Any]]:
    subject = {"family": family, "limit": limit, "steps": steps, "threads": cores()}
    command = [sys.executable, "-m", "benchmarks.automatic.predictions", "--train"]
    done = subprocess.run([*command, json.dumps(subject)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{family} within {limit}: {done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def _case(family: str, share: float, plain: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Train within a limit; return what was predicted and measured."""
    begin = plain[0]["begin_bytes"]
    limit = int(begin + share * (max(step["peak_bytes"] for step in plain) - begin))
    run = _run(family, limit, steps)
    (predicted,) = [step["predicted"] for step in run if "predicted" in step]
    measured = run[steps // 2 + 1 :]
    return {
        "family": family,
        "limit_bytes": limit,
        "same": [step["loss"] for step in run] == [step["loss"] for step in plain],
        "predicted_seconds": predicted["step"],
        "seconds": statistics.median(step["seconds"] for step in measured),
        "plain_seconds": statistics.median(step["seconds"] for step in plain[1:]),
        "predicted_bytes": predicted["peak of memory"],
        "peak_bytes": max(step["peak_bytes"] for step in measured),
        "most_bytes": max(step["peak_bytes"] for step in run),
    }


def main() -> int:
    """Run all cases; exit status 1 if a loss differs or a limit was exceeded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.automatic.predictions")
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        train(json.loads(options.train))
        return 0
    machine = describe_machine(Path("/tmp"))
    print("\n".join(f"{name}: {value}" for name, value in machine.items()), flush=True)
    cases: list[dict[str, Any]] = []
    for family in options.families:
        plain = _run(family, None, options.steps)
        for share in _SHARES:
            cases.append(_case(family, share, plain, options.steps))
            say(f"{family}: {json.dumps(cases[-1])}")
    rows, errors = [], []
    for case in cases:
        ratios = [
            case["predicted_seconds"] / case["seconds"],
            case["predicted_bytes"] / case["peak_bytes"],
        ]
        errors.append([abs(ratio - 1) for ratio in ratios])
        rows.append(
            (
                case["family"],
                f"{case['limit_bytes'] / MiB:,.0f}",
                f"{case['most_bytes'] / MiB:,.0f}",
                f"{case['predicted_bytes'] / MiB:,.0f}",
                f"{case['peak_bytes'] / MiB:,.0f}",
                f"{ratios[1]:.2f}",
                f"{case['plain_seconds']:.3f}",
                f"{case['predicted_seconds']:.3f}",
                f"{case['seconds']:.3f}",
                f"{ratios[0]:.2f}",
                "identical" if case["same"] else "DIFFERENT",
            )
        )
    heading = (
        "model | limit, MiB | peak of all steps | predicted peak | measured | ratio "
        "| plain, s | predicted, s | measured, s | ratio | losses"
    )
    print(markdown_table(heading, rows))
    for name, column in (("step", 0), ("peak", 1)):
        found = [error[column] for error in errors]
        print(f"{name}: median error {statistics.median(found):.1%}, worst {max(found):.1%}")
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine, "cases": cases}, indent=1))
    exceeded = any(case["most_bytes"] > case["limit_bytes"] for case in cases)
    return int(exceeded or not all(case["same"] for case in cases))


if __name__ == "__main__":
    sys.exit(main())
