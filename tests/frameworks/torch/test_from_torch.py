"""Runs of PyTorch that go on as training models and come back: the losses, weights and names of PyTorch itself.

Each run has made five steps before, so that its optimizer has state. Dropout is in the models, but off where numbers
are compared with those of another generator.
"""

import copy
import pickle

import models
import numpy as np
import onnx
import pytest
from marks import needs

import onward
from onward.engines import start
from onward.errors import MismatchError, UnknownNameError, UnsupportedError

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn  # noqa: E402
from torch_nets import step  # noqa: E402
from torch_runs import CASES, Loop, batches, cnn, without_dropout  # noqa: E402

from onward.frameworks.torch import capture_module, from_torch, to_module, to_torch  # noqa: E402
from onward.frameworks.torch.module import OnnxModule  # noqa: E402

pytestmark = [needs("torch"), needs("onnxscript"), pytest.mark.usefixtures("one_torch_thread")]

lr_scheduler = torch.optim.lr_scheduler


def on_onnxruntime(training, given):
    target = training.step().algorithm.inputs[0].name
    with start(training, threads=1) as engine:
        arrays = [{**{k: x.numpy() for k, x in inputs.items()}, target: t.numpy()} for inputs, t in given]
        losses = [float(engine.step(batch)[engine.loss]) for batch in arrays]
        return losses, engine.updated()


def assert_same(found, expected):
    """State dicts: names in order, types, shapes, bytes."""
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def assert_near(found, expected, tolerance=1e-4):
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        off = float((found[name].double() - tensor.double()).abs().max())
        assert off <= tolerance * max(float(tensor.abs().max()), 1e-3), name


# ---- there and back --------------------------------------------------------------------------------------------------


@pytest.mark.slow("cnn", "decoder", "encoder", "lstm")
@pytest.mark.parametrize("name", CASES)
def test_a_run_goes_on_elsewhere_and_comes_back(name, tmp_path):
    case = without_dropout(CASES[name])
    loop, given = Loop.of(case), batches(case, 25, seed=1)
    loop.steps(given[:5])
    before = copy.deepcopy((loop.module.state_dict(), loop.optimizer.state_dict()))
    training = loop.captured()
    assert_same(loop.module.state_dict(), before[0])
    assert onward.check(training) == []

    training.save(tmp_path / "training.onnx")
    back = Loop.back(case, tmp_path / "training.onnx")
    assert_same(back.module.state_dict(), before[0])
    assert_same_optimizer(back.optimizer.state_dict(), before[1])
    assert list(dict(back.module.named_parameters())) == list(dict(loop.module.named_parameters()))

    expected = loop.steps(given[5:15])
    np.testing.assert_allclose(back.steps(given[5:15]), expected, rtol=1e-5)
    losses, end = on_onnxruntime(training, given[5:15])
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    back = Loop.back(case, end)
    assert_near(back.module.state_dict(), loop.module.state_dict())
    np.testing.assert_allclose(back.steps(given[15:]), loop.steps(given[15:]), rtol=1e-5)


def test_dropout_draws_from_the_generator_of_pytorch():
    loop = Loop.of(CASES["cnn"])
    given = batches(loop.case, 10)
    back = Loop.back(loop.case, loop.captured(probe=False))
    torch.manual_seed(2)
    expected = loop.steps(given)
    torch.manual_seed(2)
    assert back.steps(given) == pytest.approx(expected, rel=1e-5)
    torch.manual_seed(3)
    assert back.steps(given) != pytest.approx(loop.steps(given), rel=1e-2)


def assert_same_optimizer(found, expected):
    assert found["state"].keys() == expected["state"].keys()
    for i, state in expected["state"].items():
        slots = {key: value for key, value in state.items() if value is not None}
        assert found["state"][i].keys() == slots.keys()
        for slot, value in slots.items():
            np.testing.assert_array_equal(found["state"][i][slot], value)
    for group, other in zip(found["param_groups"], expected["param_groups"], strict=True):
        assert group["params"] == other["params"]
        assert group["lr"] == pytest.approx(other["lr"], rel=1e-12)


def test_a_module_that_came_from_a_model_goes_back():
    """Also with dropout, which is left out of the probe, and drawn as before on ONNX Runtime."""
    case = CASES["cnn"]
    loop, given = Loop.of(case), batches(case, 10, seed=1)
    loop.steps(given[:5])
    training = loop.captured(probe=False)
    again = Loop.back(case, training).captured()
    assert on_onnxruntime(again, given[5:])[0] == on_onnxruntime(training, given[5:])[0]


