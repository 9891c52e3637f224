"""Training models as `tf.Module` and back, functions of TensorFlow as training models: the same losses everywhere."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import sysconfig

import models
import numpy as np
import onnx.parser
import pytest
from marks import needs
from onnx.reference import ReferenceEvaluator

import onward
from onward.engines import start
from onward.engines.framework import Operators
from onward.engines.framework_engine import interpreter
from onward.errors import DataError, MismatchError, RecipeError, UnsupportedError
from onward.model import load
from onward.model.state import states

pytestmark = needs("tensorflow")

RNG = np.random.default_rng(0)
FLAT = [{"image": RNG.standard_normal((n, 64)).astype("f"), "labels": RNG.integers(0, 10, n)} for n in (8, 8, 3) * 4]
SQUARE = [{"image": batch["image"].reshape(-1, 1, 8, 8), "labels": batch["labels"]} for batch in FLAT]
TOKENS = [
    {"tokens": RNG.integers(0, 32, (n, t)), "labels": RNG.integers(0, 32, (n, t))} for n, t in ((4, 6), (3, 5)) * 5
]


def tf():
    from onward.engines.tensorflow.quiet import tensorflow

    return tensorflow


def losses(model, batches):
    with start(model, threads=1) as engine:
        found = [float(engine.step(batch)[engine.loss]) for batch in batches]
        return found, engine.updated()


def assert_same_state(found, expected, **tolerance):
    assert [state.name for state in states(found)] == [state.name for state in states(expected)]
    for state, other in zip(states(found), states(expected), strict=True):
        one, two = (value.value.const_value.numpy() for value in (state, other))
        np.testing.assert_allclose(one, two, **tolerance, err_msg=state.name)


# ---- to TensorFlow ---------------------------------------------------------------------------------------------------

RECIPES = {
    "adam": (models.digits_mlp, FLAT, {"optimizer": "adam:lr=1e-2,eps=1e-3"}),
    "momentum under a schedule": (
        models.digits_mlp,
        FLAT,
        {"optimizer": "sgd:lr=0.1,momentum=0.9", "schedule": "exponential:gamma=0.8", "clip": "norm:1"},
    ),
    "small accumulators": (models.digits_mlp, FLAT, {"optimizer": "adagrad:lr=0.05"}),
    "groups, accumulation, an average": (
        models.digits_mlp,
        FLAT,
        {"optimizer": "adamw:lr=1e-2", "groups": ["*bias:weight_decay=0"], "accumulate": 2, "ema": 0.9},
    ),
    "normalization and dropout": (models.small_cnn, SQUARE, {"optimizer": "adam:lr=1e-2", "freeze": "conv.*"}),
    "a transformer": (models.small_transformer, TOKENS, {"loss": "value:loss", "optimizer": "adamw:lr=1e-2,eps=1e-3"}),
}


@pytest.mark.slow("a transformer", "normalization and dropout")
@pytest.mark.parametrize("name", RECIPES)
def test_a_module_goes_on(name):
    """Through batches of several sizes, with one graph; and what it has become is a training model again."""
    make, batches, recipe = RECIPES[name]
    model = onward.prepare(make(), **{"loss": "cross_entropy", **recipe})
    _, begun = losses(model, batches[:3])
    expected, end = losses(begun, batches)
    module = onward.to_tensorflow(begun)
    found = [float(module.train_step(**batch)["loss"]) for batch in batches]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert module.train_step.experimental_get_tracing_count() == 1
    back = onward.from_tensorflow(module)
    assert onward.check(back) == []
    assert_same_state(back, end, rtol=1e-3, atol=2e-5)
    again, _ = losses(back, batches)
    np.testing.assert_allclose(again, losses(end, batches)[0], rtol=1e-4)


def test_variables_have_the_names_of_state():
    recipe = {"optimizer": "adam", "freeze": "conv.*"}
    module = onward.to_tensorflow(onward.prepare(models.small_cnn(), loss="cross_entropy", **recipe))
    parameters = {"bn.weight", "bn.bias", "fc.weight", "fc.bias"}
    assert {variable.name for variable in module.trainable_variables} == {f"{name}:0" for name in parameters}
    slots = {f"{name}/{slot}" for name in parameters for slot in ("exp_avg", "exp_avg_sq")}
    others = {"conv.weight", "conv.bias", "bn.running_mean", "bn.running_var", "step", "rng"}
    assert {variable.name for variable in module.non_trainable_variables} == {f"{name}:0" for name in slots | others}
    assert module.state["fc.weight"] is next(v for v in module.trainable_variables if v.name == "fc.weight:0")


def test_inference_and_evaluation():
    model = onward.prepare(models.small_cnn(), loss="cross_entropy", optimizer="sgd:lr=0.1")
    _, model = losses(model, SQUARE[:2])
    module, batch = onward.to_tensorflow(model), SQUARE[2]
    with start(model) as engine:
        expected = engine.evaluate(batch)
    found = module.evaluate(**batch)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-5)
    for infer in (module, module.infer):
        np.testing.assert_allclose(infer(batch["image"])["logits"], expected["logits"], rtol=1e-5, atol=1e-5)


def test_a_loss_that_is_not_finite_changes_nothing():
    module = onward.to_tensorflow(onward.prepare(models.digits_mlp(), loss="cross_entropy"))
    before = {name: variable.numpy() for name, variable in module.state.items()}
    assert np.isnan(module.train_step(**{**FLAT[0], "image": FLAT[0]["image"] * np.nan})["loss"])
    for name, array in before.items():
        np.testing.assert_array_equal(module.state[name], array)


ELSEWHERE = """
import importlib.util, json, sys
sys.path.append(sys.argv[1])
assert importlib.util.find_spec("onward") is None
import numpy as np
import tensorflow as tf
module = tf.saved_model.load(sys.argv[2])
batches = np.load(sys.argv[3])
count = len([name for name in batches if name.startswith("image")])
losses = []
for i in range(count):
    metrics = module.train_step(image=batches[f"image{i}"], labels=batches[f"labels{i}"])
    losses.append(float(metrics["loss"]))
