"""Random training scripts: an offloaded run must agree with a plain one after every action."""

import copy
import tempfile
from pathlib import Path

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from torch import nn

from offload_strategy import OffloadEngine
from tests.optimizer.runs import OPTIMIZERS, Run, loss_of, make_net, snapshot
from tests.training import assert_same_bits
from tests.training import settings as engine_settings

#: Not fused: the weights would change with their version counters standing still, and a graph
#: that is older than the step would be differentiated at the wrong place without a word.
KINDS = ["AdamW", "NAdam", "SGD momentum"]
GRADIENT_EDITS = {
    "scale": lambda p: p.grad.mul_(0.5),
    "data": lambda p: p.grad.data.neg_(),
    "drop": lambda p: setattr(p, "grad", None),
    "replace": lambda p: setattr(p, "grad", torch.full_like(p, 0.01)),
}
PARAMETER_EDITS = {
    "scale": lambda p: p.detach().mul_(0.9),
    "freeze": lambda p: p.requires_grad_(False),
    "unfreeze": lambda p: p.requires_grad_(True),
}
STATE_EDITS = {
    "an item": lambda state, key: state.update({key: state[key] * 0.5}),
    "in place": lambda state, key: state[key].mul_(0.5),
    "without a version": lambda state, key: state[key].data.mul_(0.5),
}
NAMES = [name for name, _ in make_net().named_parameters()]


class AnyTraining(RuleBasedStateMachine):
    """Two runs, one of them with an engine; what one does the other does as well."""

    @initialize(
        kind=st.sampled_from(KINDS),
        overlap=st.sampled_from(["commit", "off"]),
        host=st.sampled_from([None, "2KiB", "1MiB"]),
        activations=st.booleans(),
    )
    def start(self, kind, overlap, host, activations):
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name)
        section = {"overlap": overlap, "subgroup_size": 60}
        sections = {"optimizer": section, "activations": {"enabled": activations}}
        self.engine = OffloadEngine(engine_settings(self.path, host, **sections))
        self.runs = [Run(OPTIMIZERS[kind]), Run(OPTIMIZERS[kind])]
        self.runs[1].optimizer = self.engine.attach(self.runs[1].model, self.runs[1].optimizer)
        self.graphs = []

    def check(self):
        plain, offloaded = (snapshot(run.model, run.optimizer) for run in self.runs)
        assert_same_bits(offloaded, plain)

    @rule(number=st.integers(0, 5), extra=st.booleans(), last=st.sampled_from([None, True, False]))
    def forward_and_backward(self, number, extra, last):
        if last is not None:
            self.engine.microbatch(0, last=last)
        for run in self.runs:
            if any(p.requires_grad for p in run.model.parameters()):
                run.backward(number, extra)
        self.check()

    @rule(number=st.integers(0, 5))
    def forward_only(self, number):
        self.graphs.append([loss_of(run.model, number) for run in self.runs])
        del self.graphs[:-2]

    @rule()
    def backward_of_an_older_forward(self):
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
    def step(self, times):
        for run in self.runs:
            for _ in range(times):
                run.optimizer.step()
        self.check()

    @rule(whole=st.booleans(), to_none=st.booleans())
    def zero_grad(self, whole, to_none):
        for run in self.runs:
            (run.model if whole else run.optimizer).zero_grad(set_to_none=to_none)

    @rule(norm=st.sampled_from([1e-3, 0.5, 1e6]))
    def clip(self, norm):
        for run in self.runs:
            nn.utils.clip_grad_norm_(run.model.parameters(), norm)

    @rule(name=st.sampled_from(NAMES), edit=st.sampled_from(list(GRADIENT_EDITS)))
    def edit_a_gradient(self, name, edit):
        for run in self.runs:
            if run.model.get_parameter(name).grad is not None:
                GRADIENT_EDITS[edit](run.model.get_parameter(name))

    @rule(name=st.sampled_from(NAMES), edit=st.sampled_from(list(PARAMETER_EDITS)))
    def edit_a_parameter(self, name, edit):
        for run in self.runs:
            PARAMETER_EDITS[edit](run.model.get_parameter(name))

    @rule(lr=st.sampled_from([1e-3, 1e-2, 0.05]))
    def change_the_learning_rate(self, lr):
        for run in self.runs:
            for group in run.optimizer.param_groups:
                group["lr"] = lr

    @rule(name=st.sampled_from(NAMES), way=st.sampled_from(["delete", "assign", *STATE_EDITS]))
    def edit_or_delete_a_state(self, name, way):
        for run in self.runs:
            parameter, states = run.model.get_parameter(name), run.optimizer.state
            if parameter not in states:
                continue
            if way == "delete":
                del states[parameter]
                continue
            state = dict(states[parameter]) if way == "assign" else states[parameter]
            for key in ("exp_avg", "momentum_buffer"):
                if state.get(key) is not None:
                    STATE_EDITS.get(way, STATE_EDITS["an item"])(state, key)
            if way == "assign":
                states[parameter] = state
        self.check()

    @rule(name=st.sampled_from(NAMES))
    def move_to_another_group(self, name):
        for run in self.runs:
            parameter, groups = run.model.get_parameter(name), run.optimizer.param_groups
            if len(groups) == 1:
                run.optimizer.add_param_group({"params": nn.Parameter(torch.ones(2)), "lr": 0.02})
            for group, other in ((0, 1), (1, 0)):
                places = [id(each) for each in groups[group]["params"]]
                if id(parameter) in places:
                    groups[other]["params"].append(
                        groups[group]["params"].pop(places.index(id(parameter)))
                    )
                    break

    @rule(crosswise=st.booleans())
    def save_and_load(self, crosswise):
        saved = [copy.deepcopy((r.model.state_dict(), r.optimizer.state_dict())) for r in self.runs]
        if crosswise:
            saved.reverse()
        for run, (weights, states) in zip(self.runs, saved, strict=True):
            run.model.load_state_dict(weights)
            run.optimizer.load_state_dict(states)
        self.check()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.graphs.clear()
        # A backward that failed leaves nodes in autograd's queue, which the next one drops.
        torch.ones((), requires_grad=True).backward()
        self.check()
        self.engine.close()
        assert self.engine._resources.store.registry.live == 0
        assert list(self.path.iterdir()) == []
        self.folder.cleanup()


AnyTraining.TestCase.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, print_blob=True
)
TestAnyTraining = AnyTraining.TestCase
