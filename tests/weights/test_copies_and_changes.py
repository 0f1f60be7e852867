"""Streamed weights that are copied, saved, loaded, changed by hand and looked at."""

import copy
import gc
import io
import pickle

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_model
from torch import nn
from torch.optim import swa_utils

from offload_strategy import OffloadError
from offload_strategy.store import writer
from tests.activations.support import noise
from tests.activations.zoo import build
from tests.training import assert_same_bits, attached, bits, gradients, in_turn, on_disk, weights
from tests.weights.nets import Block, adamw, loss, net, sgd, step, train, zoo_loss
from tests.weights.support import OVERLAPS, all_plain, compared, the_same


# ---------------------------------------------------------------------- copies, files, precision
def _saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _pickled(model):
    return pickle.loads(pickle.dumps(model))


def tied_and_tagged():
    model = net()
    model.head.weight = model.stem.weight
    for name, parameter in model.named_parameters():
        parameter.tag = name
    return model


@pytest.mark.parametrize("copied", [copy.deepcopy, _saved, _pickled])
@compared(tied_and_tagged)
def test_a_copy_goes_its_own_way(model, optimizer, copied):
    history = train(model, optimizer)
    value = loss(model)
    twin = copied(model)  # in the middle of a step
    value.backward()
    other = copied(model)
    optimizer.step()
    optimizer.zero_grad()
    assert all_plain(twin)
    assert twin.head.weight is twin.stem.weight
    if copied is not copy.deepcopy:
        assert all(p.tag == name for name, p in twin.named_parameters())
    history += [weights(other), *train(twin, adamw(twin)), weights(twin)]
    shallow = copy.copy(model)
    assert all(a is b for a, b in zip(shallow.parameters(), model.parameters(), strict=True))
    history.append({"one": copied(model.head.weight).detach().clone()})
    return [*history, *train(model, optimizer)]


@pytest.mark.parametrize(
    ("dtype", "overlap", "when"),
    in_turn(
        [torch.float16, torch.bfloat16, torch.float64] * 2,
        OVERLAPS,
        ["before attach", "before the first step", "between steps", "between steps"],
    ),
)
@compared(lambda dtype, when: net().to(dtype) if when == "before attach" else net(), sgd)
def test_training_in_another_precision(model, optimizer, dtype, when):
    history = train(model, optimizer) if when == "between steps" else []
    model.to(dtype)
    assert all(parameter.dtype == dtype for parameter in model.parameters())
    history += train(model, optimizer)
    if when == "between steps":
        model.float()
        history += train(model, optimizer)
    return history


@pytest.mark.parametrize("kind", ["GPT-2", "ResNet"])
@compared(lambda kind: build(kind))
def test_autocast_around_models_and_their_backward(model, optimizer, kind):
    """Two losses share the casts of a weight."""
    forward = zoo_loss(kind)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return train(model, optimizer, loss_of=lambda m, n: forward(m, n) + forward(m, n + 10))


@pytest.mark.parametrize("overlap", ["commit", "eager"])
@compared()
def test_a_state_dict_that_is_kept_and_loaded(model, optimizer):
    history = train(model, optimizer)
    live = model.state_dict()
    kept = {name: value.clone() for name, value in live.items()}
    history += train(model, optimizer)
    history.append({name: value.clone() for name, value in live.items()})
    model.load_state_dict(kept)
    history += [step(model, optimizer), {n: v.clone() for n, v in live.items()}]
    del live
    return [*history, *train(model, optimizer)]


@pytest.mark.parametrize("watched", [False, True], ids=["by the model", "by the optimizer too"])
@compared(optimizer_of=None)
def test_a_state_dict_that_is_assigned(model, optimizer, engine, watched):
    if watched:
        optimizer = attached(engine, None, adamw(model))
    history = train(model, optimizer) if watched else []
    loss(model).backward()
    model.zero_grad()
    model.load_state_dict({n: v * 2 for n, v in net().state_dict().items()}, assign=True)
    loss(model).backward()
    history.append(gradients(model))
    return [*history, *train(model, adamw(model))]


@pytest.mark.parametrize("kind", ["GPT-2", "T5"])
def test_safetensors_and_transformers_save_what_they_would_have_saved(
    engine, tmp_path, kind, monkeypatch
):
    monkeypatch.setattr(writer, "_WORTH_BYTES", 1)
    for way in ("plain", "streamed"):
        model = build(kind)
        if way == "streamed":  # from the middle of pages, where other things are, too
            for weight in model.parameters():
                weight.data = torch.zeros(weight.numel() + 48)[48:].view_as(weight).copy_(weight)
            engine.attach(model)
            on_disk(engine)
        save_model(model, str(tmp_path / way))
        model.save_pretrained(tmp_path / f"{way} files")
    assert_same_bits(load_file(tmp_path / "streamed"), load_file(tmp_path / "plain"))
    opened = [safe_open(tmp_path / name, "pt") for name in ("streamed", "plain")]
    assert opened[0].metadata() == opened[1].metadata()
    for file in sorted((tmp_path / "plain files").iterdir()):
        saved = tmp_path / "streamed files" / file.name
        assert saved.read_bytes() == file.read_bytes(), file.name


