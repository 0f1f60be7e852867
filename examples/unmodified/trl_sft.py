"""TRL's SFTTrainer, with packed rows and recomputed activations.

accelerate launch --config offload.yaml examples/unmodified/trl_sft.py
"""

import tempfile

from tiny import make_model, make_texts, make_tokenizer, report_of, short_run
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
                bf16=False,
                max_length=48,
                learning_rate=1e-3,
                **short_run(),
            ),
            train_dataset=make_texts(),
            processing_class=make_tokenizer(),
        )
        trainer.train()
    report_of(trainer)


if __name__ == "__main__":
    main()
