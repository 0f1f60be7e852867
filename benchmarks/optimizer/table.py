"""Plain PyTorch, DeepSpeed and this package: seconds, memory and bytes of a step."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.io.results import Context, Result, Skipped
from benchmarks.optimizer.contenders import (
    DEEPSPEED,
    DEEPSPEED_DEFAULTS,
    DEEPSPEED_HOST,
    DEEPSPEEDS,
    FILES,
    PLAIN,
    RECOMPUTE,
    TENSORNVME,
    Ours,
    deepspeed_options,
    plain_options,
    preset,
    simple_options,
)
from benchmarks.optimizer.deepspeed_peer import Settings
from benchmarks.optimizer.deepspeed_search import check_buffers, fastest_settings
from benchmarks.optimizer.session import Disk, Outcome, Rows, run
from benchmarks.optimizer.tasks import SHAPES, TINY, RandomTokens
from offload_strategy.config import presets
from offload_strategy.units import MiB

EAGER, COMMIT = "eager, activations too", "commit, activations too"
EAGER_STATES, COMMIT_STATES = "eager, states only", "commit, states only"
EAGER_BF16, COMMIT_BF16 = "eager, bfloat16", "commit, bfloat16"
EAGER_HOST, COMMIT_HOST = "eager, half on the host", "commit, half on the host"

#: memory.pinned: `eager` is for the least memory; in `commit` new weights wait for `step()`, and at
#: most half of it is for them.
_PINNED = {"eager": "88MiB", "commit": "3GiB"}


def _ours(overlap: str, **options: Any) -> Ours:
    return Ours(overlap, pinned=_PINNED[overlap], **options)


OURS = {
    EAGER: _ours("eager", activations=True),
    COMMIT: _ours("commit", activations=True),
    EAGER_STATES: _ours("eager"),
    COMMIT_STATES: _ours("commit"),
    EAGER_BF16: _ours("eager", activations=True, state_dtype="bfloat16"),
    COMMIT_BF16: _ours("commit", activations=True, state_dtype="bfloat16"),
    EAGER_HOST: _ours("eager", activations=True, host_share=0.5),
    COMMIT_HOST: _ours("commit", activations=True, host_share=0.5),
}
#: What each is, for the table.
MEANING = {
    PLAIN: "torch.optim.AdamW(fused=True), zero_grad(set_to_none=True), everything in memory",
    DEEPSPEED: "ZeRO-3 on the CPU accelerator, optimizer on NVMe, its own CPUAdam; with the "
    "fastest settings of several that were tried",
    DEEPSPEED_DEFAULTS: "the same with its own defaults, but for buffer_count 16 and pipelining",
    EAGER: "states and saved activations on the disk, overlap: eager",
    COMMIT: "the same, overlap: commit",
    EAGER_STATES: "states on the disk, activations in memory",
    COMMIT_STATES: "the same, overlap: commit",
    EAGER_BF16: "as the first of ours, states in bfloat16",
    COMMIT_BF16: "the same, overlap: commit",
    EAGER_HOST: "as the first of ours, a dram tier for half of the states' bytes in front",
    COMMIT_HOST: "the same, overlap: commit",
    RECOMPUTE: "torch.utils.checkpoint around every block, non-reentrant",
    FILES: "saved_tensors_hooks with torch.save and torch.load, a file each (the tutorial's)",
    TENSORNVME: "its DiskOffloader (libaio), one parameter's states read ahead, AdamW(fused=True)",
    DEEPSPEED_HOST: "ZeRO-3 on the CPU accelerator, optimizer in host memory, its own CPUAdam",
    **{preset(name): f"OffloadEngine('{name}'), on the same disk" for name in presets()},
}
#: All at once would not fit into memory: each session has those that are compared.
FIRST, SECOND, THIRD = "beside DeepSpeed", "less, and in bfloat16", "with a host tier"
DEFAULTS = "beside DeepSpeed with its defaults"
OTHERS, PRESETS = "other ways", "our presets"
SESSIONS = {
    FIRST: (PLAIN, DEEPSPEED, EAGER, COMMIT),
    DEFAULTS: (PLAIN, DEEPSPEED_DEFAULTS, EAGER, COMMIT),
    SECOND: (PLAIN, EAGER_STATES, COMMIT_STATES, EAGER_BF16, COMMIT_BF16),
    THIRD: (PLAIN, EAGER, EAGER_HOST, COMMIT_HOST),
    OTHERS: (PLAIN, RECOMPUTE, FILES, DEEPSPEED_HOST, TENSORNVME),
    PRESETS: (PLAIN, *(preset(name) for name in presets())),
}
#: Those of which the table consists, and those of the contest of all: of every model, of one.
TABLE = (FIRST, DEFAULTS, SECOND, THIRD)
CONTEST, CONTEST_OF_ONE = (FIRST, DEFAULTS), (OTHERS, PRESETS)
#: What must be reached, and what may be taken.
_FASTER, _STEP_FASTER, _PEAK = 1.8, 20.0, 0.25
_BESIDE_PLAIN, _PEAK_BESIDE_PLAIN = 1.03, 0.45
_HOST_CUT = 0.45


#: Sessions in which a contender takes part as a peer of others.
_JUDGED_BEFORE = {EAGER: (DEFAULTS, THIRD), COMMIT: (DEFAULTS,)}


@dataclass
class Choice:
    """What is trained and by whom, as the command line says.

    Args:
        models: of `SHAPES`.
        contenders: of those of `SESSIONS`; plain PyTorch always takes part.
        pinned: bytes of our staging buffers; None for what each contender has.
        budget: of our activations.
        deepspeed: its settings; None to search for the fastest.
        searched: what the search has tried, by model.
        fastest: of its settings, for the model that was searched last.
        left_out: sessions without the peer that they are for, and why.
    """

    models: Sequence[str] = tuple(SHAPES)
    contenders: Sequence[str] = tuple(MEANING)
    pinned: str | None = None
    budget: str = Ours.budget
    deepspeed: Settings | None = None
    searched: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    fastest: Settings | None = None
    left_out: dict[str, str] = field(default_factory=dict)

    def task(self, model: str, context: Context) -> RandomTokens:
        """The task of a model: batches of two sequences of 256 tokens."""
        return RandomTokens(TINY if context.quick else SHAPES[model])

    def options(self, name: str) -> dict[str, Any]:
        """Options of one of ours, or of plain PyTorch."""
        if name == PLAIN:
            return plain_options()
        if name == DEEPSPEED_HOST:
            return deepspeed_options(Settings(on_host=True))
        if name == DEEPSPEED_DEFAULTS:
            return {**deepspeed_options(Settings()), "contender": name}
        return self.ours(name).options() if name in OURS else simple_options(name)

    def ours(self, name: str) -> Ours:
        """One of `OURS`, as chosen."""
        setting = OURS[name]
        return replace(setting, pinned=self.pinned or setting.pinned, budget=self.budget)

    def meaning(self, name: str) -> str:
        """What a contender is."""
        pinned = f", memory.pinned {self.ours(name).pinned}" if name in OURS else ""
        return MEANING[name] + pinned


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
            _check_losses(outcome.rows, f"{model}, {session}")
            texts.append(f"{model}, {session}\n\n{markdown(outcome)}")
            results += _claims(model, session, outcome)
            context.say("\n" + texts[-1])
    return "\n\n".join(texts), results


def contest(context: Context, choice: Choice) -> tuple[str, list[Result]]:
    """Everybody who can train here; returns the tables and the claims."""
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
        outcome = run(contenders, task, context)
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
    settings = choice.deepspeed
    if settings is None:
        tried = choice.searched.setdefault(model, [])
        settings = fastest_settings(context, task, tried, choice.fastest)
        choice.fastest = settings
    context.say(f"DeepSpeed: {settings.shown()}")
    return deepspeed_options(settings)


# ---------------------------------------------------------------------- what must hold
def _check_losses(rows: Mapping[str, Rows], where: str) -> None:
    plain = rows[PLAIN].losses
    for name, row in rows.items():
        exact = name not in DEEPSPEEDS
        exact &= name not in OURS or OURS[name].state_dtype == "float32"
        if exact and row.losses != plain:
            raise RuntimeError(f"{where}: losses of {name!r} differ from those of {PLAIN}")


def _claims(model: str, session: str, outcome: Outcome) -> list[Result]:
    rows, disk = outcome.rows, outcome.disk
    results: list[Result] = []
    for name, everything in ((EAGER, True), (COMMIT, False)):
        for peer in (DEEPSPEED, DEEPSPEED_DEFAULTS):
            if name in rows and peer in rows:
                results += _beside_deepspeed(model, name, peer, rows, everything)
    for name in rows:
        if name in OURS and session not in _JUDGED_BEFORE.get(name, ()):
            results += _beside_plain(model, name, rows, disk)
    for name in (EAGER_HOST, COMMIT_HOST):
        if name in rows and EAGER in rows:
            results.append(_host_cut(model, name, rows))
    return results


def _beside_deepspeed(
    model: str, name: str, deepspeed: str, rows: Mapping[str, Rows], everything: bool
) -> list[Result]:
    ours, peer = rows[name], rows[deepspeed]
    faster = [
        Result(
            f"{model}: {name}: {what}, beside {deepspeed}",
            ours.median(key), peer.median(key), "s", peer.ratio(ours, key), least,
        )
        for what, key, least in (
            ("iteration", "seconds", _FASTER),
            ("end of backward to end of step", "step_seconds", _STEP_FASTER),
        )
    ]  # fmt: skip
    return [
        *faster,
        Result(
            f"{model}: {name}: peak memory, beside {deepspeed}",
            ours.median("peak_bytes") / MiB, peer.median("peak_bytes") / MiB, "MiB",
            ours.ratio(peer, "peak_bytes"), _PEAK, at_least=False, judged=everything,
        ),
    ]  # fmt: skip


def bounds(row: Rows, plain: Rows, disk: Disk) -> list[float]:
    """What each lap could take at best: plain's iteration, or its bytes at the disk's rates."""
    moved = zip(row.values("read_bytes"), row.values("written_bytes"), strict=True)
    return [
        max(seconds, disk.seconds(number, read, written))
        for number, (seconds, (read, written)) in enumerate(
            zip(plain.values("seconds"), moved, strict=True)
        )
    ]


def _beside_plain(model: str, name: str, rows: Mapping[str, Rows], disk: Disk) -> list[Result]:
    ours, plain = rows[name], rows[PLAIN]
    best = bounds(ours, plain, disk)
    share = [mine / least for mine, least in zip(ours.values("seconds"), best, strict=True)]
    return [
        Result(
            f"{model}: {name}: iteration, beside max(plain, its bytes at the disk's rates)",
            ours.median("seconds"), statistics.median(best), "s",
            statistics.median(share), _BESIDE_PLAIN, at_least=False,
            judged=name in (EAGER, COMMIT),
            details={"plain": plain.values("seconds"), "ours": ours.values("seconds"),
                     "bounds": best},
        ),
        Result(
            f"{model}: {name}: peak memory, beside plain",
            ours.median("peak_bytes") / MiB, plain.median("peak_bytes") / MiB, "MiB",
            ours.ratio(plain, "peak_bytes"), _PEAK_BESIDE_PLAIN, at_least=False,
            judged=name == EAGER,
        ),
    ]  # fmt: skip


def _host_cut(model: str, name: str, rows: Mapping[str, Rows]) -> Result:
    """What the host tier keeps from the disk, activations aside, which it does not hold."""

    def states(row: Rows) -> float:
        keys = ("offload/optimizer/read_bytes", "offload/optimizer/written_bytes")
        return sum(row.median(key) for key in keys)

    ours, peer = states(rows[name]), states(rows[EAGER])
    return Result(
        f"{model}: {name}: states read and written on the disk, cut",
        ours / MiB, peer / MiB, "MiB", 1 - ours / peer, _HOST_CUT,
        judged=name == EAGER_HOST,
    )  # fmt: skip


def rooflines(session: str, outcome: Outcome) -> list[dict[str, Any]]:
    """How far each of ours is from what its machine could do, and what is between.

    Args:
        session: its name.
        outcome: of it.
    """
    found = []
    for name, row in outcome.rows.items():
        if name not in OURS and not name.startswith("preset"):
            continue
        plain = outcome.rows[PLAIN]
        best = bounds(row, plain, outcome.disk)
        seconds = row.values("seconds")
        distance = statistics.median(a / b for a, b in zip(seconds, best, strict=True))
        clients = ("optimizer", "activations")
        waited = sum(row.median(f"offload/{client}/stall_seconds") for client in clients)
        slower = row.median("seconds") - waited - plain.median("seconds")
        by_disk = statistics.median(best) > 1.01 * plain.median("seconds")
        found.append(
            {
                "name": f"{session}: {name}",
                "seconds": row.median("seconds"),
                "best": statistics.median(best),
                "distance": distance,
                "limit": "the disk" if by_disk else "computing",
                "cause": f"{waited:.2f} s of waiting for the disk; computing and updates take "
                f"{max(0.0, slower):.2f} s more than plain PyTorch's",
            }
        )
    return found


# ---------------------------------------------------------------------- the table
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