trained = [name for name, variable in module.state.items() if variable.trainable]
tf.saved_model.save(module, sys.argv[4])
print(json.dumps([losses, sorted(trained)]))
"""


def in_a_process(places):
    options = {"capture_output": True, "text": True, "env": {"TF_CPP_MIN_LOG_LEVEL": "3"}}
    done = subprocess.run([sys.executable, "-S", "-c", ELSEWHERE, *places], **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def in_this_process(places):
    """In which nothing of ours can be imported then."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        patch.setattr(sys, "argv", ["-c", *places])
        patch.setattr(sys, "path", [*sys.path])
        for name in [name for name in sys.modules if name.partition(".")[0] == "onward"]:
            patch.setitem(sys.modules, name, None)
        exec(ELSEWHERE, {})
    return said.getvalue()


@pytest.mark.parametrize("go", [in_this_process, pytest.param(in_a_process, marks=pytest.mark.slow)])
def test_a_saved_model_trains_without_us(go, tmp_path):
    """Where Onward cannot be found. What it saves comes back as a training model."""
    model = onward.prepare(models.small_cnn(), loss="cross_entropy", optimizer="adam:lr=1e-2,eps=1e-3")
    tf().saved_model.save(onward.to_tensorflow(model), str(tmp_path / "model"))
    arrays = {f"{name}{i}": array for i, batch in enumerate(SQUARE) for name, array in batch.items()}
    np.savez(tmp_path / "batches.npz", **arrays)
    places = [sysconfig.get_paths()["purelib"], *(str(tmp_path / name) for name in ("model", "batches.npz", "trained"))]
    found, trained = json.loads(go(places).splitlines()[-1])
    expected, end = losses(model, SQUARE)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert trained == sorted(model.step().differentiated())
    assert_same_state(onward.from_tensorflow(tmp_path / "trained"), end, rtol=1e-3, atol=2e-5)


