"""Streamed weights through both frameworks: nothing but the config says so, and no bit differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offload_strategy import SSDOffloadPlugin
from tests.integrations.accelerate_runs import _fresh_accelerate, prepare
from tests.integrations.lightning_runs import assert_equal, assert_same, fit, strategy_class

__all__ = ["_fresh_accelerate"]


def config(overlap: str = "commit") -> dict[str, Any]:
    return {
        "parameters": {"enabled": True, "min_size": 1},
        "activations": {"min_size": 1},
        "optimizer": {"overlap": overlap},
    }


@pytest.mark.parametrize("overlap", ["commit", "eager", "off"])
def test_lightning_trains_and_validates_the_same(
    pl: Any, family: str, tmp_path: Path, overlap: str
) -> None:
    options = {"max_steps": 10, "validate": True, "accumulate_grad_batches": 2}
    streamed = fit(pl, tmp_path, strategy_class(family)(config=config(overlap)), **options)
    assert_same(streamed, fit(pl, tmp_path, **options))
    assert streamed.engine.metrics()["offload/parameters/read_bytes"] > 0


def test_lightning_clips_and_resumes_the_same(pl: Any, family: str, tmp_path: Path) -> None:
    finals = []
    for strategy in ("auto", strategy_class(family)(config=config())):
        folder = tmp_path / type(strategy).__name__
        saving = pl.callbacks.ModelCheckpoint(folder, save_last=True, every_n_train_steps=5)
        options = {"gradient_clip_val": 0.5, "enable_checkpointing": True}
        fit(pl, folder, strategy, max_steps=5, callbacks=[saving], **options)
        again = strategy if strategy == "auto" else strategy_class(family)(config=config())
        last = folder / "last.ckpt"
        finals.append(fit(pl, folder, again, ckpt_path=last, max_steps=10, **options).parameters)
    assert_equal(*finals)


@pytest.mark.parametrize("overlap", ["commit", "eager", "off"])
def test_accelerate_trains_the_same(overlap: str) -> None:
    plain = prepare(gradient_accumulation_steps=2).train(10)
    streamed = prepare(SSDOffloadPlugin(config=config(overlap)), gradient_accumulation_steps=2)
    streamed.train(10)
    assert streamed.losses == plain.losses
    assert streamed.engine.metrics()["offload/parameters/read_bytes"] > 0
    streamed.engine.close()
    assert_equal(streamed.parameters, plain.parameters)
