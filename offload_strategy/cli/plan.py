"""`ssd-offload plan`: needs and speed of a run, before anything is bought or started.

The options of all its forms are here, and what `--profile` and a script do: a lifetime plan for a
profiled step, and its replay. `plan_search` has what the others do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import runpy
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

from offload_strategy.cli.options import Command, Option, flags, given, rate, refuse
from offload_strategy.cli.plan_search import CPU, OF_GPUS, plan_here, plan_search
from offload_strategy.engine.profile_run import profile_run
from offload_strategy.errors import ConfigError
from offload_strategy.plan_runtime import lifetime_plan
from offload_strategy.plan_runtime.profile import PathRates, Profile
from offload_strategy.plan_runtime.replay import StepReplay, replay
from offload_strategy.planner.model_presets import PRESETS, from_config, preset
from offload_strategy.planner.search.search_result import USUAL_TOKENS, USUAL_TOLERANCE
from offload_strategy.planner.transformer_shape import Kind, TransformerShape
from offload_strategy.units import format_size, markdown_table

#: Usual vocabulary sizes of the kinds.
_VOCABULARY = {"gpt": 50257, "bert": 30522, "t5": 32128, "llama": 128256}
#: Options that need `--search`.
_OF_SEARCH = ("max_batch", "max_tokens", "tolerance", "sequences", "allow")
#: Options that have an effect only on the CPU.
_OF_CPU = ("update_rate", "read", "write", "duplex")
#: Options that have an effect only on a profiled step, and those that have none there.
_OF_STEP = ("device_memory", "write_plan")
#: The sizes of a model that has no name.
_SIZES = ("layers", "hidden", "heads", "kv_heads", "feed_forward", "vocabulary", "gated")
_OF_MODEL = (
    *("model", "config_json", *_SIZES, "batch", "sequence", "gpu", "ssd", "writes_per_day"),
    *("host_memory", *OF_GPUS, "duplex", "tflops", "update_rate", "write_config", "dir", "force"),
)
#: Tokens of a sequence for a model that names no length.
_USUAL_LENGTH = 2048


def _batch(text: str) -> int | str:
    return text if text == "auto" else int(text)


_KINDS = get_args(Kind)
_MODELS = f"one of {', '.join(PRESETS)}; or a kind, {', '.join(_KINDS)}, with the sizes below"
_DEVICES = (
    f"such as a100-80g; {CPU} for a machine that trains on its CPU, measured here if it can be"
)
_DIRECTORY = "directory on a drive for the config; may be repeated"
_ALLOW = "also try eager updates, which forbid clipping, or bfloat16 states, which change numbers"
_SCRIPT = (
    "a model: its folder or config.json, or a name of --model; no other option is needed. Or a "
    "training script that uses an offload engine, and its arguments: it is run for a few forward "
    "passes, for real, and then ended; options of plan come before it"
)
#: Options by group.
_OPTIONS: dict[str, list[Option]] = {
    "model": [
        ("--model NAME", _MODELS),
        ("--config-json FILE", "the config.json of a Hugging Face model instead"),
        ("--layers N", "layers of encoder and decoder together"),
        ("--hidden N", "width of the residual stream"),
        ("--heads N", "attention heads"),
        ("--kv-heads N", "key-value heads (default: as many as heads)"),
        ("--feed-forward N", "feed-forward width (default: 4 x hidden)"),
        ("--vocabulary N", "vocabulary size (default: the usual one of the kind)"),
        ("--gated", "use a gated feed-forward part"),
        ("--batch N", "sequences of a step on a GPU; or 'auto' with --search", {"type": _batch}),
        ("--sequence N", "tokens of each sequence"),
    ],
    "machine": [
        ("--gpu --device NAME", _DEVICES),
        ("--ssd [Nx]NAME", "drives, such as p5510 or 4xP5510"),
        ("--writes-per-day SIZE", "what a run may write to the drives in a day, such as 2TB"),
        ("--host-memory SIZE", "host memory, such as 768GiB"),
        ("--devices N", "GPUs of a machine, over all of which FSDP2 shards (default: 1)"),
        ("--machines N", "such machines; also says how speed grows with their number (default: 1)"),
        ("--interconnect GB/s", "between GPUs, in each direction (default: over the link)"),
        ("--network GB/s", "of each machine in each direction, for several machines"),
        ("--duplex", f"with --device {CPU}: drives read and write at full rates at the same time"),
        ("--tflops X", "sustained TFLOPS (default: as measured)", {"type": rate(1e12)}),
        ("--update-rate N", f"with --device {CPU}: updated parameters a second", {"type": rate()}),
    ],
    "search for the best settings": [
        ("--search", "find batch, micro-batches, tiers and what to offload; --batch is kept"),
        ("--max-batch N", "largest batch if --batch is searched"),
        ("--max-tokens N", f"largest number of tokens of such a step (default: {USUAL_TOKENS})"),
        ("--tolerance X", f"share of speed a smaller batch may cost (default: {USUAL_TOLERANCE})"),
        ("--sequences N", "lengths to choose from, instead of --sequence", {"nargs": "+"}),
        ("--allow", _ALLOW, {"action": "append", "choices": ("eager", "bfloat16")}),
        ("--write-config FILE", "write the best settings as a config file"),
        ("--dir PATH", _DIRECTORY, {"action": "append"}),
        ("--force", "overwrite the file of --write-config"),
    ],
    "a profiled step instead of a model": [
        ("--profile FILE", "JSON file of OffloadEngine.profile().save"),
        ("--device-memory SIZE", "memory of the step (default: half of the saved tensors stay)"),
        ("--read GB/s", "rate of the path (default: as in the profile)"),
        ("--write GB/s", "rate of the path (default: as in the profile)"),
        ("--write-plan FILE", "write the plan as JSON to read or change, for planning.plan"),
    ],
    "a model for this machine, or a training script": [
        ("script", _SCRIPT, {"nargs": argparse.REMAINDER, "metavar": "MODEL | SCRIPT ..."}),
        ("--passes N", "forward passes that are looked at (default: 8)", {"default": 8}),
        ("--write-profile FILE", "as JSON, for --profile"),
    ],
}


_ABOUT = (
    "Say in three ways how a machine can train a model: what fits, how long a step takes and what "
    "limits it, how much host memory and disk it needs, how long the drives last, and what would "
    "make it twice as fast. The machine is this one, unless options say otherwise. With --search, "
    "find the fastest settings of any batch. With --profile, plan what is offloaded in a profiled "
    "step, and predict how long that takes. With a script, run its first steps and do the same for "
    "them. The exit status is 1 if the run would not fit."
)


def _plan(options: argparse.Namespace) -> int:
    path = Path(options.script[0]) if options.script else None
    if path and path.suffix != ".py" and (path.suffix == ".json" or not path.is_file()):
        # A model that is named without an option; options may follow it.
        model, *rest = options.script
        options = options.parser.parse_args(rest, options)
        if options.script or options.model or options.config_json:
            raise ConfigError(f"give one model: {model} is one already")
        options.model, options.config_json = (None, path) if path.exists() else (model, None)
    _check_options(options)
    if options.script:
        return plan_profile(options, profile_script(options))
    if options.profile is not None:
        return plan_profile(options, Profile.load(options.profile))
    if options.search:
        options.batch = None if options.batch == "auto" else options.batch
        if not options.sequences:
            _require(options, ["sequence"], ", or --sequences")
        return plan_search(options, _shape(options))
    # With the longest sequences that the model is made for.
    shape, source = _shape(options), "as given"
    if options.sequence is None:
        known = 0 if (options.model or "").lower() in _KINDS else shape.max_positions
        source = "the model's context length" if known else "assumed: say another with --sequence"
        options.sequence = known or _USUAL_LENGTH
    return plan_here(options, shape, source)


def _check_options(options: argparse.Namespace) -> None:
    """Raise a ConfigError that names options without effect on what is planned."""
    if options.script:
        named = ("profile", "search", *_OF_MODEL)
        refuse(options, named, f"no effect with a script ({options.script[0]}): leave it out")
    else:
        refuse(options, ("write_profile",), "for a script: name one, or leave it out")
    if options.search and options.profile is not None:
        raise ConfigError("--search is for a model, --profile for a step of one: give one of them")
    if options.profile is not None:
        refuse(options, _OF_MODEL, "no effect with --profile, a step of a model: leave it out")
    elif not options.script:
        refuse(options, _OF_STEP, "for a profiled step: give --profile or a script as well")
    if not options.search:
        refuse(options, _OF_SEARCH, "give --search as well, or leave it out")
        if options.batch == "auto":
            raise ConfigError("--batch auto: give --search as well, or how many sequences")
    if options.gpu not in (None, CPU) and not (options.profile or options.script):
        why = "no effect for a GPU, which updates states itself and uses drives of the table"
        refuse(options, _OF_CPU, f"{why}; leave it out")


def _require(options: argparse.Namespace, names: Iterable[str], otherwise: str) -> None:
    """Raise a ConfigError that names options that are missing."""
    if missing := [name for name in names if getattr(options, name) is None]:
        raise ConfigError(f"give {flags(missing)} as well{otherwise}")


def _shape(options: argparse.Namespace) -> TransformerShape:
    if (options.model is None) == (options.config_json is None):
        raise ConfigError("give one of --model and --config-json")
    kind: Any = (options.model or "").lower()
    if kind not in _KINDS:
        refuse(options, _SIZES, "for a kind: this model has sizes of its own, so leave it out")
        return from_config(options.config_json) if kind == "" else preset(options.model)
    _require(options, ("layers", "hidden", "heads"), ", or the name of a model instead of a kind")
    longest = max(options.sequences or [options.sequence or _USUAL_LENGTH])
    usual: dict[str, Any] = {"vocabulary": _VOCABULARY[kind], "gated": kind == "llama"}
    return TransformerShape(
        kind,
        **usual | given(options, *_SIZES),
        tied=kind != "llama",
        max_positions=longest,
        decoder_layers=options.layers // 2 if kind == "t5" else 0,
    )


def plan_profile(options: argparse.Namespace, profile: Profile) -> int:
    """Plan and replay a profiled step; return 1 if it does not fit."""
    rates = given(options, "read", "write")
    if profile.path is None and len(rates) < 2:
        raise ConfigError("the profile knows no path: give --read and --write")
    path = replace(profile.path or PathRates("path", 1.0, 1.0), **rates)
    profile, limit = replace(profile, paths=(path,)), options.device_memory
    if limit is None:
        usable = profile.other_bytes + (profile.peak_bytes - profile.other_bytes) // 2
    else:
        usable = lifetime_plan.usable_bytes(limit, keeps_freed=profile.keeps_freed)
    plan = lifetime_plan.plan_lifetimes(profile, usable)
    found = replay(profile, plan)
    if options.write_plan is not None:
        lifetime_plan.save_plan(plan, profile, options.write_plan)
    if options.json:
        print(json.dumps({"plan": asdict(plan), "replay": asdict(found)}, indent=2))
    else:
        if limit is not None:
            print(f"Of the {format_size(limit)} given, {format_size(usable)} are planned for.\n")
        print(_text(profile, plan, found))
    return 0 if plan.fits else 1


def _text(profile: Profile, plan: lifetime_plan.LifetimePlan, found: StepReplay) -> str:
    waits = ", ".join(f"{seconds:.3f} s for {what}" for what, seconds in found.stalls.items())
    lanes = (
        (name, format_size(use.nbytes) if use.nbytes else "", f"{use.busy_share:.0%}")
        for name, use in found.lanes.items()
    )
    is_good = plan.fits and plan.hidden
    advice = "" if is_good else f"\n\nTo leave less to the path, {lifetime_plan.CHECKPOINT}."
    return (
        f"{plan}\n\n"
        f"Replayed: a step of {found.step_seconds:.3f} s, {found.computing_seconds:.3f} s of it "
        f"computing; it waits {waits}. Peak {format_size(found.peak_bytes)}, without offload "
        f"{format_size(profile.peak_bytes)}.\n\n"
        f"{markdown_table('lane | moved | busy', lanes)}{advice}"
    )


def profile_script(options: argparse.Namespace) -> Profile:
    """Run the script until its profile is known, or raise a ConfigError that says why it is not."""
    file, *arguments = options.script
    if not Path(file).is_file():
        raise ConfigError(f"{file} is no file; give a training script")
    if options.passes < 2:
        raise ConfigError(f"--passes is {options.passes}; give 2 or more")
    with profile_run(options.passes) as found:
        _run(file, arguments)
    if not found.seen:
        raise ConfigError(
            f"{file} ended without a forward pass of a model that an offload engine was attached "
            "to. Use the strategy, the plugin or OffloadEngine in it, with activations.enabled; "
            "under Accelerate: `accelerate launch --config_file FILE $(which ssd-offload) plan "
            f"{file}`"
        )
    if found.profile is None:
        raise ConfigError(
            f"{file} ended after {found.seen} forward passes with an engine; {found.passes} and a "
            "backward are needed. Give a smaller --passes, or let it train for longer."
        )
    if options.write_profile is not None:
        found.profile.save(options.write_profile)
    return found.profile


def _run(file: str, arguments: list[str]) -> None:
    """Run `python FILE ARGUMENTS` with its output on standard error."""
    before = sys.argv, list(sys.path)
    sys.argv = [file, *arguments]
    sys.path.insert(0, str(Path(file).resolve().parent))
    try:
        with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(SystemExit):
            runpy.run_path(file, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before


_HELP = "predict what a run needs, how fast it is and what to change"
_JSON: Option = ("--json", "print the figures as JSON")
COMMAND = Command("plan", _plan, _HELP, [_JSON], _ABOUT, _OPTIONS)
