"""Classical machine learning: each rewrite computes what runtimes compute, and has its derivative."""

import kernelcheck
import numpy as np
import onnx
import pytest
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator

import onward
from onward.errors import UnsupportedError
from onward.rules import RULES, Rewrite

RNG = np.random.default_rng(5)
LABELS = (TensorProto.INT64, TensorProto.FLOAT)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def numbers(count):
    return [float(number) for number in normal(count)]


def case(op_type, outputs=1, *, x=None, **attributes):
    types = LABELS if outputs == 2 else ()
    inputs = {"x": normal(3, 4) if x is None else x}
    return kernelcheck.case(op_type, inputs, outputs, domain="ai.onnx.ml", types=types, **attributes)


def linear(classes, post_transform, labels=None, **attributes):
    rows = attributes.pop("rows", classes)
    return case(
        "LinearClassifier", 2, coefficients=numbers(4 * rows), intercepts=numbers(rows), post_transform=post_transform,
        classlabels_ints=labels or list(range(10, 10 + classes)), **attributes,
    )  # fmt: skip


def svm_regressor(kernel, **attributes):
    return case(
        "SVMRegressor", coefficients=numbers(3), support_vectors=numbers(12), n_supports=3, rho=[0.3],
        kernel_type=kernel, kernel_params=[0.4, 0.2, 3.0], **attributes,
    )  # fmt: skip


