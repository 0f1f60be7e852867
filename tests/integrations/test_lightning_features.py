"""Everything that Lightning's Trainer can do, with the strategy and with "auto", to the last bit.

What is found has to be what the table in `docs/lightning.md` says. A feature is a function of a
`Session`, which returns all that a user can see of it: losses, parameters, what was logged, what
callbacks found. Nothing of it may depend on times or on paths.
"""

import csv
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from offload_strategy import OffloadError
from tests.integrations.lightning_runs import Behaviour, Session, batches, quiet
from tests.optimizer.runs import assert_same_state_dict


@dataclass(frozen=True)
class Feature:
    """A row of the table, by its name."""

    name: str
    run: Callable  # Does it in a session
    refused_with_eager: str | None = None  # What the error says; None where that works
    before_training: bool = True  # Whether it is raised before the first training step
    trains: bool = True  # Whether anything is to be moved


FEATURES = {}


def feature(name, **options):
    def add(run):
        FEATURES[name] = Feature(name, run, **options)
        return run

    return add


def fitted(name, behaviour=Behaviour, module=None, refused=None, before_training=True, **options):
    """A feature that is something a module does, or an option of the Trainer."""

    @feature(name, refused_with_eager=refused, before_training=before_training)
    def run(session):
        return session.outcome(*session.fit(session.module(behaviour, **module or {}), **options))


# ---------------------------------------------------------------------- precision

for _precision in ("32-true", "bf16-mixed", "bf16-true", "16-true", "64-true"):
    fitted(f'`precision="{_precision}"`', precision=_precision)


@feature('`precision="16-mixed"`, loss scaling', refused_with_eager="loss scaling.*overlap: commit")
def _half_mixed(session):
    # For the CPU the Trainer takes bf16-mixed instead, unless it is given the plugin itself. So
    # large a scale overflows: the first steps are skipped.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    plugin = session.pl.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)
    trainer, module = session.fit(plugins=[plugin], max_steps=30)
    assert scaler.get_scale() < 2.0**40
    return session.outcome(trainer, module, scale=scaler.get_scale())


# ---------------------------------------------------------------------- optimization


class _Adversarial(Behaviour):
    """Two losses and two optimizers, each trained by its own, with clipping by hand."""

    def __init__(self, clips=True):
        super().__init__(manual=True)
        self.clips = clips

    def training_step(self, batch, batch_idx):
        x, y = batch
        for optimizer, sign in zip(self.optimizers(), (1.0, -0.1), strict=True):
            self.toggle_optimizer(optimizer)
            loss = sign * nn.functional.mse_loss(self(x), y)
            self.losses.append(loss.item())
            optimizer.zero_grad()
            self.manual_backward(loss)
            if self.clips:
                self.clip_gradients(optimizer, gradient_clip_val=0.1)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.log("loss", self.losses[-1])


COMMIT = "overlap: commit"
IN_FIRST_STEP = {"refused": COMMIT, "before_training": False}
CLIPPED = f"gradient_clip_val.*{COMMIT}"
ONE_EPOCH, TWO_EPOCHS = ({"max_steps": -1, "max_epochs": epochs} for epochs in (1, 2))
MANUALLY = "manual optimization:"

fitted(f"{MANUALLY} two optimizers, toggled", _Adversarial, {"clips": False})
fitted(f"{MANUALLY} two optimizers, clipped", _Adversarial, **IN_FIRST_STEP)
several = {"module": {"manual": True}, **ONE_EPOCH}
fitted(f"{MANUALLY} several micro-batches to a step", **several, **IN_FIRST_STEP)
partial = {"accumulate_grad_batches": 4, "max_steps": 7}
fitted("`accumulate_grad_batches`, with a partial last group", **partial)
fitted("`gradient_clip_val`, by norm", refused=CLIPPED, gradient_clip_val=0.1)
by_value = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}
fitted("`gradient_clip_val`, by value", refused=CLIPPED, **by_value)


class _ClipsItself(Behaviour):
    def configure_gradient_clipping(self, optimizer, *args, **kwargs):
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


by_itself = f"configure_gradient_clipping.*{COMMIT}"
fitted("`configure_gradient_clipping` overridden", _ClipsItself, refused=by_itself)


