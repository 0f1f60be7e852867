"""The projects whose own tests we run, with our package switched on in their processes.

Another project is one entry of `PEERS`, and a function that switches the package on. In a process
of its tests, this is also a plugin of pytest, which notes what came of each test. The losses of all
backward passes of a test are noted as one digest: with offload they must be the same, whatever the
test itself asserts. Random numbers are seeded before each test.
"""

import hashlib
import importlib
import json
import os
import random
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from stand_ins import for_peft, for_trl

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Peer:
    """A project, of which a checkout has the tests and the environment the package."""

    package: str  # what is installed; its version is noted next to that of the checkout
    tests: tuple[str, ...]  # files, folders or tests in the folder, one pytest process each
    offload: Callable[[], None]  # switches the package on, in the process of its tests
    folder: str = ""  # of the checkout, from which its tests run
    options: tuple[str, ...] = ()  # of pytest, as to leave out tests that name another strategy
    variables: dict[str, str] = field(default_factory=dict)  # of the environment of its tests
    prepare: Callable[[Path], None] = lambda _: None  # makes there what tests load from a hub


def lightning() -> None:
    """Let `Trainer(strategy="auto")` on one device be `Trainer(strategy="ssd_offload")`."""
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.trainer.connectors import accelerator_connector

    connector = accelerator_connector._AcceleratorConnector
    choose = connector._choose_strategy

    def choose_ours(self: Any) -> Any:
        chosen = choose(self)
        return "ssd_offload" if type(chosen) is SingleDeviceStrategy else chosen

    connector._choose_strategy = choose_ours  # type: ignore[method-assign]


def accelerate() -> None:
    os.environ["ACCELERATE_USE_SSD_OFFLOAD"] = "true"


def trl_activations() -> None:
    """Let TRL's context for offloading activations be an engine's."""
    from offload_strategy import OffloadEngine

    module = importlib.import_module("trl.models.activation_offloading")
    engines = []

    class Ours:
        def __init__(self, **_: Any) -> None:
            self.engine = OffloadEngine()
            engines.append(self.engine)  # one that is collected closes itself, backward or not

        def update_model_params(self, model: Any) -> None:
            self.engine.attach(model)

        def __enter__(self) -> None:
            self.context = self.engine.forward()
            self.context.__enter__()

        def __exit__(self, *raised: Any) -> None:
            self.context.__exit__(*raised)

    module.OffloadActivations = Ours  # type: ignore[attr-defined]


def loops(module: str, *names: str) -> None:
    """Let loops that use neither Accelerate nor a Trainer offload.

    Each optimizer of these classes is attached when it is made, and each module at its first
    forward pass with gradients, to the engine that has an optimizer of its parameters, if one has.
    """
    from torch.utils.weak import WeakIdKeyDictionary

    from offload_strategy import OffloadEngine

    engines = WeakIdKeyDictionary()  # by parameter, weak references
    attached = weakref.WeakSet[torch.nn.Module]()

    def engine_of(parameters: Any) -> OffloadEngine:
        known = [engines[p]() for p in parameters if p in engines]
        engine = next((each for each in known if each and not each.closed), None)
        engine = engine or OffloadEngine()
        engines.update({p: weakref.ref(engine) for p in parameters})
        return engine

    def attaching(original: Any) -> Any:
        class Attached(original):  # type: ignore[misc]
            def __new__(cls, *args: Any, **options: Any) -> Any:
                if cls is not Attached:
                    return super().__new__(cls)
                plain = original(*args, **options)
                engine = engine_of([p for g in plain.param_groups for p in g["params"]])
                wrapped: Any = engine.attach(optimizer=plain)
                wrapped.engine = engine  # which lives as long
                return wrapped

        Attached.__name__ = Attached.__qualname__ = original.__name__
        return Attached

    place: Any = importlib.import_module(module)
    for name in names:
        setattr(place, name, attaching(getattr(place, name)))
    call, depth = torch.nn.Module.__call__, [0]

    def attach_and_call(self: torch.nn.Module, *args: Any, **options: Any) -> Any:
        new = not depth[0] and torch.is_grad_enabled() and self not in attached
        if new and (parameters := list(self.parameters())):
            attached.update(self.modules())
            engine = engine_of(parameters)
            engine.attach(self)
            weakref.finalize(self, engine.close).atexit = False
        depth[0] += 1
        try:
            return call(self, *args, **options)
        finally:
            depth[0] -= 1

    torch.nn.Module.__call__ = attach_and_call