def test_a_second_step():
    """Slots of the same name belong to each step."""
    model = onward.prepare(models.digits_mlp(), loss="cross_entropy", optimizer="adam:lr=1e-2")
    model = onward.prepare(model, loss="cross_entropy", optimizer="adam:lr=5e-2", append=True)
    module = onward.to_tensorflow(model, step=1)
    with start(model, 1) as engine:
        for batch in FLAT[:3]:
            given = dict(zip(engine.inputs, batch.values(), strict=True))
            loss = float(engine.step(given)[engine.loss])
            np.testing.assert_allclose(module.train_step(**given)["loss"], loss, rtol=1e-5)
        expected = engine.updated()
    back = onward.from_tensorflow(module)
    for step in range(2):
        found, wanted = ({s.name: s.value.const_value.numpy() for s in states(m, step)} for m in (back, expected))
        assert found.keys() == wanted.keys()
        for name, array in wanted.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-3, atol=2e-5, err_msg=f"{name} of step {step}")


def test_sizes_may_be_fixed():
    model = onward.prepare(models.digits_mlp(), loss="cross_entropy")
    module = onward.to_tensorflow(model, sizes={"N": 8})
    assert {tuple(spec.shape) for spec in module.train_step.input_signature} == {(8, 64), (8,)}
    found = [float(module.train_step(**batch)["loss"]) for batch in FLAT[:2]]
    np.testing.assert_allclose(found, losses(model, FLAT[:2])[0], rtol=1e-5)


def test_what_needs_a_size_says_so(monkeypatch):
    from onward.frameworks.tensorflow import forward

    def needs_it(x, *, axis):
        return tf().reshape(x, [x.shape[0] * 1, -1])

    rows = Operators({**forward.OpenSizes.operators, "Flatten": needs_it})
    monkeypatch.setattr(forward.OpenSizes, "operators", rows)
    model = onward.prepare(models.small_cnn(), loss="cross_entropy")
    with pytest.raises(UnsupportedError, match="TensorFlow cannot trace `train_step`") as caught:
        onward.to_tensorflow(model)
    assert "sizes=" in caught.value.hint
    module = onward.to_tensorflow(model, sizes={"N": 8})
    assert np.isfinite(module.train_step(**SQUARE[0])["loss"])


@pytest.mark.parametrize(
    ("operator", "places"),
    [
        ("ScatterND <reduction = 'add'>", [[0], [-1]]),
        ("ScatterND", [[1], [-3]]),
        ("ScatterElements <axis = 1, reduction = 'add'>", [[0, -1], [2, 0]]),
        ("ScatterElements <axis = 0>", [[0, -1, 1, 2], [1, 0, -1, 0]]),
    ],
)
def test_places_in_tensors_of_open_sizes(operator, places):
    text = f"""<ir_version: 10, opset_import: ["" : 18]>
        f (float[N,M] x, int64[I,J] places, float[I,K] updates) => (float[N,M] y) {{
            y = {operator.replace("'", '"')} (x, places, updates)
        }}"""
    from onward.frameworks.tensorflow.forward import OpenSizes

    places = np.array(places)
    x = RNG.standard_normal((3, 4)).astype("f")
    updates = RNG.standard_normal((2, 4) if "ND" in operator else places.shape).astype("f")
    model = onnx.parser.parse_model(text)
    expected = ReferenceEvaluator(model).run(None, {"x": x, "places": places, "updates": updates})[0]
    execute = interpreter(load(model), OpenSizes())
    specs = [tf().TensorSpec([None, None], array.dtype) for array in (x, places, updates)]
    if "ND" in operator:
        specs[1] = tf().TensorSpec([None, 1], places.dtype)  # how deep places are must be known
    graph = tf().function(
        lambda *given: execute(dict(zip(("x", "places", "updates"), given, strict=True)))["y"], input_signature=specs
    )
    np.testing.assert_array_equal(graph(x, places, updates), expected)


# ---- from TensorFlow -------------------------------------------------------------------------------------------------


