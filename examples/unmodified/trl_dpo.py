"""TRL's DPOTrainer, which runs a second model beside the one that it trains.

accelerate launch --config offload.yaml examples/unmodified/trl_dpo.py
"""

import tempfile

from tiny import make_model, make_preferences, make_tokenizer, report_of, short_run
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
                bf16=False,
                learning_rate=1e-3,
                **short_run(),
            ),
            train_dataset=make_preferences(),
            processing_class=make_tokenizer(),
        )
        trainer.train()
    report_of(trainer)


if __name__ == "__main__":
    main()
