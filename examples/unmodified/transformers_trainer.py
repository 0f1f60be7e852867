"""Transformers' Trainer: accumulation, clipping, evaluation before and while it trains.

accelerate launch --config offload.yaml examples/unmodified/transformers_trainer.py
"""

import tempfile

from tiny import make_model, make_texts, make_tokenizer, report_of, short_run
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments, set_seed


def main() -> None:
    """Train, and print every loss."""
    set_seed(0)
    tokenizer = make_tokenizer()
    rows = make_texts().map(lambda row: tokenizer(row["text"]), remove_columns="text")
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            make_model(),
            TrainingArguments(
                folder,
                gradient_accumulation_steps=2,
                max_grad_norm=1.0,
                learning_rate=1e-3,
                eval_strategy="steps",
                eval_steps=4,
                **short_run(),
            ),
            train_dataset=rows,
            eval_dataset=rows.select(range(8)),
            data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        )
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
    report_of(trainer, before)


if __name__ == "__main__":
    main()
