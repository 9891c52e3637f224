"""The value of every loss against the frameworks that define it, on two evaluators."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_models import Array, check, model, on_onnxruntime
from marks import needs
from representatives import examples

from onward.recipe.losses import LOSSES, loss

# ---- against PyTorch: value by value ---------------------------------------------------------------------------------

HUGE = [0.0, 1.0, -1.0, 1e4, -1e4, 40.0, -40.0]
Draw = Callable[[np.random.Generator, tuple[int, ...]], Array]


def some(special: list[float], rng: np.random.Generator, ordinary: Array) -> Array:
    """Ordinary numbers, and about one special one among three."""
    return np.where(rng.random(ordinary.shape) < 0.3, rng.choice(special, ordinary.shape), ordinary)


def reals(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return some(HUGE, rng, rng.normal(size=shape))


def moderate(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return some([0.0, -300.0, 20.0], rng, rng.normal(size=shape))


def probabilities(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return some([0.0, 1.0, 1e-30, 1 - 1e-15], rng, rng.random(shape))


def logs(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return some([0.0, -1e4], rng, np.log(rng.random(shape)))


def counts(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return some([0.0, 1.0, 1e6], rng, rng.poisson(3, shape).astype(np.float64))


def signs(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.choice([-1.0, 1.0], shape)


class Case(NamedTuple):
    name: str
    torch: Callable[..., Any]
    """(torch, *inputs, reduction=...) -> loss"""
    inputs: tuple[Draw, ...]
    options: Mapping[str, Any] = MappingProxyType({})
    vectors: bool = False
    """Whether the last axis is summed away."""

    def __str__(self) -> str:
        return ",".join([self.name, *(f"{k}={v}" for k, v in self.options.items())])


def functional(name: str, **options: Any) -> Callable[..., Any]:
    return lambda torch, *inputs, **more: getattr(torch.nn.functional, name)(*inputs, **options, **more)


def cosine_embedding(torch: Any, x: Any, y: Any, reduction: str) -> Any:
    """PyTorch takes matrices, and says in a third input that they shall be alike."""
    x, y, shape = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1]), x.shape[:-1]
    result = torch.nn.functional.cosine_embedding_loss(x, y, torch.ones(len(x)), reduction=reduction)
    return result.reshape(shape) if reduction == "none" else result


def hinge(torch: Any, x: Any, y: Any, reduction: str, power: int = 1) -> Any:
    """PyTorch has no such loss: the definition in Keras's documentation."""
    result = torch.clamp(1 - y * x, min=0) ** power
    return result if reduction == "none" else getattr(result, reduction)()


BCE, BCE_LOGITS = "binary_cross_entropy", "binary_cross_entropy_with_logits"
CASES = [
    Case("mse", functional("mse_loss"), (reals, reals)),
    Case("l1", functional("l1_loss"), (reals, reals)),
    Case("huber", functional("huber_loss"), (reals, reals)),
    Case("huber", functional("huber_loss", delta=0.3), (reals, reals), {"delta": 0.3}),
    Case("smooth_l1", functional("smooth_l1_loss"), (reals, reals)),
    Case("smooth_l1", functional("smooth_l1_loss", beta=0.3), (reals, reals), {"beta": 0.3}),
    Case("bce", functional(BCE), (probabilities, probabilities)),
    Case("bce_with_logits", functional(BCE_LOGITS), (reals, probabilities)),
    Case("hinge", hinge, (reals, signs)),
    Case("squared_hinge", functools.partial(hinge, power=2), (reals, signs)),
    Case("kl_div", functional("kl_div"), (logs, probabilities)),
    Case("kl_div", functional("kl_div", log_target=True), (logs, logs), {"log_target": True}),
    Case("poisson_nll", functional("poisson_nll_loss"), (moderate, counts)),
    Case("poisson_nll", functional("poisson_nll_loss", full=True), (moderate, counts), {"full": True}),
    Case(
        "poisson_nll",
        functional("poisson_nll_loss", log_input=False, eps=1e-7),
        (counts, counts),
        {"log_input": False, "eps": 1e-7},
    ),
    Case("gaussian_nll", functional("gaussian_nll_loss"), (moderate, moderate, probabilities)),
    Case("gaussian_nll", functional("gaussian_nll_loss", full=True), (moderate, moderate, counts), {"full": True}),
    Case("cosine", cosine_embedding, (reals, reals), vectors=True),
    Case("triplet", functional("triplet_margin_loss"), (reals, reals, reals), vectors=True),
    Case(
        "triplet",
        functional("triplet_margin_loss", margin=0.3, p=3, eps=1e-5),
        (reals, reals, reals),
        {"margin": 0.3, "p": 3, "eps": 1e-5},
        vectors=True,
    ),
]
REDUCTIONS = ["mean", "sum", "none"]