_LIGHTNING = """
    trainer/optimization loops core models tuner checkpointing trainer/flags trainer/logging_
    trainer/properties trainer/connectors trainer/dynamic_args trainer/test_trainer.py
    trainer/test_states.py trainer/test_dataloaders.py trainer/test_config_validator.py
    callbacks utilities loggers profilers overrides
"""
_ACCELERATE = "accelerator optimizer scheduler state_checkpointing grad_sync"
_SFT = """
    Qwen2 dft nll_loss config_lora prompt_tuning] reentrant bfd padding_free completion_only
"""
_SFT_TESTS = f"TestSFTTrainer and train_ and ({' or '.join(_SFT.split())}) and not vlm and not Slow"
_TORCHAO = [f"{name}{bits}" for name in ("Adam", "AdamW") for bits in ("8bit", "4bit", "Fp8")]

PEERS = {
    "lightning": Peer(
        package="lightning",
        folder="tests",
        tests=tuple(f"tests_pytorch/{each}" for each in _LIGHTNING.split()),
        offload=lightning,
        options=("-k", "not ddp_spawn and not ddp_fork"),
    ),
    "accelerate": Peer(
        package="accelerate",
        tests=(
            *(f"tests/test_{each}.py" for each in _ACCELERATE.split()),
            str(HERE / "accelerate_scripts.py"),
        ),
        offload=accelerate,
        options=("-c", os.devnull, "--rootdir", "."),
    ),
    "trl": Peer(
        package="trl",
        tests=("tests/test_sft_trainer.py",),
        offload=accelerate,
        options=("-k", _SFT_TESTS),
        prepare=for_trl,
    ),
    "trl-activations": Peer(
        package="trl",
        tests=("tests/test_activation_offloading.py",),
        offload=trl_activations,
        variables={"TRANSFORMERS_TEST_DEVICE": "cpu:0"},  # "cpu" would be skipped
        prepare=for_trl,
    ),
    "torchao": Peer(
        package="torchao",
        tests=("test/test_low_bit_optim.py",),
        offload=partial(loops, "torchao.optim", *_TORCHAO),
        options=("-k", "not compile_True and not qmap_compile"),
    ),
    "peft": Peer(
        package="peft",
        tests=(
            *(f"tests/test_{each}.py" for each in ("loraplus", "lorafa", "velora", "osf")),
            "tests/test_custom_models.py::TestPeftCustomModel::test_only_params_are_updated",
            "tests/test_custom_models.py::TestDynamicDispatch",
            "tests/test_decoder_models.py::TestDecoderModels::test_training_decoders",
        ),
        offload=partial(loops, "torch.optim", "SGD", "Adam", "AdamW"),
        options=("-o", "addopts="),
        prepare=for_peft,
    ),
}

_process = os.getpid()
_losses: list[str] = []
_moved: Counter[str] = Counter()


def _count_moves() -> None:
    """Count the bytes of each test that were written or read: did anything leave?"""
    from offload_strategy.telemetry import Recorder

    finished = Recorder.move_finished

    def counting(self: Any, record: Any, *, completed: bool) -> None:
        _moved[record.client] += record.nbytes * completed
        finished(self, record, completed=completed)

    Recorder.move_finished = counting  # type: ignore[method-assign]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "flaky: of pytest-rerunfailures; a test runs once here")
    if os.environ["PEER_OFFLOADS"] == "1":
        PEERS[os.environ["PEER"]].offload()
        _count_moves()
    backward = torch.Tensor.backward

    def noting(self: torch.Tensor, *args: Any, **options: Any) -> None:
        _losses.append(repr(self.detach().double().flatten().tolist()))
        backward(self, *args, **options)

    torch.Tensor.backward = noting  # type: ignore[assignment,method-assign]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Begin with the same random numbers, with offload and without."""
    _losses.clear()
    _moved.clear()
    random.seed(0)
    torch.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Note what will run: a process that dies has no reports of the rest."""
    _note(*({"test": item.nodeid, "outcome": "died"} for item in session.items))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note the outcome; of a later phase, if that has failed."""
    if report.when == "call" or report.outcome != "passed":
        lines = report.longreprtext.strip().splitlines() if report.failed else []
        errors = [line[2:].strip() for line in lines if line.startswith("E  ")]
        note: dict[str, Any] = {"test": report.nodeid, "outcome": report.outcome}
        note |= {"when": report.when, "error": (errors or lines or [""])[-1][:300]}
        digest = hashlib.sha256("".join(_losses).encode()).hexdigest()[:16]
        _note({**note, "losses": len(_losses), "digest": digest, "moved": dict(_moved)})


def _note(*notes: dict[str, Any]) -> None:
    if os.getpid() == _process:  # not in forked children
        with open(os.environ["PEER_RESULTS"], "a") as results:
            results.writelines(f"{json.dumps(note)}\n" for note in notes)
