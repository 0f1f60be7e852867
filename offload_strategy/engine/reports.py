"""What an engine reports: the weight schedule, profiles, predictions, metrics and traces."""

from __future__ import annotations

import math
import os
import platform
from bisect import bisect_right
from dataclasses import replace
from datetime import UTC, datetime
from itertools import accumulate, starmap

import torch

from offload_strategy.activations.saved_tensor_hooks import ActivationOffload
from offload_strategy.config import OffloadConfig
from offload_strategy.engine.attached_optimizers import AttachedOptimizers
from offload_strategy.engine.automatic_choice import AutomaticChoice
from offload_strategy.engine.metrics import Metrics
from offload_strategy.engine.model_weights import EngineWeights
from offload_strategy.engine.run_report import RunReport, timeline
from offload_strategy.engine.step_log import StepLog, compare_step, compared_path
from offload_strategy.errors import ConfigError
from offload_strategy.plan_runtime.predicted_and_measured import best_changes
from offload_strategy.plan_runtime.profile import MemoryCurve, Profile, Update
from offload_strategy.plan_runtime.replay import replay
from offload_strategy.plan_runtime.weight_schedule import BlockPass, WeightSchedule, weight_schedule
from offload_strategy.telemetry import Recorder, get_logger, write_trace

logger = get_logger(__name__)


class EngineReports(EngineWeights):
    """The methods of `OffloadEngine` that only read what the engine has seen."""

    config: OffloadConfig
    _recorder: Recorder
    _activations: ActivationOffload | None
    _optimizers: AttachedOptimizers
    _choice: AutomaticChoice
    _metrics: Metrics
    _log: StepLog
    _device: torch.device

    def plan(self) -> WeightSchedule:
        """Return what one step moves of streamed weights and states, block by block; printable.

        Blocks are in the order of the last step, and before the first step in module order.

        Raises:
            ConfigError: weights are not streamed.
        """
        self._check_open()
        parameters = [p for optimizer in self._optimizers for p in optimizer.parameters()]
        trained = sum(p.nbytes for p in parameters if p.requires_grad)
        share = self._optimizers.state_bytes / trained if trained else 0.0
        stream, config = self._stream, self.config
        if stream is None:
            raise ConfigError("plan: no weights are streamed. Set parameters.enabled: true.")
        order, learned = stream.schedule()
        passes = [
            BlockPass(block.name, backward, block.nbytes, block.trained, int(block.trained * share))
            for block, backward in order
        ]
        most, updates = config.parameters.blocks_in_flight, config.optimizer.overlap != "off"
        return weight_schedule(passes, most, learned=learned, updates=updates)

    def profile(self) -> Profile:
        """Return when the last step saved, used and freed each storage, and when it updated what.

        The profile is the input of `plan_runtime.lifetime_plan` and `plan_runtime.replay`; its
        `save` writes a file for ``ssd-offload plan --profile``. Stall time is left out.

        Raises:
            ConfigError: no step was trained yet, or activations are not offloaded.
        """
        self._check_open()
        activations = self._activations
        latest = None if activations is None else activations.latest_pass()
        if activations is None or latest is None:
            raise ConfigError(
                "profile: no backward pass has finished yet. Train a step first, with "
                "activations.enabled: true."
            )
        trace, _, ended_at = latest
        start = trace.started_at
        timings = [one for one in self._recorder.updates.copy() if one.begin >= start]
        # Updates run between the nodes of backward: their time is not the model's.
        busy = [(timing.begin, timing.end) for timing in timings]
        found = activations.profiler.profile(trace, ended_at, busy)
        updates = []
        ended = sorted(timings, key=lambda one: one.end)
        seconds_of = [0.0, *accumulate(one.end - one.begin for one in ended)]
        for timing in sorted(timings, key=lambda one: one.begin):
            before = bisect_right(ended, timing.begin, key=lambda one: one.end)
            ready = timing.begin - start - seconds_of[before]
            # What `step()` does comes after all that is computed.
            ready = min(max(ready, found.forward_seconds), found.step_seconds)
            seconds = timing.end - timing.begin - timing.waited
            updates.append(Update(ready, seconds, timing.read_bytes, timing.written_bytes))
        return replace(found, updates=tuple(updates), shared_cores=self._device.type == "cpu")

    def report(self) -> RunReport:
        """Return what the run did and how its last step went; a notebook shows it as a page.

        Its `save` writes a file for ``ssd-offload report``. Its comparison of the last five steps'
        median with a replay of the last profile is None before the third step. Without offloaded
        activations, and before the first backward has ended, the report has metrics alone. Raises
        OffloadError if the engine is closed.
        """
        self._check_open()
        date = datetime.now(UTC).isoformat(timespec="seconds")
        found = RunReport(
            about=f"{date} · {platform.node()} · {self._device} · torch {torch.__version__}",
            metrics={key: one for key, one in self.metrics().items() if math.isfinite(one)},
            config=self.effective_config().to_yaml(),
            paths=tuple(starmap(compared_path, self._resources.measured_paths.comparisons())),
        )
        activations = self._activations
        latest = None if activations is None else activations.latest_pass()
        if activations is None or latest is None:
            return found
        states, seen = self._optimizers.state_bytes, self._log.middle_step()
        step, comparison = compare_step(self.profile(), activations, self._resources, states, seen)
        profile = step.profile
        without = MemoryCurve(profile)
        return replace(
            found,
            timeline=timeline(*latest, profile.others, self._recorder),
            memory={
                "with offload": replay(profile, step.plan).memory,
                "without": tuple(zip(without.moments, [*without.levels, 0], strict=True)),
            },
            comparison=comparison,
            changes=tuple(best_changes(step)),
        )

    def save_report(self) -> None:
        """Write the report into the file that the config names, if any; never fails."""
        file, rank = self.config.report, os.environ.get("RANK", "0")
        if file is None or self.closed:
            return
        try:
            self.report().save(file if rank == "0" else file.with_stem(f"{file.stem}-{rank}"))
        except Exception as error:  # training has ended well
            logger.warning("the report of the run is not written: %s", error)

    def effective_config(self) -> OffloadConfig:
        """Return the config with what was decided automatically, which trains in the same way.

        Activations are decided while they are saved: call it after some steps.
        """
        planned = None if self._activations is None else self._activations.planned
        return self._choice.effective(None if planned is None else planned.limit_bytes)

    def metrics(self) -> dict[str, float]:
        """Return the current metrics in bytes, seconds, GB/s (1e9 bytes per second) and shares.

        `offload/endurance/projected_years` is NaN while no tier has a rated
        endurance (``tiers[].endurance_tbw``) or nothing was written.
        """
        activations = {} if self._activations is None else self._activations.figures()
        optimizers = [optimizer.figures() for optimizer in self._optimizers]
        return self._metrics.read(self._device, activations, optimizers)

    def export_trace(self, file: str | os.PathLike[str]) -> None:
        """Write the latest transfers and stalls to a JSON file for Perfetto or chrome://tracing."""
        write_trace(file, self._recorder.moves, self._recorder.stalls)