class _LogsNorms(Behaviour):
    def on_before_optimizer_step(self, optimizer):
        from lightning.pytorch.utilities import grad_norm

        self.log_dict(grad_norm(self, norm_type=2))


fitted("gradient norms logged in `on_before_optimizer_step`", _LogsNorms, **IN_FIRST_STEP)


class _Plateau(Behaviour):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        monitored = {"scheduler": schedule, "monitor": "val_loss"}
        return {"optimizer": optimizer, "lr_scheduler": monitored}


fitted("`ReduceLROnPlateau`, monitoring", _Plateau, max_steps=40)


# ---------------------------------------------------------------------- the Trainer's options

fitted("`overfit_batches`", overfit_batches=3)
fitted("`fast_dev_run`", fast_dev_run=3)
limits = {"limit_train_batches": 4, "limit_val_batches": 1, "num_sanity_val_steps": 1}
fitted("`limit_train_batches`, `limit_val_batches`, `num_sanity_val_steps`", **limits)
often = {"val_check_interval": 3, "check_val_every_n_epoch": None}
fitted("`val_check_interval`, `check_val_every_n_epoch`", **often)
fitted("`detect_anomaly`", detect_anomaly=True, max_steps=4)
fitted("`deterministic`, `benchmark`", deterministic=True, benchmark=False)
fitted("`inference_mode=False`", inference_mode=False)
timed = {**TWO_EPOCHS, "min_epochs": 2, "max_time": "00:01:00:00"}
fitted("`max_time` (`Timer`), `min_epochs`, `max_epochs`", **timed)
fitted("`reload_dataloaders_every_n_epochs`", reload_dataloaders_every_n_epochs=1, max_steps=15)


@feature("`barebones`")
def _barebones(session):
    options = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    unset = dict.fromkeys((*options, "log_every_n_steps"))
    return session.outcome(*session.fit(barebones=True, **unset))


@feature("`trainer.validate`, `test` and `predict`, before and after `fit`")
def _evaluation(session):
    found = []
    trainer, module = session.trainer(), session.module()

    def evaluate():
        found.append(trainer.validate(module, batches(2), verbose=False))
        found.append(trainer.test(module, batches(2), verbose=False))
        found.append(trainer.predict(module, batches(2)))

    evaluate()
    trainer.fit(module, batches(), batches(2))
    evaluate()
    return session.outcome(trainer, module, found=found)


@feature("`trainer.test` and `predict` alone", trains=False)
def _test_alone(session):
    trainer, module = session.trainer(), session.module()
    tested = trainer.test(module, batches(2), verbose=False)
    return {"tested": tested, "predicted": trainer.predict(module, batches(2))}


@feature("`KeyboardInterrupt`, a checkpoint after it, and a resumed run")
def _interrupt(session):
    module = session.module(fails_at=(5, KeyboardInterrupt()))
    trainer = session.trainer()
    with pytest.raises((SystemExit, KeyboardInterrupt)):  # Lightning makes the former of it
        trainer.fit(module, batches(), batches(2))
    trainer.save_checkpoint(session.root / "interrupted.ckpt")
    ended = session.fit(ckpt_path=session.root / "interrupted.ckpt")
    return session.outcome(*ended, before=module.losses, interrupted=trainer.interrupted)


# ---------------------------------------------------------------------- callbacks


def with_callback(kind, arguments=None, name=None, **options):
    """A feature that is a callback, of which the state that it saves is compared as well."""

    @feature(name or f"`{kind}`")
    def run(session):
        callback = getattr(session.pl.callbacks, kind)(**arguments or {})
        trainer, module = session.fit(callbacks=[callback], **options)
        return session.outcome(trainer, module, state=callback.state_dict())


groups = {"scheduling": {0: 1, 1: 3}}
with_partial_group = "`GradientAccumulationScheduler`, with a partial last group"
with_callback("GradientAccumulationScheduler", groups, with_partial_group, **TWO_EPOCHS)
averaging = {"swa_lrs": 1e-2, "swa_epoch_start": 1}
with_callback("StochasticWeightAveraging", averaging, max_steps=-1, max_epochs=3)
with_callback("EMAWeightAveraging", name="`WeightAveraging`, `EMAWeightAveraging`", max_steps=15)
stopping = {"monitor": "loss", "stopping_threshold": 0.9, "check_on_train_epoch_end": True}
with_callback("EarlyStopping", stopping, max_steps=-1, max_epochs=6)
with_callback("LearningRateFinder", {"num_training_steps": 12, "early_stop_threshold": None})
pruning = {"pruning_fn": "l1_unstructured", "amount": 0.3, "use_global_unstructured": True}
with_callback("ModelPruning", pruning, **TWO_EPOCHS)


