"""`MicroBatchHints` against what the strategy says by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offload_strategy import OffloadEngine
from offload_strategy.callbacks import MicroBatchHints
from tests.integrations.lightning_runs import assert_same, fit, make_module, with_engine


@pytest.mark.parametrize(
    "options", [{"max_steps": 9}, {"max_steps": -1, "max_epochs": 2, "limit_train_batches": 7}]
)
def test_the_hints_are_those_of_the_strategy_and_add_nothing_to_it(
    pl: Any, tmp_path: Path, hints: list[tuple[int, bool]], options: Any
) -> None:
    options = {"accumulate_grad_batches": 4, **options}
    plain = fit(pl, tmp_path, "auto", **options)
    # The callback adds nothing to the hints of the strategy.
    given = []
    for callbacks in ([], [MicroBatchHints()]):
        hints.clear()
        by_strategy = fit(pl, tmp_path, "ssd_offload", callbacks=callbacks, **options)
        given.append(list(hints))
    assert given[0] == given[1]
    # The first says before training that gradients will accumulate.
    expected = hints[1 : 1 + len(by_strategy.losses)]
    assert sum(last for _, last in expected) == by_strategy.trainer.global_step
    hints.clear()

    with OffloadEngine() as engine:
        module = with_engine(make_module(pl), engine)
        callbacks = [MicroBatchHints(engine)]
        by_callback = fit(pl, tmp_path, "auto", module, callbacks=callbacks, **options)
    assert hints == expected
    assert_same(by_strategy, plain)
    assert_same(by_callback, plain)


def test_manual_optimization_has_no_hints(
    pl: Any, tmp_path: Path, hints: list[tuple[int, bool]]
) -> None:
    options = {"max_steps": -1, "max_epochs": 1}
    fit(pl, tmp_path, "ssd_offload", make_module(pl, manual=True), **options)
    assert hints == [(0, False)]  # at the end of fit: no step follows
    hints.clear()
    with OffloadEngine() as engine:
        module = make_module(pl, manual=True)
        engine.attach(module)
        fit(pl, tmp_path, "auto", module, callbacks=[MicroBatchHints(engine)], **options)
    assert hints == []
