"""Streamed weights through both frameworks: nothing but the config says so, and no bit differs."""

import pytest
import torch
from accelerate import Accelerator, init_empty_weights
from torch import nn

from offload_strategy import SSDOffloadPlugin
from tests.integrations.lightning_runs import (
    FAMILIES,
    assert_same,
    batches,
    fit,
    make_module,
    make_trainer,
    strategy_class,
    tiny_model,
    with_and_without,
)


def config(overlap):
    return {
        "parameters": {"enabled": True, "min_size": 1},
        "activations": {"min_size": 1},
        "optimizer": {"overlap": overlap},
    }


def streaming(overlap):
    return strategy_class(FAMILIES[0])(config=config(overlap))


@pytest.mark.parametrize(("overlap", "clip"), [("commit", 0.5), ("eager", None)])
def test_lightning_accumulates_clips_validates_and_resumes_the_same(pl, tmp_path, overlap, clip):
    def run(name):
        first, second = (name if name == "auto" else streaming(overlap) for _ in range(2))
        folder = tmp_path / name
        saving = pl.callbacks.ModelCheckpoint(folder, save_last=True, every_n_train_steps=5)
        options = {"gradient_clip_val": clip, "enable_checkpointing": True, "validate": True}
        options["accumulate_grad_batches"] = 2
        fit(pl, folder, first, max_steps=5, callbacks=[saving], **options)
        return fit(pl, folder, second, ckpt_path=folder / "last.ckpt", max_steps=10, **options)

    assert with_and_without(run).engine.metrics()["offload/parameters/read_bytes"] > 0


def test_lightning_makes_a_model_that_does_not_fit(pl, tmp_path):
    away: list[int] = []

    class Late(type(make_module(pl))):  # type: ignore[misc]
        def __init__(self):
            super().__init__()
            self.net = nn.Identity()

        def configure_model(self):
            if isinstance(self.net, nn.Identity):
                torch.manual_seed(5)
                self.net = tiny_model()

        def on_fit_start(self):
            away.append(sum(type(p) is not nn.Parameter for p in self.parameters()))

    plain = fit(pl, tmp_path, module=Late(), max_steps=6)
    streamed = fit(pl, tmp_path, streaming("eager"), Late(), max_steps=6)
    assert away[0] == 0 < away[1]
    assert_same(streamed, plain)
    again = fit(pl, tmp_path, streaming("eager"), streamed.module, max_steps=6)
    assert len(again.losses) == 12
    again.trainer.strategy._close_engine()


def test_lightning_fills_an_empty_module_and_closes_its_engine(pl, tmp_path):
    for empty in (True, False):
        strategy = streaming("eager")
        trainer = make_trainer(pl, tmp_path, strategy, max_steps=3)
        with trainer.init_module(empty_init=empty):
            module = make_module(pl)
        assert all(parameter.is_meta for parameter in module.parameters()) is empty
        engine = strategy.offload_engine
        if empty:
            trainer.fit(module, batches())
            assert len(module.losses) == 3
            engine = strategy.offload_engine
        del trainer, strategy
        engine.close()
        for parameter in module.parameters():
            assert type(parameter) is nn.Parameter
            assert torch.isfinite(parameter).all()


def test_accelerate_fills_an_empty_model():
    with init_empty_weights():
        model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[SSDOffloadPlugin(config=config("eager"))])
    prepared, wrapped = accelerator.prepare(model, optimizer)
    x, y = next(iter(batches()))
    for _ in range(3):
        loss = nn.functional.mse_loss(prepared(x), y)
        accelerator.backward(loss)
        wrapped.step()
        wrapped.zero_grad()
        assert torch.isfinite(loss)
        del loss
    accelerator.free_memory(prepared, wrapped)
