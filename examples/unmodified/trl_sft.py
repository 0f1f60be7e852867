"""TRL's SFTTrainer, with packed rows and recomputed activations.

accelerate launch --config offload.yaml examples/unmodified/trl_sft.py
"""

import tempfile

import torch
from tiny import make_model, make_texts, make_tokenizer, report
from transformers import set_seed
from trl import SFTConfig, SFTTrainer


def main() -> None:
    """Train, and print every loss."""
    set_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            make_model(),
            SFTConfig(
                folder,
                use_cpu=not torch.cuda.is_available(),
                bf16=False,
                max_steps=8,
                max_length=48,
                per_device_train_batch_size=4,
                learning_rate=1e-3,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=make_texts(),
            processing_class=make_tokenizer(),
        )
        trainer.train()
    report([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer.model)


if __name__ == "__main__":
    main()
