"""Random training scripts: an offloaded run must agree with a plain one after every action."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from torch import nn
from torch.optim import SGD, Adam, AdamW

from offload_strategy import OffloadEngine
from tests.optimizer.runs import loss_of, make_net, snapshot
from tests.training import assert_same_bits
from tests.training import settings as engine_settings

KINDS: dict[str, Any] = {
    # Not fused: the weights would change with their version counters standing still, and a graph
    # that is older than the step would be differentiated at the wrong place without a word.
    "AdamW": lambda p: AdamW(p, 1e-2),
    "Adam": lambda p: Adam(p, 1e-2, amsgrad=True, weight_decay=0.01),
    "SGD": lambda p: SGD(p, 0.1, momentum=0.9),
}
NAMES = [name for name, _ in make_net().named_parameters()]


class AnyTraining(RuleBasedStateMachine):
    """Two runs, one of them with an engine; what one does the other does as well."""

    @initialize(
        kind=st.sampled_from(list(KINDS)),
        overlap=st.sampled_from(["commit", "off"]),
        host=st.sampled_from([None, "2KiB", "1MiB"]),
        activations=st.booleans(),
    )
    def start(self, kind: str, overlap: str, host: str | None, activations: bool) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name)
        self.engine = OffloadEngine(
            engine_settings(
                self.path,
                host,
                optimizer={"overlap": overlap, "subgroup_size": 60},
                activations={"enabled": activations},
            )
        )
        self.models = [make_net(), make_net()]
        self.optimizers: list[Any] = [KINDS[kind](model.parameters()) for model in self.models]
        self.optimizers[1] = self.engine.attach(self.models[1], self.optimizers[1])
        self.graphs: list[list[torch.Tensor]] = []

    def both(self) -> Any:
        return zip(self.models, self.optimizers, strict=True)

    def check(self) -> None:
        plain, offloaded = (snapshot(model, optimizer) for model, optimizer in self.both())
        assert_same_bits(offloaded, plain)

    @rule(number=st.integers(0, 5), extra=st.booleans(), last=st.sampled_from([None, True, False]))
    def forward_and_backward(self, number: int, extra: bool, last: bool | None) -> None:
        if last is not None:
            self.engine.microbatch(0, last=last)
        for model in self.models:
            if any(p.requires_grad for p in model.parameters()):
                loss_of(model, number, extra).backward()
        self.check()

    @rule(number=st.integers(0, 5))
    def forward_only(self, number: int) -> None:
        self.graphs.append([loss_of(model, number) for model in self.models])
        del self.graphs[:-2]

    @rule()
    def backward_of_an_older_forward(self) -> None:
        if not self.graphs:
            return
        results = []
        for loss in self.graphs.pop(0):
            try:
                loss.backward()
                results.append("")
            except RuntimeError as error:  # the weights have changed since
                results.append(str(error)[:80])
        assert results[0] == results[1]
        self.check()

    @rule(times=st.integers(1, 2))
    def step(self, times: int) -> None:
        for optimizer in self.optimizers:
            for _ in range(times):
                optimizer.step()
        self.check()

    @rule(whole=st.booleans(), to_none=st.booleans())
    def zero_grad(self, whole: bool, to_none: bool) -> None:
        for model, optimizer in self.both():
            (model if whole else optimizer).zero_grad(set_to_none=to_none)

    @rule(norm=st.sampled_from([1e-3, 0.5, 1e6]))
    def clip(self, norm: float) -> None:
        for model in self.models:
            nn.utils.clip_grad_norm_(model.parameters(), norm)

    @rule(name=st.sampled_from(NAMES), how=st.sampled_from(["scale", "data", "drop", "replace"]))
    def edit_a_gradient(self, name: str, how: str) -> None:
        for model in self.models:
            parameter = model.get_parameter(name)
            if parameter.grad is None:
                continue
            if how == "scale":
                parameter.grad.mul_(0.5)
            elif how == "data":
                parameter.grad.data.neg_()
            elif how == "drop":
                parameter.grad = None
            else:
                parameter.grad = torch.full_like(parameter, 0.01)

    @rule(name=st.sampled_from(NAMES))
    def edit_a_weight(self, name: str) -> None:
        for model in self.models:
            with torch.no_grad():
                model.get_parameter(name).mul_(0.9)

    @rule(name=st.sampled_from(NAMES), value=st.booleans())
    def freeze_or_unfreeze(self, name: str, value: bool) -> None:
        for model in self.models:
            model.get_parameter(name).requires_grad_(value)

    @rule(lr=st.sampled_from([1e-3, 1e-2, 0.05]))
    def change_the_learning_rate(self, lr: float) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr

    @rule(name=st.sampled_from(NAMES), delete=st.booleans())
    def edit_or_delete_a_state(self, name: str, delete: bool) -> None:
        for model, optimizer in self.both():
            parameter = model.get_parameter(name)
            if parameter not in optimizer.state:
                continue
            if delete:
                del optimizer.state[parameter]
                continue
            state = dict(optimizer.state[parameter])
            for key in ("exp_avg", "momentum_buffer"):
                if state.get(key) is not None:
                    state[key] = state[key] * 0.5
            optimizer.state[parameter] = state
        self.check()

    @rule(crosswise=st.booleans())
    def save_and_load(self, crosswise: bool) -> None:
        saved = [
            copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            for model, optimizer in self.both()
        ]
        for (model, optimizer), (weights, states) in zip(
            self.both(), reversed(saved) if crosswise else saved, strict=True
        ):
            model.load_state_dict(weights)
            optimizer.load_state_dict(states)
        self.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.graphs.clear()
        # A backward that failed leaves nodes in autograd's queue, which the next one drops.
        torch.ones((), requires_grad=True).backward()
        self.check()
        self.engine.close()
        assert self.engine._resources.store.live_tickets == 0
        assert list(self.path.iterdir()) == []
        self.folder.cleanup()


AnyTraining.TestCase.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, print_blob=True
)
TestAnyTraining = AnyTraining.TestCase
