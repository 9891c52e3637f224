"""Runs that are written as programs: they go on in a process that has PyTorch only, and come back."""

from __future__ import annotations

import functools
import inspect
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import models
import numpy as np
import onnx
import pytest
from marks import needs

import onward
from onward.agreement.steps import without_dropout
from onward.engines import start
from onward.errors import InvalidModelError, UnsupportedError
from onward.frameworks.run_files import restore, write
from onward.model import Model

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from onward.frameworks.torch.exact import Muon  # noqa: E402
from onward.frameworks.torch.program.training import Definitions  # noqa: E402

pytestmark = [needs("torch"), pytest.mark.usefixtures("one_torch_thread")]

STEPS = 4


class Case(NamedTuple):
    training: Model
    batch: dict[str, np.ndarray]
    losses: list[float]
    """What the training model's own engine makes of it."""


def case(training: Model, batch: dict[str, np.ndarray]) -> Case:
    """A run that has begun, so that its optimizer has something to remember."""
    with start(training, threads=1) as engine:
        for _ in range(3):
            engine.step(batch)
        begun = engine.updated()
        return Case(begun, batch, [float(engine.step(batch)[engine.loss]) for _ in range(STEPS)])


def classes(n: int, count: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, count, n)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype("f")


# ---- what is written -------------------------------------------------------------------------------------------------


def mlp(**recipe: Any) -> Case:
    training = onward.prepare(models.digits_mlp(), loss="cross_entropy:label_smoothing=0.1", **recipe)
    return case(training, {"image": normal(8, 64), "labels": classes(8, 10)})


def exact() -> Case:
    """What PyTorch has no classes for: an optimizer, a schedule, a way to clip."""
    return mlp(
        optimizer="adam:variant=keras,eps=1e-3",
        schedule="cosine:steps=40,warmup=5",
        clip={"norm": 0.5, "variant": "optax"},
    )


def mixed() -> Case:
    groups = [{"match": "fc1*", "optimizer": "lamb"}, {"match": "*bias", "lr": 0.02}]
    return mlp(optimizer="nesterov:lr=0.01,momentum=0.9", groups=groups, schedule="step:size=2,gamma=0.5")


def frozen() -> Case:
    return mlp(optimizer="adagrad", trainable=["fc2*"], clip={"value": 0.1})


def population() -> Case:
    """BatchNormalization as the standard has it, under names that no layer of PyTorch has."""
    model = without_dropout(onward.load(models.small_cnn()))
    training = onward.prepare(model, loss="cross_entropy", optimizer="rmsprop:lr=0.01,eps=1e-3")
    return case(training, {"image": normal(6, 1, 8, 8), "labels": classes(6, 10)})


def from_module(module: nn.Module, x: torch.Tensor, count: int, **options: Any) -> Case:
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    given = {"optimizer": optimizer, "scheduler": scheduler, "probe": False, **options}
    training = onward.from_torch(module, x, loss=nn.CrossEntropyLoss(), **given)
    return case(training, {training.inputs[0].name or "": x.numpy(), "labels": classes(len(x), count)})


def cnn(dropout: float = 0.0) -> Case:
    torch.manual_seed(0)
    features = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(2), nn.Dropout(dropout)
    )
    module = nn.Sequential()
    module.add_module("features", features)
    module.add_module("flat", nn.Flatten())
    module.add_module("head", nn.Linear(64, 3))
    return from_module(module, torch.randn(6, 1, 8, 8), 3)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(tokens))[0][:, -1])


def lstm() -> Case:
    torch.manual_seed(0)
    return from_module(Recurrent(), torch.randint(0, 11, (5, 4)), 4)


