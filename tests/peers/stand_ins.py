"""Models and datasets that the tests of TRL and PEFT load from a hub by name, made here instead.

A folder of that name in the directory from which the tests run is taken for the hub's. The models
are of the same architectures and as tiny, with random weights.
"""

import importlib.util
from pathlib import Path
from typing import Any

_TRL = {
    "Qwen2ForCausalLM-2.5": ("qwen2", "qwen2_5"),
    "Qwen3ForCausalLM": ("qwen3", "qwen3"),
    "Qwen3MoeForCausalLM": ("qwen3_moe", "qwen3"),
    "LlamaForCausalLM-3.2": ("llama", "llama3_2"),
    "MistralForCausalLM-0.2": ("mistral", "qwen2_5"),
    "Cohere2ForCausalLM": ("cohere2", "cohere2"),
    "GptOssForCausalLM": ("gpt_oss", "gptoss"),
    "Olmo3ForCausalLM": ("olmo3", "qwen2_5"),
}
_PEFT = {
    "peft-internal-testing/tiny-random-OPTForCausalLM": "opt",
    "peft-internal-testing/tiny-random-GPT2LMHeadModel": "gpt2",
    "peft-internal-testing/tiny-random-GPTJForCausalLM": "gptj",
    "trl-internal-testing/tiny-random-LlamaForCausalLM": "llama",
    "peft-internal-testing/tiny-dummy-qwen2": "qwen2",
}
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_SHAPE = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 1024,
}


def for_trl(checkout: Path) -> None:
    """Tiny models with TRL's chat templates, and the datasets that its own scripts make."""
    from datasets import DatasetDict

    templates = checkout / "trl/chat_templates"
    for name, (kind, template) in _TRL.items():
        text = (templates / f"{template}.jinja").read_text()
        _model(checkout / f"trl-internal-testing/tiny-{name}", kind, text, hidden_size=8)

    def save(data: DatasetDict, repository: str, config_name: str = "default", **_: Any) -> None:
        folder, files = checkout / repository, []
        for split, rows in data.items():
            rows.to_parquet(folder / config_name / f"{split}.parquet")
            files.append(f"  - {{split: {split}, path: {config_name}/{split}.parquet}}\n")
        with (folder / "configs").open("a") as configs:
            configs.write(f"- config_name: {config_name}\n  data_files:\n{''.join(files)}")

    DatasetDict.push_to_hub, original = save, DatasetDict.push_to_hub  # type: ignore[method-assign]
    try:
        for name in ("zen", "harmony", "toolcall"):
            folder = checkout / f"trl-internal-testing/{name}"
            if (folder / "README.md").exists():
                continue
            folder.mkdir(parents=True)
            path = checkout / f"scripts/generate_{name}_dataset.py"
            spec = importlib.util.spec_from_file_location(name, path)
            script = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(script)
            script.main(0.1, True, f"trl-internal-testing/{name}")
            configs = (folder / "configs").read_text()
            (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    finally:
        DatasetDict.push_to_hub = original  # type: ignore[method-assign]


def for_peft(checkout: Path) -> None:
    """Tiny models, and the file that makes the tests a package, which an sdist lacks."""
    (checkout / "tests/__init__.py").touch()
    for name, kind in _PEFT.items():
        _model(checkout / name, kind, None, hidden_size=32)


def _model(folder: Path, kind: str, template: str | None, hidden_size: int) -> None:
    """A model of a kind, and a tokenizer of bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    if (folder / "config.json").exists():
        return
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {token: number for number, token in enumerate([*alphabet, *_SPECIAL])}
    inner = Tokenizer(models.BPE(tokens, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=_SPECIAL[2],
        pad_token=_SPECIAL[0],
        additional_special_tokens=_SPECIAL[1:2],
    )
    tokenizer.chat_template = template
    shape = {**_SHAPE, "hidden_size": hidden_size, "vocab_size": len(tokens)}
    if kind not in ("opt", "gpt2", "gptj"):
        shape |= {"num_key_value_heads": 2, "head_dim": hidden_size // 4}
    if kind == "gptj":
        shape["rotary_dim"] = 4
    if kind == "opt":
        shape |= {"word_embed_proj_dim": hidden_size, "ffn_dim": 32}
    if kind in ("qwen3_moe", "gpt_oss"):
        shape |= {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
        shape["num_experts" if kind == "qwen3_moe" else "num_local_experts"] = 4
    ends = {"eos_token_id": tokens[_SPECIAL[2]], "pad_token_id": tokens[_SPECIAL[0]]}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **shape, **ends, bos_token_id=tokens[_SPECIAL[1]])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