@feature("progress bars: `TQDMProgressBar`, `RichProgressBar`")
def _progress(session):
    shown = []

    class Shown(session.pl.callbacks.TQDMProgressBar):
        def get_metrics(self, *args):
            metrics = super().get_metrics(*args)
            shown.append(dict(metrics))
            return metrics

    first = session.outcome(*session.fit(callbacks=[Shown()], enable_progress_bar=True))
    rich = session.pl.callbacks.RichProgressBar()
    trainer, module = session.fit(callbacks=[rich], enable_progress_bar=True)
    assert shown
    return session.outcome(trainer, module, first=first, shown=shown)


@feature("batch-size finder: `BatchSizeFinder`, and a run with what it found")
def _batch_size(session):
    module = session.module()
    options = {"mode": "binsearch", "steps_per_trial": 2, "max_trials": 3, "init_val": 2}
    finder = session.pl.callbacks.BatchSizeFinder(**options)
    trainer = session.trainer(callbacks=[finder], max_steps=4, num_sanity_val_steps=0)
    trainer.fit(module, val_dataloaders=batches(2))
    return session.outcome(trainer, module, size=module.batch_size)


@feature("`ModelCheckpoint`: best, last, and resumed from with `ckpt_path`")
def _checkpoints(session):
    saving = session.pl.callbacks.ModelCheckpoint(
        session.root / "best", monitor="val_loss", save_top_k=2, save_last=True
    )
    options = {"callbacks": [saving], "enable_checkpointing": True}
    trainer, module = session.fit(session.module(scheduler=True), max_steps=20, **options)
    best = saving.best_model_path
    return session.outcome(
        *session.fit(session.module(scheduler=True), max_steps=30, ckpt_path=best),
        first=session.outcome(trainer, module),
        names=sorted(path.name for path in (session.root / "best").iterdir()),
        best=(Path(best).name, saving.best_model_score),
        last=_without_paths(torch.load(saving.last_model_path, weights_only=False)),
    )


@feature("`ModelCheckpoint(save_weights_only=True)`")
def _weights_only(session):
    saving = session.pl.callbacks.ModelCheckpoint(session.root / "weights", save_weights_only=True)
    trainer, module = session.fit(callbacks=[saving], enable_checkpointing=True)
    saved = torch.load(saving.best_model_path, weights_only=True)
    assert "optimizer_states" not in saved
    again = session.module()
    again.load_state_dict(saved["state_dict"])
    return session.outcome(trainer, module, saved=_without_paths(saved), again=again.state_dict())


def _without_paths(checkpoint):
    return {key: value for key, value in checkpoint.items() if key not in ("callbacks", "loops")}


@feature("`OnExceptionCheckpoint`")
def _on_exception(session):
    saving = session.pl.callbacks.OnExceptionCheckpoint(session.root / "failed")
    module = session.module(fails_at=(5, RuntimeError("the loader is gone")))
    trainer = session.trainer(callbacks=[saving], enable_checkpointing=True)
    with pytest.raises(RuntimeError, match="the loader is gone"):
        trainer.fit(module, batches(), batches(2))
    saved = torch.load(saving.ckpt_path, weights_only=False)
    return session.outcome(trainer, module, saved=_without_paths(saved))


@feature("`BasePredictionWriter`")
def _writer(session):
    written = []

    class Writer(session.pl.callbacks.BasePredictionWriter):
        def write_on_batch_end(self, trainer, module, prediction, *_):
            written.append(prediction)

    trainer, module = session.fit(callbacks=[Writer("batch")])
    trainer.predict(module, batches(2), return_predictions=False)
    return session.outcome(trainer, module, written=written)


@feature("`ModelSummary`")
def _summary(session):
    from lightning.pytorch.utilities.model_summary import ModelSummary, summarize

    shown = []

    class Shown(session.pl.callbacks.ModelSummary):
        def on_fit_start(self, trainer, module):
            shown.append(str(summarize(module, max_depth=2)))

    trainer, module = session.fit(callbacks=[Shown()], enable_model_summary=True)
    return session.outcome(trainer, module, shown=shown, after=str(ModelSummary(module, -1)))


