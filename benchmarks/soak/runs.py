"""Random runs: what is trained, with which configuration, and what goes wrong meanwhile."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

#: What goes wrong, with how often it is drawn. See `training` and `processes`.
HOSTILITIES = {"none": 2, "kill": 5, "I/O error": 4, "reopen": 3, "exception": 4}
#: Those that need no process of their own.
WITHIN_A_PROCESS = ("none", "I/O error", "reopen", "exception")
OPTIMIZERS = ("AdamW", "AdamW, fused", "Adam", "SGD with momentum", "Adafactor")
TIERS = ("ssd", "dram, ssd", "ssd of two paths")
MODELS = ("GPT-2", "Llama", "BERT", "T5", "ViT", "Mixtral")


@dataclass(frozen=True)
class Run:
    """One training, which is the same whenever it is drawn from the same seed.

    Args:
        seed: of all that is random in it.
        model: a key of `MODELS`.
        sizes: what the model's config is made of, in Transformers' terms.
        batch: samples and tokens of a micro-batch.
        optimizer: one of `OPTIMIZERS`.
        tiers: one of `TIERS`.
        sections: of the config, without tiers.
        limit: for ``mode: auto``: the memory limit, in bytes of the weights on top of what the
            process has at attach; None without a limit.
        micro_batches: in a step.
        hints: whether micro-batches are announced.
        clip: maximum norm of the gradients, or None.
        autocast: whether the forward pass is computed in bfloat16.
        schedule: whether the learning rate changes with every step.
        frozen: whether every third parameter is frozen.
        checkpointing: whether activations are recomputed (`torch.utils.checkpoint`).
        hostility: one of `HOSTILITIES`.
        same_process: whether training goes on in the process that met the fault.
        before_attach: whether a checkpoint is loaded before `attach`, or after it.
        steps: in all.
        every: steps between two checkpoints.
    """

    seed: int
    model: str
    sizes: dict[str, Any]
    batch: tuple[int, int]
    optimizer: str
    tiers: str
    sections: dict[str, Any]
    limit: float | None
    micro_batches: int
    hints: bool
    clip: float | None
    autocast: bool
    schedule: bool
    frozen: bool
    checkpointing: bool
    hostility: str
    same_process: bool
    before_attach: bool
    steps: int
    every: int

    @property
    def overlap(self) -> str:
        """`optimizer.overlap`."""
        return str(self.sections.get("optimizer", {}).get("overlap", "commit"))

    @property
    def factors(self) -> dict[str, str]:
        """What runs are counted by."""
        sections = self.sections

        def on(value: object) -> str:
            return "on" if value else "off"

        automatic = self.limit is not None
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "overlap": self.overlap,
            "tiers": self.tiers,
            "activations": "auto" if automatic else on(sections["activations"]["enabled"]),
            "streamed weights": "auto" if automatic else on(sections["parameters"]["enabled"]),
            "checksum": sections["io"]["checksum"],
            "encryption": on(sections["io"]["encryption"]),
            "micro-batches": str(self.micro_batches),
            "clipping": on(self.clip),
            "bf16 autocast": on(self.autocast),
            "memory limit": on(automatic),
            "recomputation": on(self.checkpointing),
            "frozen parameters": on(self.frozen),
            "hostility": self.hostility,
        }

    def tiers_at(self, directories: list[Path]) -> list[dict[str, Any]]:
        """The config's tiers.

        Args:
            directories: for the paths; the first one or two are used.
        """
        chance = random.Random(self.seed)
        paths = [str(path) for path in directories]
        disk = {"name": "disk", "kind": "ssd", "path": paths[0], "capacity": "384MiB"}
        if self.tiers == "ssd of two paths":
            return [{**disk, "path": paths[:2]}]
        if self.tiers == "dram, ssd":
            room = chance.choice(["1MiB", "4MiB", "16MiB"])
            return [{"name": "host", "kind": "dram", "capacity": room}, disk]
        return [disk]


def drawn(seed: int, hostility: str | None = None, *, longest: int = 30) -> Run:
    """Draw a run.

    Args:
        seed: of the run.
        hostility: what goes wrong; None to draw that as well.
        longest: steps at most.
    """
    chance = random.Random(seed)
    names, weights = zip(*HOSTILITIES.items(), strict=True)
    drawn_hostility = chance.choices(names, weights)[0]
    limit = chance.uniform(0.0, 6.0) if chance.random() < 0.15 else None
    overlap = chance.choice(["commit", "commit", "eager", "off"]) if limit is None else "commit"
    sections = _sections(chance, overlap)
    if limit is not None:
        sections = {"mode": "auto", "io": sections["io"]}
    model = chance.choice(MODELS)
    steps = chance.randint(longest // 3, longest)
    eager = overlap == "eager"
    return Run(
        seed=seed,
        model=model,
        sizes=_sizes(model, chance),
        batch=(chance.randint(1, 4), chance.choice([16, 32, 48])),
        optimizer=chance.choice(OPTIMIZERS),
        tiers=chance.choice(TIERS),
        sections=sections,
        limit=limit,
        micro_batches=chance.choice([1, 1, 1, 2, 3]),
        hints=eager or chance.random() < 0.7,
        clip=None if eager or chance.random() < 0.6 else chance.choice([0.1, 1.0, 100.0]),
        autocast=chance.random() < 0.25,
        schedule=chance.random() < 0.5,
        frozen=chance.random() < 0.15,
        checkpointing=chance.random() < 0.15,
        hostility=hostility or drawn_hostility,
        same_process=chance.random() < 0.5,
        before_attach=chance.random() < 0.5,
        steps=steps,
        every=chance.randint(2, 6),
    )


def summary(run: Run) -> dict[str, Any]:
    """What a report says of a run."""
    return {key: value for key, value in asdict(run).items() if key not in ("seed", "hostility")}


def _sections(chance: random.Random, overlap: str) -> dict[str, Any]:
    """The config without its tiers and its limit."""
    streamed = chance.random() < 0.4
    return {
        "mode": "always",
        "activations": {
            "enabled": chance.random() < 0.75,
            "min_size": chance.choice([1, "4KiB", "64KiB"]),
            "budget": chance.choice(["100%", "100%", "50%", "auto"]),
        },
        "optimizer": {
            "enabled": chance.random() < 0.95,
            "overlap": overlap,
            "subgroup_size": chance.choice(["auto", 20_000, 100_000, 500_000]),
            "gradient_memory": chance.choice(["auto", "1KiB", "4MiB"]),
        },
        "parameters": {
            "enabled": streamed,
            "min_size": chance.choice([1, "16KiB", "256KiB"]),
            "blocks_in_flight": chance.choice([1, 2, 3]),
        },
        "io": {
            "checksum": chance.choice(["off", "sampled", "full"]),
            "encryption": chance.random() < 0.15,
            "block_size": chance.choice(["64KiB", "1MiB", "32MiB"]),
            "threads": chance.choice([1, 2, 4]),
        },
    }


def _sizes(model: str, chance: random.Random) -> dict[str, Any]:
    """A small config of a model."""
    heads = chance.choice([2, 4])
    width, layers = heads * 16 * chance.randint(1, 4), chance.randint(2, 5)
    words = chance.choice([128, 512, 2048])
    hidden = {
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
        "intermediate_size": 2 * width + 16 * chance.randint(0, 3),
    }  # fmt: skip
    text = {**hidden, "vocab_size": words, "max_position_embeddings": 64}
    decoder = {**text, "num_key_value_heads": heads // 2, "attention_dropout": 0.1,
               "use_cache": False}  # fmt: skip
    return {
        "GPT-2": {"vocab_size": words, "n_positions": 64, "n_embd": width, "n_layer": layers,
                  "n_head": heads, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2},
        "Llama": decoder,
        "BERT": text,
        "T5": {"vocab_size": words, "d_model": width, "d_kv": 16, "d_ff": 2 * width,
               "num_layers": max(2, layers // 2), "num_heads": heads,
               "decoder_start_token_id": 0, "use_cache": False},
        "ViT": {**hidden, "image_size": 32, "patch_size": 8, "num_labels": 10,
                "hidden_dropout_prob": 0.1},
        "Mixtral": {**decoder, "num_local_experts": 4, "output_router_logits": True},
    }[model]  # fmt: skip