# ---------------------------------------------------------------------- changes by hand
@pytest.mark.parametrize("overlap", ["in memory"])
@compared()
def test_weights_that_have_the_same_bytes_and_are_two(model, optimizer):
    """In the order of the optimizer: the second update begins with what the first has done."""
    history = train(model, optimizer)
    model.head.weight.data = model.stem.weight.data
    return [*history, *train(model, optimizer)]


def test_a_weight_outlives_its_model(engine):
    model, twin = net(), net()
    engine.attach(model)
    weight, block = model.blocks[1].up.weight, model.blocks[2]
    del model
    gc.collect()
    assert bits(weight) == bits(twin.blocks[1].up.weight)
    assert bits(block(noise(4, 8))) == bits(twin.blocks[2](noise(4, 8)))
    engine.close()
    assert bits(weight) == bits(twin.blocks[1].up.weight)


@pytest.mark.parametrize("trained", [True, False])
@the_same
def test_a_graph_outlives_its_model(engine, trained):
    model = net().requires_grad_(trained)
    if engine is not None:
        engine.attach(model)
    x = noise(4, 8).requires_grad_()
    value = model(x).pow(2).sum()
    del model
    gc.collect()
    value.backward()
    return ([{"slope": x.grad}],)


@pytest.mark.parametrize("way", ["tensor", "as_tensor", "asarray", "stand-in"])
def test_what_gets_past_torch_functions_never_finds_plausible_numbers(engine, way):
    """The values, or else NaN; and what is written there is refused, or harms no other weight."""
    model, expected = net(), weights(net())
    engine.attach(model)
    on_disk(engine)
    for name, parameter in model.named_parameters():
        if way == "stand-in":
            with torch._C.DisableTorchFunctionSubclass():
                got = parameter.detach()
        else:
            got = getattr(torch, way)(parameter, dtype=torch.float64)
        assert bool(got.isnan().all()) or torch.equal(got, expected[name].to(got.dtype))
    engine.close()
    assert_same_bits(weights(model), expected)


# ---------------------------------------------------------------------- between steps
def _tie(model):
    model.blocks[2].up.weight = model.blocks[0].up.weight
    model.head.weight = model.stem.weight


def _replace_a_block(model):
    torch.manual_seed(8)
    model.blocks[1] = Block()


def _replace_a_parameter(model):
    model.blocks[1].up.weight = nn.Parameter(noise(16, 8, seed=8))


def _remove_a_block(model):
    del model.blocks[1]


def _initialize(model):
    def fill(module):
        if isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            nn.init.uniform_(module.bias, -0.1, 0.1)

    torch.manual_seed(8)
    model.apply(fill)
    for parameter in model.blocks[0].parameters():
        if parameter.dim() == 2:
            nn.init.orthogonal_(parameter)
            nn.init.trunc_normal_(parameter[:2])
    nn.init.eye_(model.head.weight)
    nn.init.zeros_(model.head.bias)


def _through_numpy_and_dlpack(model):
    for parameter in model.parameters():
        array = parameter.detach().numpy()
        array *= 0.5
        array.reshape(-1)[0] = 0.25
        np.asarray(parameter.data)[...] += 0.01
        torch.utils.dlpack.from_dlpack(parameter.detach()).mul_(0.5)


def _in_place(model):
    parameters = list(model.parameters())
    with torch.no_grad():
        torch.linspace(0.1, 0.9, 8, out=model.blocks[2].gain)  # before anything else loads it
        torch._foreach_mul_(parameters, 0.9)
        for parameter in parameters:
            parameter[0] = 0.125
            parameter[-1] += 0.5
            parameter.view(-1)[1:3].fill_(-0.25)
            parameter[parameter > 1] = 1.0
            for row in parameter:
                row.mul_(0.9)
            parameter.mul_(0.5)
            parameter += 0.01
            parameter.clamp_(-0.4, 0.4)


def _data_set(model):
    for number, parameter in enumerate(model.parameters()):
        if number % 2:
            parameter.data = noise(*parameter.shape, seed=number)
        else:
            with torch.no_grad():
                parameter.set_(noise(*parameter.shape, seed=number))