class Encoder(nn.Module):
    """A transformer whose last layer is its embedding, and with a part that does not learn."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.norm = nn.LayerNorm(8).requires_grad_(False)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.encoder(self.embed(tokens)))).mean(1)


def encoder() -> Case:
    torch.manual_seed(0)
    shapes = {"tokens": {0: "batch", 1: "time"}}
    return from_module(Encoder(), torch.randint(0, 11, (5, 4)), 11, dynamic_shapes=shapes)


QUICK: list[Callable[[], Case]] = [exact, mixed, frozen, population]
SLOW: list[Callable[[], Case]] = [cnn, lstm, encoder]
"""Those that PyTorch exports."""
CASES = [
    *(pytest.param(one.__name__, id=one.__name__) for one in QUICK),
    *(pytest.param(one.__name__, id=one.__name__, marks=pytest.mark.slow) for one in SLOW),
]

# ---- alone -----------------------------------------------------------------------------------------------------------

ALONE = """
import sys
sys.modules["onward"] = None  # whoever imports it now fails
import importlib.util, json, numpy as np, torch
torch.set_num_threads(1)

def train(folder, steps):
    spec = importlib.util.spec_from_file_location("run", f"{folder}/run.py")
    run = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run)
    module, optimizer, scheduler, loss = run.load(f"{folder}/run.pt")
    losses = []
    batch = {name: torch.tensor(array) for name, array in np.load(f"{folder}/batch.npz").items()}
    labels = batch.pop("labels")
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(module(**batch), labels)
        value.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(value.item())
    run.save(f"{folder}/after.pt", module, optimizer, scheduler)
    return losses

print(json.dumps({folder: train(folder, int(sys.argv[1])) for folder in sys.argv[2:]}))
"""


class Trained(NamedTuple):
    case: Case
    folder: Path
    losses: list[float]


@functools.cache
def all_trained(cases: tuple[Callable[[], Case], ...]) -> dict[str, Trained]:
    """Cases, written, and trained by one process that cannot import us."""
    folder = Path(tempfile.mkdtemp())
    made = {one.__name__: one() for one in cases}
    for name, one in made.items():
        (folder / name).mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "executable", "")  # they are tried below, all in one process
            written = write(one.training, "torch", folder / name / "run.pt")
        assert written == [folder / name / "run.pt", folder / name / "run.py"]
        np.savez(folder / name / "batch.npz", **one.batch)
    command = [sys.executable, "-W", "error", "-c", ALONE, str(STEPS), *(str(folder / name) for name in made)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stderr
    losses = json.loads(done.stdout)
    return {name: Trained(made[name], folder / name, losses[str(folder / name)]) for name in made}


def trained(name: str) -> Trained:
    cases = QUICK if any(one.__name__ == name for one in QUICK) else SLOW
    return all_trained(tuple(cases))[name]


@pytest.mark.slow("exact", "mixed")
@pytest.mark.parametrize("name", CASES)
def test_the_program_goes_on(name: str) -> None:
    run = trained(name)
    np.testing.assert_allclose(run.losses, run.case.losses, rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_what_was_trained_comes_back(name: str) -> None:
    run = trained(name)
    back = restore("torch", run.folder / "after.pt", run.case.training)
    with start(run.case.training, threads=1) as engine:
        for _ in range(STEPS):
            engine.step(run.case.batch)
        expected = engine.updated()
    for value in expected.initializers():
        if str(value.name).endswith("num_batches_tracked"):  # which only PyTorch counts
            assert back.array(str(value.name)) == 3 + STEPS
            continue
        found, wanted = back.array(value.name or ""), expected.array(value.name or "")
        assert found.dtype == wanted.dtype
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5, err_msg=str(value.name))


@pytest.mark.slow("exact")
@pytest.mark.parametrize("name", CASES)
def test_the_module_is_that_of_to_torch(name: str) -> None:
    live, made = (onward.to_torch(trained(name).case.training, live=way) for way in (True, False))
    assert [(key, x.shape, x.dtype) for key, x in made.module.state_dict().items()] == [
        (key, x.shape, x.dtype) for key, x in live.module.state_dict().items()
    ]
    assert [p.requires_grad for p in made.module.parameters()] == [p.requires_grad for p in live.module.parameters()]
    batch = {key: torch.tensor(x) for key, x in trained(name).case.batch.items() if key != "labels"}
    for size in (1, 3):
        some = {key: x[:size] for key, x in batch.items()}
        torch.testing.assert_close(made.module.eval()(**some), live.module.eval()(**some), rtol=1e-6, atol=1e-6)


# ---- how it looks ----------------------------------------------------------------------------------------------------

CNN = """
class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.ModuleList()
        self.features.append(nn.Conv2d(1, 4, 3, padding=1, bias=False))
        self.features.append(nn.BatchNorm2d(4))
        self.head = nn.Linear(64, 3)

    def forward(self, input: Tensor) -> Tensor:
        x = self.features[1](self.features[0](input))
        x = F.avg_pool2d(torch.relu(x), 2).flatten(1)
        return self.head(x)


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        module.parameters(), lr=0.01, betas=(0.9, 0.999), eps=0.001, weight_decay=0.01
    )


