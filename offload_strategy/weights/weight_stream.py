"""Streamed weights: which models are streamed, and how their weights are created.

What happens during training is in block_residency.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from offload_strategy.config import ParametersConfig
from offload_strategy.errors import ConfigError
from offload_strategy.store.shared_tickets import SharedFiles
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Tier
from offload_strategy.telemetry import Progress
from offload_strategy.torch_support.dtensors import fsdp_param_of, is_sharded, local_tensor
from offload_strategy.torch_support.modules import WeakHook
from offload_strategy.weights.block_residency import BlockResidency
from offload_strategy.weights.guarded_parameter import GuardedParameter
from offload_strategy.weights.model_building import materialize_module, modules_to_materialize
from offload_strategy.weights.sharded_weight import ShardedWeight, sharded_blocks
from offload_strategy.weights.streamed_weight import StreamedWeight
from offload_strategy.weights.weight_blocks import StreamedBlock, can_be_streamed, cut_into_blocks


@dataclass(eq=False)
class _AttachedModel:
    model: weakref.ref[nn.Module]
    blocks: list[StreamedBlock] = field(default_factory=list)
    hooks: ExitStack = field(default_factory=ExitStack)


class WeightStream(BlockResidency):
    """The streamed weights of one engine; see `cut_into_blocks` for `is_block`."""

    def __init__(
        self,
        store: TensorStore,
        tiers: Sequence[Tier],
        section: ParametersConfig,
        is_block: Callable[[str, nn.Module], bool] | None,
        files: SharedFiles,
    ) -> None:
        super().__init__(store, tiers, section.blocks_in_flight, files)
        self._section = section
        self._is_block = is_block
        self._models: list[_AttachedModel] = []

    @contextmanager
    def building(self) -> Iterator[None]:
        """Offload weights while models are built within the context; see model_building.py."""

        def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            if parameter is not None and not parameter.is_meta:
                self.stream_parameter(f"{type(module).__name__}.{name}", parameter)

        handle = register_module_parameter_registration_hook(registered)
        try:
            yield
        finally:
            handle.remove()
            with self.lock:
                self._offload_accessed()

    def is_streamed(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is streamed, or will be once its model is attached."""
        return parameter in self._weights or can_be_streamed(parameter, self._section.min_size)

    def unplaced_bytes(self, model: nn.Module, *, adopt: bool | None = None) -> int:
        """Return the bytes of a model's weights that still need room on the tiers.

        `adopt` says whether frozen weights stay in files that will be loaded; None for no such
        files. A weight in an external file moves to the tiers with its first update.
        """
        return sum(
            local_tensor(p).nbytes
            for p in model.parameters()
            if self.is_streamed(p)
            and ((weight := self._weights.get(p)) is None or not weight.is_placed)
            and (p.requires_grad or (weight is None if adopt is None else not adopt))
        )

    def materialize_meta(self, model: nn.Module, device: torch.device) -> None:
        """Materialize and initialize a model's meta parameters, module by module."""
        modules = modules_to_materialize(model).items()
        for module, name in Progress("attach", unit=" modules", iterable=modules):
            materialize_module(name, module, device, partial(self.stream_parameter, model=model))
            with self.lock:
                self._offload_accessed()

    def stream_parameter(
        self, name: str, parameter: nn.Parameter, model: nn.Module | None = None
    ) -> None:
        """Stream a resident parameter; it is offloaded when others need the room.

        One that FSDP2 has sharded is looked for in `model`.
        """
        if not can_be_streamed(parameter, self._section.min_size):
            return
        if not is_sharded(parameter):
            self.on_access(self._stream(name, parameter))
        elif model is not None and (fsdp_param := fsdp_param_of(model, parameter)) is not None:
            fsdp_param.reset_sharded_param()  # it was on the meta device
            self.on_access(self._stream(name, fsdp_param.sharded_param, fsdp_param))

    def _stream(self, name: str, parameter: nn.Parameter, fsdp_param: Any = None) -> StreamedWeight:
        """Return the streamed weight of a parameter, or of an FSDPParam's; create it if needed."""
        weight = self._weights.get(parameter)
        if weight is None and fsdp_param is None:
            weight = StreamedWeight(name, parameter, self)
        elif weight is None:
            weight = ShardedWeight(name, fsdp_param, self)
        self._weights[parameter] = weight
        weight.name = name
        return weight

    def attach(self, model: nn.Module, owner: Any) -> None:
        """Offload a model's weights, and load them whenever a block computes.

        The owner is kept alive by every module that has a streamed weight.
        """
        self._remove_freed_models()
        for name, parameter in model.named_parameters():
            if type(parameter) is GuardedParameter and parameter not in self._weights:
                raise ConfigError(
                    f"attach: the weight {name} is streamed by another engine. Attach models that "
                    f"share weights to one engine, or close the other one (engine.close()) first."
                )
        attached = _AttachedModel(weakref.ref(model))
        self._models.append(attached)
        hook = WeakHook(self.enter_model, attached.blocks)
        hooks = attached.hooks
        hooks.enter_context(model.register_forward_pre_hook(hook, prepend=True))
        classes, min_size = self._section.blocks, self._section.min_size
        for name, module, parameters in cut_into_blocks(model, classes, self._is_block, min_size):
            block = StreamedBlock(name, [self._stream(*named) for named in parameters.items()])
            self._add_block(attached, block)
            enter, leave = WeakHook(self.enter_block, block), WeakHook(self.exit_block, block)
            hooks.enter_context(module.register_forward_pre_hook(enter, prepend=True))
            hooks.enter_context(module.register_forward_hook(leave, always_call=True))
        for name, shards in sharded_blocks(model, min_size):  # FSDP2 asks for their weights
            streamed = [self._stream(key, each.sharded_param, each) for key, each in shards.items()]
            self._add_block(attached, StreamedBlock(name, streamed))
        for module in model.modules():  # a part may outlive the model, such as what DDP wraps
            if any(p is not None and p in self._weights for p in module._parameters.values()):
                # Unlike a forward hook, it costs nothing when the module is called.
                keeps = module.register_load_state_dict_post_hook(WeakHook(None, owner))
                hooks.enter_context(keeps)
        with self.lock:
            self._make_room(0)
            self._offload_accessed()

    def _add_block(self, attached: _AttachedModel, block: StreamedBlock) -> None:
        attached.blocks.append(block)
        for weight in block.weights:
            self._blocks_of.setdefault(weight, []).append(block)
        with self.lock:
            self._resident[block] = None
            self._make_room(self._most)

    def detach(self, model: nn.Module) -> None:
        """Stop streaming a model, and restore its weights in memory."""
        for attached in [known for known in self._models if known.model() is model]:
            self._detach_model(attached, restore=True)

    def _remove_freed_models(self) -> None:
        """Remove models without living weights; parts of a model may outlive it."""
        with self.lock:
            for attached in list(self._models):
                weights = [weight for block in attached.blocks for weight in block.weights]
                if attached.model() is None and all(w.parameter() is None for w in weights):
                    self._detach_model(attached, restore=False)

    def _detach_model(self, attached: _AttachedModel, *, restore: bool) -> None:
        self._models.remove(attached)
        with self.lock:
            attached.hooks.close()
            for block in attached.blocks:
                self._resident.pop(block, None)
                for weight in block.weights:
                    blocks = self._blocks_of.get(weight, [])
                    if block in blocks:
                        blocks.remove(block)
                        if not blocks:  # it is not part of another model
                            del self._blocks_of[weight]
                            self._close(weight, restore=restore)

    def _close(self, weight: StreamedWeight, *, restore: bool) -> None:
        self._accessed.pop(weight, None)
        self._shared.pop(weight, None)
        self._by_storage = {key: w for key, w in self._by_storage.items() if w is not weight}
        if (parameter := weight.key()) is not None:
            self._weights.pop(parameter, None)
        weight.close(restore=restore)

    def offloaded_bytes(self) -> int:
        """Return the bytes of all offloaded weights."""
        return sum(weight.nbytes for weight in self._weights.values() if not weight.is_resident)

    def close(self, *, restore: bool) -> None:
        """Stop streaming; weights that are not restored in memory are NaN from now on."""
        self._exit_blocks([block for block, _ in self._open.blocks])
        for attached in list(self._models):
            self._detach_model(attached, restore=restore)
        for weight in list(self._weights.values()):  # built but never attached
            self._close(weight, restore=restore)

    def schedule(self) -> tuple[list[tuple[StreamedBlock, bool]], bool]:
        """Return what a step needs, and whether one was seen: blocks, each for backward or not."""
        if learned := self._order.last_step:
            backward = {block for block, in_backward in learned if in_backward}
            # Backward does not need a first layer's weight if its input requires no gradient.
            rest = {block: None for block, _ in learned if block not in backward and block.trained}
            return [*learned, *((block, True) for block in rest)], True
        blocks = [block for attached in self._models for block in attached.blocks]
        forward = [(block, False) for block in blocks]
        return forward + [(block, True) for block in reversed(blocks)], False
