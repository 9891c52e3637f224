"""Linear models of scikit-learn, as skl2onnx writes them: weights are attributes, and are trained all the same."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from onnx.helper import make_node, make_tensor_value_info

import onward
from onward.errors import RecipeError

ML = "ai.onnx.ml"
RNG = np.random.default_rng(11)
X = RNG.standard_normal((6, 4)).astype(np.float32)


def numbers(count):
    return [float(number) for number in RNG.standard_normal(count).astype(np.float32)]


def ml(operator, inputs, outputs, **attributes):
    return make_node(operator, inputs, outputs, name=operator, domain=ML, **attributes)


def tensor(name, kind=TensorProto.FLOAT, shape=(None, None)):
    return make_tensor_value_info(name, kind, shape)


def model(nodes, outputs, inputs=None):
    graph = helper.make_graph(nodes, "pipeline", inputs or [tensor("X", shape=(None, 4))], outputs)
    opsets = [helper.make_opsetid("", 15), helper.make_opsetid(ML, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8, producer_name="skl2onnx")


def regressor(targets=1, **attributes):
    weights = attributes or {"coefficients": numbers(4 * targets), "intercepts": numbers(targets)}
    return model([ml("LinearRegressor", ["X"], ["variable"], targets=targets, **weights)], [tensor("variable")])


def classifier(rows, labels, post_transform, before=(), read="X", after=(), outputs=None, width=4, **attributes):
    kind = "classlabels_strings" if isinstance(labels[0], str) else "classlabels_ints"
    weights = {"coefficients": numbers(width * rows), "intercepts": numbers(rows)} | {kind: labels} | attributes
    node = ml("LinearClassifier", [read], ["label", "probabilities"], post_transform=post_transform, **weights)
    label = tensor("label", TensorProto.STRING if isinstance(labels[0], str) else TensorProto.INT64, (None,))
    return model([*before, node, *after], outputs or [label, tensor("probabilities")])


def pipeline(coefficients=None, intercepts=None, offset=None, scale=None, classes=3, width=4):
    """StandardScaler and LogisticRegression, with the ZipMap that skl2onnx puts at the end."""
    maps = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    zipped = helper.make_value_info("output_probability", helper.make_sequence_type_proto(maps))
    return model(
        [
            ml("Scaler", ["X"], ["variable"], offset=offset or numbers(width), scale=scale or [0.5] * width),
            ml(
                "LinearClassifier", ["variable"], ["label", "probability_tensor"], multi_class=1,
                coefficients=coefficients or numbers(width * classes), intercepts=intercepts or numbers(classes),
                classlabels_ints=list(range(classes)), post_transform="SOFTMAX",
            ),
            make_node("Cast", ["label"], ["output_label"], name="Cast", to=TensorProto.INT64),
            ml("Normalizer", ["probability_tensor"], ["probabilities"], norm="L1"),
            ml("ZipMap", ["probabilities"], ["output_probability"], classlabels_int64s=list(range(classes))),
        ],
        [tensor("output_label", TensorProto.INT64, (None,)), zipped],
        [tensor("X", shape=(None, width))],
    )  # fmt: skip


CASES = {
    "regressor": (regressor(), "mse"),
    "two_targets": (regressor(2), "mse"),
    "without_intercepts": (regressor(coefficients=numbers(4)), "mse"),
    "softmax": (classifier(3, [4, 5, 6], "SOFTMAX"), "LinearClassifier.scores=ce"),
    "words": (classifier(2, ["no", "yes"], "LOGISTIC"), "LinearClassifier.scores=bce_with_logits"),
    "one_row": (classifier(1, [0, 1], "LOGISTIC"), "probabilities=binary_cross_entropy"),
    "scores": (classifier(3, [0, 1, 2], "NONE"), "probabilities=ce"),
    "pipeline": (pipeline(), "LinearClassifier.scores=ce"),
}


def outputs(proto, fed):
    return ort.InferenceSession(proto.SerializeToString()).run(None, fed)


def agree(a, b):
    for x, y in zip(a, b, strict=True):
        if isinstance(x, list):
            x, y = ([list(row.values()) for row in rows] for rows in (x, y))
        if np.asarray(x).dtype.kind == "f":
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
        else:
            assert np.asarray(x).tolist() == np.asarray(y).tolist()


@pytest.mark.parametrize("name", CASES)
def test_it_is_opened_for_training_and_comes_back_as_it_was(name):
    proto, loss = CASES[name]
    training = onward.prepare(proto, loss=loss)
    assert not onward.check(training)
    assert "LinearRegressor" not in {node.op_type for node in training.graph}
    agree(outputs(proto, {"X": X}), outputs(training.to_proto(), {"X": X}))
    back = onward.transform.strip(training).to_proto()
    assert [(n.op_type, n.name, list(n.output)) for n in back.graph.node] == [
        (n.op_type, n.name, list(n.output)) for n in proto.graph.node
    ]
    for old, new in zip(proto.graph.node, back.graph.node, strict=True):
        assert {a.name: helper.get_attribute_value(a) for a in old.attribute} == {
            a.name: helper.get_attribute_value(a) for a in new.attribute
        }
    assert not back.graph.initializer and {o.domain: o.version for o in back.opset_import}[ML] == 1


def test_a_regressor_arrives_at_the_least_squares(tmp_path):
    linear = pytest.importorskip("sklearn.linear_model")
    x = RNG.standard_normal((64, 4)).astype(np.float32)
    y = (x @ np.float32([[1], [-2], [0.5], [3]]) + 0.7 + 0.1 * RNG.standard_normal((64, 1))).astype(np.float32)
    run = onward.train(
        regressor(), {"X": x, "target": y}, loss="mse", optimizer="sgd:lr=0.2", epochs=60, batch_size=64,
        run=tmp_path / "run", quiet=True,
    )  # fmt: skip
    (node,) = run.best.to_proto().graph.node
    found = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    expected = linear.LinearRegression().fit(x, y)
    assert node.op_type == "LinearRegressor"
    np.testing.assert_allclose(found["coefficients"], expected.coef_[0], atol=1e-4)
    np.testing.assert_allclose(found["intercepts"], expected.intercept_, atol=1e-4)


@pytest.mark.filterwarnings("ignore:lbfgs failed to converge")
def test_a_classifier_of_scikit_learn_goes_on_learning(tmp_path):
    datasets = pytest.importorskip("sklearn.datasets")
    linear = pytest.importorskip("sklearn.linear_model")
    images, labels = datasets.load_digits(return_X_y=True)
    images = images.astype(np.float32)
    mean, scale = images.mean(axis=0), 1 / (images.std(axis=0) + 1)
    begun = linear.LogisticRegression(max_iter=1).fit((images[:200] - mean) * scale, labels[:200])
    weights = {"coefficients": begun.coef_.ravel().tolist(), "intercepts": begun.intercept_.tolist()}
    made = pipeline(**weights, offset=mean.tolist(), scale=scale.tolist(), classes=10, width=64)
    assert (outputs(made, {"X": images})[0] == begun.predict((images - mean) * scale)).all()
    run = onward.train(
        made, {"X": images, "labels": labels}, loss="LinearClassifier.scores=ce", optimizer="adam:lr=0.01", epochs=3,
        run=tmp_path / "run", quiet=True,
    )  # fmt: skip
    trained = run.best.to_proto()
    assert [node.op_type for node in trained.graph.node] == [node.op_type for node in made.graph.node]
    before, after = ((outputs(proto, {"X": images})[0] == labels).mean() for proto in (made, trained))
    assert before < 0.9 and after > 0.97


def test_probabilities_are_looked_at_through_maps():
    with pytest.warns(UserWarning, match="LinearClassifier.scores=cross_entropy"):
        training = onward.prepare(pipeline(), loss="cross_entropy")
    assert training.steps[0].metadata


@pytest.mark.parametrize("end", ["LinearClassifier", "ZipMap"])
def test_class_names_of_data_have_the_numbers_of_the_model(end, tmp_path):
    names = ["no", "yes", "maybe"]
    made = classifier(3, names, "SOFTMAX")
    if end == "ZipMap":  # as skl2onnx ends: the probabilities have no shape
        maps = helper.make_map_type_proto(TensorProto.STRING, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
        zipped = helper.make_value_info("maps", helper.make_sequence_type_proto(maps))
        nodes = [*made.graph.node, ml("ZipMap", ["probabilities"], ["maps"], classlabels_strings=names)]
        made = model(nodes, [made.graph.output[0], zipped])
    rows = [",".join([*map(str, row), names[1 + i % 2]]) for i, row in enumerate(X)]  # sorted: maybe, yes
    (tmp_path / "data.csv").write_text("\n".join(["a,b,c,d,label", *rows]))
    run = onward.train(
        made, tmp_path / "data.csv", columns={"X": list("abcd")}, loss="LinearClassifier.scores=ce", epochs=1,
        run=tmp_path / "run", quiet=True,
    )  # fmt: skip
    chosen = np.array([[row[name] for name in names] if end == "ZipMap" else row for row in outputs(made, {"X": X})[1]])
    losses = [event["loss"] for event in run.read_log() if event["event"] == "epoch"]
    np.testing.assert_allclose(losses[0], -np.log(chosen[range(6), [1, 2] * 3]).mean(), rtol=1e-5)


def test_words_become_features_in_a_step(tmp_path):
    before = [
        ml("OneHotEncoder", ["word"], ["hot"], cats_strings=["u", "v"]),
        make_node("Reshape", ["hot", "rows"], ["h"]),
        make_node("Concat", ["h", "X"], ["z"], axis=1),
    ]
    made = classifier(3, [0, 1, 2], "SOFTMAX", before, "z", width=6)
    made.graph.input.append(tensor("word", TensorProto.STRING, (None, 1)))
    made.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1, 2]), "rows"))
    words = np.array([["u"], ["v"]] * 3, object)  # as pandas has them
    data = {"X": X, "word": words, "labels": np.arange(6) % 3}
    run = onward.train(made, data, loss="LinearClassifier.scores=ce", epochs=2, run=tmp_path / "run", quiet=True)
    expected = -np.log(outputs(made, {"X": X, "word": words})[1][range(6), data["labels"]]).mean()
    losses = [event["loss"] for event in run.read_log() if event["event"] == "epoch"]
    np.testing.assert_allclose(losses[0], expected, rtol=1e-5)
    assert losses[1] < losses[0]


@pytest.mark.parametrize("engine", ["onnxruntime", "numpy"])
def test_validation_reads_the_inner_value_that_the_loss_reads(engine, tmp_path):
    made = classifier(3, [0, 1, 2], "SOFTMAX")
    data = {"X": X, "labels": np.arange(6) % 3}
    run = onward.train(
        made, data, loss="LinearClassifier.scores=ce", epochs=1, validation=data, engine=engine, run=tmp_path / "run",
        quiet=True,
    )  # fmt: skip
    start = next(event for event in run.read_log() if event["event"] == "validation")
    label, probabilities = outputs(made, {"X": X})
    assert start["accuracy"] == pytest.approx((label == data["labels"]).mean())
    assert start["loss"] == pytest.approx(-np.log(probabilities[range(6), data["labels"]]).mean(), rel=1e-5)


def test_a_sequence_is_refused_for_a_loss():
    made = classifier(3, [0, 1, 2], "SOFTMAX", after=[])
    listed = helper.make_value_info("all", helper.make_tensor_sequence_value_info("", TensorProto.FLOAT, None).type)
    nodes = [*made.graph.node, make_node("SequenceConstruct", ["probabilities"], ["all"])]
    with pytest.raises(RecipeError, match="`all` is a sequence") as caught:
        onward.prepare(model(nodes, [listed]), loss="ce")
    assert "`probabilities=ce`" in caught.value.hint


def test_trees_are_said_not_to_be_trained():
    tree = ml(
        "TreeEnsembleRegressor", ["X"], ["y"], nodes_treeids=[0], nodes_nodeids=[0], nodes_featureids=[0],
        nodes_values=[0.0], nodes_modes=["LEAF"], nodes_truenodeids=[0], nodes_falsenodeids=[0], target_treeids=[0],
        target_nodeids=[0], target_ids=[0], target_weights=[1.0], n_targets=1,
    )  # fmt: skip
    with pytest.raises(RecipeError, match="no weights") as caught:
        onward.prepare(model([tree], [tensor("y")]), loss="mse")
    assert "`TreeEnsembleRegressor`" in caught.value.hint


PREPARED = {
    "imputer": (
        [ml("Imputer", ["X"], ["z"], imputed_value_floats=[1.0, 2.0, 3.0, 4.0], replaced_value_float=float("nan"))],
        np.where(X > 1, np.float32("nan"), X), 4,
    ),
    "binarizer": ([ml("Binarizer", ["X"], ["z"], threshold=0.5)], X, 4),
    "one_hot": (
        [
            ml("OneHotEncoder", ["X"], ["hot"], cats_int64s=[10, 20, 30]),
            make_node("Reshape", ["hot", "rows"], ["z"]),
        ],
        np.array([[10, 20], [30, 10], [20, 20]]), 6,
    ),
    "features": (
        [
            make_node("Constant", [], ["columns"], value_ints=[3, 0]),
            ml("ArrayFeatureExtractor", ["X", "columns"], ["some"]),
            ml("FeatureVectorizer", ["some", "X"], ["z"], inputdimensions=[2, 4]),
        ],
        X, 6,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PREPARED)
def test_what_goes_before_stays_and_runs(name):
    before, fed, width = PREPARED[name]
    rows = onnx.numpy_helper.from_array(np.array([-1, 6]), "rows")
    made = classifier(3, [0, 1, 2], "SOFTMAX", before, "z", width=width)
    if fed.dtype == np.int64:
        made.graph.initializer.append(rows)
        made.graph.input[0].CopyFrom(tensor("X", TensorProto.INT64, (None, 2)))
    training = onward.prepare(made, loss="LinearClassifier.scores=ce", optimizer="sgd:lr=0.5")
    labels = np.arange(len(fed)) % 3
    with onward.engines.start(training) as engine:
        losses = [float(engine.step({"X": fed, "labels": labels})["loss"]) for _ in range(5)]
        trained = onward.transform.strip(engine.updated())
    probabilities = outputs(trained.to_proto(), {"X": fed})[1]
    assert losses[-1] < losses[0]
    assert [n.op_type for n in trained.graph] == [n.op_type for n in made.graph.node]
    assert -np.log(probabilities[range(len(fed)), labels]).mean() < losses[-1]
