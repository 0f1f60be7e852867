"""A Llama that learns the sources of Python's standard library with Transformers' Trainer.

    accelerate launch --config offload.yaml benchmarks/frameworks/llama_trainer.py

It knows nothing of offloading. Its tokens are bytes; every loss is printed by the Trainer.
"""

import argparse
import hashlib
import sysconfig
import tempfile
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


class Text(Dataset[dict[str, torch.Tensor]]):
    """Pieces of the modules of the standard library, one after the other.

    Args:
        length: bytes of a piece.
    """

    def __init__(self, length: int) -> None:
        modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = bytearray(b"".join(module.read_bytes() for module in modules))
        pieces = torch.frombuffer(text, dtype=torch.uint8)
        self.pieces = pieces[: len(pieces) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.pieces[index].long()
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    """Train, and print a digest of the weights."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    options = parser.parse_args()
    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=options.width,
            intermediate_size=options.width * 11 // 4,
            num_hidden_layers=options.layers,
            num_attention_heads=8,
            num_key_value_heads=4,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                folder,
                use_cpu=not torch.cuda.is_available(),
                max_steps=options.steps,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=2,
                max_grad_norm=1.0,
                learning_rate=3e-4,
                lr_scheduler_type="cosine",
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=Text(256),
        )
        trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print("loss", float(entry["loss"]).hex())
    digest = hashlib.sha256()
    for weight in model.state_dict().values():
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    print("weights", digest.hexdigest())


if __name__ == "__main__":
    main()
