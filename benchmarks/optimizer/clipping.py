"""Clipping on real text: the cost of updates that ran ahead of `step()` and run again.

The norms of a run without clipping give three limits: one that no step exceeds, one that about 5 %
exceed, one that nearly all do. Then contenders train alternately, from the same weights on the same
text; clipping begins when the norms have settled.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.io.results import Context, Result
from benchmarks.optimizer.contenders import Ours, plain_options
from benchmarks.optimizer.session import start
from benchmarks.optimizer.tasks import Text
from benchmarks.turns import by_turns

#: Steps of a turn; the first of them is not timed, see [Note: laps] in session.py.
_LAP = 5
#: Steps until the norms have settled: there is nothing to clip by before.
_SETTLING = 40
#: A limit by the share of steps that exceed it in the run without clipping.
_LIMITS = {"never": 0.0, "in about 5 %": 0.05, "in nearly all": 0.97}
#: Share of redone steps up to which clipping may cost this much.
_REDONE, _COST = 0.10, 1.05
_REDONE_STEPS = "offload/optimizer/redone_steps"
_SPECULATED_STEPS = "offload/optimizer/speculated_steps"
#: Running ahead in fewer steps than this counts as switched off.
_SPECULATES = 0.5
#: AdamW's learning rate: the norms come to rest with it.
_ADAMW = {"lr": 1e-3}


@dataclass
class _Row:
    """One contender.

    Args:
        laps: seconds of the timed steps of each lap.
        norms: of each step of the laps, timed or not.
        steps: the steps of the laps as the subject answered.
    """

    laps: list[float]
    norms: list[float]
    steps: list[dict[str, Any]]

    def share(self, key: str) -> float:
        """Share of the steps that a counter of the engine counted."""
        return statistics.fmean(step[key] for step in self.steps)


def clipping(context: Context, pinned: str, steps: int) -> tuple[str, list[Result]]:
    """Train with three limits; returns the table and the claims.

    Args:
        context: where, and how quick.
        pinned: bytes of our staging buffers.
        steps: that count, of each contender.
    """
    settling = 2 if context.quick else _SETTLING // _LAP
    laps = max(2, math.ceil(steps / _LAP))
    batches = _LAP * (settling + laps)
    task = Text(2, 64, 32, 2, batches) if context.quick else Text(8, 512, 256, 2, batches)
    context.say(f"clipping: norms of {batches} steps without it")
    norms = _norms(context, task, settling, laps)
    limits = {name: _limit(norms, share) for name, share in _LIMITS.items()}
    rows = _train(context, task, pinned, limits, settling, laps)
    return _table(rows, limits), _claims(rows, limits)


def _norms(context: Context, task: Text, settling: int, laps: int) -> list[float]:
    """Of every step after they have settled, without clipping."""
    with contextlib.ExitStack() as stack:
        options = {**plain_options(), "adamw": _ADAMW}
        subject, _ = start(stack, "plain PyTorch", options, task, context.directory)
        steps = subject.ask({"steps": _LAP * (settling + laps), "clip": math.inf})["steps"]
    return [step["norm"] for step in steps[_LAP * settling :]]


def _limit(norms: Sequence[float], share: float) -> float:
    """What a share of the norms exceed."""
    if share == 0.0:
        return 10 * max(norms)
    ordered = sorted(norms, reverse=True)
    place = min(len(ordered) - 2, int(share * len(ordered)))
    return (ordered[place] + ordered[place + 1]) / 2


def _train(
    context: Context,
    task: Text,
    pinned: str,
    limits: dict[str, float],
    settling: int,
    laps: int,
) -> dict[tuple[str, str], _Row]:
    contenders: dict[tuple[str, str], float | None] = {
        (overlap, limit): value
        for limit, value in {"without": None, **limits}.items()
        for overlap in ("commit", "off")
    }
    names = {f"{overlap}, {limit}": (overlap, limit) for overlap, limit in contenders}
    with contextlib.ExitStack() as stack:
        subjects = {}
        for name, (overlap, _) in names.items():
            options = {**Ours(overlap, pinned=pinned).options(), "adamw": _ADAMW}
            subjects[name], _ = start(stack, name, options, task, context.directory)

        def ask(name: str, number: int) -> dict[str, Any]:
            limit = contenders[names[name]]
            clips = limit is not None and number >= settling
            return subjects[name].ask({"steps": _LAP, **({"clip": limit} if clips else {})})

        found = by_turns(
            list(names),
            ask,
            warm_up=settling,
            repeats=laps,
            each_round=lambda number: context.say(f"clipping: lap {number + 1} of {laps}"),
        )
    rows = {}
    for name, key in names.items():
        steps = [step for lap in found[name] for step in lap["steps"]]
        timed = [sum(s["seconds"] for s in lap["steps"][1:]) for lap in found[name]]
        rows[key] = _Row(timed, [s["norm"] for s in steps if s["norm"] is not None], steps)
    return rows


def _noise(ours: Sequence[float], peer: Sequence[float]) -> float:
    """Two standard errors of the ratio of the sums, from how it varies from lap to lap."""
    ratio = sum(ours) / sum(peer)
    residuals = [a - ratio * b for a, b in zip(ours, peer, strict=True)]
    return 2 * statistics.stdev(residuals) * math.sqrt(len(ours)) / sum(peer)


def _claims(rows: dict[tuple[str, str], _Row], limits: dict[str, float]) -> list[Result]:
    results = []
    free = rows["commit", "without"]
    for limit in limits:
        ours, off = rows["commit", limit], rows["off", limit]
        redone, speculated = ours.share(_REDONE_STEPS), ours.share(_SPECULATED_STEPS)
        cheap = redone <= _REDONE and speculated >= _SPECULATES
        peer = free if cheap else off
        noise = _noise(ours.laps, peer.laps)
        ratio = sum(ours.laps) / sum(peer.laps)
        what = "without clipping" if cheap else "overlap: off"
        margin = "" if cheap else f" (≤ 1 and the noise of this run's laps, {noise:.3f})"
        per_step = len(ours.laps) * (_LAP - 1)
        results.append(
            Result(
                f"clipping {limit}: iteration relative to {what}{margin}",
                sum(ours.laps) / per_step, sum(peer.laps) / per_step, "s", ratio,
                _COST if cheap else round(1.0 + noise, 4), at_least=False,
                details={"redone": redone, "speculated": speculated, "noise": noise,
                         "our_laps": ours.laps, "peer_laps": peer.laps},
            )
        )  # fmt: skip
    return results


def _table(rows: dict[tuple[str, str], _Row], limits: dict[str, float]) -> str:
    free = rows["commit", "without"]
    lines = [
        f"{len(free.steps)} steps of each; ratios of all timed steps, ± two standard errors",
        "",
        "| clipping | limit | overlap | steps clipped | redone | ran ahead | iteration, s "
        "| of commit without clipping | of off with the same limit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (overlap, limit), row in rows.items():
        value = limits.get(limit)
        clipped = [norm > value for norm in row.norms] if value is not None else []
        off = rows["off", limit]
        lines.append(
            f"| {limit} | {'' if value is None else f'{value:.4g}'} | {overlap} "
            f"| {f'{sum(clipped) / len(clipped):.0%}' if clipped else ''} "
            f"| {row.share(_REDONE_STEPS):.0%} | {row.share(_SPECULATED_STEPS):.0%} "
            f"| {sum(row.laps) / len(row.laps) / (_LAP - 1):.3f} "
            f"| {_ratio(row.laps, free.laps)} | {_ratio(row.laps, off.laps)} |"
        )
    return "\n".join(lines)


def _ratio(ours: Sequence[float], peer: Sequence[float]) -> str:
    if ours is peer:
        return "1"
    return f"{sum(ours) / sum(peer):.3f} ± {_noise(ours, peer):.3f}"