@pytest.mark.slow("Adam")
@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_a_scheduler_that_counts_epochs(kind):
    """In the middle of one. SGD does not count updates, and has to be told."""
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    optimizer = getattr(torch.optim, kind)(net.parameters(), lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
    given = [({"input": torch.randn(5, 4)}, torch.randint(0, 3, (5,))) for _ in range(16)]

    def steps(start, end):
        losses = []
        for i in range(start, end):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(**given[i][0]), given[i][1])
            loss.backward()
            nn.utils.clip_grad_value_(net.parameters(), 0.05)
            optimizer.step()
            if (i + 1) % 4 == 0:
                scheduler.step()
            losses.append(float(loss.detach()))
        return losses

    steps(0, 6)
    run = {"loss": F.cross_entropy, "optimizer": optimizer, "scheduler": scheduler, "clip": {"value": 0.05}}
    training = from_torch(net, given[0][0], **run, steps_per_epoch=4, step=6)
    losses, _ = on_onnxruntime(training, given[6:])
    np.testing.assert_allclose(losses, steps(6, 16), rtol=1e-5)
    with pytest.raises(UnsupportedError, match="count 16 updates, not 5"):
        from_torch(net, given[0][0], **run, steps_per_epoch=4, step=5)


# ---- what is trained, and how ----------------------------------------------------------------------------------------


