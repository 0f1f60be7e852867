"""TRL's DPOTrainer, which runs a second model beside the one that it trains.

accelerate launch --config offload.yaml examples/unmodified/trl_dpo.py
"""

import tempfile

import torch
from tiny import make_model, make_preferences, make_tokenizer, report
from transformers import set_seed
from trl import DPOConfig, DPOTrainer


def main() -> None:
    """Train, and print every loss."""
    set_seed(0)
    model = make_model()
    reference = make_model()
    reference.load_state_dict(model.state_dict())
    with tempfile.TemporaryDirectory() as folder:
        trainer = DPOTrainer(
            model,
            reference,
            DPOConfig(
                folder,
                use_cpu=not torch.cuda.is_available(),
                bf16=False,
                max_steps=8,
                per_device_train_batch_size=4,
                learning_rate=1e-3,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=make_preferences(),
            processing_class=make_tokenizer(),
        )
        trainer.train()
    report([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer.model)


if __name__ == "__main__":
    main()
