"""`ssd-offload plan`: needs and speed of a run, before anything is bought or started."""

from __future__ import annotations

import argparse
import json
from typing import Any, get_args

from offload_strategy.cli.plan_cpu import CPU, cpu_request
from offload_strategy.cli.plan_profile import add_profile_options, plan_profile
from offload_strategy.cli.plan_script import add_script_options, profile_script
from offload_strategy.cli.plan_search import (
    add_search_options,
    check_search_options,
    plan_search,
)
from offload_strategy.errors import ConfigError
from offload_strategy.plan_runtime.profile import Profile
from offload_strategy.planner.analysis import analyse
from offload_strategy.planner.costs import Prices
from offload_strategy.planner.hardware import device as device_named
from offload_strategy.planner.hardware import drive_set
from offload_strategy.planner.model_presets import PRESETS, from_config, preset
from offload_strategy.planner.request import Request
from offload_strategy.planner.saved_tensor_bytes import Workload
from offload_strategy.planner.transformer_shape import Kind, TransformerShape
from offload_strategy.units import parse_size

_TERA = 1e12
#: Usual vocabulary sizes of the kinds.
_VOCABULARY = {"gpt": 50257, "bert": 30522, "t5": 32128, "llama": 128256}


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of `ssd-offload`."""
    plan = commands.add_parser(
        "plan",
        help="predict what a run needs, how fast it is and what to change",
        description="Predict what fits, how long a step takes and what limits it, how much host "
        "memory and disk it needs and how long the drives last, from the shape of a model and the "
        "figures of a machine. With --search, find the fastest settings. With --profile, plan what "
        "is offloaded in a profiled step, and predict how long that takes. With a script, run its "
        "first steps and do the same for them. Otherwise nothing is opened or measured, except by "
        "a search on the CPU. The exit status is 1 if the run would not fit.",
    )
    _add_model(plan.add_argument_group("model"))
    _add_machine(plan.add_argument_group("machine"))
    _add_prices(plan.add_argument_group("prices, in US dollars"))
    add_search_options(plan.add_argument_group("search for the best settings"))
    add_profile_options(plan.add_argument_group("a profiled step instead of a model"))
    add_script_options(plan.add_argument_group("a training script instead of both"))
    plan.add_argument("--json", action="store_true", help="print the figures as JSON")
    plan.set_defaults(run=_plan)


def _add_model(group: Any) -> None:
    group.add_argument(
        "--model",
        metavar="NAME",
        help=f"one of {', '.join(PRESETS)}; or a kind, {', '.join(get_args(Kind))}, with "
        "the options below",
    )
    group.add_argument(
        "--config-json", metavar="FILE", help="the config.json of a Hugging Face model instead"
    )
    group.add_argument(
        "--layers", type=int, metavar="N", help="layers of encoder and decoder together"
    )
    group.add_argument("--hidden", type=int, metavar="N", help="width of the residual stream")
    group.add_argument("--heads", type=int, metavar="N", help="attention heads")
    group.add_argument(
        "--kv-heads", type=int, metavar="N", help="key-value heads (default: as many as heads)"
    )
    group.add_argument(
        "--feed-forward", type=int, metavar="N", help="feed-forward width (default: 4 x hidden)"
    )
    group.add_argument(
        "--vocabulary",
        type=int,
        metavar="N",
        help="vocabulary size (default: the usual one of the kind)",
    )
    group.add_argument("--gated", action="store_true", help="use a gated feed-forward part")
    group.add_argument(
        "--batch",
        type=_batch,
        metavar="N",
        help="sequences of a step; with --search, 'auto' or no value searches it",
    )
    group.add_argument("--sequence", type=int, metavar="N", help="tokens of each sequence")


def _add_machine(group: Any) -> None:
    group.add_argument(
        "--gpu",
        "--device",
        metavar="NAME",
        help=f"such as a100-80g; {CPU} with --search for a machine that trains on its CPU: figures "
        "that are not given are measured here",
    )
    group.add_argument("--ssd", metavar="[Nx]NAME", help="drives, such as p5510 or 4xP5510")
    group.add_argument("--host-memory", metavar="SIZE", help="host memory, such as 768GiB")
    group.add_argument(
        "--tflops",
        type=float,
        metavar="X",
        help="sustained TFLOPS of the device (default: as measured, or a share of the peak)",
    )
    group.add_argument(
        "--update-rate",
        type=float,
        metavar="N",
        help="parameters that the host updates in a second, such as 8e9 (default: Fuyou's host)",
    )


def _add_prices(group: Any) -> None:
    group.add_argument("--gpu-price", type=float, metavar="X", help="price of the device")
    group.add_argument("--ssd-price", type=float, metavar="X", help="price of each drive")
    group.add_argument(
        "--host-price", type=float, metavar="X", help="price of the rest of the machine"
    )
    group.add_argument(
        "--years",
        type=float,
        default=3.0,
        metavar="X",
        help="depreciation period in years (default: 3)",
    )


def _plan(options: argparse.Namespace) -> int:
    check_search_options(options)
    if options.script:
        _check_script_alone(options)
        return plan_profile(options, profile_script(options))
    if options.profile is not None:
        return plan_profile(options, Profile.load(options.profile))
    if options.search and options.gpu == CPU:
        return plan_search(options, cpu_request(options, _shape(options)))
    request = _request(options)
    if options.search:
        return plan_search(options, request)
    found = analyse(request)
    if options.json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        print(found)
    return 0 if all(fit.ok for fit in found.fits) else 1


def _check_script_alone(options: argparse.Namespace) -> None:
    given = {"--profile": options.profile, "--model": options.model}
    given |= {"--config-json": options.config_json, "--search": options.search or None}
    for name, value in given.items():
        if value is not None:
            raise ConfigError(
                f"{name} has no effect with a script ({options.script[0]}): leave it out"
            )


def _batch(text: str) -> int | None:
    return None if text == "auto" else int(text)


def _request(options: argparse.Namespace) -> Request:
    names = ["gpu", "ssd", "host_memory"]
    if not options.sequences:
        names.insert(0, "sequence")
    if not options.search:
        names.insert(0, "batch")
    missing = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) is None]
    if missing:
        raise ConfigError(f"give {', '.join(missing)} as well: `ssd-offload plan --help` says how")
    device, drives = device_named(options.gpu), drive_set(options.ssd)
    try:
        memory = parse_size(options.host_memory)
    except ValueError as error:
        raise ConfigError(f"--host-memory: {error}") from error
    return Request(
        shape=_shape(options),
        # A search replaces missing values.
        work=Workload(_first(options.batch, 1), _first(options.sequence, 1)),
        device=device,
        drives=drives,
        host_memory_bytes=memory,
        sustained_flops=None if options.tflops is None else options.tflops * _TERA,
        update_rate=options.update_rate,
        prices=Prices(
            _first(options.gpu_price, device.price),
            _first(options.ssd_price, drives.drive.price),
            options.host_price,
            options.years,
        ),
    )


def _shape(options: argparse.Namespace) -> TransformerShape:
    if (options.model is None) == (options.config_json is None):
        raise ConfigError("give one of --model and --config-json")
    if options.config_json is not None:
        return from_config(options.config_json)
    kind = options.model.lower()
    if kind not in get_args(Kind):
        return preset(options.model)
    missing = [name for name in ("layers", "hidden", "heads") if getattr(options, name) is None]
    if missing:
        raise ConfigError(
            f"--model {kind} is a kind of model: give "
            f"{', '.join(f'--{name}' for name in missing)} as well, or the name of a model"
        )
    return TransformerShape(
        kind,
        layers=options.layers,
        hidden=options.hidden,
        heads=options.heads,
        vocabulary=_first(options.vocabulary, _VOCABULARY[kind]),
        kv_heads=options.kv_heads,
        feed_forward=options.feed_forward,
        gated=options.gated or kind == "llama",
        tied=kind != "llama",
        max_positions=_positions(options) if kind in ("gpt", "bert") else 0,
        decoder_layers=options.layers // 2 if kind == "t5" else 0,
    )


def _positions(options: argparse.Namespace) -> int:
    """Return the number of learned positions: enough for the longest sequence."""
    longest: int = max(options.sequences or [options.sequence])
    return longest


def _first(given: Any, otherwise: Any) -> Any:
    return otherwise if given is None else given