def make_scheduler(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=0.0)


def make_loss() -> nn.Module:
    return nn.CrossEntropyLoss()
"""
LSTM = """
        self.lstm = nn.LSTM(6, 8, bidirectional=True)
"""
ENCODER = """
        q = y[0].reshape(time, batch, 2, 4).permute(1, 2, 0, 3)
        k = y[1].reshape(time, batch, 2, 4).permute(1, 2, 0, 3)
        v = y[2].reshape(time, batch, 2, 4).permute(1, 2, 0, 3)
        y = F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "part"), [("cnn", CNN), ("lstm", LSTM), ("encoder", ENCODER)])
def test_a_person_would_have_written_it(name: str, part: str) -> None:
    text = (trained(name).folder / "run.py").read_text()
    assert part in text
    assert "onward" not in text
    assert max(map(len, text.splitlines())) <= 120


class Attention(nn.Module):
    """A layer with a part of its own, one that all share, and dropout."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.register_buffer("scale", torch.full((20,), scale), persistent=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = (q @ k.transpose(1, 2) * 0.3 * self.scale.sum()).masked_fill(mask, -1e9).softmax(-1)
        return x + self.out(nn.functional.dropout(weights @ v, 0.25, self.training))


class Stack(nn.Module):
    def __init__(self, *scales: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(scale) for scale in scales)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, gap: torch.Tensor) -> torch.Tensor:
        mask = (gap > 0).unsqueeze(1)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x.mean(1))


@pytest.mark.slow("buffers differ")
@pytest.mark.parametrize("scales", [(0.05, 0.05, 0.05), (0.05, 0.05, 0.1)], ids=["alike", "buffers differ"])
def test_blocks_that_repeat_are_a_class_and_a_loop(scales: tuple[float, ...]) -> None:
    torch.manual_seed(0)
    net, inputs = Stack(*scales), (torch.randn(2, 5, 8), (torch.rand(2, 5) > 0.8).float())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    training = onward.from_torch(net, inputs, loss=nn.CrossEntropyLoss(), optimizer=optimizer, probe=False)
    module = onward.to_torch(training, live=False).module
    torch.testing.assert_close(module.eval()(*inputs), net.eval()(*inputs), rtol=1e-5, atol=1e-6)
    assert list(module.state_dict()) == list(net.state_dict())
    assert "for block in self.layers:\n            z = block(z, y)\n" in inspect.getsource(type(module).forward)
    assert "self.layers = nn.ModuleList(Layer() for _ in range(3))" in inspect.getsource(type(module).__init__)
    assert module.layers[2].dropout.p == 0.25
    assert not torch.equal(module.train()(*inputs), module(*inputs))


@pytest.mark.slow
def test_dropout_drops_in_training_only() -> None:
    begun = cnn(dropout=0.25)
    module = onward.to_torch(begun.training, live=False).module
    x = torch.tensor(begun.batch["input"])
    assert torch.equal(module.eval()(x), module(x))
    assert not torch.equal(module.train()(x), module(x))
    assert module.dropout.p == 0.25


@pytest.mark.slow
@needs("transformers", "onnxscript")
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_models_of_hugging_face(name: str) -> None:
    from torch_transformers import begun, steps

    run = begun(name)
    made = onward.to_torch(run.training, live=False)
    assert list(made.module.state_dict()) == list(run.state)
    loss = (lambda outputs, _: made.loss(outputs)) if "labels" in run.batches[0][0] else made.loss
    losses = steps(made.module, made.optimizer, made.scheduler, loss, run.batches)
    np.testing.assert_allclose(losses, run.losses, rtol=1e-5)


@pytest.mark.usefixtures("untried")
def test_the_loop_says_when_a_scheduler_steps(tmp_path: Path) -> None:
    training = onward.prepare(models.digits_mlp(), loss="cross_entropy", schedule="step:size=2,every=30")
    write(training, "torch", tmp_path / "epochs.pt")
    text = (tmp_path / "epochs.py").read_text()
    assert 'load("epochs.pt")' in text and "    scheduler.step()  # once in 30 updates\n" in text


def test_names_are_never_code() -> None:
    odd = {"fc1.weight": 'a"]; raise SystemExit(1) #.class', "fc1.bias": "b/c:0", "logits": '"""', "image": "for"}
    training = onward.transform.rename(mlp(optimizer="adamw", groups=["*bias:lr=0.1"]).training, odd)
    live, made = (onward.to_torch(training, live=way) for way in (True, False))
    assert list(made.module.state_dict()) == list(live.module.state_dict())
    x = torch.tensor(normal(3, 64))
    torch.testing.assert_close(made.module(x), live.module(x))


