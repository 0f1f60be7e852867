"""``overlap: eager`` through the frameworks: their hints suffice, what it lacks is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offload_strategy import ConfigError, OffloadError, SSDOffloadPlugin
from tests.integrations.accelerate_runs import _fresh_accelerate, prepare
from tests.integrations.lightning_runs import assert_equal, fit, strategy_class

__all__ = ["_fresh_accelerate"]

EAGER: dict[str, Any] = {"optimizer": {"overlap": "eager"}}


@pytest.mark.parametrize("accumulate", [1, 4])
def test_lightning_trains_to_the_same_bits(
    pl: Any, family: str, accumulate: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate, "max_steps": 9}
    plain = fit(pl, tmp_path, **options)
    offloaded = fit(pl, tmp_path, strategy_class(family)(config=EAGER), **options)
    assert offloaded.losses == plain.losses
    assert_equal(offloaded.parameters, plain.parameters)


def test_lightnings_clipping_is_refused_before_the_first_step(
    pl: Any, family: str, tmp_path: Path
) -> None:
    strategy = strategy_class(family)(config=EAGER)
    with pytest.raises(ConfigError, match=r"gradient_clip_val.*overlap: commit"):
        fit(pl, tmp_path, strategy, gradient_clip_val=1.0)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_accelerate_trains_to_the_same_bits(accumulate: int) -> None:
    options = {"gradient_accumulation_steps": accumulate}
    plain = prepare(**options).train(9)
    offloaded = prepare(SSDOffloadPlugin(EAGER), **options).train(9)
    assert offloaded.losses == plain.losses
    assert_equal(offloaded.parameters, plain.parameters)


def test_clipping_through_accelerate_is_refused_in_the_first_step() -> None:
    run = prepare(SSDOffloadPlugin(EAGER))
    with pytest.raises(OffloadError, match=r"overlap: commit"):
        run.train(1, clip=1.0)
