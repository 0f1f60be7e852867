"""Plain PyTorch, DeepSpeed and this package: seconds, memory and bytes of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.io.results import Context, Result, Skipped
from benchmarks.optimizer.claims import check_losses, claims_of
from benchmarks.optimizer.contender_sets import (
    ALLOCATORS,
    CONTEST,
    CONTEST_OF_ONE,
    DEFAULTS,
    OURS,
    SESSIONS,
    TABLE,
    Choice,
)
from benchmarks.optimizer.contenders import (
    DEEPSPEED,
    DEEPSPEED_DEFAULTS,
    PLAIN,
    deepspeed_options,
)
from benchmarks.optimizer.deepspeed_peer import Settings
from benchmarks.optimizer.deepspeed_search import check_buffers, fastest_settings
from benchmarks.optimizer.session import Outcome, run
from benchmarks.optimizer.tasks import RandomTokens
from offload_strategy.units import MiB


def table_of(
    context: Context, choice: Choice, sessions: Sequence[str] = TABLE
) -> tuple[str, list[Result]]:
    """Every model in some sessions; returns the tables and the claims."""
    texts: list[str] = []
    results: list[Result] = []
    for model in choice.models:
        for session in sessions:
            try:
                outcome = session_of(context, choice, model, session)
            except Skipped as why:
                context.say(f"{model}, {session}: {why}")
                continue
            check_losses(outcome.rows, f"{model}, {session}")
            texts.append(f"{model}, {session}\n\n{markdown(outcome)}")
            results += claims_of(model, session, outcome)
            context.say("\n" + texts[-1])
    return "\n\n".join(texts), results


def contest(context: Context, choice: Choice) -> tuple[str, list[Result]]:
    """All contenders; returns the tables and the claims."""
    text, results = table_of(context, choice, CONTEST)
    more, others = table_of(context, replace(choice, models=choice.models[:1]), CONTEST_OF_ONE)
    return f"{text}\n\n{more}", results + others


def session_of(context: Context, choice: Choice, model: str, session: str) -> Outcome:
    """A session of a model; held once for all lines of a run that look at it.

    Raises:
        Skipped: none of its contenders was chosen.
    """
    key = f"{model}, {session}"
    if key not in context.shared:
        names = [name for name in SESSIONS[session] if name == PLAIN or name in choice.contenders]
        if names == [PLAIN]:
            raise Skipped("none of its contenders was chosen")
        task = choice.task(model, context)
        contenders: dict[str, dict[str, Any]] = {}
        missing: dict[str, str] = {}
        for name in names:
            try:
                contenders[name] = _options(context, choice, model, name, task)
            except Skipped as why:
                missing[name] = str(why)
                context.say(f"{name} does not take part: {why}")
        if session == DEFAULTS and DEEPSPEED_DEFAULTS in missing:
            choice.left_out[key] = missing[DEEPSPEED_DEFAULTS]
            raise Skipped(missing[DEEPSPEED_DEFAULTS])
        context.say(f"{key}: {', '.join(contenders)}")
        outcome = run(contenders, task, context, allocator=ALLOCATORS.get(session))
        outcome.skipped |= missing
        context.shared[key] = outcome
    held: Outcome = context.shared[key]
    return held


def _options(
    context: Context, choice: Choice, model: str, name: str, task: RandomTokens
) -> dict[str, Any]:
    """Of a contender; DeepSpeed's are searched for, once for each model.

    Raises:
        Skipped: it cannot take part.
    """
    if name == DEEPSPEED_DEFAULTS:
        check_buffers(Settings(), task)
    if name != DEEPSPEED:
        return choice.options(name)
    settings = choice.deepspeed or choice.fastest.get(model)
    if settings is None:
        tried = choice.searched.setdefault(model, [])
        known = next(reversed(choice.fastest.values()), None)
        settings = fastest_settings(context, task, tried, known)
        choice.fastest[model] = settings
    context.say(f"DeepSpeed: {settings.shown()}")
    return deepspeed_options(settings)


def markdown(outcome: Outcome) -> str:
    """Medians of a session's laps, as a table."""
    rows, disk = outcome.rows, outcome.disk
    plain = rows[PLAIN]
    lines = [
        f"{outcome.parameters / 1e6:.1f}M parameters; disk: {disk.read / 1e9:.2f} GB/s read, "
        f"{disk.write / 1e9:.2f} GB/s written (medians of the rounds)",
        "",
        "| | forward, s | backward, s | end of backward to end of step, s | zero_grad, s "
        "| iteration, s | of plain | peak, MiB | of it anonymous | of plain | read, MB "
        "| written, MB | states read + written, MB | waited for states + activations, s "
        "| last loss |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        states = waited = ""
        if name in OURS or name.startswith("preset"):
            read = row.median("offload/optimizer/read_bytes") / 1e6
            states = f"{read:.0f} + {row.median('offload/optimizer/written_bytes') / 1e6:.0f}"
            waited = f"{row.median('offload/optimizer/stall_seconds'):.3f}"
            waited += f" + {row.median('offload/activations/stall_seconds'):.3f}"
        lines.append(
            f"| {name} | {row.median('forward_seconds'):.3f} | {row.median('backward_seconds'):.3f}"
            f" | {row.median('step_seconds'):.4f} | {row.median('zero_grad_seconds'):.4f} "
            f"| {row.median('seconds'):.3f} | {row.ratio(plain, 'seconds'):.3f} "
            f"| {row.median('peak_bytes') / MiB:.0f} | {row.median('anonymous_bytes') / MiB:.0f} "
            f"| {row.ratio(plain, 'peak_bytes'):.3f} | {row.median('read_bytes') / 1e6:.0f} "
            f"| {row.median('written_bytes') / 1e6:.0f} | {states} | {waited} "
            f"| {float.fromhex(row.losses[-1]):.6f} |"
        )
    lines += [f"\n{name} does not take part: {why}" for name, why in outcome.skipped.items()]
    return "\n".join(lines)
