"""Frameworks on two ranks: the numbers and checkpoints of plain training, which runs beside."""

import importlib
import json
import os

import pytest
import pytorch_lightning  # noqa: F401
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from offload_strategy.checkpoints import consolidate
from offload_strategy.integrations.accelerate.plugin import SSDOffloadPlugin, session_of
from tests.distributed.loops import Net, check, config, different, loss_of, same, tokens, whole
from tests.distributed.ranks import run_ranks
from tests.distributed.test_sharded import STREAMED
from tests.integrations import lightning_runs
from tests.integrations.accelerate_runs import forget_accelerator
from tests.integrations.lightning_runs import FAMILIES, strategy_class


def use(sections, *, accelerate=False):
    os.environ["SSD_OFFLOAD_CONFIG"] = json.dumps(sections)
    os.environ["ACCELERATE_USE_SSD_OFFLOAD"] = str(int(accelerate))


def batches_of(rows, **options):
    return DataLoader(TensorDataset(tokens(1, rows)), batch_size=4, **options)


def settings_of(directory, overlap, *, streamed):
    """A config, and what it moves."""
    settings, moved = config(directory, overlap), ["activations", "optimizer"]
    if streamed:
        settings["parameters"] = STREAMED
        moved.append("parameters")
    return settings, moved


def fresh():
    torch.manual_seed(0)
    net = Net()
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2)


def outcome(net, losses, states, engine):
    return {
        "losses": losses,
        "weights": whole({name: value.clone() for name, value in net.state_dict().items()}),
        "states": states,
        "metrics": {} if engine is None else engine.metrics(),
    }


def two_epochs(loader, micro_batch, save, load):
    """Train and save in the middle, or go on from there; the losses of the second epoch."""

    def epoch():
        return [micro_batch(n, tokens).item().hex() for n, (tokens,) in enumerate(loader, start=1)]

    if load is None:
        epoch()
        save()
    else:
        load()
    return epoch()


# ---------------------------------------------------------------------- Fabric
def fabric_fit(family, strategy, clip, place, name, resumed=None):
    """Train with accumulation and save a file of this name, or go on from that of another run."""
    fabric = importlib.import_module(family).Fabric(strategy=strategy, devices=2, accelerator="cpu")
    fabric.launch()
    net, optimizer = fresh()
    model, optimizer = fabric.setup(net, optimizer)
    loader = fabric.setup_dataloaders(batches_of(48))
    state = {"model": model, "optimizer": optimizer}

    def micro_batch(index, tokens):
        with fabric.no_backward_sync(model, enabled=index % 3 > 0):
            loss = loss_of(model, tokens)
            fabric.backward(loss)
        if index % 3 == 0:
            if clip:
                fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    load = None if resumed is None else lambda: fabric.load(place / resumed, state)
    losses = two_epochs(loader, micro_batch, lambda: fabric.save(place / name, state), load)
    engine = getattr(fabric.strategy, "offload_engine", None)
    # Fabric asks optimizers whose states are shared by ranks on the first rank alone.
    states = whole(optimizer.state_dict())
    found = outcome(net, losses, states if fabric.is_global_zero else {}, engine)
    if engine is not None:
        fabric.strategy.teardown()
    return {**found, "class": type(fabric.strategy).__name__}


def with_fabric(rank, directory):
    """Both Fabrics, with DDP and with ours: from the start, and from each other's file."""
    for family, clip in (("lightning.fabric", True), ("lightning_fabric", False)):
        place = directory / family
        plain = fabric_fit(family, "ddp", clip, place, "plain")
        for overlap, name, resumed in (
            ("commit" if clip else "eager", "ours", None),
            ("off", "of plain", "plain"),
            ("commit", "again", "ours"),
        ):
            # The registered name is that of a strategy for one device, which becomes another one.
            settings, moved = settings_of(directory, overlap, streamed=name == "again")
            use(settings)
            ours = fabric_fit(family, "ssd_offload", clip, place, name, resumed)
            check_with_strategy(plain, ours, family, name, moved=moved)
        assert same(*[torch.load(place / name, weights_only=False) for name in ("plain", "ours")])
        dist.barrier()


def check_with_strategy(plain, ours, *case, kind="DataParallel", **moved):
    assert ours.pop("class") == f"SSDOffload{kind}Strategy"
    check(case, {key: plain[key] for key in ours}, ours, **moved)


