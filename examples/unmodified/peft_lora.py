"""LoRA adapters of PEFT, trained by Transformers' Trainer; the weights below them are frozen.

accelerate launch --config offload.yaml examples/unmodified/peft_lora.py
"""

import tempfile

import torch
from peft import LoraConfig, get_peft_model
from tiny import make_model, make_texts, make_tokenizer, report
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
                use_cpu=not torch.cuda.is_available(),
                max_steps=8,
                per_device_train_batch_size=4,
                learning_rate=1e-2,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=rows,
            data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        )
        trainer.train()
    report([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], model)


if __name__ == "__main__":
    main()