class Assorted(nn.Module):
    """Normalizations of all kinds, tied and equal and unused and frozen weights, two inputs, several outputs."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1, bias=False)
        self.moving = nn.BatchNorm2d(3)
        self.fixed = nn.BatchNorm2d(3)
        self.frozen_scale = nn.BatchNorm2d(3)
        self.plain = nn.BatchNorm2d(3, affine=False)
        self.local = nn.BatchNorm2d(3, track_running_stats=False)
        self.first = nn.Linear(48, 4)
        self.second = nn.Linear(48, 4)
        self.second.weight = self.first.weight
        self.idle = nn.Linear(2, 2)
        self.frozen = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 0.5))
        self.register_buffer("shift", torch.ones(4), persistent=False)
        for parameter in (*self.frozen.parameters(), *self.frozen_scale.parameters()):
            parameter.requires_grad = False
        for layer in (self.moving, self.fixed, self.frozen_scale, self.plain):
            nn.init.normal_(layer.running_mean, std=0.1)
            nn.init.uniform_(layer.running_var, 0.5, 2)

    def train(self, mode=True):
        super().train(mode)
        self.fixed.eval()
        return self

    def forward(self, image, *, pair):
        y = self.conv(image)
        for norm in (self.moving, self.fixed, self.frozen_scale, self.plain, self.local):
            y = norm(torch.tanh(y))
        y = self.first(y.flatten(1)) + self.second(y.flatten(1))
        with torch.no_grad():
            fixed = self.first.bias * 2
        logits = self.frozen(y * self.scale + self.shift) + pair[0] + fixed + self.second.bias.detach()
        return {"logits": logits, "more": (y.sum(1), pair[1] + 1, None)}


@pytest.fixture(scope="module")
def assorted():
    torch.manual_seed(0)
    module = Assorted().train()
    inputs = {"image": torch.randn(5, 1, 4, 4), "pair": (torch.randn(5, 4), torch.randn(5, 2))}
    return module, inputs, capture_module(module, inputs)


def test_names_of_inputs_and_outputs(assorted):
    _, _, model = assorted
    assert [value.name for value in model.inputs] == ["image", "pair_0", "pair_1"]
    assert [value.name for value in model.outputs] == ["logits", "more_0", "more_1"]
    assert [str(value.shape[0]) for value in (*model.inputs, *model.outputs[:2])] == ["batch"] * 5


def test_every_tensor_keeps_its_name(assorted):
    module, _, model = assorted
    back = to_module(model)
    assert_same(back.state_dict(), module.state_dict())
    assert [n for n, _ in back.named_parameters()] == [n for n, _ in module.named_parameters()]
    assert [p.requires_grad for p in back.parameters()] == [p.requires_grad for p in module.parameters()]
    assert back.first.weight is back.second.weight
    assert "shift" in dict(back.named_buffers())


@pytest.mark.parametrize("training", [True, False])
def test_modes_and_derivatives(assorted, training):
    module, inputs, model = assorted
    back, module = to_module(model).train(training), copy.deepcopy(module).train(training)
    flat = {"image": inputs["image"], "pair_0": inputs["pair"][0], "pair_1": inputs["pair"][1]}
    for _ in range(2):  # the second time with other statistics
        found, expected = back(**flat), module(**inputs)
        torch.testing.assert_close(found["logits"], expected["logits"], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found["more_0"], expected["more"][0], rtol=1e-5, atol=1e-5)
    assert_near(back.state_dict(), module.state_dict(), 1e-5)
    found["logits"].square().sum().backward()
    expected["logits"].square().sum().backward()
    theirs = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert_near({name: p.grad for name, p in back.named_parameters() if p.grad is not None}, theirs)


def test_what_the_optimizer_knows_but_does_not_train(assorted):
    module, inputs, _ = assorted
    module = copy.deepcopy(module)
    wide = [p for name, p in module.named_parameters() if not name.startswith("moving")]
    optimizer = torch.optim.Adam(
        [{"params": wide, "lr": 1e-2}, {"params": module.moving.parameters(), "lr": 1e-3}], eps=1e-3
    )
    training = from_torch(module, inputs, loss={"logits": nn.MSELoss()}, optimizer=optimizer)
    trained = {state for state in training.step().update if "/" not in state}
    assert not {name for name in trained if name.startswith(("idle", "frozen."))}
    assert {"frozen_scale.running_mean", "moving.running_mean", "plain.running_mean"} <= trained
    assert not {"fixed.running_mean", "frozen_scale.weight"} & trained
    back = to_torch(training)
    assert_same(back.module.state_dict(), module.state_dict())
    places = {id(p): name for name, p in back.module.named_parameters()}
    groups = [[places[id(p)] for p in group["params"]] for group in back.optimizer.param_groups]
    ours = {id(p): name for name, p in module.named_parameters()}
    assert groups == [[ours[id(p)] for p in group["params"]] for group in optimizer.param_groups]


class Namesake(nn.Module):
    """Parameters that are called as an argument is, and as values of the graph are."""

    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.randn(3))
        self.mul = nn.Parameter(torch.randn(3))
        self.output = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return x * self.x + self.mul * self.output


def test_parameters_keep_names_that_others_have():
    net, x = Namesake(), torch.randn(2, 3)
    model = capture_module(net, x)
    assert [value.name for value in model.inputs] == ["x_input"]
    module = to_module(model)
    assert_same(module.state_dict(), net.state_dict())
    torch.testing.assert_close(module(x), net(x))


def test_an_example_whose_inputs_are_one_tensor():
    """The exporter takes them for one input, and would ignore the other."""

    class Difference(nn.Module):
        def forward(self, a, b):
            return a - 2 * b

    x = torch.ones(3, 2)
    model = capture_module(Difference(), {"a": x, "b": x})
    assert all(value.uses() for value in model.inputs) and len(model.inputs) == 2


def test_a_module_in_eval_is_captured_as_in_training():
    module = cnn().eval()
    model = capture_module(module, torch.randn(4, 2, 6, 6))
    assert not module.training
    training = onward.prepare(model, loss="cross_entropy", variance="sample")
    assert {"1.running_mean", "rng"} <= training.step().update.keys()


def test_batches_that_were_seen_elsewhere_are_counted():
    case = without_dropout(CASES["cnn"])
    loop, given = Loop.of(case), batches(case, 7)
    loop.steps(given[:3])
    _, end = on_onnxruntime(loop.captured(probe=False), given[3:])
    assert int(to_torch(end).module.state_dict()["1.num_batches_tracked"]) == 7


# ---- modules ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return net, to_module(capture_module(net, torch.randn(2, 3)))


def test_copies_types_and_files(small):
    net, module = small
    x = torch.randn(5, 3)
    other = copy.deepcopy(module)
    other.load_state_dict({name: tensor + 1 for name, tensor in net.state_dict().items()})
    torch.testing.assert_close(module(x), net(x))
    assert not torch.allclose(other(x), module(x))
    torch.testing.assert_close(copy.deepcopy(module).double()(x.double()), copy.deepcopy(net).double()(x.double()))
    restored = pickle.loads(pickle.dumps(module))
    torch.testing.assert_close(restored(x), net(x))
    assert isinstance(restored, OnnxModule)


def test_second_derivatives(small):
    _, module = small
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    double = copy.deepcopy(module).double()
    assert torch.autograd.gradcheck(double, (x,))
    assert torch.autograd.gradgradcheck(double, (x,))


def test_names_that_pytorch_cannot_take():
    """Such as those of other frameworks, and of attributes that every module has."""
    rng = np.random.default_rng(0)
    model = onward.load(models.digits_mlp())
    names = dict(
        zip(["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"], ["type", "dense/kernel:0", "a", "a.b"], strict=True)
    )
    module = to_module(onward.transform.rename(model, names))
    assert [*module.state_dict()] == ["type_", "dense/kernel:0", "a", "a_.b"]
    assert list(module.parameters_by_name()) == list(names.values())
    image = rng.standard_normal((3, 64)).astype("f")
    torch.testing.assert_close(module(torch.from_numpy(image)), to_module(model)(torch.from_numpy(image)))


def test_population_statistics():
    """As other frameworks keep them."""
    net = nn.BatchNorm1d(2)
    x = torch.randn(4, 2)
    module = to_module(capture_module(net, x), statistics="population")
    module(x)
    torch.testing.assert_close(module.running_var, 0.9 + 0.1 * x.var(0, correction=0))
    net(x)
    torch.testing.assert_close(module.running_mean, net.running_mean)


# ---- probes ----------------------------------------------------------------------------------------------------------


class Doubled(nn.Linear):
    """A derivative that is not that of what is computed."""

    def forward(self, input):
        result = super().forward(input)
        if result.requires_grad:
            result.register_hook(lambda gradient: 2 * gradient)
        return result


def test_a_derivative_that_the_graph_does_not_have():
    net, x = Doubled(3, 2), torch.randn(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(MismatchError, match="after step 1 `weight` is off by"):
        from_torch(net, x, loss=nn.MSELoss(), optimizer=optimizer)
    from_torch(net, x, loss=nn.MSELoss(), optimizer=optimizer, probe=False)


def test_rounding_errors_that_adam_makes_large():
    """The gradient of a bias before a normalization is nothing else, and running statistics follow the bias."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    from_torch(net, torch.randn(8, 16), loss=nn.CrossEntropyLoss(), optimizer=optimizer)


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_name_of_a_loss_is_no_output() -> None:
    module = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(onward.Error, match="the module has no output `cross_entropy`") as caught:
        onward.from_torch(module, torch.randn(2, 3), loss="cross_entropy", optimizer=optimizer)
    assert caught.value.hint == "pass a loss: `loss=torch.nn.CrossEntropyLoss()`"


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.layer(x)


