"""The engine's metrics in whatever `report_to` of a Transformers or TRL Trainer names.

[Note: who sees the metrics]
`Trainer.log` gives one dictionary to all callbacks: those that report to TensorBoard, W&B or
MLflow, those that print, and the script's own. Dozens of figures would make the console unreadable,
and a script's callback may not expect them. So `Trainer.log` only notes what is due, and the
reporting callbacks, wherever in the list they are, get it beside the Trainer's own values: in the
same call at the same step. `state.log_history` and all other callbacks are as without offload.

These callbacks put "train/" before every name. The engine's names stay as they are, so that they
are the same in every framework.

This is installed when the first `Accelerator` that offloads is created: in the `Trainer` itself.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

_PREFIX = "offload/"
#: A key of the last values that a Trainer logs in a training.
_SUMMARY = "train_runtime"
_INSTALLED = "_ssd_offload_reports"

_due: ContextVar[Mapping[str, float]] = ContextVar("ssd_offload_due_metrics")


def install(session_of: Callable[[Any], Any]) -> None:
    """Let the Trainer and its reporting callbacks add what is due. Idempotent.

    Args:
        session_of: returns the session of an `Accelerator`, or None if it does not offload.
    """
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    reports = sys.modules.get("transformers.integrations.integration_utils")
    if trainer is None or reports is None or hasattr(trainer, _INSTALLED):
        return
    setattr(trainer, _INSTALLED, True)
    trainer.log = _noting(trainer.log, session_of)
    for callback in set(getattr(reports, "INTEGRATION_TO_CALLBACK", {}).values()):
        if "on_log" in vars(callback):
            callback.on_log = _adding(callback.on_log)
    if original := getattr(reports, "rewrite_logs", None):
        vars(reports)["rewrite_logs"] = _keeping_names(original)


def _noting(original: Callable[..., None], session_of: Callable[[Any], Any]) -> Callable[..., None]:
    @functools.wraps(original)
    def log(self: Any, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        session = session_of(getattr(self, "accelerator", None))
        token = _due.set({} if session is None else session.metrics(now=_SUMMARY in logs))
        try:
            original(self, logs, *args, **kwargs)
        finally:
            _due.reset(token)

    return log


def _adding(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def on_log(*args: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
        return original(*args, logs={**_due.get({}), **(logs or {})}, **kwargs)

    return on_log


def _keeping_names(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def rewrite_logs(d: Mapping[str, Any]) -> dict[str, Any]:
        ours = {key: value for key, value in d.items() if key.startswith(_PREFIX)}
        return {**original({key: d[key] for key in d if key not in ours}), **ours}

    return rewrite_logs
