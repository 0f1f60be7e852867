"""What combines with what, each against the same training without offload, to the last bit.

The rows of `docs/combinations.md` are what is tried. Not every product of values is run: for each
way to train, every pair of values occurs in some row. What is refused is run by itself, with the
first values of everything else.
"""

import itertools
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from offload_strategy import OffloadEngine, OffloadError, SSDOffloadPlugin
from offload_strategy.integrations.accelerate.plugin import session_of
from tests.distributed.loops import same
from tests.distributed.ranks import run_ranks
from tests.integrations.accelerate_runs import forget_accelerator
from tests.integrations.lightning_runs import make_module, make_trainer, quiet, strategy_class
from tests.training import Block, attached, left_bytes, settings

DOCUMENT = Path(__file__).parents[2] / "docs" / "combinations.md"
STEPS = 3
BATCH, LENGTH, VOCABULARY, WIDTH = 4, 16, 64, 32

STREAMED = "all, streamed weights too"

OFF = {"enabled": False}
CLIENTS = {
    "activations": {"optimizer": OFF},
    "optimizer: commit": {"activations": OFF, "optimizer": {"overlap": "commit"}},
    "optimizer: eager": {"activations": OFF, "optimizer": {"overlap": "eager"}},
    "optimizer: off": {"activations": OFF, "optimizer": {"overlap": "off"}},
    STREAMED: {"parameters": {"enabled": True, "min_size": 1}},
}
"""Sections of the config by client; what is not said is on, as in the defaults."""

AXES = {
    "precision": ("32", "bf16-mixed", "bf16-true"),
    "checkpointing": ("none", "non-reentrant", "reentrant"),
    "compile": ("no", "aot_eager"),
    "client": tuple(CLIENTS),
}
"""Values of each property; the first one is what everybody begins with."""

SCALED = "16-mixed"


@dataclass(frozen=True)
class Combination:
    precision: str
    checkpointing: str
    compile: str
    client: str

    @property
    def training(self):
        """What training without offload depends on; the client only by what is compiled."""
        return self if self.compiles_blocks else replace(self, client="")

    @property
    def compiles_blocks(self):
        """Whether each block is compiled, and not the model.

        Blocks that are streamed would break the model's graph, and graphs that are cut elsewhere
        may round elsewhere: in bfloat16 they do, with streaming or without.
        """
        return self.compile != "no" and self.client == STREAMED

    def pairs(self):
        """Every two values of it, with their axes."""
        return {frozenset(pair) for pair in itertools.combinations(asdict(self).items(), 2)}


@dataclass(frozen=True)
class Refusal:
    """Values that cannot be had together."""

    values: Mapping[str, str]  # By axis
    error: str  # A pattern that the error's class and message match


SCALED_AND_EAGER = {"client": "optimizer: eager", "precision": SCALED}


@dataclass(frozen=True)
class Way:
    train: Callable  # With a combination and a config, None without offload; see `outcome`
    refusals: Mapping[str, Refusal]  # By what the table says of them
    precisions: Sequence[str] = AXES["precision"]


def documented(name):
    """The combinations of a way with their verdicts, from its table."""
    section = DOCUMENT.read_text().partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    head, *rows = (line.strip("| ").split(" | ") for line in lines)
    assert head == [*AXES, "verdict"], name
    return {Combination(*values): verdict for *values, verdict in rows}


def untried_pairs(name, way):
    """Pairs of values that are in no row, and are not refused; what is refused has no others."""
    identical = [one for one, verdict in documented(name).items() if verdict == "identical"]
    axes = {**AXES, "precision": way.precisions}
    every = itertools.starmap(Combination, itertools.product(*axes.values()))
    pairs = set().union(*(one.pairs() for one in every))
    pairs -= set().union(*(one.pairs() for one in identical))
    refused = [refusal.values.items() for refusal in way.refusals.values()]
    return {pair for pair in pairs if not any(values <= pair for values in refused)}


