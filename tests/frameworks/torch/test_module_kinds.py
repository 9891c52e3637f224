"""Modules of many kinds, as people write them: trained on ONNX Runtime and as modules again, as PyTorch trains them."""

from __future__ import annotations

import numpy as np
import pytest
from marks import needs

import onward
from onward.engines import start

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch_nets import Net, step  # noqa: E402

from onward.frameworks.torch.arguments import Flat  # noqa: E402
from onward.runtime.sessions import evaluate  # noqa: E402
from onward.transform.training import without_steps  # noqa: E402

pytestmark = [needs("torch", "onnxscript"), pytest.mark.usefixtures("one_torch_thread")]


def images():
    return (torch.randn(4, 3, 16, 16),)


def tokens(first=0):
    return (torch.randint(first, 11, (4, 5)),)


# ---- modules, and what they take -------------------------------------------------------------------------------------


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True, activation="gelu")
    layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    (x,) = tokens(1)
    x[0, 3:], x[1, 2:] = 0, 0

    def compute(self, x):
        return self.out(self.encoder(self.table(x), src_key_padding_mask=x == 0)[:, 0])

    return Net(compute, table=nn.Embedding(11, 8, padding_idx=0), encoder=layers, out=nn.Linear(8, 3)), (x,)


def transformer():
    def compute(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        made = self.both(self.table(source), self.table(target), tgt_mask=mask, tgt_is_causal=True)
        return self.out(made).mean(1)

    both = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
    return Net(compute, table=nn.Embedding(11, 8), both=both, out=nn.Linear(8, 3)), (*tokens(), *tokens())


def attention():
    def compute(self, q, k, v):
        found, weights = self.attend(q, k, v)
        return self.out(found).mean(1) + weights.mean()

    attend = nn.MultiheadAttention(8, 2, batch_first=True, kdim=6, vdim=4, add_bias_kv=True, add_zero_attn=True)
    given = torch.randn(4, 5, 8), torch.randn(4, 7, 6), torch.randn(4, 7, 4)
    return Net(compute, attend=attend, out=nn.Linear(8, 3)), given


def attention_without_heads():
    def compute(self, x):
        q, k, v = self.into(x).chunk(3, -1)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return self.out(F.scaled_dot_product_attention(q, k, v, mask)).mean(1)

    return Net(compute, into=nn.Linear(5, 24), out=nn.Linear(8, 3)), (torch.randn(4, 6, 5),)


def recurrent():
    def compute(self, x):
        first = self.start.expand(4, x.shape[0], 6).contiguous()
        made, last = self.lstm(x, (first, torch.zeros_like(first)))
        other, _ = self.gru(x.transpose(0, 1))
        return self.out(made[:, -1] + other[-1]) + last[0].mean()

    module = Net(
        compute,
        lstm=nn.LSTM(5, 6, 2, bidirectional=True, batch_first=True),
        gru=nn.GRU(5, 6, bidirectional=True),
        out=nn.Linear(12, 3),
    )
    module.start = nn.Parameter(torch.zeros(4, 1, 6))
    return module, (torch.randn(4, 7, 5),)


def cell():
    def compute(self, x):
        h = c = torch.zeros(x.shape[0], 6)
        for i in range(x.shape[1]):
            h, c = self.cell(x[:, i], (h, c))
        return self.out(h)

    return Net(compute, cell=nn.LSTMCell(5, 6), out=nn.Linear(6, 3)), (torch.randn(4, 3, 5),)


def block(into, out):
    return nn.Sequential(nn.Conv2d(into, out, 3, padding=1), nn.GroupNorm(2, out), nn.SiLU())


def unet():
    def compute(self, x):
        a = self.a(x)
        b = self.b(F.max_pool2d(a, 2))
        c = self.c(F.max_pool2d(b, 2))
        d = self.d(torch.cat([self.up(c), b], 1))
        d = F.interpolate(d, scale_factor=2, mode="bilinear", align_corners=False)
        return self.e(torch.cat([d, a], 1)).mean((2, 3))

    layers = {"a": block(3, 4), "b": block(4, 8), "c": block(8, 8), "d": block(16, 4), "e": nn.Conv2d(8, 3, 1)}
    return Net(compute, **layers, up=nn.ConvTranspose2d(8, 8, 2, 2)), images()


def in_place():
    def compute(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.first(x)), inplace=True), 3, 2, 1)
        y = self.other(self.second(x))
        y += x
        return self.out(torch.flatten(F.adaptive_avg_pool2d(F.hardswish(y), 1), 1))

    convolutions = {"first": nn.Conv2d(3, 8, 3, 2, 1, bias=False), "second": nn.Conv2d(8, 8, 3, 1, 1, bias=False)}
    norms = {"norm": nn.BatchNorm2d(8), "other": nn.BatchNorm2d(8)}
    return Net(compute, **convolutions, **norms, out=nn.Linear(8, 3)), images()


