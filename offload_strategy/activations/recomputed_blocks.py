"""Blocks of a model that may be recomputed in backward instead of being kept or offloaded.

[Note: what may run twice]
A block that runs a second time must give the same values and change nothing. Transformers' authors
say so of layers that can be checkpointed. It is known of blocks that consist of torch's own modules
alone, if they have no hooks and no buffers that a call changes (running averages). Of others the
user has to say so. A block may change objects that it gets besides tensors. A key-value cache is
such an object: layers of Transformers skip it when they are checkpointed, but then keys have
another memory layout, and a product with them may differ in the last bits (seen with T5). So such
layers are recomputed only if the user says so.
`torch.utils.checkpoint` does the work, and restores the state of random number generators.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload_strategy.activations.forward_records import BlockCall, Trace
from offload_strategy.telemetry import get_logger
from offload_strategy.torch_support.modules import outermost_blocks

logger = get_logger(__name__)

#: Types of inputs and outputs of a block that it cannot change, and tensors.
_PLAIN = (torch.Tensor, type(None), bool, int, float, complex, str, torch.dtype, torch.device)


@dataclass(eq=False)
class _Candidate:
    """A block that might be recomputed."""

    name: str
    module: weakref.ref[nn.Module]
    #: Whether it is a layer of Transformers that checkpoints itself.
    by_itself: bool
    handles: list[Any] = field(default_factory=list)
    refused: bool = False
    # State of the current call.
    trace: Trace | None = None
    versions: tuple[int, ...] = ()


class RecomputableBlocks:
    """Observes the blocks of attached models, and recomputes some of them.

    Blocks that may run twice are those known to be safe ("auto"), all (True) or none (False).
    `trace` returns the trace of the current forward pass of this thread, or None.
    """

    def __init__(self, which: Literal["auto"] | bool, trace: Callable[[], Trace | None]) -> None:
        self._which = which
        self._trace = trace
        self._candidates: dict[str, _Candidate] = {}
        self._wanted: list[str] = []
        self._told = False
        #: Names of blocks that are recomputed.
        self.recomputed: set[str] = set()
        #: Whether this set is final.
        self.settled = False

    def add_model(self, model: nn.Module) -> None:
        """Observe the blocks of a model from the next forward pass on."""
        if self._which is False or self.settled or _is_compiled(model):
            return
        for name, module in outermost_blocks(model):
            kind = _kind(module, ask=self._which == "auto")
            if kind is None:
                continue
            candidate = _Candidate(name, weakref.ref(module), kind == "by itself")
            # Two models may use the same names.
            self._candidates.setdefault(name, candidate)
            if self._candidates[name] is candidate:
                hooks = _Hooks(self, candidate)
                candidate.handles = [
                    module.register_forward_pre_hook(hooks.before, with_kwargs=True),
                    module.register_forward_hook(hooks.after),
                ]

    def want(self, names: Collection[str]) -> None:
        """Recompute these blocks as well from the next forward pass on."""
        self._wanted += names

    def settle(self) -> None:
        """Make the set of recomputed blocks final, and stop observing the others."""
        self.settled = True
        for candidate in self._candidates.values():
            if candidate.name not in self._wanted:
                self._release(candidate)

    def forward_begins(self) -> None:
        """Start a forward pass, in which no block is running yet."""
        wanted, self._wanted = self._wanted, []
        missing = [name for name in wanted if not self._recompute(name)]
        if missing:
            logger.warning(
                "planning: the plan has blocks computed again that the model has not, or that may "
                "not run twice: %s. What they save is kept or moved.",
                ", ".join(missing),
            )

    def allowed(self, calls: Sequence[BlockCall]) -> list[BlockCall]:
        """Return the calls whose blocks may be recomputed, as far as observed."""
        names = [call.name for call in calls]
        found = []
        for call in calls:
            candidate = self._candidates.get(call.name)
            if candidate is None or candidate.refused:
                continue
            if names.count(call.name) == 1 and call.ends_at is not None:
                found.append(call)
        return found

    def remove_model(self, model: nn.Module) -> None:
        """Restore the blocks of a model. Idempotent."""
        modules = set(model.modules())
        for candidate in list(self._candidates.values()):
            if candidate.module() in modules:
                self._forget(candidate)

    def close(self) -> None:
        """Restore all blocks. Idempotent."""
        for candidate in list(self._candidates.values()):
            self._forget(candidate)

    # ------------------------------------------------------------------ calls
    def begins(
        self,
        candidate: _Candidate,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Record the start of a call."""
        trace = self._trace()
        if trace is None or torch._C._current_graph_task_id() != -1:
            return
        given = list(_leaves((args, dict(kwargs))))
        self._look_at(candidate, given)
        candidate.trace, candidate.versions = trace, _versions(module)
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        # Inputs come back as tensors of their own: a block may ask whether two are the same one.
        candidate.refused |= len({id(tensor) for tensor in tensors}) < len(tensors)
        now = time.perf_counter() - trace.held
        trace.blocks.begin(candidate.name, tensors, len(trace.sizes), now)

    def ends(self, candidate: _Candidate, module: nn.Module, output: Any) -> None:
        """Record the end of a call."""
        trace, candidate.trace = candidate.trace, None
        if trace is None or trace is not self._trace():
            return
        self._look_at(candidate, _leaves(output))
        candidate.refused |= _versions(module) != candidate.versions
        trace.blocks.end(candidate.name, len(trace.sizes), time.perf_counter() - trace.held)

    def _look_at(self, candidate: _Candidate, values: Iterable[Any]) -> None:
        """Refuse a block with other objects than tensors; see [Note: what may run twice]."""
        if candidate.by_itself and self._which is True:
            return
        strange = next((value for value in values if not isinstance(value, _PLAIN)), None)
        if strange is None:
            return
        candidate.refused = True
        if not self._told:
            self._told = True
            logger.info(
                "planning.recompute: %s, and perhaps other blocks, are given an object of class "
                "%s; such blocks are not computed again. If it is a cache of keys, which training "
                "has no use for, set use_cache=False in the model's config.",
                candidate.name,
                type(strange).__name__,
            )

    def _recompute(self, name: str) -> bool:
        candidate = self._candidates.get(name)
        module = None if candidate is None else candidate.module()
        if candidate is None or module is None or candidate.refused:
            return False
        self._release(candidate)
        _compute_again(module, by_itself=candidate.by_itself)
        self.recomputed.add(name)
        return True

    def _forget(self, candidate: _Candidate) -> None:
        self._release(candidate)
        del self._candidates[candidate.name]
        module = candidate.module()
        if module is not None and candidate.name in self.recomputed:
            _compute_once(module, by_itself=candidate.by_itself)
        self.recomputed.discard(candidate.name)

    def _release(self, candidate: _Candidate) -> None:
        for handle in candidate.handles:
            handle.remove()
        candidate.handles.clear()


