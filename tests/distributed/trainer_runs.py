"""What the ranks of `test_ranks` do.

Each trains a model as it is, and one with LoRA: plainly, offloaded, and resumed from the
checkpoints of either.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from offload_strategy.integrations.accelerate.plugin import session_of
from tests.distributed.data_parallel_runs import compared, config, same

STEPS, SAVED = 4, 2
TOKENS = torch.randint(0, 64, (32, 12), generator=torch.Generator().manual_seed(1))


def make_model(lora: bool) -> Any:
    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )
    return get_peft_model(model, LoraConfig(r=8, target_modules="all-linear")) if lora else model


def train(
    directory: Path, lora: bool, offload: bool, source: Path | None, target: Path
) -> dict[str, Any]:
    """Train with accumulation and clipping, and save in the middle; or from there on."""
    os.environ["ACCELERATE_USE_SSD_OFFLOAD"] = str(int(offload))
    os.environ["SSD_OFFLOAD_CONFIG"] = json.dumps(config(directory / "tier", "commit"))
    trainer = Trainer(
        make_model(lora),
        TrainingArguments(
            str(target),
            use_cpu=True,
            ddp_backend="gloo",
            max_steps=STEPS,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_grad_norm=0.5,
            learning_rate=1e-2,
            logging_steps=1,
            save_steps=SAVED,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in TOKENS],
    )
    trainer.train(resume_from_checkpoint=None if source is None else str(source))
    session = session_of(trainer.accelerator)
    assert (session is not None) == offload
    history = trainer.state.log_history
    weights = trainer.model.state_dict()
    return {
        "losses": [float(entry["loss"]).hex() for entry in history if "loss" in entry],
        "norms": [float(entry["grad_norm"]).hex() for entry in history if "grad_norm" in entry],
        "weights": {name: value.clone() for name, value in weights.items()},
        # After its last save they are on rank 0, the only one that the Trainer asks.
        "states": trainer.optimizer.state_dict() if trainer.args.should_save else {},
        "metrics": session.engine.metrics() if session is not None else {},
    }


def files(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint holds, apart from how and when it was made."""
    found = {file.name: file.read_bytes() for file in checkpoint.glob("*.safetensors")}
    states = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    return {**found, "names": sorted(file.name for file in checkpoint.iterdir()), "states": states}


def against_plain(rank: int, directory: Path) -> list[dict[str, Any]]:
    """Every run beside the plain one."""
    found = []
    for lora in (False, True):
        folders = {offload: directory / f"{'lora' * lora}-{offload}" for offload in (False, True)}
        checkpoints = {key: folder / f"checkpoint-{SAVED}" for key, folder in folders.items()}
        plain = train(directory, lora, False, None, folders[False])
        runs = [(True, None)] + [(offload, saved) for offload in (True, False) for saved in folders]
        if lora:
            runs = [(True, None), (True, True)]
        for offload, saved in runs:
            source = None if saved is None else checkpoints[saved]
            target = folders[True] if saved is None else directory / "again"
            ours = train(directory, lora, offload, source, target)
            found.append(compared([lora, offload, saved], plain, ours))
        if rank == 0 and not same(*map(files, checkpoints.values())):
            found.append({"case": [lora, "the files"], "differs": ["files"]})
    return found