def variables(seed=0, **shapes):
    rng = np.random.default_rng(seed)
    return {name: tf().Variable(rng.normal(0, 0.3, shape).astype("f"), name=name) for name, shape in shapes.items()}


def mlp():
    class Mlp(tf().Module):
        def __init__(self):
            super().__init__()
            self.layers = [variables(weight=(64, 16), bias=(16,)), variables(1, weight=(16, 10), bias=(10,))]
            self.scale = tf().Variable(2.0, trainable=False)

        def __call__(self, image):
            first, second = self.layers
            hidden = tf().nn.tanh(image @ first["weight"] + first["bias"]) * self.scale
            return hidden @ second["weight"] + second["bias"]

    return Mlp()


def cnn(fused=True):
    class Cnn(tf().Module):
        def __init__(self):
            super().__init__()
            self.weights = variables(kernel=(3, 3, 1, 4), gamma=(4,), beta=(4,), deep=(2, 2, 4, 1), head=(16, 10))
            self.mean = tf().Variable(np.zeros(4, "f"), trainable=False, name="moving_mean")
            self.variance = tf().Variable(np.ones(4, "f"), trainable=False, name="moving_variance")

        @tf().function
        def normalized(self, x):
            gamma, beta = self.weights["gamma"], self.weights["beta"]
            if fused:
                y, mean, variance = tf().compat.v1.nn.fused_batch_norm(x, gamma, beta, epsilon=1e-3, is_training=True)
            else:
                mean, variance = tf().nn.moments(x, [0, 1, 2])
                y = tf().nn.batch_normalization(x, mean, variance, beta, gamma, 1e-3)
            self.mean.assign(0.9 * self.mean + 0.1 * mean)
            self.variance.assign_sub((self.variance - variance) * (1 - 0.9))
            return y

        def __call__(self, image):
            x = self.normalized(tf().nn.conv2d(image, self.weights["kernel"], 1, "SAME"))
            x = tf().nn.max_pool2d(tf().nn.relu(x), 2, 2, "SAME")
            x = tf().nn.depthwise_conv2d(x, self.weights["deep"], [1, 2, 2, 1], "SAME")
            return tf().reshape(x, [tf().shape(x)[0], -1]) @ self.weights["head"]

    return Cnn()


def transformer(width=8, heads=2):
    """A decoder with its loss, as one writes it by hand: the batch and the length are free."""

    class Transformer(tf().Module):
        def __init__(self):
            super().__init__()
            shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 32), "down": (32, width)}
            self.embedding = variables(embedding=(32, width))["embedding"]
            self.blocks = [{**variables(i, **shapes), "norm": tf().Variable(np.ones(width, "f"))} for i in range(2)]

        def attention(self, x, block):
            n, t = tf().shape(x)[0], tf().shape(x)[1]
            parts = tf().split(x @ block["qkv"], 3, -1)
            q, k, v = (tf().transpose(tf().reshape(p, [n, t, heads, -1]), [0, 2, 1, 3]) for p in parts)
            scores = tf().matmul(q, k, transpose_b=True) / (width / heads) ** 0.5
            mask = tf().linalg.band_part(tf().ones([t, t]), -1, 0)
            weights = tf().nn.softmax(tf().where(mask > 0, scores, -1e9))
            return tf().reshape(tf().transpose(weights @ v, [0, 2, 1, 3]), [n, t, width]) @ block["out"]

        def normalized(self, x, block):
            mean, variance = tf().nn.moments(x, [-1], keepdims=True)
            return (x - mean) * tf().math.rsqrt(variance + 1e-5) * block["norm"]

        @tf().function
        def __call__(self, tokens, labels):
            x = tf().nn.embedding_lookup(self.embedding, tokens)
            for block in self.blocks:
                x = x + self.attention(self.normalized(x, block), block)
                x = x + tf().nn.gelu(self.normalized(x, block) @ block["up"]) @ block["down"]
            logits = tf().einsum("ntd,vd->ntv", x, self.embedding)
            each = tf().nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            return {"logits": logits, "loss": tf().reduce_mean(each)}

    return Transformer()