def verdicts(name, way, directory):
    """Train every combination of a way with offload and without.

    The verdict is "identical", "refused: why", or what else was found.
    """
    plain, found = {}, {}
    for one, expected in documented(name).items():
        if expected == "identical" and one.training not in plain:
            torch._dynamo.reset()  # what was compiled for it is used again with offload
            plain[one.training] = way.train(one, None)
        try:
            ours = way.train(one, config(directory, one.client))
        except OffloadError as error:
            found[one] = _refused(error, way)
            # A backward that failed leaves nodes in autograd's queue, which the next one drops.
            torch.ones(1, requires_grad=True).sum().backward()
            continue
        if expected != "identical":
            found[one] = "trained, and should be refused"
            continue
        theirs = plain[one.training]
        differs = [part for part in ("losses", "weights") if not same(ours[part], theirs[part])]
        parts = [*ours["moved"]] if one.client == STREAMED else [one.client.partition(":")[0]]
        still = [part for part in parts if not ours["moved"][part] > 0]
        found[one] = f"differs: {differs}; not moved: {still}" if differs or still else "identical"
    torch._dynamo.reset()
    return found


def _refused(error, way):
    said = f"{type(error).__name__}: {error}"
    matching = (text for text, it in way.refusals.items() if re.search(it.error, said, re.DOTALL))
    return next((f"refused: {summary}" for summary in matching), f"fails: {said}")


def config(directory, client):
    sections = settings(directory, **CLIENTS[client])
    sections["activations"]["min_size"] = "1KiB"  # smaller tensors stay
    return sections


def outcome(losses, model, engine):
    """What runs are compared by, with shards brought together; and bytes that left, by part."""
    parts = ("activations", "optimizer", "parameters") if engine is not None else ()
    moved = {part: left_bytes(engine.metrics(), part) for part in parts}
    weights = {
        name: getattr(parameter, "full_tensor", parameter.clone)().detach()
        for name, parameter in model.named_parameters()
    }
    return {"losses": losses, "weights": weights, "moved": moved}


class Model(nn.Module):
    """A tiny GPT with tied embeddings and dropout, whose output is its loss."""

    def __init__(self, checkpointing):
        super().__init__()
        self.checkpointing = checkpointing
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.checkpointing == "none":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        logits = self.head(x)[:, :-1].float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def make_model(combination):
    """Always the same weights."""
    torch.manual_seed(0)
    model = Model(combination.checkpointing)
    return model.to(torch.bfloat16) if combination.precision == "bf16-true" else model


def batches(rank=0):
    """A batch of tokens for each step."""
    generator = torch.Generator().manual_seed(1 + rank)
    return torch.randint(0, VOCABULARY, (STEPS, BATCH, LENGTH), generator=generator)


def plain_loop(combination, sections, model, rank=0):
    """Train a model, which may be wrapped or sharded, in a loop of one's own."""
    low = {"bf16-mixed": torch.bfloat16, SCALED: torch.float16}.get(combination.precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaled = combination.precision == SCALED
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=2.0**10)
    torch.manual_seed(1 + rank)  # of dropout
    losses = []
    with nullcontext() if sections is None else OffloadEngine(sections) as engine:
        used = attached(engine, model, optimizer)
        for tokens in batches(rank):
            with torch.autocast("cpu", low, enabled=low is not None):
                loss = model(tokens)
            scaler.scale(loss).backward()
            losses.append(loss.item())
            del loss
            scaler.step(used)
            scaler.update()
            used.zero_grad()
        return outcome(losses, model, engine)


def compiled(model, combination):
    if combination.compiles_blocks:
        for block in getattr(model, "module", model).blocks:
            block.compile(backend=combination.compile)
        return model
    return model if combination.compile == "no" else torch.compile(model, backend="aot_eager")


def _loop(combination, sections):
    return plain_loop(combination, sections, compiled(make_model(combination), combination))