# ---------------------------------------------------------------------- Accelerate
def accelerate_fit(directory, sections, source=None, sharded=False):
    """Train with accumulation, clipping and a scheduler, by FSDP version 2 if it is sharded.

    Accelerate shards on accelerators alone, and ignores FSDP on the CPU. Its code runs all the same
    once its state says so.
    """
    forget_accelerator()
    plugins = None if sections is None else [SSDOffloadPlugin(sections)]
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3, kwargs_handlers=plugins)
    if sharded:
        for state in (accelerator.state, PartialState()):  # the one copies from the other
            state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False,
            state_dict_type="FULL_STATE_DICT",
        )  # fmt: skip
    net, optimizer = fresh()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    prepared = accelerator.prepare(net, optimizer, batches_of(48), scheduler)
    model, optimizer, loader, scheduler = prepared

    def micro_batch(index, tokens):
        with accelerator.accumulate(model):
            loss = loss_of(model, tokens)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return loss.detach()

    def save():
        accelerator.save_state(directory)
        accelerator.wait_for_everyone()

    load = None if source is None else lambda: accelerator.load_state(source)
    losses = two_epochs(loader, micro_batch, save, load)
    session = session_of(accelerator)
    states = whole(optimizer.state_dict())
    found = outcome(net, losses, states, None if session is None else session.engine)
    if session is not None:
        session.close()
    return found


def with_accelerate(rank, directory):
    """Plain and offloaded loops, data-parallel and sharded, and resumed from each other's files."""
    for sharded in (False, True):
        folders = {name: directory / f"{name}-{sharded}" for name in ("plain", "ours")}
        plain = accelerate_fit(folders["plain"], None, sharded=sharded)
        for overlap, source in (("commit", None), ("off", "ours"), ("commit", "plain")):
            settings, moved = settings_of(directory, overlap, streamed=source is not None)
            place = None if source is None else folders[source]
            ours = accelerate_fit(folders["ours"], settings, place, sharded)
            check((sharded, overlap, source), plain, ours, moved=moved)
        resumed = accelerate_fit(directory, None, folders["ours"], sharded)
        assert set(different(plain, resumed)) <= {"states"}