NHWC = [{"image": batch["image"].reshape(-1, 8, 8, 1), "labels": batch["labels"]} for batch in FLAT]
MODULES = {
    "mlp": (mlp, FLAT),
    "cnn, fused normalization": (cnn, NHWC),
    "cnn, written out": (lambda: cnn(fused=False), NHWC),
    "transformer": (transformer, TOKENS),
}


def loss_of(module, batch):
    if "tokens" in batch:
        return module(batch["tokens"], batch["labels"])["loss"]
    each = tf().nn.sparse_softmax_cross_entropy_with_logits(batch["labels"], module(batch["image"]))
    return tf().reduce_mean(each)


class Momentum:
    recipe = "sgd:lr=0.05,momentum=0.9"

    def __init__(self):
        self.slots = {}

    def __call__(self, variable, gradient):
        self.slots[variable.ref()] = 0.9 * self.slots.get(variable.ref(), 0.0) + gradient
        variable.assign_sub(0.05 * self.slots[variable.ref()])


class Adam:
    recipe = "adam:lr=0.01,eps=1e-3"

    def __init__(self):
        self.slots = {}

    def __call__(self, variable, gradient):
        m, v, t = self.slots.get(variable.ref(), (0.0, 0.0, 0))
        m, v, t = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2, t + 1
        self.slots[variable.ref()] = m, v, t
        variable.assign_sub(0.01 * (m / (1 - 0.9**t)) / (tf().sqrt(v / (1 - 0.999**t)) + 1e-3))


def trained_by_hand(module, batches, update):
    for batch in batches:
        with tf().GradientTape() as tape:
            loss = loss_of(module, batch)
        gradients = tape.gradient(loss, module.trainable_variables)
        for variable, gradient in zip(module.trainable_variables, gradients, strict=True):
            update(variable, tf().convert_to_tensor(gradient))
        yield float(loss)


def captured(module, batch, **given):
    recipe = {"optimizer": "sgd:lr=0.01", **given}
    if "tokens" in batch:
        specs = {name: tf().TensorSpec([None, None], array.dtype) for name, array in batch.items()}
        return onward.from_tensorflow(module, specs, loss="value:loss", **recipe)
    return onward.from_tensorflow(module, batch["image"], loss="cross_entropy", **recipe)


def fed(model, batch):
    """A batch under the names of the model: the loss calls its labels `target`, or as the function does."""
    return {value.name or "": batch.get(value.name or "", batch["labels"]) for value in inputs_of(model).values()}


def named(module, model):
    """The variables of a module by the names that the model has for them: their own, or their places."""
    found = module._flatten(predicate=lambda value: isinstance(value, tf().Variable), with_path=True)
    both = {variable.ref(): (".".join(map(str, path)), variable.name[:-2]) for path, variable in found}
    return {next(name for name in both[v.ref()] if name in model.graph.initializers): v for v in module.variables}


def inputs_of(model):
    with start(model) as engine:
        return engine.inputs


@pytest.mark.slow(
    "cnn, fused normalization-Momentum",
    "cnn, written out-Adam",
    "cnn, written out-Momentum",
    "mlp-Momentum",
    "transformer-Adam",
    "transformer-Momentum",
)
@pytest.mark.parametrize("kind", [Momentum, Adam])
@pytest.mark.parametrize("name", MODULES)
def test_trains_as_tensorflow_does(name, kind):
    make, batches = MODULES[name]
    module = make()
    before = [variable.numpy() for variable in module.variables]
    model = captured(module, batches[0], optimizer=kind.recipe)
    for variable, array in zip(module.variables, before, strict=True):
        np.testing.assert_array_equal(variable, array, "the capture changes nothing")
    assert onward.check(model) == []
    expected = list(trained_by_hand(module, batches, kind()))
    found, end = losses(model, [fed(model, batch) for batch in batches])
    np.testing.assert_allclose(found, expected, rtol=2e-5)
    for name, variable in named(module, model).items():
        np.testing.assert_allclose(end.initializer(name).const_value.numpy(), variable, atol=2e-4, err_msg=name)