def _through_a_view_that_was_kept(model):
    views = [parameter.data.view(-1)[:3] for parameter in model.parameters()]
    with torch.no_grad():
        loss(model)
    for view in views:
        view.fill_(0.5)


def _through_a_storage(model):
    for parameter in model.parameters():
        parameter.untyped_storage().copy_(noise(*parameter.shape, seed=3).untyped_storage())


def _through_a_vector(model):
    with torch.no_grad():
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(vector * 0.9, model.parameters())


def _through_a_vector_and_changed(model):
    """One storage has all weights then, and each weight counts its changes for itself."""
    _through_a_vector(model)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            for _ in range(number):
                parameter.mul_(0.99)


def _average(model):
    averaged = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    for _ in range(2):
        averaged.update_parameters(model)
        with torch.no_grad():
            model.scale.mul_(0.5)
    assert all_plain(averaged)
    with torch.no_grad():
        return {"loss": loss(averaged), **weights(averaged)}


CHANGES = {
    function.__name__.strip("_").replace("_", " "): function
    for function in (
        _tie, _replace_a_block, _replace_a_parameter, _remove_a_block, _initialize,
        _through_numpy_and_dlpack, _in_place, _data_set, _through_a_view_that_was_kept,
        _through_a_storage, _through_a_vector, _through_a_vector_and_changed, _average,
    )
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "overlap", "from_disk"), in_turn(CHANGES, ["eager", "commit"], [False, True, True])
)
@compared()
def test_changes_between_steps(model, optimizer, engine, change, from_disk):
    history = []
    for number in range(4):
        if number in (1, 3):
            if from_disk and engine is not None:
                on_disk(engine)
            history.append(CHANGES[change](model) or {})
        if len(model.blocks):
            history.append(step(model, optimizer, number))
    return history


IN_FORWARD = {
    "limited": lambda layer: layer.weight.data.clamp_(-0.1, 0.1),
    "replaced": lambda layer: setattr(layer.weight, "data", layer.weight.data.mul(0.9)),
    "by numpy": lambda layer: layer.bias.numpy().__imul__(0.5),
    "detached": lambda layer: layer.weight.detach().mul_(0.9),
}


@pytest.mark.parametrize("change", IN_FORWARD)
@compared()
def test_changes_by_a_block_itself(model, optimizer, change):
    """By layers that limit their weights, by codebooks, by adapters that are merged."""

    def hook(layer, _):
        IN_FORWARD[change](layer)

    for layer in model.modules():
        if isinstance(layer, nn.Linear) and (change != "by numpy" or layer.bias is not None):
            if change == "by numpy":
                layer.bias.requires_grad_(False)
            layer.register_forward_pre_hook(hook)
    history = train(model, optimizer)
    with torch.no_grad():
        history.append({"evaluated": loss(model).detach()})
    return [*history, *train(model, optimizer)]


@pytest.mark.parametrize("overlap", ["commit"])
@pytest.mark.parametrize("change", ["in place", "through numpy and dlpack", "data set"])
@pytest.mark.parametrize("from_disk", [False, True])
@compared()
def test_changes_between_backward_and_step(model, optimizer, engine, change, from_disk):
    """An update that has run by then is dropped, and runs again with the changed weights."""
    history = []
    for number in range(3):
        loss(model, number).backward()
        if from_disk and engine is not None:
            on_disk(engine)
        if number:
            history.append(CHANGES[change](model) or {})
        optimizer.step()
        optimizer.zero_grad()
        history.append(weights(model))
    return history


@pytest.mark.parametrize(
    "change", ["tie", "replace a block", "replace a parameter", "remove a block"]
)
@compared(optimizer_of=None)
def test_changes_of_weights_that_no_optimizer_holds(model, optimizer, change):
    """The parameters that were replaced are gone then."""
    history = train(model, None, 1, look=gradients)
    CHANGES[change](model)
    return [*history, *train(model, None, 2, first=1, look=gradients)]


@compared(optimizer_of=None)
def test_data_replaced_between_backwards_is_found_where_autograd_saved_a_leaf(model, optimizer):
    losses = loss(model), loss(model, 1)
    history = []
    for value in losses:
        value.backward()
        history.append(gradients(model))
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms, gains and biases
                parameter.data = parameter.data - 0.5 * parameter.grad
        model.zero_grad()
    return history


def test_data_replaced_between_backwards_is_refused_where_autograd_saved_a_view(engine):
    model = net()
    engine.attach(model)
    value = loss(model)
    value.backward(retain_graph=True)
    for parameter in model.parameters():
        parameter.data = parameter.data * 2
    with pytest.raises(OffloadError, match="was replaced"):
        value.backward()
    model.zero_grad()
    loss(model).backward()  # a new pass is fine