def test_settings_that_are_off_are_written() -> None:
    """A class may have them on by default, and a program may be used without its state file."""
    module = nn.Linear(4, 3, bias=False)
    off = {"nesterov": False, "momentum": 0.0, "weight_decay": 0.0, "decoupled_weight_decay": False}
    optimizer = Muon(module.parameters(), lr=0.1, **off)
    (line,) = Definitions().optimizer(optimizer, module)
    again = eval(line.removeprefix("return "), {"Muon": Muon, "module": module})
    assert again.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_decisions_by_values_are_refused() -> None:
    model = onnx.parser.parse_model(
        """
        <ir_version: 8, opset_import: ["": 17]>
        graph (float[N, 4] x) => (float[N, 4] y) <float[4] w = {1, 2, 3, 4}> {
            z = Mul(x, w)
            s = ReduceSum<keepdims=0>(z)
            zero = Constant<value = float {0}>()
            positive = Greater(s, zero)
            y = If(positive) <
                then_branch = yes () => (float[N, 4] a) { a = Identity(z) },
                else_branch = no () => (float[N, 4] b) { b = Neg(z) }
            >
        }
        """
    )
    training = onward.prepare(model, loss="mse", optimizer="sgd", trainable=["w"])
    with pytest.raises(UnsupportedError, match="cannot be written as a program") as refused:
        onward.to_torch(training, live=False)
    assert "onward.to_torch" in str(refused.value.hint)


def test_state_of_another_model_is_refused(tmp_path: Path) -> None:
    other = trained("population").case.training
    with pytest.raises(UnsupportedError, match=r"the training model has no `fc1.weight`"):
        restore("torch", trained("exact").folder / "run.pt", other)
    with pytest.raises(UnsupportedError, match="holds the state") as refused:
        restore("torch", trained("exact").folder / "run.pt")
    assert "--like" in str(refused.value.hint)
    torch.save({"module": print}, tmp_path / "bad.pt")
    with pytest.raises(InvalidModelError, match="without executing it"):
        restore("torch", tmp_path / "bad.pt", other)