@pytest.mark.slow("transformer")
@pytest.mark.parametrize("name", MODULES)
def test_gradients_are_those_of_a_tape(name):
    make, batches = MODULES[name]
    module = make()
    with tf().GradientTape() as tape:
        loss = loss_of(module, batches[0])
    expected = tape.gradient(loss, module.trainable_variables)
    module = make()
    model = captured(module, batches[0])
    with start(model) as engine:
        found = engine.gradients(fed(model, batches[0]))
    assert len(found) == len(expected)
    names = {variable.ref(): name for name, variable in named(module, model).items()}
    for variable, gradient in zip(module.trainable_variables, expected, strict=True):
        name = names[variable.ref()]
        np.testing.assert_allclose(found[name], tf().convert_to_tensor(gradient), atol=1e-5, err_msg=name)


def test_from_tensorflow_to_tensorflow():
    """A module goes on by hand, and as a module of ours that was made of a training model."""
    module = cnn()
    ours = onward.to_tensorflow(captured(module, NHWC[0], optimizer=Momentum.recipe))
    names = list(ours.train_step.input_signature)
    found = [
        float(ours.train_step(**{spec.name: batch.get(spec.name, batch["labels"]) for spec in names})["loss"])
        for batch in NHWC
    ]
    np.testing.assert_allclose(found, list(trained_by_hand(module, NHWC, Momentum())), rtol=2e-5)
    np.testing.assert_allclose(ours.state["moving_variance"], module.variance, rtol=1e-5)


def test_names_of_variables():
    """As they were named; where that is not clear, their place in the module."""
    assert set(captured(cnn(), NHWC[0]).step().differentiated()) == {"kernel", "gamma", "beta", "deep", "head"}
    model = captured(mlp(), FLAT[0])
    assert model.step().differentiated() == [f"layers.{i}.{name}" for i in range(2) for name in ("weight", "bias")]
    assert "scale" in model.graph.initializers
    assert [list(value.shape) for value in model.inputs] == [["N", 64]]


def test_a_function_with_a_signature():
    t, weight = tf(), tf().Variable(np.ones((4, 2), "f"), name="weight")

    @t.function(input_signature=[t.TensorSpec([None, None, 4], t.float32, name="series")])
    def last(series):
        return (series @ weight)[:, -1]

    model = onward.from_tensorflow(last, loss="mse", optimizer="sgd:lr=0.1")
    assert [(value.name, [str(size) for size in value.shape]) for value in model.inputs] == [
        ("series", ["N", "series_1", "4"])
    ]
    concrete = onward.from_tensorflow(last.get_concrete_function(), loss="mse", optimizer="sgd:lr=0.1")
    batch = {"series": np.ones((3, 5, 4), "f"), "labels": np.zeros((3, 2), "f")}
    assert losses(model, [fed(model, batch)])[0] == losses(concrete, [fed(concrete, batch)])[0] == [16.0]


@pytest.mark.parametrize("stateless", [False, True])
def test_dropout_is_dropout(stateless):
    t, weight = tf(), tf().Variable(np.ones((64, 10), "f"), name="weight")
    seed = t.Variable([1, 2], trainable=False)
    drop = (
        (lambda x: t.nn.experimental.stateless_dropout(x, 0.25, seed)) if stateless else lambda x: t.nn.dropout(x, 0.25)
    )
    model = onward.from_tensorflow(
        lambda image: drop(image) @ weight, FLAT[0]["image"], loss="cross_entropy", optimizer="sgd"
    )
    dropout = next(node for node in model.graph if node.op_type == "Dropout")
    assert dropout.inputs[1].producer().attributes["value"].as_tensor().numpy() == 0.25
    assert "rng" in [state.name for state in states(model)]


