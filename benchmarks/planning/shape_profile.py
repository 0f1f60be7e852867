"""A step of a transformer as a profile, from its shape alone: what a plan by lifetimes starts from.

It is the step of one device of a pipeline (of one stage: of the whole model), in which all that is
in device memory may move, as Teraio has it: weights, gradients, states of the optimizer, and what
autograd saves.

[Note: lifetimes in a step]
Stages take a forward pass and a backward pass in turns (1F1B), so that the first of two has the
saved tensors of two micro-batches at a time. Within a layer the products of
`TransformerShape.parts` are computed one after the other, backward takes twice as long as forward,
and nothing is computed again. What is no product takes no time, nor does sending between stages.

    weights           used by their product in each forward and backward pass, and by the update
    gradients         made by the first backward pass, added to by the others, gone with the update
    states            used by the update alone
    saved tensors     made by one product, used in the backward pass of another

A step begins with the update that ends the one before, matrix by matrix on the device: so the time
in which states lie unused is within the step, and a plan sees all of it. Gradients are all there at
the end of the step, and count no more while the update runs.

A tensor is used at a moment: it may begin to leave when the product that uses it begins. So what a
product needs at a time is counted once more beside the tensors: of the largest one input, weights
and output, and the gradients of the three. Left out are vectors (of norms and biases), saved
tensors under 2^20 elements, and what the head saves, as its backward pass begins at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from offload_strategy.plan_runtime.profile import Profile, TensorLife
from offload_strategy.planner.saved_tensor_bytes import SMALL_ELEMENTS, Workload, layer_tensors
from offload_strategy.planner.transformer_shape import TransformerShape, Weight

#: Backward over forward computation: a product each for the gradients of input and weights.
_BACKWARD_OVER_FORWARD = 2.0
#: The product that a matrix of a layer belongs to, unless it has its name.
_PRODUCT_OF = {"q": "qkv", "k": "qkv", "v": "qkv", "o": "projection", "gate": "up"}
_FIRST = "qkv"
_ATTENTION = ("attention",)
_INNER = ("up", ("down",))
#: The product that makes a saved tensor, None for what the layer begins with, and those that use it
#: in backward, in their order. Norms and functions count as part of the product after them.
_SAVED: dict[str, tuple[str | None, tuple[str, ...]]] = {
    **dict.fromkeys(("input of the norm", "input of qkv"), (None, ("qkv",))),
    **dict.fromkeys(("queries", "keys", "values"), ("qkv", _ATTENTION)),
    "statistics": ("attention", _ATTENTION),
    "result of attention": ("attention", ("projection", "attention")),
    **dict.fromkeys(("input of the second norm", "input of up"), ("projection", ("up",))),
    **dict.fromkeys(("gate", "activated gate", "up", "result of up", "input of down"), _INNER),
}


@dataclass(frozen=True, slots=True)
class StageStep:
    """A step of one device of a pipeline, of which each stage has as many layers."""

    shape: TransformerShape  # Without an encoder; `stages` divide its layers
    work: Workload  # Of one micro-batch
    micro_batches: int
    flops: float
    update_rate: float  # Parameters that the device updates in a second
    stages: int = 1
    stage: int = 0  # The one that is looked at. The first has the embedding, the last the head
    weight_bytes: int = 4  # Of each parameter, as the next two
    gradient_bytes: int = 4
    state_bytes: int = 8  # What the optimizer keeps beside the weight

    @property
    def layers(self) -> range:
        each = self.shape.layers // self.stages
        return range(self.stage * each, (self.stage + 1) * each)


class _Product(NamedTuple):
    """One product of a stage, as `TransformerShape.parts` names it, "embedding" or "head"."""

    name: str
    layer: int  # -1 for none
    seconds: float  # Of its forward pass
    weights: tuple[Weight, ...]
    active_bytes: int  # Of input, weights and output


class _Pass(NamedTuple):
    """The forward or backward pass of a micro-batch through a stage, and when it begins."""

    micro_batch: int
    backward: bool
    begin: float


def step_profile(step: StageStep) -> Profile:
    """List what a device has in memory during a step, and when it uses it.

    See [Note: lifetimes in a step]. The profile has no paths. Its time is that of computing and of
    waiting for other stages.
    """
    products = _products(step, step.stage)
    weights = list(dict.fromkeys(weight for product in products for weight in product.weights))
    updates, begin = {}, 0.0
    for weight in weights:
        updates[weight] = begin
        begin += weight.elements / step.update_rate
    passes, end = _schedule(step, begin)
    clock = _Clock(products)
    tensors = [*_kept(step, products, passes, clock, updates, end), *_saved(step, passes, clock)]
    return Profile(
        forward_seconds=min(one.begin for one in passes if one.backward),
        step_seconds=end,
        tensors=tuple(tensors),
        other_bytes=max(active_bytes(step)),
    )


def active_bytes(step: StageStep) -> list[int]:
    """Bytes that each product needs at a time, of a forward pass and then of a backward pass."""
    forward = [product.active_bytes for product in _products(step, step.stage)]
    return [*forward, *(2 * nbytes for nbytes in reversed(forward))]


def _products(step: StageStep, stage: int) -> list[_Product]:
    """What a stage computes in a forward pass, in order."""
    shape, work = step.shape, step.work
    stream = work.tokens * shape.hidden * work.dtype_bytes
    table = Weight("embedding", shape.vocabulary * shape.hidden)
    each = shape.layers // step.stages
    found = []

    def add(
        name: str, layer: int, flops: float, weights: tuple[Weight, ...], activations: int
    ) -> None:
        of_weights = step.weight_bytes * sum(weight.elements for weight in weights)
        found.append(_Product(name, layer, flops / step.flops, weights, activations + of_weights))

    if stage == 0:
        add("embedding", -1, 0.0, (table,), stream)
    for layer in range(stage * each, (stage + 1) * each):
        of_product: dict[str, list[Weight]] = {}
        for weight in shape.layer_weights(layer):
            name = weight.name.rsplit(".", 1)[1]
            of_product.setdefault(_PRODUCT_OF.get(name, name), []).append(weight)
        before = stream
        for part in shape.parts(work.batch, work.sequence, work.dtype_bytes):
            own = tuple(of_product.get(part.name, ()))
            add(part.name, layer, part.flops, own, before + part.output_bytes)
            before = part.output_bytes
    if stage == step.stages - 1:
        shared = shape.tied and step.stages == 1
        head = table if shared else Weight("head", table.elements)
        logits = work.tokens * shape.vocabulary * work.dtype_bytes
        add("head", -1, shape.head_flops(work.batch, work.sequence), (head,), stream + logits)
    return found


def _schedule(step: StageStep, begin: float) -> tuple[list[_Pass], float]:
    """The passes of the stage that is looked at, and when the last one of any stage ends."""
    forward = [
        sum(product.seconds for product in _products(step, stage)) for stage in range(step.stages)
    ]
    left = [_order(step, stage) for stage in range(step.stages)]
    ends: dict[tuple[int, int, bool], float] = {}
    free = [begin] * step.stages
    found = []
    while any(left):
        for stage, order in enumerate(left):
            while order:
                number, backward = order[0]
                before = stage + 1 if backward else stage - 1
                waits = 0 <= before < step.stages
                if waits and (before, number, backward) not in ends:
                    break
                order.pop(0)
                now = max(free[stage], ends[before, number, backward] if waits else 0.0)
                took = forward[stage] * (_BACKWARD_OVER_FORWARD if backward else 1.0)
                free[stage] = ends[stage, number, backward] = now + took
                if stage == step.stage:
                    found.append(_Pass(number, backward, now))
    return found, max(free)


def _order(step: StageStep, stage: int) -> list[tuple[int, bool]]:
    """Passes of a stage as 1F1B has them: (micro-batch, whether backward)."""
    ahead = step.stages - stage
    forwards = [(number, False) for number in range(step.micro_batches)]
    order, rest = forwards[:ahead], forwards[ahead:]
    for number in range(step.micro_batches):
        order.append((number, True))
        order += rest[number : number + 1]
    return order


class _Clock:
    """When the products of a stage are computed, seconds from the begin of a pass."""

    def __init__(self, products: list[_Product]) -> None:
        self._begins: dict[tuple[bool, int, str], float] = {}
        self._ends: dict[tuple[int, str], float] = {}
        now = 0.0
        for product in products:
            self._begins[False, product.layer, product.name] = now
            now += product.seconds
            self._ends[product.layer, product.name] = now
        now = 0.0
        for product in reversed(products):
            self._begins[True, product.layer, product.name] = now
            now += product.seconds * _BACKWARD_OVER_FORWARD

    def begin(self, one: _Pass, layer: int, product: str) -> float:
        """When a pass begins to compute a product."""
        return one.begin + self._begins[one.backward, layer, product]

    def made(self, forward: _Pass, layer: int, product: str | None) -> float:
        """When a forward pass has the result of a product; None for the layer's input."""
        if product is None:
            return self.begin(forward, layer, _FIRST)
        return forward.begin + self._ends[layer, product]


