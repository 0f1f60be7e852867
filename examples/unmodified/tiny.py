"""A model of some thousand parameters and some text, made here: nothing is downloaded."""

from __future__ import annotations

import argparse
import hashlib
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SENTENCE = "a tensor that leaves is written once and read once and then it is freed"
SPECIAL = ["<pad>", "<s>", "</s>"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that knows the words of the text."""
    words = [*SPECIAL, *sorted(set(SENTENCE.split()))]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def make_model() -> LlamaForCausalLM:
    """A causal language model with random weights; seed torch before."""
    config = LlamaConfig(
        vocab_size=len(make_tokenizer()),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def short_run() -> dict[str, Any]:
    """What the arguments of all trainers have in common: a few steps, a log of each, no files.

    `--report_to tensorboard wandb` on the command line says where the logs go as well.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--report_to", nargs="*", default=[])
    return {
        "use_cpu": not torch.cuda.is_available(),
        "max_steps": 8,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": parser.parse_args().report_to,
        "disable_tqdm": True,
    }


def report(losses: list[float], model: torch.nn.Module) -> None:
    """Print losses to the last bit, and a digest of the weights."""
    for loss in losses:
        print("loss", float(loss).hex())
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    print("weights", digest.hexdigest())


def report_of(trainer: Any, *before: float) -> None:
    """Print what a Trainer has logged, after losses before that, and a digest of its model."""
    history = trainer.state.log_history
    losses = [entry[key] for entry in history for key in ("loss", "eval_loss") if key in entry]
    report([*before, *losses], trainer.model)


def turned(by: int) -> str:
    """The sentence, begun at another word."""
    words = SENTENCE.split()
    return " ".join(words[by:] + words[:by])


def make_texts(rows: int = 48) -> Dataset:
    """Rows of text."""
    return Dataset.from_list([{"text": turned(row % 15)} for row in range(rows)])


def make_preferences(rows: int = 48) -> Dataset:
    """Rows of a prompt, an answer that is liked and one that is not."""
    return Dataset.from_list(
        [
            {"prompt": turned(row % 15), "chosen": turned(row % 7), "rejected": turned(row % 11)}
            for row in range(rows)
        ]
    )