# ---------------------------------------------------------------------- loggers and profilers


@feature("`LearningRateMonitor`, `DeviceStatsMonitor`, `ThroughputMonitor`, several loggers")
def _loggers(session):
    pl = session.pl
    # One that keeps what the others write, which have times in their files.
    loggers = [
        pl.loggers.CSVLogger(session.root, name="csv"),
        pl.loggers.TensorBoardLogger(session.root, name="board"),
    ]
    callbacks = [
        pl.callbacks.LearningRateMonitor("step", log_momentum=True),
        pl.callbacks.DeviceStatsMonitor(cpu_stats=True),
        pl.callbacks.ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2),
    ]
    module = session.module(scheduler=True)
    trainer, _ = session.fit(module, logger=loggers, callbacks=callbacks)
    with Path(loggers[0].log_dir, "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    timeless = ("lr-AdamW", "lr-AdamW-momentum", "loss", "mean", "val_loss", "epoch", "step")
    return {
        **session.outcome(trainer, module, logged={}, callbacks={}),
        "columns": list(rows[0]),
        "rows": [[row[name] for name in timeless] for row in rows],
        "files": sorted(path.name.split(".")[0] for path in Path(loggers[1].log_dir).iterdir()),
    }


def profiled(name, look, **options):
    @feature(f"`{name}`")
    def run(session):
        profiler = getattr(session.pl.profilers, name)(session.root, "profile", **options)
        trainer, module = session.fit(profiler=profiler, max_steps=5)
        seen = look(profiler, session.root)
        assert seen
        return session.outcome(trainer, module, seen=seen)


def _without_strategy(actions):
    """The actions that were timed, but for the hooks of the strategy, which bear its name."""
    return sorted(name for name in actions if not name.startswith("[Strategy]"))


def _in_file(profiler, root):
    (file,) = root.glob("fit-profile*.txt")
    heading = "Profile stats for: "
    lines = [line for line in file.read_text().splitlines() if line.startswith(heading)]
    return _without_strategy(line.removeprefix(heading).split(" rank:")[0] for line in lines)


profiled("SimpleProfiler", lambda it, root: _without_strategy(it.recorded_durations))
profiled("AdvancedProfiler", _in_file)
profiled("PyTorchProfiler", lambda it, root: bool(it.function_events), export_to_chrome=False)


# ---------------------------------------------------------------------- every one of them

DOCUMENT = Path(__file__).parents[2] / "docs" / "lightning.md"


@pytest.mark.parametrize("feature", FEATURES.values(), ids=lambda feature: feature.name)
def test_a_feature_is_identical_or_refused(feature, tmp_path):
    expected = _run(feature, Session(tmp_path, None))
    verdicts = []
    for overlap in ("commit", "eager"):
        session = Session(tmp_path, overlap)
        if overlap == "eager" and feature.refused_with_eager is not None:
            with pytest.raises(OffloadError, match=feature.refused_with_eager):
                _run(feature, session)
            begun = sum(len(module.losses) for module in session.modules)
            # Of a step, which has two micro-batches at most.
            assert begun in ([0] if feature.before_training else [1, 2])
            # A backward that failed leaves nodes in autograd's queue, which the next one drops.
            torch.ones(1, requires_grad=True).sum().backward()
            verdicts.append("refused" if feature.before_training else "refused in the first step")
            continue
        assert_same_state_dict(_run(feature, session), expected, in_order=False)
        for client in ("activations", "optimizer"):
            assert (session.moved_bytes(client) > 0) == feature.trains
        verdicts.append("identical" if feature.trains else "identical; nothing is moved")
    row = f"| {feature.name} | {' | '.join(verdicts)} |"
    assert row in DOCUMENT.read_text().splitlines()


def _run(feature, session):
    with quiet():
        return feature.run(session)


def test_the_document_has_the_features_that_are_tried_and_no_others():
    pattern = r"^\| (.*?) \| (?:identical|refused)"
    assert re.findall(pattern, DOCUMENT.read_text(), flags=re.MULTILINE) == list(FEATURES)
