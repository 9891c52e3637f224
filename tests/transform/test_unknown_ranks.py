"""Models of exporters that leave shapes out: they train like those with shapes, or it is said where one is missing."""

from __future__ import annotations

from pathlib import Path

import models
import numpy as np
import onnx
import pytest
from marks import needs

import onward
from onward.errors import InvalidModelError, UnsupportedError
from onward.frameworks import run_files

RNG = np.random.default_rng(3)
NETS = {
    "mlp": (models.digits_mlp(), "cross_entropy", {"image": ("N", 64)}, {"image": (3, 64), "labels": (3,)}),
    "cnn": (models.small_cnn(), "cross_entropy", {"image": ("N", 1, 8, 8)}, {"image": (3, 1, 8, 8), "labels": (3,)}),
    "transformer": (
        models.small_transformer(),
        "value:loss",
        {"tokens": ("N", "T"), "labels": ("N", "T")},
        {"tokens": (2, 5), "labels": (2, 5)},
    ),
}


def bare(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model without any shape, as old exporters write it."""
    stripped = onnx.ModelProto.FromString(proto.SerializeToString())
    del stripped.graph.value_info[:]
    for value in (*stripped.graph.input, *stripped.graph.output):
        value.type.tensor_type.ClearField("shape")
    return stripped


def batch(sizes):
    return {
        name: RNG.standard_normal(shape).astype(np.float32) if name == "image" else RNG.integers(0, 10, shape)
        for name, shape in sizes.items()
    }


@pytest.mark.parametrize("engine", ["onnxruntime", "numpy"])
@pytest.mark.parametrize("name", NETS)
def test_training_is_the_same_without_shapes(name, engine):
    """To the last digits on the plain graph: which kernels apply depends on shapes, and each sums in its own order."""
    proto, loss, _, sizes = NETS[name]
    plain = {"kernels": False} if engine == "onnxruntime" else {}
    fed, losses = batch(sizes), []
    for model in (proto, bare(proto)):
        training = onward.prepare(model, loss=loss, optimizer="sgd:lr=0.1")
        with onward.engines.start(training, engine=engine, **plain) as running:
            losses.append([float(next(iter(running.step(fed).values()))) for _ in range(3)])
    rounding = 1e-7 * max(losses[0])  # a small loss is what is left of terms that cancel
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6, atol=rounding)


@pytest.mark.parametrize("name", NETS)
def test_shapes_can_be_declared_afterwards(name):
    proto, loss, shapes, _ = NETS[name]
    training = onward.prepare(bare(proto), loss=loss)
    (finding,) = onward.check(training)
    assert f"`{next(iter(shapes))}`" in finding.message and "onward set MODEL --shape" in finding.hint
    declared = onward.transform.declare(training, shapes)
    assert not onward.check(declared)
    assert {value.name: tuple(map(str, value.shape)) for value in declared.inputs} == {
        key: tuple(map(str, sizes)) for key, sizes in shapes.items()
    }


def test_what_a_file_says_stays_true():
    digits = models.digits_mlp()
    with pytest.raises(InvalidModelError, match="has the shape"):
        onward.transform.declare(digits, {"image": ("N", 65)})
    fixed = onward.transform.declare(onward.prepare(digits, loss="ce"), {"image": (32, 64)})
    assert fixed.outputs[0].shape == [32, 10] and fixed.steps[0].algorithm.inputs[0].shape == [32]


def test_who_needs_a_shape_says_of_what():
    training = onward.prepare(bare(models.digits_mlp()), loss="ce")
    with pytest.raises(UnsupportedError, match="`image`") as caught:
        onward.verify(training, engines=["numpy"])
    assert "--shape image=" in caught.value.hint


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("framework", [pytest.param(name, marks=needs(name)) for name in run_files.FRAMEWORKS])
def test_programs_want_to_know_shapes(framework, tmp_path: Path):
    proto, loss, shapes, _ = NETS["mlp"]
    training = onward.prepare(bare(proto), loss=loss, optimizer="sgd:lr=0.1")
    path = tmp_path / f"run{run_files.ENDINGS[framework]}"
    if framework != "jax":
        with pytest.raises(UnsupportedError, match="`image` has no shape") as caught:
            run_files.write(training, framework, path)
        assert "onward.transform.declare" in caught.value.hint
        training = onward.transform.declare(training, shapes)
    assert all(made.exists() for made in run_files.write(training, framework, path))
