"""LoRA adapters of PEFT, trained by Transformers' Trainer; the weights below them are frozen.

accelerate launch --config offload.yaml examples/unmodified/peft_lora.py
"""

import tempfile

from peft import LoraConfig, get_peft_model
from tiny import make_model, make_texts, make_tokenizer, report_of, short_run
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments, set_seed


def main() -> None:
    """Train, and print every loss."""
    set_seed(0)
    tokenizer = make_tokenizer()
    model = get_peft_model(
        make_model(),
        LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.1),
    )
    rows = make_texts().map(lambda row: tokenizer(row["text"]), remove_columns="text")
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                folder,
                learning_rate=1e-2,
                **short_run(),
            ),
            train_dataset=rows,
            data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        )
        trainer.train()
    report_of(trainer)


if __name__ == "__main__":
    main()