def _kept(
    step: StageStep,
    products: list[_Product],
    passes: list[_Pass],
    clock: _Clock,
    updates: dict[Weight, float],
    end: float,
) -> Iterator[TensorLife]:
    """Weights, gradients and states of the optimizer."""
    needed: dict[Weight, list[float]] = {weight: [] for weight in updates}
    added: dict[Weight, list[float]] = {weight: [] for weight in updates}
    for product in products:
        for one in passes:
            # Sums in another order may differ by a rounding: nothing is used after the end.
            moment = min(clock.begin(one, product.layer, product.name), end)
            for weight in product.weights:
                if one.backward:
                    added[weight].append(moment)
                # Only its rows' gradients are made in the backward pass of an embedding.
                if not one.backward or product.name != "embedding":
                    needed[weight].append(moment)
    for weight, update in updates.items():
        name, elements = weight
        uses = (update, *sorted(needed[weight]))
        yield TensorLife(name, elements * step.weight_bytes, uses, cyclic=True)
        uses = (*sorted(added[weight]), end)
        yield TensorLife(f"gradient of {name}", elements * step.gradient_bytes, uses)
        yield TensorLife(f"states of {name}", elements * step.state_bytes, (update,), cyclic=True)


def _saved(step: StageStep, passes: list[_Pass], clock: _Clock) -> Iterator[TensorLife]:
    """What the layers save for backward."""
    saved = (one for one in layer_tensors(step.shape, step.work) if one.elements >= SMALL_ELEMENTS)
    tensors = tuple(saved)
    backwards = {one.micro_batch: one for one in passes if one.backward}
    for forward in (one for one in passes if not one.backward):
        backward = backwards[forward.micro_batch]
        for layer in step.layers:
            for tensor in tensors:
                maker, users = _SAVED[tensor.name]
                made = clock.made(forward, layer, maker)
                used = (clock.begin(backward, layer, user) for user in users)
                name = f"layers.{layer}: {tensor.name}, micro-batch {forward.micro_batch}"
                yield TensorLife(name, tensor.nbytes, (made, *used))