def test_normalization_that_does_not_train():
    """The statistics that a function was captured with stay as they are."""
    t, scale = tf(), tf().Variable(np.ones(4, "f"), name="scale")
    mean, variance = (tf().Variable(np.full(4, x, "f"), trainable=False, name=f"v{x}") for x in (0.5, 2.0))

    def normalized(x):
        zeros = t.zeros([4])
        return t.compat.v1.nn.fused_batch_norm(x, scale, zeros, mean, variance, epsilon=1e-3, is_training=False)[0]

    model = onward.from_tensorflow(normalized, np.ones((2, 3, 3, 4), "f"), loss="mse", optimizer="sgd:lr=0.1")
    assert set(model.step().update) == {"step", "scale"}


def test_a_function_of_which_a_tape_has_taken_the_gradient():
    """TensorFlow then calls a form of it that also returns what its own gradient needs."""
    t, weight = tf(), tf().Variable(RNG.standard_normal((4, 3)).astype("f"), name="weight")
    inner = t.function(
        lambda x, y: t.reduce_mean(t.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=x @ weight))
    )

    @t.function
    def loss_of_a_step(x, y):
        with t.GradientTape() as tape:
            loss = inner(x, y)
        tape.gradient(loss, weight)
        return loss

    batch = RNG.standard_normal((5, 4)).astype("f"), np.array([0, 1, 2, 0, 1])
    found = onward.from_tensorflow(loss_of_a_step, batch, loss="value:output", optimizer="sgd:lr=0.1")
    assert set(found.step().update) == {"step", "weight"}


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_what_cannot_be_carried_is_named_at_once():
    t, weight = tf(), tf().Variable(np.ones((4, 4), "f"))

    def strange(x):
        unused = t.linalg.svd(x, compute_uv=False)
        del unused  # what no result depends on is no obstacle
        y = t.stop_gradient(x @ weight) + t.signal.fft(t.cast(x, t.complex64)).shape.rank
        return t.linalg.inv(y[:4]) + t.random.truncated_normal([4, 4]) + t.math.digamma(y[:4])

    with pytest.raises(UnsupportedError) as caught:
        onward.from_tensorflow(strange, np.ones((4, 4), "f"), loss="mse", optimizer="sgd")
    said = str(caught.value)
    for operation in ("MatrixInverse", "TruncatedNormal", "Digamma"):
        assert f"`{operation}`" in said
    assert "Svd" not in said and caught.value.hint


def test_assignments_that_are_no_averages():
    t, weight, count = tf(), tf().Variable(np.ones((4, 2), "f")), tf().Variable(0.0, trainable=False, name="count")

    def counted(x):
        count.assign_add(t.reduce_sum(x))
        return x @ weight

    with pytest.raises(UnsupportedError, match="not running averages of a batch normalization: `count`"):
        onward.from_tensorflow(counted, np.ones((3, 4), "f"), loss="mse", optimizer="sgd")


@pytest.mark.parametrize(("recipe", "missing"), [({}, "loss"), ({"loss": "cross_entropy"}, "optimizer")])
def test_loss_and_optimizer_are_not_guessed(recipe, missing):
    with pytest.raises(RecipeError, match=f"no `{missing}` is given"):
        onward.from_tensorflow(mlp(), FLAT[0]["image"], **recipe)


def test_a_derivative_that_was_given_by_hand():
    """That of `tf.nn.silu` is the derivative; others are not known to the model, and the trial finds them."""
    t, weight = tf(), tf().Variable(RNG.standard_normal((4, 3)).astype("f"), name="weight")
    batch, recipe = RNG.standard_normal((5, 4)).astype("f"), {"loss": "mse", "optimizer": "sgd:lr=0.1"}
    assert set(onward.from_tensorflow(lambda x: t.nn.silu(x @ weight), batch, **recipe).step().update) >= {"weight"}
    straight = t.custom_gradient(lambda x: (t.round(x), lambda dy: dy))
    with pytest.raises(MismatchError, match="the gradient of `output` with respect to `weight` is off by"):
        onward.from_tensorflow(lambda x: straight(x @ weight), batch, **recipe)


