"""Names that are numbers, paths, keywords or worse: a name is a name, wherever it is given or written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import needs
from onnx import TensorProto, helper, numpy_helper

import onward
from onward.errors import RecipeError
from onward.frameworks import run_files

PLAIN = ("x", "w1", "b1", "h", "r", "w2", "b2", "y")
BATCH = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
ODD = {
    "numbers": ("0", "1", "2", "3", "4", "5", "6", "7"),
    "paths": ("/in", "/a/MatMul.w", "/a/b", "/a/Gemm_output_0", "/relu/0", "/b/w", "/b/b", "/out"),
    "tensorflow": ("in:0", "d/kernel:0", "d/bias:0", "d/Add:0", "d/Relu:0", "e/kernel:0", "e/bias:0", "Identity:0"),
    "one_identifier": ("a.b", "a/b", "a b", "a_b", "a:b", "a-b", "a__b", "a,b"),
    "keywords": ("class", "def", "return", "lambda", "self", "import", "None", "forward"),
    "patterns": ("*", "[w]", "b?", "h*", "r[a-z]", "w[1]", "b[!1]", "y=1"),
    "quotes": ("it's", 'say "w"', "back\\slash", "new\nline", "tab\t", "{w}", "%s", "$y"),
    "words": ("вход", "重み", "ß", "ñ", "ﬁ", "fi", "é", "e\u0301"),
}


def mlp(names):
    x, w1, b1, h, r, w2, b2, y = names
    rng = np.random.default_rng(1)
    arrays = {n: rng.standard_normal(s).astype(np.float32) for n, s in {w1: (4, 8), b1: 8, w2: (8, 3), b2: 3}.items()}
    nodes = [
        helper.make_node("Gemm", [x, w1, b1], [h], name=h),
        helper.make_node("Relu", [h], [r], name=r),
        helper.make_node("Gemm", [r, w2, b2], [y], name=y),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", n]) for name, n in ((x, 4), (y, 3))]
    weights = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "odd", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def losses(training, x):
    labels = training.steps[0].algorithm.inputs[0].name
    with onward.engines.start(training) as engine:
        results = [engine.step({x: BATCH, labels: np.arange(6) % 3}) for _ in range(3)]
    return [float(next(iter(result.values()))) for result in results]


def recipe(names):
    """What names a parameter or an output exactly, in every place where one can."""
    _, w1, b1, _, _, w2, _, y = names
    return {
        "loss": f"{y}=cross_entropy:scale=2",
        "optimizer": "sgd:lr=0.1",
        "trainable": [w1, b1, w2],
        "freeze": [b1],
        "groups": [f"{w1}:lr=0.2"],
        "init": [f"{w2}=zeros"],
    }


EXPECTED = losses(onward.prepare(mlp(PLAIN), **recipe(PLAIN)), "x")


def agrees_with_plain_names(names):
    training = onward.prepare(mlp(names), **recipe(names))
    assert not onward.check(training)
    again = onward.load(training.to_proto().SerializeToString())
    assert {names[1], names[5]} <= set(again.steps[0].update) and not {names[2], names[6]} & set(again.steps[0].update)
    np.testing.assert_allclose(losses(again, names[0]), EXPECTED, rtol=1e-6)
    renamed = onward.transform.rename(again, dict(zip(names, (f"plain_{name}" for name in PLAIN), strict=True)))
    np.testing.assert_allclose(losses(renamed, "plain_x"), EXPECTED, rtol=1e-6)


@pytest.mark.parametrize("kind", ODD)
def test_odd_names_are_names(kind):
    agrees_with_plain_names(ODD[kind])


ALL_TRAINED = losses(onward.prepare(mlp(PLAIN), loss="cross_entropy:scale=2", optimizer="sgd:lr=0.1"), "x")
ANY_NAME = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=12)


@settings(max_examples=20)
@given(st.lists(ANY_NAME, min_size=8, max_size=8, unique=True))
def test_any_name_is_a_name(names):
    training = onward.prepare(mlp(names), loss={names[7]: "cross_entropy:scale=2"}, optimizer="sgd:lr=0.1")
    assert {names[i] for i in (1, 2, 5, 6)} <= set(training.steps[0].update)
    onnx.checker.check_model(training.to_proto(), full_check=True)
    np.testing.assert_allclose(losses(training, names[0]), ALL_TRAINED, rtol=1e-6)


def test_training_has_names_of_its_own():
    with pytest.raises(RecipeError, match="trains a tensor `step`") as caught:
        onward.prepare(mlp(("x", "step", *PLAIN[2:])), loss="ce")
    assert "onward rename MODEL step=" in caught.value.hint


@pytest.mark.slow
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("framework", [pytest.param(name, marks=needs(name)) for name in run_files.FRAMEWORKS])
def test_programs_have_odd_names(framework, kind, tmp_path: Path):
    training = onward.prepare(mlp(ODD[kind]), loss="cross_entropy", optimizer="adam:lr=0.1")
    path = tmp_path / f"run{run_files.ENDINGS[framework]}"
    run_files.write(training, framework, path)
    back = run_files.restore(framework, path, training)
    for name in training.steps[0].update:
        np.testing.assert_array_equal(back.array(name), training.array(name))