def weight_norm():
    norm = nn.utils.parametrizations.weight_norm
    return nn.Sequential(norm(nn.Linear(5, 8)), nn.ReLU(), norm(nn.Linear(8, 3))), (torch.randn(4, 5),)


class Center(nn.Module):
    """A running mean that the forward pass reads and changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


def changing():
    """Buffers that the forward pass changes: of a spectral norm, of statistics, and of a layer of its own."""
    norm = nn.utils.parametrizations.spectral_norm
    statistics = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
    layers = norm(nn.Linear(5, 8)), Center(), nn.Unflatten(1, (2, 4)), statistics, nn.Flatten(), norm(nn.Linear(8, 3))
    return nn.Sequential(*layers), (torch.randn(4, 5),)


def orthogonal():
    norm = nn.utils.parametrizations.orthogonal
    return nn.Sequential(norm(nn.Linear(5, 5)), nn.Tanh(), norm(nn.Linear(5, 3))), (torch.randn(4, 5),)


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, slope):
        return -ctx.factor * slope, None


class Rotation(torch.autograd.Function):
    """Two inputs and results, with a context that is set up by itself and a derivative that reads it."""

    @staticmethod
    def forward(x, angle):
        return x * angle.cos(), x * angle.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, first, second):
        x, angle = ctx.saved_tensors
        return first * angle.cos() + second * angle.sin(), 2 * x * (second * angle.cos() - first * angle.sin())


def own_derivatives():
    def compute(self, x):
        hidden = Reversal.apply(self.into(x), 0.5)
        return self.out(sum(Rotation.apply(hidden, torch.tanh(hidden))))

    return Net(compute, into=nn.Linear(5, 8), out=nn.Linear(8, 3)), (torch.randn(4, 5),)


def norms_of_old():
    """They keep a matrix that each forward pass computes, which PyTorch cannot copy."""
    norms = nn.utils.weight_norm(nn.Linear(5, 8)), nn.ReLU(), nn.utils.spectral_norm(nn.Linear(8, 3))
    return nn.Sequential(*norms), (torch.randn(4, 5),)


def tied():
    def compute(self, x):
        return self.back(torch.tanh(self.hidden(self.table(x)))).mean(1)

    module = Net(compute, table=nn.Embedding(11, 8), hidden=nn.Linear(8, 8), back=nn.Linear(8, 11, bias=False))
    module.back.weight = module.table.weight
    return module, tokens()


def bags():
    def compute(self, x, offsets, shares, rows):
        made = (
            self.mean(x, offsets)
            + self.total(rows, per_sample_weights=shares)
            + self.mean(rows[:, :1].flatten(), offsets)
        )
        return self.out(made)

    module = Net(
        compute,
        mean=nn.EmbeddingBag(11, 8, mode="mean", padding_idx=2, include_last_offset=True),
        total=nn.EmbeddingBag(11, 8, mode="sum"),
        out=nn.Linear(8, 3),
    )
    offsets = torch.tensor([0, 2, 2, 3, 4])
    return module, (torch.tensor([2, 3, 2, 1]), offsets, torch.rand(4, 3), torch.randint(0, 5, (4, 3)))


def nested():
    def compute(self, batch, scale=2.0, *, more):
        hidden = torch.relu(self.left(batch["x"]) + self.table(batch["id"]).mean(1)) * scale + more[0]
        return {"kinds": self.heads["kinds"](hidden), "hidden": [hidden, hidden * 2]}

    module = Net(
        compute, left=nn.Linear(5, 8), table=nn.Embedding(7, 8), heads=nn.ModuleDict({"kinds": nn.Linear(8, 3)})
    )
    batch = {"x": torch.randn(4, 5), "id": torch.randint(0, 7, (4, 3))}
    return module, {"batch": batch, "scale": 1.5, "more": (torch.randn(4, 8),)}


def ended():
    """Gradients end, also in the largest numbers that there are."""

    def compute(self, x):
        hidden = self.into(x)
        with torch.no_grad():
            large = (hidden * 0 + 1) * torch.finfo(torch.float32).max
        return self.out(hidden.detach() * hidden) + (large.detach() / 3e38)[:, :3] * hidden[:, :3]

    return Net(compute, into=nn.Linear(5, 5), out=nn.Linear(5, 3)), (torch.randn(4, 5),)


QUICK = [attention_without_heads, bags, ended, own_derivatives]
SLOW = [attention, cell, changing, encoder, in_place, nested, norms_of_old, orthogonal, recurrent, tied]
SLOW += [transformer, unet, weight_norm]


@pytest.mark.slow("bags")
@pytest.mark.parametrize("kind", [*QUICK, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW)])
def test_a_run_goes_on(kind):
    torch.manual_seed(0)
    module, given = kind()
    loss, classes = nn.CrossEntropyLoss(), torch.tensor([0, 2, 1, 2])
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2, eps=1e-3)

    def steps(module, optimizer, given, count):
        losses = []
        for _ in range(count):
            outputs = module(**given) if isinstance(given, dict) else module(*given)
            losses.append(step(loss(outputs["kinds"] if isinstance(outputs, dict) else outputs, classes), optimizer))
        return losses

    steps(module, optimizer, given, 2)
    objective = {"kinds": loss} if isinstance(given, dict) else loss
    shapes = {} if kind is bags else None
    training = onward.from_torch(module, given, loss=objective, optimizer=optimizer, dynamic_shapes=shapes)
    flat = Flat(module, given).inputs
    back = onward.to_torch(training)
    again = steps(back.module, back.optimizer, flat, 6)
    batch = {name: x.numpy() for name, x in {**flat, "labels": classes}.items()}
    with start(training, threads=1) as engine:
        found = [float(engine.step({name: batch[name] for name in engine.inputs})[engine.loss]) for _ in range(6)]
    expected = steps(module, optimizer, given, 6)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(again, expected, rtol=1e-5)


# ---- dropout in other forms ------------------------------------------------------------------------------------------


class Depth(nn.Module):
    """Stochastic depth, as it is usually written."""

    def __init__(self, is_rounded, share=0.25):
        super().__init__()
        self.is_rounded, self.share = is_rounded, share

    def forward(self, x):
        if not self.training:
            return x
        keep, shape = 1 - self.share, (x.shape[0],) + (1,) * (x.ndim - 1)
        if self.is_rounded:
            mask = keep + torch.rand(shape, dtype=x.dtype)
            return x.div(keep) * mask.floor_()
        return x * x.new_empty(shape).bernoulli_(keep).div_(keep)


@pytest.mark.slow("True")
@pytest.mark.parametrize("is_rounded", [True, False])
def test_stochastic_depth(is_rounded):
    """Rows are left out as often as they should be, and in inference none is; both sides agree when none is."""
    net = nn.Sequential(nn.Linear(5, 4), Depth(is_rounded), nn.Linear(4, 3))
    given = {"loss": nn.CrossEntropyLoss(), "optimizer": torch.optim.SGD(net.parameters(), lr=0.1)}
    module = onward.to_torch(onward.from_torch(net, torch.randn(4, 5), **given)).module
    x = torch.randn(2000, 5)
    torch.testing.assert_close(module.eval()(x), net.eval()(x))
    left_out = (module.train()(x) == net[2].bias).all(1).float().mean()
    assert left_out.item() == pytest.approx(0.25, abs=0.05)


def test_buffers_in_inference():
    """A spectral norm computes another matrix in inference."""
    net, x = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 3)), torch.randn(4, 5)
    given = {"loss": nn.MSELoss(), "optimizer": torch.optim.SGD(net.parameters(), lr=0.1), "probe": False}
    training = onward.from_torch(net, x, **given)
    with torch.no_grad():
        expected = net.eval()(x).numpy()
    (found,) = evaluate(without_steps(training), {"input": x.numpy()})
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.slow("uniform", "permutation")
@pytest.mark.parametrize(
    "draw",
    [
        pytest.param(lambda x: x + torch.randn_like(x), id="normal"),
        pytest.param(lambda x: x + torch.empty_like(x).uniform_(-1, 2), id="uniform"),
        pytest.param(lambda x: F.gumbel_softmax(x, hard=True), id="gumbel"),
        pytest.param(lambda x: x * torch.bernoulli(x.sigmoid()), id="bernoulli"),
        pytest.param(lambda x: x[:, torch.randperm(8)] * torch.randint(1, 4, (8,)), id="permutation"),
    ],
)
def test_random_numbers(draw):
    """The comparison of `from_torch` has the same numbers on both sides; a run draws others at each step."""
    net = Net(lambda self, x: self.out(draw(self.into(x))), into=nn.Linear(5, 8), out=nn.Linear(8, 3))
    given = {"loss": nn.MSELoss(), "optimizer": torch.optim.SGD(net.parameters(), lr=0.0)}
    training = onward.from_torch(net, torch.randn(64, 5), **given)
    rng = np.random.default_rng(0)
    batch = {"inputs_0": rng.random((64, 5), np.float32), "target": rng.random((64, 3), np.float32)}
    with start(training, threads=1) as engine:
        losses = {float(engine.step(batch)[engine.loss]) for _ in range(4)}
    assert len(losses) == 4


def test_dropout_that_is_called():
    def compute(self, x):
        hidden = F.dropout(torch.relu(self.into(x)), 0.5, self.training).view(-1, 2, 4)
        attended = F.scaled_dot_product_attention(hidden, hidden, hidden, None, 0.3 if self.training else 0.0)
        return self.out(attended.flatten(1))

    module, x = Net(compute, into=nn.Linear(5, 8), out=nn.Linear(8, 3)), torch.randn(4, 5)
    given = {"loss": nn.CrossEntropyLoss(), "optimizer": torch.optim.SGD(module.parameters(), lr=0.1)}
    training = onward.from_torch(module, x, **given)
    assert sum(node.op_type == "Dropout" for node in training.graph.all_nodes()) == 2
    torch.testing.assert_close(onward.to_torch(training).module.eval()(x), module.eval()(x))