@pytest.mark.slow
def test_a_loop_with_objects_of_keras_goes_on_and_comes_back():
    """Two steps of a tape and an optimizer of Keras, three of the training model, three of the tape again."""
    keras, t = pytest.importorskip("keras"), tf()
    images, labels = FLAT[0]["image"], np.arange(len(FLAT[0]["image"])).astype(np.int32) % 3
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    loss = lambda y, p: entropy(y, p) + 0.1 * t.reduce_mean(t.abs(p))

    def optimizer():
        rate = keras.optimizers.schedules.CosineDecay(0.05, 10)
        return keras.optimizers.AdamW(rate, weight_decay=0.1, global_clipnorm=1.0)

    def steps(module, optimizer, count):
        losses = []
        for _ in range(count):
            with t.GradientTape() as tape:
                value = loss(labels, module(images))
            variables = module.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(value, variables), variables, strict=True))
            losses.append(float(value))
        return losses

    module, own = mlp(), optimizer()
    steps(module, own, 2)
    training = onward.from_tensorflow(module, images, loss=loss, example_targets=labels, optimizer=own)
    with onward.engines.start(training, threads=1) as engine:
        losses = [float(engine.step({"image": images, "labels": labels})[engine.loss]) for _ in range(3)]
        for name, array in engine.state().items():
            training.set(name, array)
    other, optimizer_of_other = mlp(), optimizer()
    onward.load_into(other, training, optimizer=optimizer_of_other)
    losses += steps(other, optimizer_of_other, 3)
    np.testing.assert_allclose(losses, steps(module, own, 6), rtol=2e-5)
    with pytest.raises(UnsupportedError, match="not SGD"):
        onward.load_into(other, training, optimizer=keras.optimizers.SGD(0.1))


@pytest.mark.slow
def test_losses_and_optimizers_that_do_not_fit():
    keras, call, t = pytest.importorskip("keras"), (mlp(), FLAT[0]["image"]), tf()
    adam, mean = keras.optimizers.Adam(0.1), lambda p: t.reduce_mean(p)
    with pytest.raises(DataError, match="must be a scalar"):
        onward.from_tensorflow(*call, loss=lambda p: p, optimizer=adam)
    with pytest.raises(RecipeError, match="`clip` is not one"):
        onward.from_tensorflow(*call, loss=mean, optimizer=adam, clip={"norm": 1.0})
    table = t.Variable(t.ones([4, 3]), name="table")
    with pytest.raises(UnsupportedError, match="Adam updates gathered rows one by one"):
        squares = lambda p: t.reduce_sum(p**2)
        onward.from_tensorflow(lambda ids: t.gather(table, ids), np.array([0, 1, 1, 1]), loss=squares, optimizer=adam)


def test_int32_labels_are_cast():
    training = onward.from_tensorflow(mlp(), FLAT[0]["image"], loss="cross_entropy", optimizer="sgd:lr=0.1")
    batch = {"image": FLAT[0]["image"], "labels": np.zeros(len(FLAT[0]["image"]), np.int32)}
    with onward.engines.start(training, threads=1) as engine:
        expected = engine.step(batch)["loss"]
    module = onward.to_tensorflow(training)
    value = module.train_step(image=batch["image"], labels=tf().constant(batch["labels"]))["loss"]
    np.testing.assert_allclose(float(value), expected, rtol=1e-5)


def test_a_folder_that_holds_something_else(tmp_path):
    with pytest.raises(UnsupportedError, match="is not a SavedModel"):
        onward.from_tensorflow(tmp_path)
    module = tf().Module()
    module.weight = tf().Variable(1.0)
    tf().saved_model.save(module, str(tmp_path / "other"))
    with pytest.raises(UnsupportedError, match="does not hold a training model"):
        onward.from_tensorflow(tmp_path / "other")


def test_a_wrong_table_is_found_out(monkeypatch):
    from onward.frameworks.tensorflow import graph

    wrong = {**graph.operators(), "Tanh": lambda op, x: op.Sigmoid(x)}
    monkeypatch.setattr(graph, "operators", lambda: wrong)
    with pytest.raises(MismatchError, match="`output` is off by"):
        captured(mlp(), FLAT[0])