# ---------------------------------------------------------------------- Trainer
def trainer_fit(directory, lora, offload, source, target):
    """Train with accumulation and clipping, and save in the middle; or from there on."""
    use(config(directory / "disk", "commit"), accelerate=offload)
    set_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_attention_heads=2, **shape))
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    tokens = torch.randint(0, 64, (32, 12), generator=torch.Generator().manual_seed(1))
    trainer = Trainer(
        model,
        TrainingArguments(
            str(target), use_cpu=True, ddp_backend="gloo", max_steps=4, save_steps=2,
            per_device_train_batch_size=2, gradient_accumulation_steps=2, max_grad_norm=0.5,
            learning_rate=1e-2, logging_steps=1, report_to=[], disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=None if source is None else str(source))
    session = session_of(trainer.accelerator)
    assert (session is not None) == offload
    history = trainer.state.log_history
    losses = [float(entry["loss"]).hex() for entry in history if "loss" in entry]
    norms = [float(entry["grad_norm"]).hex() for entry in history if "grad_norm" in entry]
    # After its last save they are on rank 0, the only one that the Trainer asks.
    states = trainer.optimizer.state_dict() if trainer.args.should_save else {}
    engine = None if session is None else session.engine
    return {**outcome(trainer.model, losses, states, engine), "norms": norms}


def trainer_files(checkpoint):
    """What a checkpoint holds, apart from how and when it was made."""
    found = {file.name: file.read_bytes() for file in checkpoint.glob("*.safetensors")}
    states = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    return {**found, "names": sorted(file.name for file in checkpoint.iterdir()), "states": states}


def with_the_trainer(rank, directory):
    """A model as it is, and with LoRA: plainly, offloaded, and resumed from either's files."""
    for lora in (False, True):
        folders = {offload: directory / f"{'lora' * lora}-{offload}" for offload in (False, True)}
        checkpoints = {key: folder / "checkpoint-2" for key, folder in folders.items()}
        plain = trainer_fit(directory, lora, False, None, folders[False])
        runs = [(True, None)] + [(offload, saved) for offload in (True, False) for saved in folders]
        if lora:
            runs = [(True, None), (True, True)]
        for offload, saved in runs:
            source = None if saved is None else checkpoints[saved]
            target = folders[True] if saved is None else directory / "again"
            ours = trainer_fit(directory, lora, offload, source, target)
            moved = ("activations", "optimizer") if offload else ()
            check((lora, offload, saved), plain, ours, moved=moved)
        assert rank > 0 or same(*map(trainer_files, checkpoints.values())), lora


# ---------------------------------------------------------------------- Lightning
class Behaviour(lightning_runs.Behaviour):
    def __init__(self):
        super().__init__(scheduler=True)
        self.net = Net()

    def loss(self, batch):
        return loss_of(self.net, batch[0])

    def train_dataloader(self):
        return batches_of(56, shuffle=True)


class Sharded(Behaviour):
    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        if not isinstance(self.net, FSDPModule):
            for block in (self.net.up, self.net.down, self.net.spare, self.net):
                fully_shard(block, mesh=mesh)


def lightning_fit(family, behaviour, strategy, place, name, resumed=None, **options):
    """Train two epochs with accumulation, or the second from the checkpoint of another run."""
    pl = importlib.import_module(family)
    pl.seed_everything(5, verbose=False)
    module = lightning_runs.make_module(pl, behaviour)
    saving = pl.callbacks.ModelCheckpoint(place / name, filename="{epoch}", save_top_k=-1)
    options |= {"max_epochs": 2, "max_steps": -1, "enable_checkpointing": True, "devices": 2}
    options |= {"accumulate_grad_batches": 3, "callbacks": [saving]}
    trainer = lightning_runs.make_trainer(pl, place, strategy, **options)
    trainer.fit(module, ckpt_path=None if resumed is None else place / resumed / "epoch=0.ckpt")
    engine = getattr(trainer.strategy, "offload_engine", None)
    states = whole(trainer.strategy.optimizer_state(trainer.optimizers[0]))
    if behaviour is not Sharded and not trainer.is_global_zero:
        states = {}
    found = outcome(module, module.losses[-7:], states, engine)
    if engine is not None:
        engine.close()
    return {**found, "class": type(trainer.strategy).__name__}


def with_lightning(rank, directory):
    """Data-parallel and sharded; the second install gets a short run."""
    runs = [("commit", "ours", None), ("off", "again", "ours"), ("commit", "of plain", "plain")]
    data_parallel(FAMILIES[0], directory / "clipped", 0.5, runs)
    data_parallel(FAMILIES[0], directory / "eager", None, [("eager", "ours", None)])
    fsdp(rank, FAMILIES[0], directory / "sharded")
    data_parallel(FAMILIES[1], directory / "short", 0.5, runs[:1])


def data_parallel(family, place, clip, runs):
    """Two processes with "ddp" and with ours, from the start and from each other's checkpoints."""
    place.mkdir(exist_ok=True)
    options = {"gradient_clip_val": clip}
    plain = lightning_fit(family, Behaviour, "ddp", place, "plain", **options)
    for overlap, name, resumed in runs:
        settings, moved = settings_of(place, overlap, streamed=name == "again")
        strategy = strategy_class(family)(settings)
        ours = lightning_fit(family, Behaviour, strategy, place, name, resumed, **options)
        check_with_strategy(plain, ours, place, overlap, name, moved=moved)
    files = [place / name / "epoch=0.ckpt" for name in ("plain", "ours")]
    one, other = (torch.load(file, weights_only=False) for file in files)
    assert [key for key in one if not same(one[key], other[key])] in ([], ["callbacks"])
    dist.barrier()


def fsdp(rank, family, directory):
    """Two processes with Lightning's model-parallel strategy and with ours; checkpoints too."""
    directory.mkdir(exist_ok=True)
    pl = importlib.import_module(family)
    ours_of = strategy_class(family, "SSDOffloadFSDPStrategy")
    for kind, runs in (
        ("file", [("off", "ours", None), ("eager", "again", "ours")]),
        ("folder", [("commit", "ours", None), ("commit", "of plain", "plain")]),
    ):
        place = directory / kind
        options = {"save_distributed_checkpoint": kind == "folder"}
        parallel = pl.strategies.ModelParallelStrategy(2, 1, **options)
        plain = lightning_fit(family, Sharded, parallel, place, "plain")
        for overlap, name, resumed in runs:
            # From a checkpoint without streamed weights.
            settings, moved = settings_of(directory, overlap, streamed=name == "again")
            use(settings)
            # By its name it saves folders.
            strategy = ours_of(**options) if kind == "file" else "ssd_offload_fsdp"
            ours = lightning_fit(family, Sharded, strategy, place, name, resumed)
            check_with_strategy(plain, ours, place, name, kind="FSDP", moved=moved)
    if rank == 0:  # a folder of parts becomes what is saved in one file
        consolidate(directory / "folder" / "ours" / "epoch=0.ckpt", directory / "one.ckpt")
        files = directory / "one.ckpt", directory / "file" / "plain" / "epoch=0.ckpt"
        one, plain = (torch.load(file, weights_only=False) for file in files)
        keys = ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch")
        assert [key for key in keys if not same(plain[key], one[key])] == []
    dist.barrier()


@pytest.mark.parametrize("framework", ["accelerate", "the_trainer", "lightning", "fabric"])
def test_frameworks_give_the_numbers_and_checkpoints_of_plain_training(
    tmp_path, disk, monkeypatch, framework
):
    if framework == "the_trainer":
        pytest.importorskip("peft")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run_ranks(f"tests.distributed.test_frameworks:with_{framework}", tmp_path)
