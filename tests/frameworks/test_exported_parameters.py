"""What is trained of an exported module: its parameters, each on its own, and nothing else. PyTorch says which."""

import functools
import io
import itertools
import math

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

torch = pytest.importorskip("torch")
from marks import needs  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.utils.parametrizations import weight_norm  # noqa: E402
from torch_export import quiet  # noqa: E402
from torch_nets import Net, step  # noqa: E402

import onward  # noqa: E402
from onward.engines import start  # noqa: E402

pytestmark = [needs("torch", "onnxscript"), pytest.mark.usefixtures("one_torch_thread")]


def rms_norm(size):
    return Net(
        lambda s, x: s.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
        weight=nn.Parameter(torch.ones(size)),
    )


class Block(nn.Module):
    """A layer of a vision transformer, whose biases are zero and whose branches are scaled."""

    def __init__(self, width=8, heads=2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale1, self.scale2 = (nn.Parameter(torch.full((width,), 0.1)) for _ in range(2))
        for layer in (self.query, self.key, self.value, self.out, self.wide, self.narrow):
            nn.init.zeros_(layer.bias)

    def forward(self, x):
        batch, length, width = x.shape
        y = self.norm1(x)
        split = (batch, length, self.heads, width // self.heads)
        query, key, value = (layer(y).view(split).transpose(1, 2) for layer in (self.query, self.key, self.value))
        scores = (query @ key.transpose(-1, -2) / split[-1] ** 0.5).softmax(-1)
        x = x + self.scale1 * self.out((scores @ value).transpose(1, 2).reshape(batch, length, width))
        return x + self.scale2 * self.narrow(F.silu(self.wide(self.norm2(x))))


class MobileViT(nn.Module):
    """Convolutions, transformers over what they find, and a head: all as fresh as `timm` makes them."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.GroupNorm(1, 8), nn.SiLU(), nn.Conv2d(8, 8, 1))
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 2)
        for layer in (self.stem[0], self.stem[3], self.head):
            nn.init.zeros_(layer.bias)

    def forward(self, x):
        x = self.stem(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(1))


def attention():
    layer = nn.MultiheadAttention(6, 2, batch_first=True)
    return Net(lambda s, x: s.attention(x, x, x, need_weights=False)[0], attention=layer)


def recurrent(kind, **options):
    return Net(lambda s, x: s.layer(x)[0], layer=kind(6, 4, batch_first=True, **options))


def tied_model():
    net = Net(
        lambda s, i: s.head(torch.tanh(s.hidden(s.table(i)))),
        table=nn.Embedding(40, 32), hidden=nn.Linear(32, 32), head=nn.Linear(32, 40, bias=False),
    )  # fmt: skip
    net.head.weight = net.table.weight
    return net


def rotated(net, x):
    angles = torch.outer(torch.arange(x.shape[1]).float(), net.frequencies)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    query, key = (layer(x) for layer in (net.query, net.key))
    query, key = (z * cos + torch.cat((-z[..., 4:], z[..., :4]), -1) * sin for z in (query, key))
    return (query @ key.transpose(-1, -2)).softmax(-1) @ net.value(x)


def biased(net, x):
    table = net.table[net.places.view(-1)].view(4, 4)
    y = net.layer(x)
    return (y @ y.transpose(-1, -2) + table).softmax(-1) @ y


def zero_biases(net):
    for layer in net.modules():
        if isinstance(getattr(layer, "bias", None), nn.Parameter):
            nn.init.zeros_(layer.bias)
    return net


def waves(length, width):
    angles = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)


def normalized(norm, channels=4):
    return nn.Sequential(nn.Conv2d(4, channels, 3), norm(), nn.ReLU(), nn.Conv2d(channels, channels, 1), norm())


def rows(*sizes):
    return lambda: torch.randn(sizes)


PICTURE, VECTOR, SEQUENCE, SOUND = rows(2, 4, 8, 8), rows(3, 6), rows(3, 5, 6), rows(2, 6, 9)
WORDS = lambda: torch.randint(0, 10, (2, 5))

KINDS = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), VECTOR),
    "linear_without_bias": (lambda: nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 1, bias=False)), SEQUENCE),
    "linear_zero_bias": (lambda: zero_biases(nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))), SEQUENCE),
    "conv": (lambda: nn.Sequential(nn.Conv2d(4, 5, 3), nn.ReLU(), nn.Conv2d(5, 4, 3)), PICTURE),
    "conv_zero_bias": (lambda: zero_biases(nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3, groups=4))), PICTURE),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(6, 4, 3), nn.GELU(), nn.Conv1d(4, 1, 1)), SOUND),
    "conv_transpose": (
        lambda: zero_biases(nn.Sequential(nn.ConvTranspose2d(4, 6, 2, 2, groups=2), nn.Conv2d(6, 2, 1))), PICTURE
    ),
    "group_norm": (lambda: normalized(lambda: nn.GroupNorm(2, 4)), PICTURE),
    "group_norm_plain": (lambda: normalized(lambda: nn.GroupNorm(2, 4, affine=False)), PICTURE),
    "group_norm_of_pairs": (lambda: normalized(lambda: nn.GroupNorm(2, 2), 2), PICTURE),
    "instance_norm": (lambda: normalized(lambda: nn.InstanceNorm2d(4, affine=True)), PICTURE),
    "instance_norm_plain": (lambda: normalized(lambda: nn.InstanceNorm2d(4)), PICTURE),
    "instance_norm1d": (
        lambda: nn.Sequential(nn.Conv1d(6, 4, 3), nn.InstanceNorm1d(4, affine=True), nn.Conv1d(4, 2, 1)), SOUND
    ),
    "instance_norm1d_plain": (
        lambda: nn.Sequential(nn.Conv1d(6, 4, 3), nn.InstanceNorm1d(4), nn.Conv1d(4, 2, 1)), SOUND
    ),
    "instance_norm_scaled": (
        lambda: Net(
            lambda s, x: s.norm(x) * s.scale + s.shift, norm=nn.InstanceNorm2d(4),
            scale=nn.Parameter(torch.ones(1, 4, 1, 1)), shift=nn.Parameter(torch.zeros(1, 4, 1, 1)),
        ),
        PICTURE,
    ),
    "layer_norm": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 6), nn.LayerNorm(6)), SEQUENCE
    ),
    "layer_norm_plain": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6, elementwise_affine=False), nn.Linear(6, 6)), SEQUENCE
    ),
    "layer_norm_without_bias": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6, bias=False), nn.Linear(6, 6)), SEQUENCE
    ),
    "rms_norm": (lambda: nn.Sequential(nn.Linear(6, 6), rms_norm(6), nn.Linear(6, 6), rms_norm(6)), SEQUENCE),
    "batch_norm": (lambda: normalized(lambda: nn.BatchNorm2d(4)), PICTURE),
    "embedding": (lambda: nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 3)), WORDS),
    "attention": (attention, SEQUENCE),
    "lstm": (lambda: recurrent(nn.LSTM, bidirectional=True), SEQUENCE),
    "gru": (lambda: recurrent(nn.GRU), SEQUENCE),
    "prelu": (lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.PReLU(), nn.Conv2d(4, 4, 1), nn.PReLU(4)), PICTURE),
    "positions": (
        lambda: Net(
            lambda s, x: s.layer(torch.cat([s.first.expand(x.shape[0], -1, -1), x], 1) + s.positions),
            layer=nn.Linear(6, 6), first=nn.Parameter(torch.zeros(1, 1, 6)), positions=nn.Parameter(torch.zeros(6, 6)),
        ),
        rows(1, 5, 6),
    ),
    "layer_scale": (lambda: nn.Sequential(Block(), Block()), rows(3, 5, 8)),
    "single_numbers": (
        lambda: Net(
            lambda s, x: F.normalize(s.layer(x)) * s.scale + s.shift, layer=nn.Linear(6, 4, bias=False),
            scale=nn.Parameter(torch.tensor(2.5)), shift=nn.Parameter(torch.tensor(-10.0)),
        ),
        VECTOR,
    ),
    "weight_norm": (
        lambda: nn.Sequential(weight_norm(nn.Linear(6, 4)), nn.Tanh(), weight_norm(nn.Linear(4, 3))), VECTOR
    ),
    "bias_table": (
        lambda: Net(
            biased, layer=nn.Linear(6, 6), table=nn.Parameter(torch.randn(7)),
            places=torch.arange(4)[:, None] - torch.arange(4) + 3,
        ),
        rows(2, 4, 6),
    ),
    "einsum": (
        lambda: Net(
            lambda s, x: torch.einsum("bld,dhe->blhe", x, s.weight) + s.shift,
            weight=nn.Parameter(torch.randn(6, 2, 3)), shift=nn.Parameter(torch.zeros(2, 3)),
        ),
        SEQUENCE,
    ),
    "ones_and_zeros": (
        lambda: Net(
            lambda s, x: s.layer(x * s.scale + s.shift), layer=nn.Linear(6, 6),
            scale=nn.Parameter(torch.ones(6)), shift=nn.Parameter(torch.zeros(6)),
        ),
        VECTOR,
    ),
    "copies": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), 2), SEQUENCE),
    "called_twice": (
        lambda: zero_biases(Net(
            lambda s, x: s.layer(s.norm(s.layer(s.norm(x)))), layer=nn.Linear(36, 36), norm=nn.LayerNorm(36)
        )),
        rows(3, 5, 36),
    ),
    "tied": (tied_model, WORDS),
    "mobilevit": (MobileViT, rows(2, 3, 8, 8)),
    "constant_in_loss": (
        lambda: Net(
            lambda s, x: (F.log_softmax(s.layer(x), -1) * torch.tensor([0.2, 1.0, 3.0, 0.5])).sum(-1),
            layer=nn.Linear(6, 4),
        ),
        VECTOR,
    ),
    "standardized": (
        lambda: Net(
            lambda s, x: s.layer((x - torch.tensor([0.4, 0.5, 0.6, 0.7]).view(4, 1, 1)) / 0.25),
            layer=nn.Conv2d(4, 4, 3),
        ),
        PICTURE,
    ),
    # with buffers, from here on
    "sinusoids": (
        lambda: Net(lambda s, x: s.layer(x + s.positions[: x.shape[1]]), layer=nn.Linear(6, 6), positions=waves(8, 6)),
        SEQUENCE,
    ),
    "rotary": (
        lambda: Net(
            rotated, **{name: nn.Linear(8, 8, bias=False) for name in ("query", "key", "value")},
            frequencies=1 / 10000 ** (torch.arange(0, 8, 2) / 8),
        ),
        rows(3, 5, 8),
    ),
    "causal_mask": (
        lambda: Net(
            lambda s, x: (s.layer(x) @ x.transpose(-1, -2)).masked_fill(s.mask == 0, -math.inf).softmax(-1) @ x,
            layer=nn.Linear(6, 6), mask=torch.tril(torch.ones(5, 5)),
        ),
        SEQUENCE,
    ),
    "anchors": (
        lambda: Net(
            lambda s, x: s.layer(x).sigmoid() * s.sizes + s.grid,
            layer=nn.Conv2d(4, 2, 1), sizes=torch.rand(1, 2, 1, 1),
            grid=torch.stack(torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij"))[None],
        ),
        PICTURE,
    ),
    "stft": (
        lambda: Net(
            lambda s, x: s.layer(F.conv1d(x[:, None], s.waves * s.window, stride=8).abs().log1p()),
            layer=nn.Conv1d(9, 4, 3), window=torch.hann_window(16),
            waves=torch.cos(2 * math.pi * torch.outer(torch.arange(9.0), torch.arange(16.0)) / 16)[:, None],
        ),
        rows(2, 64),
    ),
}  # fmt: skip


def fresh(name: str) -> tuple[nn.Module, torch.Tensor]:
    """A module of a kind, and what it takes."""
    torch.manual_seed(0)
    make, take = KINDS[name]
    return make(), take()


def dynamo(module, x, **options):
    return torch.onnx.export(module, (x,), dynamo=True, verbose=False, **options).model_proto


def traced(module, x, **options):
    file = io.BytesIO()
    torch.onnx.export(module, (x,), file, dynamo=False, verbose=False, **options)
    return onnx.load_from_string(file.getvalue())


def in_training_mode(module, x):
    preserve = torch.onnx.TrainingMode.PRESERVE
    return traced(module.train(), x, training=preserve, do_constant_folding=False)


EXPORTERS = {
    "dynamo": dynamo,
    "unoptimized": functools.partial(dynamo, optimize=False),
    "traced": traced,
    "traced_in_training_mode": in_training_mode,
}
FOLDS = {"dynamo", "traced"}
"""Exporters that fold BatchNormalization into convolutions."""
COMPUTED = "the exporter computed"
UNKNOWN = "PyTorch's tracing exporter does not say whether they are buffers"
SAID = {
    **{(kind, "dynamo"): COMPUTED for kind in ("bias_table", "weight_norm")},
    **{(kind, "traced"): UNKNOWN for kind in ("anchors", "bias_table", "rotary", "sinusoids", "stft")},
    **{(kind, "traced_in_training_mode"): UNKNOWN for kind in ("anchors", "rotary", "sinusoids", "stft")},
}
"""Where parameters are not all that is trained, or not they: it is said."""
QUICK = {
    ("group_norm", "dynamo"), ("group_norm", "traced"), ("instance_norm_plain", "unoptimized"), ("mobilevit", "dynamo"),
    ("conv_zero_bias", "dynamo"), ("tied", "dynamo"), ("tied", "traced"), ("called_twice", "dynamo"),
    ("copies", "dynamo"), ("constant_in_loss", "dynamo"), ("single_numbers", "traced"), ("sinusoids", "traced"),
    ("rotary", "dynamo"), ("lstm", "dynamo"),
}  # fmt: skip


def cases(of=KINDS):
    return [
        pytest.param(kind, exporter, marks=() if (kind, exporter) in QUICK else pytest.mark.slow)
        for kind, exporter in itertools.product(of, EXPORTERS)
    ]


@functools.cache
def exported(kind, exporter):
    module, x = fresh(kind)
    if kind == "copies" and "traced" in exporter:
        pytest.skip("PyTorch cannot trace it")
    with quiet():
        return EXPORTERS[exporter](module.eval(), x)


def numbers(arrays):
    """All numbers, in order: exporters transpose, reshape and pack."""
    return np.sort(np.concatenate([np.ravel(array) for array in arrays]))


@pytest.mark.parametrize(("kind", "exporter"), cases())
@pytest.mark.filterwarnings("ignore")
def test_what_is_trained_are_the_parameters_of_the_module(kind, exporter):
    module = fresh(kind)[0]
    proto = exported(kind, exporter)
    training = onward.prepare(proto, loss="mse", optimizer="sgd")
    trained = {name: training.array(name) for name in training.step().differentiated()}
    remarks = " ".join(onward.describe(training).remarks)
    if kind == "batch_norm" and exporter in FOLDS:
        assert "BatchNormalization was folded" in remarks
    elif (kind, exporter) in SAID:
        assert SAID[kind, exporter] in remarks
    else:
        parameters = [parameter.detach().numpy() for parameter in module.parameters()]
        np.testing.assert_array_equal(numbers(trained.values()), numbers(parameters))
        assert len(trained) == len(parameters) or kind in ("lstm", "gru", "weight_norm")
        if exporter in ("dynamo", "unoptimized") and kind != "weight_norm":
            assert not {*dict(module.named_parameters())} & {*names_of_constants(training)}


def names_of_constants(training):
    selection = training.step().fact("train.selection")
    return [name for names in selection.get("constant", {}).values() for name in names]


# ---- losses ----------------------------------------------------------------------------------------------------------

TRAINED = [
    "group_norm", "group_norm_plain", "group_norm_of_pairs", "instance_norm", "instance_norm_plain",
    "instance_norm1d_plain", "layer_norm", "linear_zero_bias", "conv_zero_bias", "conv_transpose", "layer_scale",
    "called_twice", "copies", "tied", "mobilevit", "ones_and_zeros", "constant_in_loss",
]  # fmt: skip


@pytest.mark.parametrize(("kind", "exporter"), cases(TRAINED))
@pytest.mark.filterwarnings("ignore")
def test_losses_are_those_of_pytorch(kind, exporter):
    proto = exported(kind, exporter)
    module, x = fresh(kind)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    training = onward.prepare(proto, loss="mse", optimizer="sgd:lr=0.05")
    (name,), (target,) = (
        [value.name for value in values] for values in (training.inputs, training.step().algorithm.inputs)
    )
    wanted, found = [], []
    with start(training, threads=1) as engine:
        for _ in range(10):
            x = torch.randn(x.shape) if x.is_floating_point() else torch.randint(0, 10, x.shape)
            y = module(x)
            wish = torch.randn(y.shape)
            wanted.append(step(F.mse_loss(y, wish), optimizer))
            found.append(float(engine.step({name: x.numpy(), target: wish.numpy()})["loss"]))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


class Tokens(torch.nn.Module):
    """An embedding with padding whose table is the matrix of the head, too, and another one without padding."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = torch.nn.Embedding(11, 6, **options), torch.nn.Embedding(4, 6)
        torch.nn.init.normal_(self.words.weight)

    def forward(self, tokens):
        x = torch.tanh(self.words(tokens) + self.places(torch.arange(4)))
        return torch.nn.functional.linear(x.mean(1), self.words.weight)


def _steps_on_tokens(module):
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
    rng = np.random.default_rng(0)
    for _ in range(8):
        tokens, target = rng.integers(0, 4, (5, 4)), rng.standard_normal((5, 11)).astype(np.float32)
        yield tokens, target, step(F.mse_loss(module(torch.tensor(tokens)), torch.tensor(target)), optimizer)


@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.parametrize("padding", [0, -8])
@pytest.mark.filterwarnings("ignore")
def test_rows_of_padding_do_not_learn(padding, optimize):
    module = Tokens(padding_idx=padding)
    proto = dynamo(module, torch.zeros(5, 4, dtype=torch.long), optimize=optimize)
    training = onward.prepare(proto, loss="mse", optimizer="adam:lr=0.02")
    assert not onward.check(training)
    row = padding % 11
    remark = f"row {row} of `words.weight` is padding (`padding_idx`) and gets no gradient"
    assert remark in onward.describe(training).remarks
    names = [training.inputs[0].name, training.step().algorithm.inputs[0].name]
    there, optimizer, *_, loss_of = onward.to_torch(training)
    with start(training, threads=1) as engine:
        for tokens, target, expected in _steps_on_tokens(module):
            found = engine.step(dict(zip(names, (tokens, target), strict=True)))["loss"]
            np.testing.assert_allclose(found, expected, rtol=1e-5)
            step(loss_of(there(torch.tensor(tokens)), torch.tensor(target)), optimizer)
        trained = engine.updated()
    expected = module.words.weight.detach().numpy()
    np.testing.assert_allclose(trained.array("words.weight"), expected, atol=1e-5)
    (table,) = (p.detach().numpy() for name, p in there.named_parameters() if "words" in name)
    np.testing.assert_allclose(table, expected, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_gradients_that_are_scaled_by_frequency_are_refused():
    proto = dynamo(Tokens(scale_grad_by_freq=True), torch.zeros(5, 4, dtype=torch.long))
    with pytest.raises(onward.Error, match="scales gradients by frequency"):
        onward.prepare(proto, loss="mse")


# ---- what is said, and what comes back -------------------------------------------------------------------------------


def test_what_was_merged_dropped_and_left_out_is_said_and_recorded(tmp_path):
    proto = exported("mobilevit", "dynamo")
    training = onward.prepare(proto, loss="mse")
    fact = training.step().fact("train.exporter")
    assert fact["separated"]["blocks.1.out.bias"] != "blocks.1.out.bias"
    assert "head.bias" in fact["biases"]
    for model in (proto, training):
        said = " ".join(onward.describe(model).remarks)
        assert "trained separately, as `blocks" in said and "zero biases that the exporter dropped" in said
        assert "left out: 2 constants of the exporter, such as `val_" in said
    left_out = next(name for name in names_of_constants(training) if name in training.graph.initializers)
    assert onward.prepare(proto, loss="mse", trainable=[left_out]).step().differentiated() == [left_out]
    assert left_out not in onward.prepare(proto, loss="mse", trainable="norms").step().differentiated()


def test_a_run_gives_back_separate_tensors(tmp_path):
    module, _ = fresh("linear_zero_bias")
    with quiet():
        batch = torch.export.Dim("batch")
        proto = dynamo(module, torch.randn(3, 5, 6), dynamic_shapes=({0: batch},))
    rng = np.random.default_rng(0)
    data = {name: rng.standard_normal((32, 5, 6)).astype(np.float32) for name in (proto.graph.input[0].name, "target")}
    run = onward.train(proto, data, loss="mse", optimizer="sgd:lr=0.1", epochs=1, run=tmp_path / "run", quiet=True)
    biases = [run.last.array(f"{i}.bias") for i in range(3)]
    assert all(bias.any() for bias in biases) and not np.array_equal(biases[0], biases[1])
    given = {data_name: array for data_name, array in data.items() if data_name != "target"}
    with start(onward.prepare(run.last, loss="mse", optimizer="sgd"), threads=1) as engine:
        assert np.isfinite(engine.evaluate({**given, "target": data["target"]})["loss"])


@pytest.mark.parametrize(
    ("kind", "exporter"),
    [("mobilevit", "dynamo"), pytest.param("group_norm", "traced_in_training_mode", marks=pytest.mark.slow)],
)
def test_a_checkpoint_goes_on_in_the_file_that_was_exported_before(kind, exporter, tmp_path):
    onnx.save(exported(kind, exporter), tmp_path / "model.onnx")
    module, x = fresh(kind)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)

    def steps(count):
        return [step((module(torch.randn(x.shape, generator=generator)) ** 2).mean(), optimizer) for _ in range(count)]

    generator = torch.Generator().manual_seed(1)
    steps(3)
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
    training = onward.from_checkpoint(tmp_path / "checkpoint.pt", tmp_path / "model.onnx", loss="mse:constant=0")
    assert {*training.step().differentiated()} == {*dict(module.named_parameters())}
    state, found = generator.get_state(), []
    wanted = steps(3)
    generator.set_state(state)
    with start(training, threads=1) as engine:
        for _ in range(3):
            batch = torch.randn(x.shape, generator=generator).numpy()
            found.append(float(engine.step({training.inputs[0].name: batch})["loss"]))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_weights_of_a_frozen_module_are_trained():
    """PyTorch makes constants of them, which is what they look like in the file, and there are no others."""
    module, x = fresh("layer_norm")
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    with quiet():
        proto = traced(torch.jit.freeze(torch.jit.trace(module.eval(), x)), x)
    assert len(onward.prepare(proto, loss="mse").step().differentiated()) == 8


def test_scales_and_biases_are_separated_in_files_without_notes():
    """As ONNX Runtime's optimizer and others leave them: but not where layers share their weight, too."""
    first, second, bias = np.eye(4, dtype=np.float32), np.ones((4, 4), np.float32) / 3, np.zeros(4, np.float32)
    tensors = [numpy_helper.from_array(a, n) for n, a in {"w": first, "v": second, "b": bias}.items()]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Add", ["p", "b"], ["q"], "node_first"),
        helper.make_node("MatMul", ["q", "w"], ["r"]), helper.make_node("Add", ["r", "b"], ["s"], "node_again"),
        helper.make_node("MatMul", ["s", "v"], ["t"]), helper.make_node("Add", ["t", "b"], ["y"], "node_second"),
    ]  # fmt: skip
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 4]) for name in "xy"]
    graph = helper.make_graph(nodes, "merged", ends[:1], ends[1:], tensors)
    proto = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 18)], producer_name="pytorch", ir_version=10
    )
    assert onward.prepare(proto, loss="mse").step().differentiated() == ["w", "v", "b", "node_second/b"]
    proto.graph.initializer[2].CopyFrom(numpy_helper.from_array(np.arange(4, dtype=np.float32), "b"))
    assert onward.prepare(proto, loss="mse").step().differentiated() == ["w", "v", "b"]


