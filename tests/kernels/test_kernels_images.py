"""Native kernels of images: what they compute is what PyTorch computes, and what is wrong is an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from marks import needs
from models import small_cnn
from native_kernels import needs_kernels, run_kernel
from representatives import examples

import onward
from onward.kernels import DOMAIN, PASSES, library
from onward.lowering.step import LoweringOptions, lower_for_engine

pytestmark = needs_kernels


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def last(image: Any) -> np.ndarray:
    return image.detach().permute(0, 2, 3, 1).numpy()


def assert_near(found: np.ndarray, expected: np.ndarray, within: float = 1e-5) -> None:
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=within * max(float(np.abs(expected).max(initial=0)), 1e-3))


# ---- convolutions ----------------------------------------------------------------------------------------------------


def check_convolution(size: tuple[int, ...], kernel: tuple[int, int], channels: tuple[int, int], **window: Any) -> None:
    import torch

    (n, height, width), (inputs, outputs), group = size, channels, window["group"]
    x, w = random(n, height, width, inputs), random(outputs, inputs // group, *kernel, seed=1)
    bias = random(outputs, seed=2)
    image, weights = torch.from_numpy(x).permute(0, 3, 1, 2).requires_grad_(), torch.from_numpy(w).requires_grad_()
    top, left, bottom, right = window["pads"]
    padded = torch.nn.functional.pad(image, (left, right, top, bottom))
    strides, dilations = window["strides"], window["dilations"]
    y = torch.nn.functional.conv2d(padded, weights, torch.from_numpy(bias), strides, 0, dilations, group)
    settings = {"kernel_shape": kernel, **window}
    assert_near(run_kernel("Conv", x, w, bias, **settings)[0], last(y))
    dy = random(*last(y).shape, seed=3)
    dx, dw = torch.autograd.grad(y, [image, weights], torch.from_numpy(dy).permute(0, 3, 1, 2))
    sizes = np.array(x.shape, np.int64)
    assert_near(run_kernel("ConvInputGradient", dy, w, sizes, **settings)[0], last(dx))
    assert_near(run_kernel("ConvWeightGradient", x, dy, **settings)[0], dw.numpy())
    bias = random(inputs, seed=4)
    covered = [(y.shape[i + 2] - 1) * strides[i] + dilations[i] * (kernel[i] - 1) + 1 for i in range(2)]
    more = [(height, width)[i] + window["pads"][i] + window["pads"][i + 2] - covered[i] for i in range(2)]
    turned = run_kernel("ConvTranspose", dy, w, bias, output_padding=more, **settings)[0]
    assert_near(turned, last(dx) + bias)


PLAIN = {"strides": [1, 1], "dilations": [1, 1], "pads": [1, 1, 1, 1], "group": 1}
CONVOLUTIONS: dict[str, tuple[Any, ...]] = {
    "many channels": ((2, 9, 7), (3, 3), (70, 130), PLAIN),
    "strides": ((2, 9, 8), (3, 3), (20, 33), {**PLAIN, "strides": [2, 3]}),
    "dilations": ((1, 12, 11), (3, 2), (17, 5), {**PLAIN, "dilations": [2, 3]}),
    "one by one": ((3, 7, 7), (1, 1), (16, 48), {**PLAIN, "pads": [0] * 4, "strides": [2, 2]}),
    "the first layer": ((2, 21, 19), (7, 7), (3, 18), {**PLAIN, "pads": [3] * 4, "strides": [2, 2]}),
    "groups": ((2, 8, 8), (3, 3), (12, 20), {**PLAIN, "group": 4}),
    "by channel": ((2, 9, 9), (3, 3), (33, 33), {**PLAIN, "group": 33}),
    "by channel, strides": ((2, 9, 10), (5, 5), (32, 32), {**PLAIN, "group": 32, "strides": [2, 2]}),
    "by channel, one-sided": ((1, 6, 7), (5, 5), (18, 18), {**PLAIN, "group": 18, "pads": [0, 4, 3, 1]}),
    "by channel, large": ((1, 9, 9), (7, 3), (5, 5), {**PLAIN, "group": 5, "dilations": [1, 2]}),
    "pixels of few channels": ((2, 11, 12), (5, 3), (2, 3), {**PLAIN, "pads": [0, 2, 2, 1]}),
    "pixels of few channels, strides": ((2, 9, 17), (5, 5), (5, 4), {**PLAIN, "pads": [0] * 4, "strides": [1, 2]}),
    "many pixels": ((4, 40, 40), (3, 3), (16, 16), PLAIN),
}


@needs("torch")
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions(case: str) -> None:
    *sizes, window = CONVOLUTIONS[case]
    check_convolution(*sizes, **window)


@needs("torch")
@examples(10)
@given(st.data())
def test_any_convolution(data: st.DataObject) -> None:
    def draw(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    kernel, dilations = (draw(1, 5), draw(1, 5)), [draw(1, 2), draw(1, 2)]
    pads, group = [draw(0, 4) for _ in range(4)], draw(1, 4)
    covered = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True)]
    height, width = (max(draw(1, 12), c - a - b, 1) for c, a, b in zip(covered, pads[:2], pads[2:], strict=True))
    channels = group * draw(1, 20), group * draw(1, 20)
    window = {"strides": [draw(1, 3), draw(1, 3)], "dilations": dilations, "pads": pads, "group": group}
    check_convolution((draw(1, 3), height, width), kernel, channels, **window)


# ---- normalization and pools -----------------------------------------------------------------------------------------

ACTIVATIONS = {"nothing": 0, "relu": 1, "hardswish": 2}


@needs("torch")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(3, 5, 4, 37), (2, 1, 1, 3), (16, 20, 20, 16)])
def test_batch_normalization(activation: str, shape: tuple[int, ...]) -> None:
    """Far from zero, where a variance by squares alone would lose its digits."""
    import torch

    x, scale, bias = random(*shape) + 100, random(shape[-1], seed=1), random(shape[-1], seed=2)
    wide = [torch.from_numpy(array).double().requires_grad_() for array in (x, scale, bias)]
    axes = (0, 1, 2)
    mean, variance = wide[0].mean(axes), wide[0].var(axes, unbiased=False)
    y = (wide[0] - mean) / (variance + 1e-3).sqrt() * wide[1] + wide[2]
    kinks = sum((y.abs() - kink).abs() < 1e-3 for kink in (0, 3))
    if activation != "nothing":
        y = getattr(torch.nn.functional, activation)(y)
    settings = {"epsilon": 1e-3, "activation": ACTIVATIONS[activation]}
    found = run_kernel("BatchNormalization", x, scale, bias, outputs=3, **settings)
    for made, expected in zip(found, (y, mean, variance), strict=True):
        assert_near(made, expected.detach().numpy().astype(np.float32), 1e-4)
    dy = np.where(kinks, 0, random(*shape, seed=3)).astype(np.float32)
    gradients = torch.autograd.grad(y, wide, torch.from_numpy(dy).double())
    made = run_kernel("BatchNormalizationGradient", dy, x, scale, bias, *found[1:], outputs=3, **settings)
    for one, gradient in zip(made, gradients, strict=True):
        assert_near(one, gradient.numpy().astype(np.float32), 1e-3)


@needs("torch")
def test_max_pool() -> None:
    import torch

    x = np.maximum(random(2, 9, 8, 19), 0)  # many are equal: the first of them counts
    image = torch.from_numpy(x).permute(0, 3, 1, 2).requires_grad_()
    y = torch.nn.functional.max_pool2d(image, 3, 2, 1)
    dy = random(*last(y).shape, seed=1)
    (dx,) = torch.autograd.grad(y, image, torch.from_numpy(dy).permute(0, 3, 1, 2))
    window = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4}
    assert (run_kernel("MaxPool", x, **window)[0] == last(y)).all()
    assert_near(run_kernel("MaxPoolGradient", dy, x, **window)[0], last(dx))


@needs("torch")
@pytest.mark.parametrize("counts_pads", [False, True])
def test_average_pool(counts_pads: bool) -> None:
    import torch

    x = random(2, 9, 8, 19)
    image = torch.from_numpy(x).permute(0, 3, 1, 2).requires_grad_()
    y = torch.nn.functional.avg_pool2d(image, (3, 2), 2, 1, count_include_pad=counts_pads)
    dy = random(*last(y).shape, seed=1)
    (dx,) = torch.autograd.grad(y, image, torch.from_numpy(dy).permute(0, 3, 1, 2))
    window = {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1] * 4, "count_include_pad": int(counts_pads)}
    assert_near(run_kernel("AveragePool", x, **window)[0], last(y))
    assert_near(run_kernel("AveragePoolGradient", dy, np.array(x.shape), **window)[0], last(dx))


# ---- what is odd, or wrong -------------------------------------------------------------------------------------------


def test_nothing_at_all() -> None:
    w, dy = random(4, 3, 3, 3), np.zeros((0, 5, 5, 4), np.float32)
    x = np.zeros((0, 5, 5, 3), np.float32)
    window = {"kernel_shape": [3, 3], "pads": [1] * 4}
    assert run_kernel("Conv", x, w, **window)[0].shape == dy.shape
    assert run_kernel("ConvInputGradient", dy, w, np.array(x.shape), **window)[0].shape == x.shape
    assert not run_kernel("ConvWeightGradient", x, dy, **window)[0].any()
    assert run_kernel("ConvTranspose", dy, w, random(3), **window)[0].shape == x.shape
    assert run_kernel("MaxPool", x, kernel_shape=[2, 2])[0].shape == (0, 4, 4, 3)
    assert run_kernel("AveragePool", x, kernel_shape=[2, 2])[0].shape == (0, 4, 4, 3)
    assert run_kernel("AveragePoolGradient", dy, np.array((0, 6, 6, 4)), kernel_shape=[2, 2])[0].shape == (0, 6, 6, 4)
    assert run_kernel("Resize", x, *TABLE, *TABLE)[0].shape == (0, 2, 2, 3)
    no_channels = np.zeros((1, 0, 5, 3), np.float32)
    assert run_kernel("AveragePool", no_channels, kernel_shape=[2, 2])[0].shape == (1, 0, 4, 3)


def test_not_a_number_stays() -> None:
    x, w = random(1, 6, 6, 20), random(20, 20, 3, 3)
    x[0, 2, 3, 4] = np.nan
    y = run_kernel("Conv", x, w, kernel_shape=[3, 3], pads=[1] * 4)[0]
    assert np.isnan(y[0, 1:4, 2:5]).all() and np.isfinite(y[0, 4:]).all()
    one = np.ones(20, np.float32)
    normal = run_kernel("BatchNormalization", x, one, one, outputs=3, activation=1)[0]
    assert np.isnan(normal[..., 4]).all() and np.isfinite(normal[..., 5]).all()


TABLE = [np.array([[0, 1], [3, 4]]), np.full((2, 2), 0.5, np.float32)]
"""Two lines, or columns, each of which is mixed of two."""
WRONG: Mapping[str, tuple[str, list[np.ndarray], dict[str, Any]]] = {
    "channels": ("Conv", [random(1, 5, 5, 3), random(4, 2, 3, 3)], {"kernel_shape": [3, 3]}),
    "axes": ("Conv", [random(5, 5, 3), random(4, 3, 3, 3)], {"kernel_shape": [3, 3]}),
    "a window": ("Conv", [random(1, 5, 5, 3), random(4, 3, 3, 3)], {"kernel_shape": [3, 3], "strides": [0, 1]}),
    "a bias": ("Conv", [random(1, 5, 5, 3), random(4, 3, 3, 3), random(5)], {"kernel_shape": [3, 3]}),
    "a gradient": ("ConvWeightGradient", [random(1, 5, 5, 3), random(1, 5, 5, 4)], {"kernel_shape": [3, 3]}),
    "sizes": (
        "ConvInputGradient",
        [random(1, 3, 3, 4), random(4, 3, 3, 3), np.array([1, 9, 9, 3])],
        {"kernel_shape": [3, 3]},
    ),
    "channels, transposed": ("ConvTranspose", [random(1, 5, 5, 3), random(4, 2, 3, 3)], {"kernel_shape": [3, 3]}),
    "a bias, transposed": (
        "ConvTranspose",
        [random(1, 5, 5, 4), random(4, 2, 3, 3), random(4)],
        {"kernel_shape": [3, 3]},
    ),
    "nothing left": (
        "ConvTranspose",
        [random(1, 1, 1, 4), random(4, 2, 3, 3)],
        {"kernel_shape": [3, 3], "pads": [2] * 4},
    ),
    "averages": ("AveragePoolGradient", [random(1, 9, 9, 4), np.array([1, 5, 5, 4])], {"kernel_shape": [2, 2]}),
    "a line that is not there": ("Resize", [random(1, 4, 5, 2), *TABLE, *TABLE], {}),
    "parts": ("Resize", [random(1, 5, 5, 2), TABLE[0], random(2, 1), *TABLE], {}),
    "other sizes": ("ResizeGradient", [random(1, 2, 3, 2), *TABLE, *TABLE, np.array([1, 5, 5, 2])], {}),
    "a scale": ("BatchNormalization", [random(2, 3, 3, 4), random(3), random(4)], {"outputs": 3}),
    "a pool": ("MaxPoolGradient", [random(1, 9, 9, 4), random(1, 5, 5, 4)], {"kernel_shape": [2, 2]}),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused(case: str) -> None:
    name, inputs, settings = WRONG[case]
    with pytest.raises(Exception, match=r"does not fit|has four axes|positive|each channel|do not fit"):
        run_kernel(name, *inputs, **settings)


# ---- in a training ---------------------------------------------------------------------------------------------------


def losses(model: onward.Model, kernels: bool) -> list[float]:
    rng = np.random.default_rng(0)
    with onward.engines.start(model, kernels=kernels) as engine:
        batches = [
            {
                name: rng.integers(0, 10, 8) if value.dtype == ir.DataType.INT64 else random(8, 1, 8, 8, seed=i)
                for name, value in engine.inputs.items()
            }
            for i in range(6)
        ]
        return [float(engine.step(batch)["loss"]) for batch in batches]


@pytest.fixture(scope="module")
def training() -> onward.Model:
    return onward.prepare(small_cnn(), loss="cross_entropy", optimizer="sgd:lr=0.05,momentum=0.9")


def test_a_training_is_the_same_without(training: onward.Model) -> None:
    np.testing.assert_allclose(losses(training, True), losses(training, False), rtol=1e-5)


def test_images_are_turned_once(training: onward.Model) -> None:
    """And nothing native is in what is lowered for others."""
    graph = lower_for_engine(training, options=LoweringOptions(passes=PASSES)).graph
    names = {node.op_type for node in graph if node.domain == DOMAIN}
    assert {"Conv", "ConvWeightGradient"} <= names
    assert not any(node.op_type == "Conv" and not node.domain for node in graph)
    plain = onward.lower(training)
    assert all(node.domain == "" for node in plain.graph)


def test_they_can_be_turned_off(training: onward.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONWARD_KERNELS", "0")
    assert library().path is None and "ONWARD_KERNELS" in library().note
    assert np.isfinite(losses(training, True)).all()