def _lightning(combination, sections):
    strategy = "auto" if sections is None else strategy_class(pl.__name__)(config=sections)
    options = {"precision": combination.precision.replace("32", "32-true")}
    if combination.precision == SCALED:
        # For the CPU the Trainer takes bf16-mixed instead, unless it is given the plugin itself.
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        options = {"plugins": [pl.plugins.MixedPrecision(SCALED, "cpu", scaler=scaler)]}
    module = make_module(pl)
    module.net = compiled(make_model(combination), combination)
    module.loss = lambda tokens: module.net(tokens)
    torch.manual_seed(1)
    with quiet(), tempfile.TemporaryDirectory() as root:
        trainer = make_trainer(pl, Path(root), strategy, max_steps=len(batches()), **options)
        trainer.fit(module, DataLoader(list(batches()), batch_size=None))
    return outcome(module.losses, module, getattr(trainer.strategy, "offload_engine", None))


def _accelerate(combination, sections):
    forget_accelerator()
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16" if combination.precision == "bf16-mixed" else "no",
        dynamo_backend="no" if combination.compiles_blocks else combination.compile,
        kwargs_handlers=None if sections is None else [SSDOffloadPlugin(config=sections)],
    )
    net = make_model(combination)
    if combination.compiles_blocks:
        compiled(net, combination)
    loader = DataLoader(list(batches()), batch_size=None)
    plain = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(net, plain, loader)
    torch.manual_seed(1)
    losses = []
    for tokens in loader:
        loss = model(tokens)
        accelerator.backward(loss)
        losses.append(loss.item())
        del loss
        optimizer.step()
        optimizer.zero_grad()
    session = session_of(accelerator)
    found = outcome(losses, net, session and session.engine)
    if session is not None:
        session.close()
    return found


_OWN_LOOP = Refusal(SCALED_AND_EAGER, r"^OffloadError: .*overlap: commit")
_TRAINER = Refusal(SCALED_AND_EAGER, r"^ConfigError: .*loss scaling.*overlap: commit")
_EARLY = "gradients are used before the scaler sees them"
_WITH_SCALER = (*AXES["precision"], SCALED)

IN_ONE_PROCESS = {
    "Loop of one's own": Way(_loop, {f"{_EARLY} (first step)": _OWN_LOOP}, _WITH_SCALER),
    "Lightning, one device": Way(_lightning, {_EARLY: _TRAINER}, _WITH_SCALER),
    "Accelerate, one process": Way(_accelerate, {}),
}


def _data_parallel(rank, combination, sections):
    model = nn.parallel.DistributedDataParallel(make_model(combination))
    return plain_loop(combination, sections, compiled(model, combination), rank)


def _sharded(rank, combination, sections):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = make_model(combination)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if combination.precision == "bf16-mixed":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.blocks:
        if combination.compile != "no":
            block.compile(backend=combination.compile)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)

    # The policy is all that there is of precision.
    return plain_loop(replace(combination, precision="32"), sections, model, rank)


def ways_of_ranks(rank=0):
    """The ways of several processes, by name, for one of them."""
    return {
        "DistributedDataParallel, two ranks": Way(partial(_data_parallel, rank), {}),
        "FSDP2 (`fully_shard`), two ranks": Way(partial(_sharded, rank), {}),
    }


def in_ranks(rank, directory):
    """What each rank does, for `run_ranks`: the verdicts of its ways, in order."""
    ways = ways_of_ranks(rank)
    return {name: list(verdicts(name, way, directory).values()) for name, way in ways.items()}


WAYS = {**IN_ONE_PROCESS, **ways_of_ranks()}


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_ONE_PROCESS)
def test_in_one_process(name, tmp_path):
    assert verdicts(name, IN_ONE_PROCESS[name], tmp_path) == documented(name)


@pytest.mark.slow
def test_in_two_ranks(tmp_path):
    expected = {name: list(documented(name).values()) for name in ways_of_ranks()}
    assert run_ranks(f"{__name__}:in_ranks", tmp_path) == [expected, expected]


@pytest.mark.parametrize("name", WAYS)
def test_every_pair_of_values_and_every_refusal_is_in_the_document(name):
    assert untried_pairs(name, WAYS[name]) == set()
    told = set(documented(name).values()) - {"identical"}
    assert told == {f"refused: {summary}" for summary in WAYS[name].refusals}
    headings = [line[3:] for line in DOCUMENT.read_text().splitlines() if line[:3] == "## "]
    assert headings == list(WAYS), "the document has other ways"