def svm_classifier(classes, post_transform="NONE", kernel="RBF"):
    counts = [2, 1, 3][:classes]
    return case(
        "SVMClassifier", 2, coefficients=numbers((classes - 1) * sum(counts)), support_vectors=numbers(4 * sum(counts)),
        vectors_per_class=counts, rho=numbers(classes * (classes - 1) // 2), kernel_type=kernel,
        kernel_params=[0.4, 0.2, 2.0], classlabels_ints=list(range(classes)), post_transform=post_transform,
    )  # fmt: skip


CASES = {
    "scaler": case("Scaler", offset=numbers(4), scale=numbers(4)),
    "scaler_same": case("Scaler", offset=[0.5], scale=[2.0]),
    "normalizer_max": case("Normalizer", x=np.abs(normal(3, 4)), norm="MAX"),
    "normalizer_l1": case("Normalizer", norm="L1"),
    "normalizer_l2": case("Normalizer", norm="L2"),
    "linear_regressor": case("LinearRegressor", coefficients=numbers(8), intercepts=numbers(2), targets=2),
    "linear_regressor_plain": case("LinearRegressor", coefficients=numbers(4)),
    "linear_classifier": linear(3, "NONE"),
    "linear_classifier_softmax": linear(3, "SOFTMAX"),
    "linear_classifier_logistic": linear(3, "LOGISTIC"),
    "linear_classifier_softmax_zero": linear(3, "SOFTMAX_ZERO"),
    "linear_classifier_two": linear(2, "NONE", rows=1),
    "linear_classifier_two_logistic": linear(2, "LOGISTIC", rows=1),
    "linear_classifier_probit": case(
        "LinearClassifier", 2, x=RNG.uniform(0.3, 0.7, (3, 2)).astype(np.float32), coefficients=[0.5, 0.1, 0.2, 0.6],
        intercepts=[0.1, 0.2], classlabels_ints=[0, 1], post_transform="PROBIT",
    ),
    "svm_regressor_linear": svm_regressor("LINEAR"),
    "svm_regressor_poly": svm_regressor("POLY"),
    "svm_regressor_rbf": svm_regressor("RBF"),
    "svm_regressor_sigmoid": svm_regressor("SIGMOID"),
    "svm_regressor_without_vectors": case(
        "SVMRegressor", coefficients=numbers(4), rho=[0.3], kernel_type="LINEAR", kernel_params=[0.0, 0.0, 0.0]
    ),
    "svm_classifier": svm_classifier(3),
    "svm_classifier_softmax": svm_classifier(3, "SOFTMAX", "POLY"),
    "svm_classifier_two": svm_classifier(2),
    "svm_classifier_two_logistic": svm_classifier(2, "LOGISTIC", "SIGMOID"),
    "svm_classifier_without_vectors": case(
        "SVMClassifier", 2, coefficients=numbers(12), rho=[0.2], classlabels_ints=[4, 5, 6], kernel_type="LINEAR",
        kernel_params=[0.0, 0.0, 0.0],
    ),
    "imputer": case(
        "Imputer", x=np.float32([[1, np.nan, 3], [np.nan, 5, 6]]), imputed_value_floats=[7.0, 8.0, 9.0],
        replaced_value_float=float("nan"),
    ),
    "imputer_same": case(
        "Imputer", x=np.float32([[1, -1, 3], [-1, 5, 6]]), imputed_value_floats=[7.0], replaced_value_float=-1.0
    ),
    "array_feature_extractor": kernelcheck.case(
        "ArrayFeatureExtractor", {"x": normal(3, 4), "i": np.array([[2, 0, 2]])}, domain="ai.onnx.ml"
    ),
    "feature_vectorizer": kernelcheck.case(
        "FeatureVectorizer", {"a": normal(3, 2), "b": normal(3, 3)}, domain="ai.onnx.ml", inputdimensions=[2, 3]
    ),
}  # fmt: skip

UNLIKE_THE_REFERENCE = {
    "linear_classifier_two": "it has (-score, score), ONNX Runtime has (1 - score, score)",
    "linear_regressor_plain": "it computes NaN without intercepts",
    "svm_classifier_without_vectors": "it ignores the labels",
}
"""Cases that the reference computes in another way than ONNX Runtime."""


@pytest.mark.parametrize("name", [name for name in CASES if name != "imputer_same"])
def test_rewrite_agrees_with_onnxruntime(name):
    graph, inputs = CASES[name]
    settings = {"step": 1e-3, "gradient_rtol": 3e-2} if name == "normalizer_l1" else {}  # a kink is near
    kernelcheck.check(kernelcheck.model(graph, 18, symbolic=True), inputs, **settings)


@pytest.mark.parametrize("name", [name for name in CASES if name not in UNLIKE_THE_REFERENCE])
def test_rewrite_agrees_with_the_reference(name):
    graph, inputs = CASES[name]
    proto = kernelcheck.model(graph, 21)
    names = [value.name for value in graph.output]
    expected = dict(zip(names, ReferenceEvaluator(proto).run(None, inputs), strict=True))
    kernelcheck.check(proto, inputs, expected=expected)


def test_what_is_imputed_has_no_gradient():
    graph, inputs = CASES["imputer_same"]
    grads = onward.gradient(kernelcheck.model(graph, 21), "y0", ["x"]).to_proto()
    np.testing.assert_array_equal(kernelcheck.run(grads, inputs)["x/grad"], inputs["x"] != -1)


def test_labels_may_be_words():
    graph, inputs = case(
        "LinearClassifier", 2, coefficients=numbers(12), intercepts=numbers(3), classlabels_strings=["a", "b", "c"]
    )
    graph.output[0].type.tensor_type.elem_type = TensorProto.STRING
    kernelcheck.check(kernelcheck.model(graph, 21), inputs)


def test_probabilities_of_an_svm_are_refused():
    graph, _ = svm_classifier(2)
    proto = kernelcheck.model(graph, 21)
    proto.graph.node[0].attribute.extend(
        [onnx.helper.make_attribute("prob_a", [0.5]), onnx.helper.make_attribute("prob_b", [0.1])]
    )
    with pytest.raises(UnsupportedError, match="with probabilities"):
        onward.gradient(proto, "y1", ["x"])


def test_trees_say_why_they_have_none():
    reason = RULES["ai.onnx.ml", "TreeEnsembleRegressor"].reason
    assert "piecewise constant" in reason


def test_every_rewrite_has_a_case():
    operators = {graph.node[0].op_type for graph, _ in CASES.values()}
    assert operators == {
        name for (domain, name), r in RULES.items() if domain == "ai.onnx.ml" and isinstance(r, Rewrite)
    }