def test_every_loss_is_compared():
    elsewhere = {"cross_entropy", "nll", "ctc"}
    assert {case.name for case in CASES} | elsewhere <= set(LOSSES)
    assert {loss(name) for name in LOSSES} == {loss(case.name) for case in CASES} | {loss(n) for n in elsewhere}


@needs("torch")
@pytest.mark.filterwarnings("ignore:reduction:UserWarning")  # PyTorch on kl_div's "mean"
@pytest.mark.parametrize("case", CASES, ids=str)
@settings(max_examples=10, derandomize=True)
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple),
    reduction=st.sampled_from(REDUCTIONS),
    seed=st.integers(0, 2**32 - 1),
)
def test_values_are_pytorchs(case: Case, shape: tuple[int, ...], reduction: str, seed: int):
    import torch

    rng = np.random.default_rng(seed)
    shape = (*shape, 3) if case.vectors else shape
    inputs = [draw(rng, shape) for draw in case.inputs]
    expected = case.torch(torch, *map(torch.from_numpy, inputs), reduction=reduction)
    check(expected.numpy(), case.name, *inputs, reduction=reduction, **case.options)


@needs("torch")
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weights_of_binary_cross_entropy(reduction: str):
    import torch

    rng = np.random.default_rng(0)
    x, p, y = reals(rng, (4, 3)), probabilities(rng, (4, 3)), probabilities(rng, (4, 3))
    weight, positive = [0.5, 1.0, 2.0], [1.0, 0.1, 7.0]
    torch_of = {name: torch.tensor(v, dtype=torch.double) for name, v in {"weight": weight, "pos": positive}.items()}
    inputs = torch.from_numpy(x), torch.from_numpy(y)
    both = functional(BCE_LOGITS, weight=torch_of["weight"], pos_weight=torch_of["pos"], reduction=reduction)
    check(both(torch, *inputs), "bce_with_logits", x, y, weight=weight, pos_weight=positive, reduction=reduction)
    one = functional(BCE_LOGITS, pos_weight=torch.tensor(2.5, dtype=torch.double), reduction=reduction)
    check(one(torch, *inputs), "bce_with_logits", x, y, pos_weight=2.5, reduction=reduction)
    weighted = functional(BCE, weight=torch_of["weight"], reduction=reduction)
    check(weighted(torch, torch.from_numpy(p), inputs[1]), "bce", p, y, weight=weight, reduction=reduction)


@needs("torch")
@pytest.mark.parametrize("log_target", [False, True])
def test_batchmean_is_the_default_of_kl_div(log_target: bool):
    import torch

    rng = np.random.default_rng(0)
    x, y = logs(rng, (5, 2, 3)), (logs if log_target else probabilities)(rng, (5, 2, 3))
    expected = functional("kl_div", reduction="batchmean", log_target=log_target)
    check(expected(torch, torch.from_numpy(x), torch.from_numpy(y)), "kl_div", x, y, log_target=log_target)


# ---- against PyTorch: classes ----------------------------------------------------------------------------------------

WEIGHT = [1.0, 2.0, 0.5, 0.0, 3.0]
IGNORED = {"none": None, "one class": 1, "all": 4, "no class": -7}


