"""`MicroBatchHints` against what the strategy says by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offload_strategy import OffloadEngine
from offload_strategy.callbacks import MicroBatchHints
from tests.integrations.lightning_runs import assert_same, fit, make_module, with_engine


@pytest.mark.parametrize(
    "options",
    [{"max_steps": 9}, {"max_steps": -1, "max_epochs": 2, "limit_train_batches": 7}],
)
def test_the_hints_are_those_of_the_strategy(
    pl: Any, tmp_path: Path, hints: list[tuple[int, bool]], options: Any
) -> None:
    options = {"accumulate_grad_batches": 4, **options}
    plain = fit(pl, tmp_path, "auto", **options)
    by_strategy = fit(pl, tmp_path, "ssd_offload", **options)
    # The first says before training that gradients will accumulate.
    expected = hints[1 : 1 + len(by_strategy.losses)]
    assert sum(last for _, last in expected) == by_strategy.trainer.global_step
    hints.clear()

    with OffloadEngine() as engine:
        module = with_engine(make_module(pl), engine)
        by_callback = fit(
            pl, tmp_path, "auto", module, callbacks=[MicroBatchHints(engine)], **options
        )
    assert hints == expected
    assert_same(by_strategy, plain)
    assert_same(by_callback, plain)


def test_it_adds_nothing_to_the_hints_of_the_strategy(
    pl: Any, tmp_path: Path, hints: list[tuple[int, bool]]
) -> None:
    fit(pl, tmp_path, "ssd_offload", max_steps=3)
    expected = list(hints)
    hints.clear()
    fit(pl, tmp_path, "ssd_offload", max_steps=3, callbacks=[MicroBatchHints()])
    assert hints == expected


def test_manual_optimization_has_no_hints(
    pl: Any, tmp_path: Path, hints: list[tuple[int, bool]]
) -> None:
    with OffloadEngine() as engine:
        module = make_module(pl, manual=True)
        engine.attach(module)
        callbacks = [MicroBatchHints(engine)]
        fit(pl, tmp_path, "auto", module, callbacks=callbacks, max_steps=-1, max_epochs=1)
    assert hints == []