class _Hooks:
    """Forward hooks of one block. A copy of them does nothing: it belongs to one engine."""

    def __init__(
        self, blocks: RecomputableBlocks | None = None, candidate: _Candidate | None = None
    ) -> None:
        self._blocks = None if blocks is None else weakref.ref(blocks)
        self._candidate = candidate

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Forward pre-hook."""
        # A compiled graph has no blocks.
        if self._blocks is not None and not torch.compiler.is_dynamo_compiling():
            blocks, candidate = self._blocks(), self._candidate
            if blocks is not None and candidate is not None:
                blocks.begins(candidate, module, args, kwargs)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook."""
        if self._blocks is not None and not torch.compiler.is_dynamo_compiling():
            blocks, candidate = self._blocks(), self._candidate
            if blocks is not None and candidate is not None:
                blocks.ends(candidate, module, output)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(self), ()


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the elements of plain containers; any other object is a leaf."""
    if type(value) in (tuple, list):
        for inner in value:
            yield from _leaves(inner)
    elif type(value) is dict:
        for inner in value.values():
            yield from _leaves(inner)
    else:
        yield value


# ---------------------------------------------------------------------- modules
def _kind(module: nn.Module, *, ask: bool) -> Literal["by itself", "from outside"] | None:
    """Return how a block can be recomputed; None if it cannot, or must be known to be safe."""
    if any(_is_transformers_layer(type(inner)) for inner in module.modules()):
        # A layer that is checkpointed already stays as it is.
        on = any(getattr(inner, "gradient_checkpointing", False) for inner in module.modules())
        return "by itself" if _is_transformers_layer(type(module)) and not on else None
    if any(_is_called_otherwise(inner) for inner in module.modules()):
        return None
    return "from outside" if not ask or all(map(_is_of_torch, module.modules())) else None


def _is_transformers_layer(kind: type) -> bool:
    return any(
        base.__name__ == "GradientCheckpointingLayer" and base.__module__.startswith("transformers")
        for base in kind.__mro__
    )


def _is_called_otherwise(module: nn.Module) -> bool:
    """Return whether a module has hooks, which would run twice, or a replaced call."""
    hooked = (
        module._forward_hooks or module._forward_pre_hooks
        or module._backward_hooks or module._backward_pre_hooks
    )  # fmt: skip
    return bool(hooked) or module._compiled_call_impl is not None or "forward" in vars(module)


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).forward.__module__.startswith("torch.nn.modules.")


def _is_compiled(model: nn.Module) -> bool:
    return any(
        hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        for module in model.modules()
    )


def _versions(module: nn.Module) -> tuple[int, ...]:
    """Return the version counters of its buffers, which change if a call changes them."""
    return tuple(buffer._version for buffer in module.buffers() if not buffer.is_inference())


def _compute_again(module: nn.Module, *, by_itself: bool) -> None:
    again = functools.partial(checkpoint, use_reentrant=False)
    if by_itself:
        module._gradient_checkpointing_func = again  # type: ignore[assignment]
        module.gradient_checkpointing = True  # type: ignore[assignment]
    else:
        # Where `nn.Module.compile` puts what is called instead; copies and pickles go without it.
        module._compiled_call_impl = _Again(module)


def _compute_once(module: nn.Module, *, by_itself: bool) -> None:
    if by_itself:
        for name in ("gradient_checkpointing", "_gradient_checkpointing_func"):
            vars(module).pop(name, None)
    elif isinstance(module._compiled_call_impl, _Again):
        del module._compiled_call_impl


class _Again:
    """Calls a module so that it is recomputed in backward."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, with checkpointing while it trains."""
        module = self._module()
        assert module is not None
        if not (module.training and torch.is_grad_enabled()):
            return module._call_impl(*args, **kwargs)
        return checkpoint(module._call_impl, *args, use_reentrant=False, **kwargs)