@pytest.mark.parametrize(
    ("module", "x", "message"),
    [
        (Counting(), torch.randn(2, 3), "changes the buffer `calls`"),
        (
            nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 2), nn.BatchNorm1d(2, momentum=None)),
            torch.tensor([1, 2]),
            "`2.running_mean` is an average over all batches; `0` has sparse=True",
        ),
        (nn.Sequential(nn.LazyLinear(2)), torch.randn(2, 3), "`0.weight` has no values yet"),
        (
            nn.Sequential(nn.Unflatten(0, (2, 2)), nn.Linear(3, 2)),
            torch.randn(4, 3),
            "only with a size of 4 along axis 0",
        ),
    ],
    ids=["changes a buffer", "has options", "is lazy", "has a fixed batch"],
)
def test_a_module_that_is_refused(module, x, message):
    with pytest.raises(UnsupportedError, match=message):
        capture_module(module, x)


def test_inputs_that_are_not_there(small):
    net, module = small
    with pytest.raises(UnknownNameError, match="the module has no input `inputs`") as caught:
        capture_module(net, torch.randn(2, 3), {"inputs": {0: "batch"}})
    assert "`input`" in caught.value.hint
    for wrong in [(), (torch.randn(2, 3),) * 2]:
        with pytest.raises(TypeError, match="the module takes input"):
            module(*wrong)


