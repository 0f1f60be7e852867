"""Models of every form: the same bits with streamed weights as without."""

import random
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

from offload_strategy import ConfigError
from tests.activations.support import noise
from tests.activations.test_recompute import WAYS
from tests.activations.zoo import ZOO, build
from tests.training import attached, gradients, in_turn
from tests.weights.nets import Block, Net, adamw, loss, net, step, train, zoo_loss
from tests.weights.support import OVERLAPS, away, compared, nearly_all_left, the_same


# ---------------------------------------------------------------------- models of the zoo
def fused(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


@pytest.mark.parametrize(
    ("kind", "overlap", "activations"), in_turn(ZOO, [*OVERLAPS, "in memory"], [True, False, False])
)
@compared(lambda kind: build(kind), fused)
def test_models_of_the_zoo(model, optimizer, kind, overlap):
    # Eager updates have used gradients up before anybody can look.
    look = {} if overlap == "eager" else {"look": gradients}
    return train(model, optimizer, 4, loss_of=zoo_loss(kind), **look)


@compared(lambda: build("ResNet"))
def test_channels_last(model, optimizer):
    history = train(model, optimizer, 2, loss_of=zoo_loss("ResNet"))
    model.to(memory_format=torch.channels_last)
    history += [{"strides": torch.tensor(p.stride())} for p in model.parameters()]
    return [*history, *train(model, optimizer, 2, first=2, loss_of=zoo_loss("ResNet"))]


# ---------------------------------------------------------------------- the order of blocks
class Ordered(Net):
    def __init__(self, order):
        super().__init__()
        self.order = order

    def features(self, x):
        x = self.stem(x)
        for number in self.order():
            x = self.blocks[number](x)
        return x


def _at_random():
    # Seeded by torch's numbers, which every loss seeds anew.
    return random.Random(int(torch.randint(1000, ()))).choices(range(3), k=4)


ORDERS = {
    "a block twice": lambda: [0, 1, 1, 2],
    "a block twice, apart": lambda: [0, 1, 2, 0],
    "one block always": lambda: [1, 1, 1, 1],
    "a block never": lambda: [0, 2],
    "none": lambda: [],
    "backwards": lambda: [2, 1, 0],
    "at random": _at_random,
}


class Deep(Block):
    depth = 3

    def forward(self, x):
        if self.depth:
            self.depth -= 1
            x = self(x)
            self.depth += 1
        return super().forward(x)


def in_two_places():
    model = Net()
    model.blocks.append(model.blocks[0])
    model.tail = model.blocks[1]
    return model


# ---------------------------------------------------------------------- odd weights
class Used(nn.Module):
    """Uses weights outside of the module that has them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = (x @ layer.weight).tanh()
        return x


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.waves = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.nothing = nn.Parameter(torch.empty(0, 8))
        self.one = nn.Parameter(torch.ones(1))
        self.turned = nn.Parameter(torch.randn(8, 8).t())
        self.halves = nn.Parameter(torch.randn(16, 8))
        self.wide = nn.Parameter(torch.randn(8, dtype=torch.float64))

    def forward(self, x):
        x = x / self.temperature + (x * self.waves).abs() + x @ self.turned @ self.halves[8:]
        return x * self.one + (x * self.wide).float() + self.nothing.sum()


class Limited(nn.Module):
    """Its embeddings limit their own norms."""

    def __init__(self):
        super().__init__()
        self.embeddings = nn.ModuleList([nn.Embedding(16, 8, 0, max_norm=1.0) for _ in range(3)])
        self.bag = nn.EmbeddingBag(16, 8, max_norm=0.5)
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        indices = x.abs().mul(10).long() % 16
        return self.head(sum(e(indices) for e in self.embeddings).mean(1) + self.bag(indices))


class Quantized(nn.Module):
    """A frozen layer whose weight is narrow, and a trained one beside it."""

    def __init__(self, dtype, width=8):
        super().__init__()
        wide = torch.randn(width, width)
        self.scale = nn.Parameter(wide.abs().amax(1, keepdim=True) / 127, requires_grad=False)
        narrow = wide / self.scale
        if dtype in (torch.uint8, torch.bool):
            narrow = narrow.relu()
        self.weight = nn.Parameter(narrow.round().to(dtype), requires_grad=False)
        self.delta = nn.Linear(width, width)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) * self.scale) + self.delta(x).tanh()


class Product(nn.Module):
    """As `Conv1D` of GPT-2: autograd saves its weight as it is, and that of `Linear` transposed."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.zeros(8))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight).tanh()


def partly_frozen(trained):
    """Blocks that are recomputed, and need their frozen weights in backward."""
    model = Net(lambda: nn.Sequential(Product(), Product()), around=WAYS["non-reentrant"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    return model


# ---------------------------------------------------------------------- parametrizations
class Symmetric(nn.Module):
    def forward(self, weight):
        square = weight[: weight.shape[1]]
        return torch.cat([square.triu() + square.triu(1).T, weight[weight.shape[1] :]])


PARAMETRIZED = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "the weight itself": lambda m: parametrize.register_parametrization(m, "weight", nn.Identity()),
    "symmetric": lambda m: parametrize.register_parametrization(m, "weight", Symmetric()),
    "weight norm of old": nn.utils.weight_norm,
    "pruned": lambda m: prune.l1_unstructured(m, "weight", amount=0.3),
}


def parametrized(model, way):
    torch.manual_seed(4)
    for layer in (*(block.up for block in model.blocks), model.head):
        PARAMETRIZED[way](layer)
    return model


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(
    "way", ["spectral norm", "the weight itself", "symmetric", "weight norm of old", "pruned"]
)
@compared()
def test_parametrizations_come_are_cached_and_are_removed(model, optimizer, way):
    history = train(model, optimizer)
    parametrized(model, way)
    with parametrize.cached():
        history += train(model, optimizer, 1)
    history += train(model, optimizer, 1)
    for layer in (*(block.up for block in model.blocks), model.head):
        if parametrize.is_parametrized(layer):
            parametrize.remove_parametrizations(layer, "weight")
    return [*history, *train(model, optimizer)]


TRAINED = ["bias", "0.weight", "blocks.2"]
# ---------------------------------------------------------------------- all of them
NARROW = [torch.int8, torch.bool, torch.int64, torch.bfloat16, torch.float8_e4m3fn]

MODELS = {
    "weights of layers": Used,
    "odd forms": lambda: Net(Odd),
    "norms that are limited": Limited,
    "a block within itself": lambda: Net(Deep),
    "blocks in two places": in_two_places,
    **{f"{dtype} weights": lambda dtype=dtype: Net(lambda: Quantized(dtype)) for dtype in NARROW},
    **{f"order: {name}": partial(Ordered, order) for name, order in ORDERS.items()},
    **{f"regions: {name}": partial(Net, around=way) for name, way in WAYS.items()},
    **{f"trained: {name}": partial(partly_frozen, name) for name in TRAINED},
    **{f"parametrized: {way}": lambda way=way: parametrized(Net(), way) for way in PARAMETRIZED},
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.parametrize(
    ("kind", "overlap", "activations", "parameters"),
    in_turn(MODELS, OVERLAPS, [True, False], [{"blocks_in_flight": n} for n in (1, 2, 3, 2)]),
)
@compared(lambda kind: net(MODELS[kind]))
def test_models_of_every_form(model, optimizer, engine):
    history = train(model, optimizer, 4)
    # Of the few blocks of `Limited` most are in flight.
    assert engine is None or isinstance(model, Limited) or nearly_all_left(model)
    return history


# ---------------------------------------------------------------------- several models
@pytest.mark.parametrize(
    ("overlap", "toggle"),
    # With eager updates the generator's loss would train the critic: that is an error.
    [("eager", True), ("off", True), ("commit", False)],
)
@the_same
def test_two_models_against_each_other(engine, toggle):
    generator, critic = net(), net()
    makers = attached(engine, generator, adamw(generator))
    judges = attached(engine, critic, adamw(critic))

    history = []
    for number in range(3):
        critic.requires_grad_(True)
        judges.zero_grad()
        made = generator(noise(4, 8, seed=number)).detach()
        judged = critic(made).mean() - critic(noise(4, 8, seed=50 + number)).mean()
        judged.backward()
        judges.step()
        critic.requires_grad_(not toggle)
        makers.zero_grad()
        value = -critic(generator(noise(4, 8, seed=number))).mean()
        value.backward()  # adds to what the critic's step has used, unless that is frozen
        makers.step()
        history.append({"judged": judged.detach().clone(), "made": value.detach().clone()})
    judges.zero_grad()
    return history, generator, critic


@pytest.mark.parametrize("overlap", ["commit", "eager"])
@the_same
def test_two_models_that_share_a_part_until_one_is_detached(engine):
    first, second = net(), net()
    second.blocks[0] = first.blocks[0]
    second.head.weight = first.head.weight
    both = nn.ModuleList([first, second])
    optimizer = adamw(both)
    if engine is not None:
        engine.attach(first)
        engine.attach(second)
        optimizer = engine.attach(None, optimizer)

    def loss_of(_, number):
        return loss(first, number) + loss(second, number)

    history = train(both, optimizer, loss_of=loss_of)
    if engine is not None:
        engine.detach_model(first)
    assert all(bool(torch.isfinite(p).all()) for p in first.parameters())
    return [*history, step(second, optimizer)], both


# ---------------------------------------------------------------------- weights of other classes
class Tagged(nn.Parameter):
    """What libraries make of quantized weights: a class of its own, with attributes."""

    tag = ""


def tagged():
    model = net()
    for block in model.blocks:
        block.up.weight = Tagged(block.up.weight.detach())
    for name, parameter in model.named_parameters():
        parameter.tag = name
    return model


@pytest.mark.parametrize("overlap", ["commit", "eager"])
@compared(tagged)
def test_parameters_keep_their_identity_and_what_was_hung_on_them(model, optimizer):
    """Those of other classes stay in memory, besides."""
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    history = train(model, optimizer)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert all(parameter.tag == name for name, parameter in model.named_parameters())
    assert all(type(block.up.weight) is Tagged for block in model.blocks)
    assert not {f"blocks.{number}.up.weight" for number in range(3)} & set(away(model))
    return history


class Lazy(Block):
    """Its gain is to be conjugated and negated by whoever computes with it."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(8, dtype=torch.cfloat).conj())
        self.turn = nn.Parameter(torch.rand(8, dtype=torch.cfloat).conj().imag)

    def forward(self, x):
        inner = self.down(F.gelu(self.up(self.norm(x)))) * self.turn
        return x + (inner * self.gain).real


@pytest.mark.parametrize(("overlap", "activations"), in_turn(OVERLAPS, [True, False]))
@compared(lambda: net(lambda: Net(Lazy)), lambda m: torch.optim.SGD(m.parameters(), 0.01, 0.9))
def test_parameters_that_are_conjugate_or_negative_views_stay(model, optimizer):
    assert model.blocks[0].gain.is_conj()
    assert model.blocks[0].turn.is_neg()
    history = train(model, optimizer)
    stay = {f"blocks.{number}.{name}" for number in range(3) for name in ("gain", "turn")}
    assert not stay & set(away(model))
    return history


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted_modules_with_weights_to_stream_are_refused(engine):
    model = net()
    model.blocks[1] = torch.jit.script(nn.Linear(8, 8))
    with pytest.raises(ConfigError, match=r"'blocks\.1' is a ScriptModule"):
        engine.attach(model, adamw(model))
    assert away(model) == []
    model.blocks[1] = nn.Linear(8, 8)
    engine.attach(model, adamw(model))


# ---------------------------------------------------------------------- compiled
@pytest.fixture
def _nothing_compiled_remains():
    yield
    torch._dynamo.reset()


def _in_place(model, *modules):
    for module in modules:
        module.compile(backend="aot_eager")
    return model


COMPILED = {
    "the model": partial(torch.compile, backend="aot_eager"),
    "the model in place": lambda m: _in_place(m, m),
    "blocks in place": lambda m: _in_place(m, *m.blocks),
}


@pytest.mark.usefixtures("_nothing_compiled_remains")
@pytest.mark.parametrize(("part", "before"), in_turn(COMPILED, [False, True]))
@compared(lambda part, before: COMPILED[part](net()) if before else net())
def test_compiled_models(model, optimizer, part, before):
    model = model if before else COMPILED[part](model)
    history = train(model, optimizer)
    model.eval()
    with torch.no_grad():
        history.append({"checked": loss(model, 9).clone()})
    model.train()
    return [*history, *train(model, optimizer, 2, first=4)]
