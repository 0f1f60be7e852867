"""Transformers' Trainer: accumulation, clipping, evaluation before and while it trains.

accelerate launch --config offload.yaml examples/unmodified/transformers_trainer.py
"""

import tempfile

import torch
from tiny import make_model, make_texts, make_tokenizer, report
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
                use_cpu=not torch.cuda.is_available(),
                max_steps=8,
                per_device_train_batch_size=4,
                gradient_accumulation_steps=2,
                max_grad_norm=1.0,
                learning_rate=1e-3,
                logging_steps=1,
                eval_strategy="steps",
                eval_steps=4,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=rows,
            eval_dataset=rows.select(range(8)),
            data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        )
        losses = [trainer.evaluate()["eval_loss"]]
        trainer.train()
    history = trainer.state.log_history
    losses += [entry[key] for entry in history for key in ("loss", "eval_loss") if key in entry]
    report(losses, trainer.model)


if __name__ == "__main__":
    main()