def classified(dims: tuple[int, ...], ignore: str = "none") -> tuple[Array, Array]:
    rng = np.random.default_rng(len(dims))
    scores = reals(rng, (6, 5, *dims))
    labels = np.full((6, *dims), 4) if ignore == "all" else rng.integers(0, 5, (6, *dims))
    if ignore == "no class":
        labels[rng.random(labels.shape) < 0.3] = -7
    return scores, labels


def in_torch(torch: Any, function: str, scores: Array, labels: Array, axis: int = 1, **options: Any) -> Array:
    if axis == -1:
        scores = np.moveaxis(scores, -1, 1)
        labels = np.moveaxis(labels, -1, 1) if labels.ndim == scores.ndim else labels
    if options.get("weight") is not None:
        options["weight"] = torch.tensor(options["weight"], dtype=torch.double)
    options = {k: v for k, v in options.items() if v is not None}
    return getattr(torch.nn.functional, function)(torch.tensor(scores), torch.tensor(labels), **options).numpy()


@needs("torch")
@pytest.mark.parametrize("dims", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("ignore", IGNORED)
@pytest.mark.parametrize("function", ["cross_entropy", "nll"])
def test_class_indices(function: str, dims: tuple[int, ...], ignore: str):
    import torch

    scores, labels = classified(dims, ignore)
    for weight, reduction in itertools.product([None, WEIGHT], REDUCTIONS):
        options = {"weight": weight, "reduction": reduction, "ignore_index": IGNORED[ignore]}
        expected = in_torch(torch, "nll_loss" if function == "nll" else function, scores, labels, **options)
        check(expected, function, scores, labels, **options)


@needs("torch")
@pytest.mark.parametrize("dims", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("ignore", IGNORED)
def test_label_smoothing(dims: tuple[int, ...], ignore: str):
    import torch

    scores, labels = classified(dims, ignore)
    for weight, reduction, smoothing in itertools.product([None, WEIGHT], REDUCTIONS, [0.1, 1]):
        options = {"weight": weight, "reduction": reduction, "label_smoothing": smoothing}
        options["ignore_index"] = IGNORED[ignore]
        check(in_torch(torch, "cross_entropy", scores, labels, **options), "ce", scores, labels, **options)


@needs("torch")
@pytest.mark.parametrize("dims", [(), (3,), (2, 3)], ids=str)
def test_class_probabilities(dims: tuple[int, ...]):
    import torch

    scores, _ = classified(dims)
    target = np.moveaxis(np.random.default_rng(0).dirichlet(np.ones(5), (6, *dims)), -1, 1)
    for weight, reduction, smoothing in itertools.product([None, WEIGHT], REDUCTIONS, [0.0, 0.1]):
        options = {"weight": weight, "reduction": reduction, "label_smoothing": smoothing}
        expected = in_torch(torch, "cross_entropy", scores, target, **options)
        check(expected, "cross_entropy", scores, target, target="probabilities", **options)


@needs("torch")
@pytest.mark.parametrize("dims", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_classes_on_the_last_axis(dims: tuple[int, ...], reduction: str):
    import torch

    scores, labels = classified(dims, "no class")
    scores = np.ascontiguousarray(np.moveaxis(scores, 1, -1))
    target = np.random.default_rng(0).dirichlet(np.ones(5), (6, *dims))
    options = {"weight": WEIGHT, "reduction": reduction, "axis": -1}
    indices, smoothed = {**options, "ignore_index": -7}, {**options, "label_smoothing": 0.1}
    check(in_torch(torch, "nll_loss", scores, labels, **indices), "nll", scores, labels, **indices)
    check(in_torch(torch, "cross_entropy", scores, labels, **indices), "ce", scores, labels, **indices)
    smooth_indices = {**smoothed, "ignore_index": -7}
    check(in_torch(torch, "cross_entropy", scores, labels, **smooth_indices), "ce", scores, labels, **smooth_indices)
    expected = in_torch(torch, "cross_entropy", scores, target, **smoothed)
    check(expected, "ce", scores, target, target="probabilities", **smoothed)


@pytest.mark.parametrize("options", [{}, {"ignore_index": 1}, {"label_smoothing": 0.1}], ids=str)
def test_labels_may_be_int32(options: dict[str, Any]):
    scores, labels = classified((3,))
    (expected,) = on_onnxruntime(model("cross_entropy", scores, labels, **options), scores, labels)
    check(expected, "cross_entropy", scores, labels.astype(np.int32), **options)


# ---- against PyTorch: sequences --------------------------------------------------------------------------------------


@needs("torch")
@examples(10)
@given(
    time=st.integers(1, 8),
    length=st.integers(1, 4),
    blank=st.integers(0, 3),
    scale=st.sampled_from([1.0, 30.0, 1e3]),
    reduction=st.sampled_from(REDUCTIONS),
    zero_infinity=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_ctc(time: int, length: int, blank: int, scale: float, reduction: str, zero_infinity: bool, seed: int):
    """Any lengths, also 0 and impossible ones, repeated labels, and padding that is no label."""
    import torch

    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(time, 5, 4)) * scale
    input_lengths, target_lengths = rng.integers(0, time + 1, 5), rng.integers(0, length + 1, 5)
    labels = rng.choice([label for label in range(4) if label != blank], (5, length))
    labels[np.arange(length) >= target_lengths[:, None]] = -1
    log_probs = torch.from_numpy(scores).log_softmax(-1)
    options = {"blank": blank, "reduction": reduction, "zero_infinity": zero_infinity}
    lengths = torch.from_numpy(input_lengths), torch.from_numpy(target_lengths)
    expected = torch.nn.functional.ctc_loss(log_probs, torch.from_numpy(labels), *lengths, **options).numpy()
    rest = labels, input_lengths, target_lengths
    check(expected, "ctc", log_probs.numpy(), *rest, **options)
    batch_first = np.ascontiguousarray(scores.transpose(1, 0, 2))
    check(expected, "ctc", batch_first, *rest, logits=True, batch_first=True, **options)


@needs("torch")
def test_ctc_without_lengths_reads_the_width_and_the_padding():
    import torch

    rng = np.random.default_rng(0)
    log_probs = torch.from_numpy(rng.normal(size=(6, 4, 5))).log_softmax(-1)
    labels = np.array([[1, 2, 2], [3, 4, -1], [4, 2, 2], [-100, -1, 2]])  # 2 is the blank
    labels[3, 2] = -1
    ends, widths = np.array([1, 2, 1, 0]), np.full(4, 6)
    by_kind = {"both": (widths, ends), "input": (widths,), "target": (ends,), "neither": ()}
    places = torch.from_numpy(np.where(labels < 0, 0, labels))
    expected = torch.nn.functional.ctc_loss(log_probs, places, *map(torch.from_numpy, (widths, ends)), blank=2)
    for lengths, given_lengths in by_kind.items():
        check(expected.numpy(), "ctc", log_probs.numpy(), labels, *given_lengths, blank=2, lengths=lengths)


def test_ctc_with_certain_probabilities_and_no_labels():
    """log 0 is -inf here, and one of the two inputs has no label at all."""
    with np.errstate(divide="ignore"):
        log_probs = np.log(np.array([[[0, 1.0], [1, 0]], [[1, 0], [0, 1]]]))
    check([0, np.inf], "ctc", log_probs, np.array([[1], [0]]), np.array([2, 2]), np.array([1, 0]), reduction="none")
    check(0, "ctc", log_probs[:, :1, ::-1].copy()[1:], np.zeros((1, 0), np.int64), np.array([0]), np.array([0]))


def test_ctc_of_half_precision_is_computed_in_float32():
    half = np.log(np.full((4, 2, 3), 1 / 3, np.float16))
    full, rest = half.astype(np.float32), (np.array([[1, 2], [1, 1]]), np.array([4, 4]), np.array([2, 2]))
    (expected,) = on_onnxruntime(model("ctc", full, *rest), full, *rest)
    (actual,) = on_onnxruntime(model("ctc", half, *rest), half, *rest)
    assert actual == expected and actual.dtype == np.float32


# ---- against Keras and optax -----------------------------------------------------------------------------------------


@needs("keras")
def test_values_are_keras():
    import keras

    rng = np.random.default_rng(0)
    x, y, p = rng.normal(size=(6, 5)), rng.normal(size=(6, 5)), probabilities(rng, (6, 5))
    rows, hot = rng.dirichlet(np.ones(5), 6), np.eye(5)[rng.integers(0, 5, 6)]
    losses, labels, double = keras.losses, rng.integers(0, 5, 6), {"dtype": "float64"}

    def compare(made: Any, name: str, *inputs: Array, offset: float = 0, rtol: float = 1e-12, **options: Any) -> None:
        check(np.asarray(made(inputs[1], inputs[0])) + offset, name, *inputs, rtol=rtol, **options)

    compare(losses.MeanSquaredError(**double), "mse", x, y)
    compare(losses.MeanAbsoluteError(**double), "l1", x, y)
    compare(losses.Huber(delta=0.3, **double), "huber", x, y, delta=0.3)
    compare(losses.Hinge(**double), "hinge", x, np.sign(y))
    compare(losses.SquaredHinge(**double), "squared_hinge", x, np.sign(y))
    compare(losses.CosineSimilarity(**double), "cosine", x, y, offset=1)  # -cos there, 1 - cos here
    compare(losses.Poisson(**double), "poisson_nll", np.exp(x), np.abs(y), log_input=False, eps=1e-7)
    compare(losses.BinaryCrossentropy(from_logits=True, **double), "bce_with_logits", x, p)
    compare(losses.BinaryCrossentropy(**double), "binary_cross_entropy", p, hot, clip=1e-7)
    compare(losses.SparseCategoricalCrossentropy(from_logits=True, **double), "cross_entropy", x, labels)
    soft = {"from_logits": True, **double}
    compare(losses.CategoricalCrossentropy(**soft), "cross_entropy", x, rows, target="probabilities")
    smoothed = losses.CategoricalCrossentropy(label_smoothing=0.1, **soft)
    compare(smoothed, "cross_entropy", x, hot, target="probabilities", label_smoothing=0.1)
    sure = hot * 0.9 + 0.02
    check(np.asarray(losses.KLDivergence(**double)(sure, rows)), "kl_div", np.log(rows), sure)


@needs("optax", "jax")
def test_values_are_optaxs():
    import jax
    import optax

    rng = np.random.default_rng(0)
    x, y, p = rng.normal(size=(6, 5)), rng.normal(size=(6, 5)), rng.random((6, 5))
    rows, labels = rng.dirichlet(np.ones(5), 6), rng.integers(0, 5, 6)
    scores, sequences = rng.normal(size=(6, 9, 5)), rng.integers(1, 5, (6, 4))
    none = {"reduction": "none"}
    with jax.enable_x64(True):
        check(optax.squared_error(x, y), "mse", x, y, **none)
        check(optax.huber_loss(x, y, delta=0.3), "huber", x, y, delta=0.3, **none)
        check(optax.cosine_distance(x, y), "cosine", x, y, eps=1e-30, **none)
        check(optax.hinge_loss(x, np.sign(y)), "hinge", x, np.sign(y), **none)
        check(optax.sigmoid_binary_cross_entropy(x, p), "bce_with_logits", x, p, **none)
        check(optax.softmax_cross_entropy_with_integer_labels(x, labels), "cross_entropy", x, labels, **none)
        check(optax.softmax_cross_entropy(x, rows), "cross_entropy", x, rows, target="probabilities", **none)
        smoothed = optax.softmax_cross_entropy(x, optax.smooth_labels(rows, 0.1))
        check(smoothed, "cross_entropy", x, rows, target="probabilities", label_smoothing=0.1, **none)
        check(optax.kl_divergence(np.log(p), rows).mean(), "kl_div", np.log(p), rows)
        inputs = scores, np.zeros((6, 9)), sequences, np.zeros((6, 4))
        lengths = np.full(6, 9), np.full(6, 4)
        options = {"logits": True, "batch_first": True, **none}
        check(optax.ctc_loss(*inputs), "ctc", scores, sequences, *lengths, rtol=1e-6, **options)  # log 0 is -1e5 there
