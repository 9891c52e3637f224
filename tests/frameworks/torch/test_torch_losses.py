"""Losses of PyTorch and of training models are the same both ways: their values and their gradients, in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from marks import needs

import onward
from onward.engines import start
from onward.errors import UnsupportedError
from onward.recipe.losses import LOSSES
from onward.recipe.objective import terms
from onward.recipe.spec import Spec

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from onward.frameworks.torch.loss import (  # noqa: E402
    ROWS,
    make_loss,
    read_loss,
    summands,
)

pytestmark = [needs("torch"), pytest.mark.usefixtures("one_torch_thread")]

RNG = np.random.default_rng(0)
Arrays = dict[str, np.ndarray]
Inputs = tuple[np.ndarray, Arrays]
"""A prediction and its targets."""

# ---- inputs ----------------------------------------------------------------------------------------------------------


def classes(*places: int, last: bool = False, extreme: bool = False, log: bool = False) -> Inputs:
    scores = RNG.normal(size=(6, 5, *places))
    if extreme:
        scores[:3] = RNG.choice([-1000.0, 0.0, 1000.0], size=scores[:3].shape)
    labels = RNG.integers(0, 5, size=(6, *places))
    labels[0] = 2
    if log:
        scores = torch.tensor(scores).log_softmax(1).numpy()
    return (np.moveaxis(scores, 1, -1).copy() if last else scores), {"labels": labels}


def ignoring(inputs: Inputs, index: int) -> Inputs:
    scores, targets = inputs
    labels = targets["labels"].copy()
    labels[1] = index
    return scores, {"labels": labels}


def soft(*places: int, last: bool = False) -> Inputs:
    probabilities = RNG.dirichlet(np.ones(5), size=(6, *places))
    target = probabilities if last else np.moveaxis(probabilities, -1, 1).copy()
    return RNG.normal(size=target.shape), {"target": target}


def values(extreme: bool = False) -> Inputs:
    prediction, target = RNG.normal(size=(4, 5)), RNG.normal(size=(4, 5))
    if extreme:
        prediction[0], target[1], prediction[2] = 1e6, -1e6, target[2] + 1e-9
    return prediction, {"target": target}


def yes_or_no(extreme: bool = False, logits: bool = False) -> Inputs:
    prediction = RNG.normal(size=(4, 5)) * 3
    if extreme:
        prediction[0], prediction[1] = 1000.0, -1000.0
    return (prediction if logits else 1 / (1 + np.exp(-prediction.clip(-30, 30)))), {
        "target": RNG.integers(0, 2, size=(4, 5)).astype(float)
    }


def signs() -> Inputs:
    return RNG.normal(size=(4, 5)), {"target": RNG.choice([-1.0, 1.0], size=(4, 5))}


def distributions(log: bool = False) -> Inputs:
    target = RNG.dirichlet(np.ones(5), size=4)
    target[0] = [1, 0, 0, 0, 0]
    prediction = (
        torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log_softmax(1).numpy()
    )
    return prediction, {"target": np.log(target + 1e-30) if log else target}


def counts() -> Inputs:
    return RNG.uniform(0.1, 3, size=(4, 5)), {"target": RNG.integers(0, 9, size=(4, 5)).astype(float)}


def normals() -> Inputs:
    variance = RNG.uniform(0, 2, size=(4, 5))
    variance[0] = 0
    return RNG.normal(size=(4, 5)), {"target": RNG.normal(size=(4, 5)), "variance": variance}


def triplets() -> Inputs:
    return RNG.normal(size=(4, 5)), {"positive": RNG.normal(size=(4, 5)), "negative": RNG.normal(size=(4, 5))}


def sequences(batch_first: bool = False, log: bool = True) -> Inputs:
    scores = torch.tensor(RNG.normal(size=(7, 3, 5)))
    scores = scores.log_softmax(-1) if log else scores
    return (scores.transpose(0, 1) if batch_first else scores).numpy().copy(), {
        "labels": np.array([[1, 2, 2], [3, 1, 4], [2, 4, 1]]),
        "input_lengths": np.array([7, 6, 5]),
        "target_lengths": np.array([3, 2, 3]),
    }


# ---- both sides ------------------------------------------------------------------------------------------------------


def on_onnxruntime(loss: Any, inputs: Inputs) -> tuple[float, np.ndarray]:
    """A loss and its gradient, as the first step of a bias that is added to the prediction."""
    prediction, targets = inputs
    helper, double = onnx.helper, onnx.TensorProto.DOUBLE
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "bias"], ["prediction"])],
        "add",
        [helper.make_tensor_value_info("x", double, prediction.shape)],
        [helper.make_tensor_value_info("prediction", double, prediction.shape)],
        [onnx.numpy_helper.from_array(np.zeros_like(prediction), "bias")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    training = onward.prepare(onward.load(model), loss=loss, optimizer="sgd:lr=1")
    with start(training, threads=1) as engine:
        value = float(engine.step({"x": prediction, **targets})[engine.loss])
        return value, _before_softmax(-engine.state()["bias"], inputs)


def on_torch(loss: Callable[..., Any], inputs: Inputs) -> tuple[float, np.ndarray]:
    prediction = torch.tensor(inputs[0], requires_grad=True)
    value = loss(prediction, *(torch.tensor(target) for target in inputs[1].values()))
    value.backward()
    return value.item(), _before_softmax(prediction.grad.numpy(), inputs)


def _before_softmax(gradient: np.ndarray, inputs: Inputs) -> np.ndarray:
    """PyTorch has the gradient of CTC before a LogSoftmax, where its sum over the classes is zero."""
    if "input_lengths" not in inputs[1]:
        return gradient
    return gradient - np.exp(inputs[0]) * gradient.sum(-1, keepdims=True)


def agree(found: tuple[float, np.ndarray], expected: tuple[float, np.ndarray]) -> None:
    assert np.isfinite(expected[0])
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-10)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-8, atol=1e-12 * max(1, np.abs(expected[1]).max()))


WEIGHT = torch.tensor([0.5, 2.0, 1.0, 3.0, 0.125], dtype=torch.float64)
partial = functools.partial

FROM_TORCH: list[tuple[Any, Inputs]] = [
    (nn.CrossEntropyLoss(), classes()),
    (nn.CrossEntropyLoss(), classes(extreme=True)),
    (nn.CrossEntropyLoss(), ignoring(classes(), -100)),
    (nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=2), classes(3)),
    (nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1), ignoring(classes(extreme=True), -100)),
    (nn.CrossEntropyLoss(label_smoothing=0.2, reduction="sum"), classes(2, 3)),
    (F.cross_entropy, classes()),
    (partial(F.cross_entropy, label_smoothing=0.1, weight=WEIGHT), classes()),
    (nn.NLLLoss(), classes(log=True)),
    (nn.NLLLoss(weight=WEIGHT, ignore_index=3, reduction="sum"), classes(4, log=True)),
    (F.nll_loss, ignoring(classes(log=True), -100)),
    (nn.MSELoss(), values()),
    (nn.MSELoss(reduction="sum"), values(extreme=True)),
    (F.mse_loss, values()),
    (nn.L1Loss(), values(extreme=True)),
    (F.l1_loss, values()),
    (nn.SmoothL1Loss(beta=0.3), values(extreme=True)),
    (nn.SmoothL1Loss(beta=0.0), values()),
    (partial(F.smooth_l1_loss, beta=2.0), values()),
    (nn.HuberLoss(delta=0.3), values(extreme=True)),
    (F.huber_loss, values()),
    (nn.BCELoss(), yes_or_no()),
    (nn.BCELoss(weight=WEIGHT, reduction="sum"), yes_or_no()),
    (F.binary_cross_entropy, yes_or_no()),
    (nn.BCEWithLogitsLoss(), yes_or_no(extreme=True, logits=True)),
    (nn.BCEWithLogitsLoss(pos_weight=WEIGHT, weight=WEIGHT), yes_or_no(extreme=True, logits=True)),
    (partial(F.binary_cross_entropy_with_logits, pos_weight=WEIGHT), yes_or_no(logits=True)),
    (nn.KLDivLoss(), distributions()),
    (nn.KLDivLoss(reduction="batchmean"), distributions()),
    (nn.KLDivLoss(reduction="sum", log_target=True), distributions(log=True)),
    (F.kl_div, distributions()),
    (nn.PoissonNLLLoss(), counts()),
    (nn.PoissonNLLLoss(log_input=False, full=True), counts()),
    (partial(F.poisson_nll_loss, full=True), counts()),
    (nn.GaussianNLLLoss(), normals()),
    (nn.GaussianNLLLoss(full=True, eps=1e-2, reduction="sum"), normals()),
    (F.gaussian_nll_loss, normals()),
    (nn.CTCLoss(), sequences()),
    (nn.CTCLoss(blank=0, zero_infinity=True, reduction="sum"), sequences()),
    (F.ctc_loss, sequences()),
    (nn.TripletMarginLoss(margin=0.7, p=2.0), triplets()),
    (F.triplet_margin_loss, triplets()),
]


def loss_id(value: Any) -> str | None:
    if isinstance(value, tuple):
        return None
    given = value.func if isinstance(value, functools.partial) else value
    return getattr(given, "__name__", type(given).__name__)


@pytest.mark.parametrize(("loss", "inputs"), FROM_TORCH, ids=loss_id)
def test_there_and_back(loss: Any, inputs: Inputs) -> None:
    spec = read_loss(loss)
    expected = on_torch(loss, inputs)
    agree(on_onnxruntime(spec, inputs), expected)
    made = make_loss(spec).double()
    agree(on_torch(made, inputs), expected)
    assert type(made).__module__ == "torch.nn.modules.loss"
    assert read_loss(made) == spec


@pytest.mark.parametrize("settings", [{}, {"weight": WEIGHT}, {"label_smoothing": 0.1, "reduction": "sum"}], ids=len)
def test_class_probabilities(settings: dict[str, Any]) -> None:
    loss = nn.CrossEntropyLoss(**settings)
    for inputs in (soft(), soft(3)):
        spec = read_loss(loss, probabilities=True)
        agree(on_onnxruntime(spec, inputs), on_torch(loss, inputs))
        agree(on_torch(make_loss(spec).double(), inputs), on_torch(loss, inputs))


def test_every_loss_of_torch_is_tested() -> None:
    modules = {type(loss) for loss, _ in FROM_TORCH}
    functions = {loss.func if isinstance(loss, functools.partial) else loss for loss, _ in FROM_TORCH}
    assert {row.module for row in ROWS} <= modules
    assert {row.function for row in ROWS} <= functions


# ---- what PyTorch has no class for -----------------------------------------------------------------------------------

OURS: list[tuple[dict[str, Any], Inputs]] = [
    ({"name": "hinge"}, signs()),
    ({"name": "hinge", "reduction": "sum"}, signs()),
    ({"name": "squared_hinge"}, signs()),
    ({"name": "cosine"}, values()),
    ({"name": "cosine", "axis": 0, "eps": 0.1, "reduction": "sum"}, values()),
    ({"name": "bce", "clip": 0.05}, yes_or_no()),
    ({"name": "bce", "clip": 1e-7, "weight": [1, 2, 3, 4, 5], "reduction": "sum"}, yes_or_no()),
    ({"name": "ce", "axis": -1, "label_smoothing": 0.1}, classes(3, last=True)),
    ({"name": "ce", "axis": -1, "target": "probabilities"}, soft(3, last=True)),
    ({"name": "nll", "axis": -1, "weight": WEIGHT.tolist()}, classes(2, last=True)),
    ({"name": "ctc", "logits": True}, sequences(log=False)),
    ({"name": "ctc", "batch_first": True}, sequences(batch_first=True)),
    ({"name": "ctc", "batch_first": True, "logits": True}, sequences(batch_first=True, log=False)),
    ({"name": "mse", "scale": 0.25}, values()),
    ({"name": "bce_with_logits", "pos_weight": 3.0, "weight": 2.0}, yes_or_no(logits=True)),
]


@pytest.mark.parametrize(("given", "inputs"), OURS, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_ours(given: dict[str, Any], inputs: Inputs) -> None:
    made = make_loss([{"prediction": given}]).double()
    agree(on_torch(made, inputs), on_onnxruntime(given, inputs))
    (summand,) = summands(made, tuple(torch.tensor(target) for target in inputs[1].values()))
    assert complete(summand.spec()) == complete(given)


def complete(given: Any) -> tuple[Any, ...]:
    """The name, the scale and all options of a loss."""
    (term,) = terms(given)
    options = {**LOSSES[term.spec.name].options, **term.spec.options}
    return (
        LOSSES[term.spec.name].name,
        term.scale,
        {"ignore_index": -100} | {k: v for k, v in options.items() if v is not None},
    )


def test_all_of_ours_can_be_made() -> None:
    made = {LOSSES[given["name"]].name for given, _ in OURS} | {row.name for row in ROWS}
    assert made == {loss.name for loss in LOSSES.values()}


def test_a_sum_of_losses() -> None:
    first, second = torch.randn(3, 4), torch.randn(3, 2)
    labels, target = torch.tensor([0, 3, 1]), torch.randn(3, 2)
    loss = make_loss([{"a": "cross_entropy"}, {"b": {"name": "mse", "scale": 0.5}}])
    expected = F.cross_entropy(first, labels) + 0.5 * F.mse_loss(second, target)
    torch.testing.assert_close(loss((first, labels), (second, target)), expected)


# ---- what is refused -------------------------------------------------------------------------------------------------


class Mine(nn.MSELoss):
    pass


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (Mine(), "loss Mine .* formula is unknown"),
        (nn.MultiMarginLoss(), "MultiMarginLoss .* formula is unknown"),
        (lambda x, y: F.mse_loss(x, y), "<lambda> .* formula is unknown"),
        (nn.MSELoss(reduction="none"), "has reduction=.none."),
        (nn.TripletMarginLoss(swap=True), "`swap=True` has no counterpart"),
        (partial(F.mse_loss, size_average=False), "`size_average=False` has no counterpart"),
        (partial(F.mse_loss, weight=WEIGHT), "`weight=.*` has no counterpart"),
        (partial(F.huber_loss, weight=WEIGHT, reduction="none"), "`weight=.*; it has reduction=.none."),
        (partial(F.kl_div, torch.ones(2)), "arguments have no names"),
    ],
)
def test_refused(loss: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message) as caught:
        read_loss(loss)
    assert caught.value.hint


def test_probabilities_ignore_nothing() -> None:
    with pytest.raises(UnsupportedError, match="no ignore_index"):
        read_loss(nn.CrossEntropyLoss(ignore_index=3), probabilities=True)


def test_what_the_model_computes_is_picked() -> None:
    """Its own loss, alone and in a sum, and a value inside of it that a loss looks at."""
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    outputs = {"probabilities": torch.zeros(4, 3), "inner": x, "penalty": torch.tensor(2.0)}
    assert make_loss("value:penalty")(outputs) == 2
    watching = make_loss([{"inner": "mse"}], ["inner"])
    assert watching(outputs, y) == watching(x, y) == nn.MSELoss()(x, y)
    both = make_loss([{"inner": "mse"}, {"penalty": {"name": "value", "scale": 0.5}}], ["inner"])
    assert both((outputs, y), (outputs,)) == both((x, y), (outputs["penalty"],)) == nn.MSELoss()(x, y) + 1
    assert isinstance(make_loss(Spec("mse")), nn.MSELoss)


def test_a_graph_of_its_own_is_not_made() -> None:
    with pytest.raises(UnsupportedError, match="is a custom graph"):
        make_loss([{"y": {"name": "custom"}}])