def test_an_optimizer_of_something_else():
    net, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = torch.optim.SGD([*net.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(UnsupportedError, match="2 parameters that the module does not have"):
        from_torch(net, torch.randn(2, 3), loss=nn.MSELoss(), optimizer=optimizer)


def test_a_loss_on_an_inner_value_there_and_back():
    proto = models.digits_mlp()
    proto.graph.node.append(onnx.helper.make_node("Softmax", ["logits"], ["probabilities"]))
    proto.graph.output[0].name = "probabilities"
    training = onward.prepare(proto, loss=[{"logits": "cross_entropy"}, {"active": "mse:scale=0.1"}], optimizer="adam")
    module, optimizer, scheduler, loss = to_torch(training)
    x = torch.randn(8, 64)
    for outputs in (module(x), copy.deepcopy(module).eval()(x)):
        assert list(outputs) == ["probabilities", "logits", "active"]
    back = from_torch(module, x, loss=loss, optimizer=optimizer, scheduler=scheduler)
    assert [value.name for value in back.outputs] == ["probabilities"]
    found = [(term.output, term.name, term.scale) for term in onward.describe(back).steps[0].loss.terms]
    assert found == [("logits", "cross_entropy", 1.0), ("active", "mse", 0.1)]


# ---- wrappers --------------------------------------------------------------------------------------------------------


class AcceleratedOptimizer(torch.optim.Optimizer):
    """As Hugging Face's Accelerate has it: an optimizer by its class, that holds nothing but another."""

    def __init__(self, optimizer, num_steps=1, scaler=None):
        self.optimizer = optimizer
        self.gradient_state = type("GradientState", (), {"num_steps": num_steps})()
        self.scaler = scaler

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def step(self, closure=None):
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none=None):
        self.optimizer.zero_grad()


class AcceleratedScheduler:
    def __init__(self, scheduler, optimizers):
        self.scheduler, self.optimizers = scheduler, optimizers

    def step(self, *args, **kwargs):
        self.scheduler.step(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self.scheduler, name)


def accelerate():
    """The real ones where they are installed, else what they are like."""
    try:
        from accelerate import Accelerator
        from accelerate.optimizer import AcceleratedOptimizer as Optimizer
        from accelerate.scheduler import AcceleratedScheduler as Scheduler
    except ImportError:
        return AcceleratedOptimizer, AcceleratedScheduler
    Accelerator(cpu=True)  # the wrappers read its state
    return Optimizer, Scheduler


@pytest.mark.slow("the wrapper")
@pytest.mark.parametrize("scheduler_of", ["the wrapper", "the optimizer"])
def test_what_accelerate_puts_around_a_run(scheduler_of):
    torch.manual_seed(0)
    module, x, y = nn.Linear(4, 3), torch.randn(5, 4), torch.randint(0, 3, (5,))
    inner = torch.optim.AdamW(module.parameters(), lr=0.1)
    around, scheduled = accelerate()
    optimizer = around(inner)
    plain = lr_scheduler.StepLR(optimizer if scheduler_of == "the wrapper" else inner, 2)
    scheduler = scheduled(plain, [optimizer])
    for _ in range(3):
        step(F.cross_entropy(module(x), y), optimizer)
        plain.step()
    training = from_torch(module, x, loss=nn.CrossEntropyLoss(), optimizer=optimizer, scheduler=scheduler)
    expected = from_torch(module, x, loss=nn.CrossEntropyLoss(), optimizer=inner, scheduler=plain)
    assert training.to_proto() == expected.to_proto()
    assert int(training.array("step")) == 3
    assert isinstance(optimizer, around) and plain.optimizer in (optimizer, inner)  # what is given stays as it is


@pytest.mark.parametrize(
    ("options", "message"), [({"num_steps": 4}, "gradients of 4 batches"), ({"scaler": object()}, "scales the loss")]
)
def test_wrappers_that_do_more(options, message):
    module = nn.Linear(4, 3)
    wrapper = AcceleratedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), **options)
    with pytest.raises(UnsupportedError, match=message):
        from_torch(module, torch.randn(5, 4), loss=nn.MSELoss(), optimizer=wrapper)


class GraphLayer(nn.Module):
    """A graph convolution, whose normalization is called twice."""

    def __init__(self):
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.randn(3, 3)), nn.BatchNorm1d(3)

    def forward(self, nodes, edges):
        first = self.norm(torch.spmm(edges, torch.mm(nodes, self.weight)))
        return self.norm(torch.spmm(edges, torch.mm(first, self.weight)))