@pytest.mark.filterwarnings("ignore")
def test_an_lstm_of_keras_has_one_bias():
    """Beside it tf2onnx stores zeros. PyTorch, which has two, is told to leave the second alone."""
    module = torch.nn.LSTM(6, 4)
    module.bias_hh_l0.requires_grad_(False).zero_()
    with quiet():
        proto = traced(module, torch.randn(5, 3, 6))
    proto.producer_name = "tf2onnx"
    training = onward.prepare(proto, loss=[f"{proto.graph.output[0].name}=mse:constant=0"], optimizer="sgd:lr=0.5")
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.5)
    with start(training, threads=1) as engine:
        for _ in range(3):
            x = torch.randn(5, 3, 6)
            expected = step((module(x)[0] ** 2).mean(), optimizer)
            found = engine.step({training.inputs[0].name: x.numpy()})["loss"]
            assert float(found) == pytest.approx(expected, rel=1e-5)


def test_biases_that_tf2onnx_may_have_dropped_are_said():
    with quiet():
        proto = traced(fresh("linear_without_bias")[0], torch.randn(3, 5, 6))
    assert not any("tf2onnx" in said for said in onward.describe(proto).remarks)
    proto.producer_name = "tf2onnx"
    assert any("2 layers have no bias" in said for said in onward.describe(proto).remarks)


# ---- a loss that the model puts out ----------------------------------------------------------------------------------


@functools.cache
def with_its_loss():
    module = torch.nn.Linear(6, 3)
    net = Net(lambda s, x: ((y := s.layer(x)).pow(2).mean(), y), layer=module)
    with quiet():
        return traced(net, torch.randn(4, 6), input_names=["x"], output_names=["loss", "logits"])


@pytest.mark.parametrize(
    "engine",
    [
        "onnxruntime",
        "numpy",
        *(pytest.param(name, marks=[needs(name), pytest.mark.slow]) for name in ("torch", "jax", "tensorflow")),
    ],
)
def test_a_loss_that_the_model_puts_out_is_the_metric(engine):
    training = onward.prepare(with_its_loss(), loss="value:loss", optimizer="sgd:lr=0.1")
    batch = {"x": np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)}
    with start(training, engine=engine) as started:
        before = started.evaluate(batch)
        assert {*before} == {"loss", "logits"}
        assert started.loss == "loss" and started.step(batch)["loss"] == pytest.approx(before["loss"], rel=1e-6)
    assert "loss" in [value.name for value in onward.lower(training).outputs]