def test_sparse_examples_and_statistics_that_are_updated_twice():
    """The comparison with PyTorch, which makes three steps, is the test."""
    torch.manual_seed(0)
    net, nodes, edges = GraphLayer(), torch.randn(6, 3), (torch.rand(6, 6) > 0.5).float().to_sparse()
    chosen, optimizer = torch.tensor([0, 2, 5]), torch.optim.SGD(net.parameters(), lr=0.1)
    loss = lambda result, rows, labels: nn.functional.cross_entropy(result[rows], labels[rows])
    targets = (chosen, torch.randint(0, 3, (6,)))
    with pytest.warns(UserWarning, match="takes the sizes of the example"):
        training = onward.from_torch(net, (nodes, edges), loss=loss, example_targets=targets, optimizer=optimizer)
    assert tuple(training.inputs[1].shape) == (6, 6)


@pytest.mark.slow
def test_what_a_loop_does_around_the_step():
    """It accumulates two batches, scales the loss, and averages the parameters; an overflow makes no update."""
    torch.manual_seed(0)
    net, x, y = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(20, 4, 5), torch.randn(20, 4, 3)
    y[9] = 1e3
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, eps=1e-3)
    ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**125, growth_interval=5)

    def loop(batches):
        losses = []
        for i in batches:
            loss = nn.functional.mse_loss(net(x[i]), y[i])
            scaler.scale(loss / 2).backward()
            losses.append(loss.item())
            if i % 2:
                before = optimizer.state[net[0].weight]["step"].item() if optimizer.state else 0
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                if optimizer.state[net[0].weight]["step"].item() > before:
                    ema.update_parameters(net)
        return losses

    loop(range(4))
    around = {"ema": ema, "accumulate": 2, "scaler": scaler}
    training = onward.from_torch(net, x[0], loss=nn.MSELoss(), optimizer=optimizer, **around)
    with start(training, threads=1) as engine:
        found = [
            float(engine.step(dict(zip(engine.inputs, (x[i].numpy(), y[i].numpy()), strict=True)))[engine.loss])
            for i in range(4, 20)
        ]
        state = engine.state()
    np.testing.assert_allclose(found, loop(range(4, 20)), rtol=1e-5)
    for name, parameter in net.named_parameters():
        np.testing.assert_allclose(state[name], parameter.detach(), rtol=1e-4, atol=1e-6)
        average = ema.module.get_parameter(name).detach()
        np.testing.assert_allclose(state[f"ema/{name}"], average, rtol=1e-4, atol=1e-6)
    assert state["scaler/scale"] == scaler.get_scale() and state["ema/n_averaged"] == int(ema.n_averaged)


@pytest.mark.slow("torch", "jax")
@pytest.mark.parametrize("engine", ["onnxruntime", "numpy", "torch", "jax"])
def test_a_loss_that_is_not_finite_shrinks_the_scale(engine):
    pytest.importorskip(engine)
    torch.manual_seed(0)
    net, x, y = nn.Linear(5, 3), torch.randn(8, 4, 5), torch.randn(8, 4, 3)
    y[2], y[5] = torch.inf, torch.nan
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, eps=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    training = onward.from_torch(net, x[0], loss=nn.MSELoss(), optimizer=optimizer, scaler=scaler)
    options = {"threads": 1} if engine == "onnxruntime" else {}
    with start(training, engine=engine, **options) as running:
        for i in range(8):
            found = float(running.step({"input": x[i].numpy(), "target": y[i].numpy()})[running.loss])
            loss = nn.functional.mse_loss(net(x[i]), y[i])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            np.testing.assert_allclose(found, loss.item(), rtol=1e-5)
            assert running.state()["scaler/scale"] == scaler.get_scale()
        np.testing.assert_allclose(running.state()["weight"], net.weight.detach(), rtol=1e-5, atol=1e-6)
        assert running.state()["step"] == 6


def test_averages_that_are_refused():
    net = nn.Linear(5, 3)
    parts = {"loss": nn.MSELoss(), "optimizer": torch.optim.SGD(net.parameters(), lr=0.1), "probe": False}
    for ema, message in (
        (AveragedModel(net), "is not exponential"),
        (AveragedModel(net, avg_fn=get_ema_avg_fn(0.9)), "first update is a copy"),
        (AveragedModel(net, avg_fn=get_ema_avg_fn(0.9), use_buffers=True), "averages buffers"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            onward.from_torch(net, torch.randn(4, 5), ema=ema, **parts)
