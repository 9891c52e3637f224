"""Optimizers that are ONNX graphs of somebody else's: against the formula in numpy, and through all of training."""

from __future__ import annotations

import models
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from marks import needs
from onnx import helper, numpy_helper, parser
from onnx.reference import ReferenceEvaluator
from rich.console import Console

import onward
from onward.engines import start
from onward.errors import RecipeError
from onward.inspect import render
from onward.model.state import states
from onward.run_state.training_models import from_training_model, to_training_model

RNG = np.random.default_rng(0)
BATCH = {"image": RNG.standard_normal((8, 64)).astype("f"), "labels": RNG.integers(0, 10, 8)}
PARAMETERS = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]

LION = parser.parse_function(
    """
    <domain: "mine", opset_import: ["" : 21]>
    Lion (x, g, m, lr) => (x_new, m_new) {
        near = Constant <value_float = 0.9> ()
        far = Constant <value_float = 0.99> ()
        one = Constant <value_float = 1.0> ()
        new = Sub (one, near)
        kept = Mul (near, m)
        added = Mul (new, g)
        between = Add (kept, added)
        way = Sign (between)
        rate = CastLike (lr, x)
        step = Mul (rate, way)
        x_new = Sub (x, step)
        newer = Sub (one, far)
        long_kept = Mul (far, m)
        long_added = Mul (newer, g)
        m_new = Add (long_kept, long_added)
    }
    """
)


def steps(model, count=4, engine="onnxruntime", **options):
    options = options or ({"threads": 1} if engine == "onnxruntime" else {})
    with start(model, engine=engine, **options) as running:
        losses = [float(running.step(BATCH)["loss"]) for _ in range(count)]
        return losses, running.updated()


def arrays(model):
    return {state.name: state.array for state in states(model)}


def gradients_of(model):
    with start(model, threads=1) as engine:
        return engine.gradients(BATCH)


def test_a_function_of_one_parameter():
    """Two steps by hand; the momentum has the name of the function's input, and begins as it is told."""
    optimizer = {"function": LION, "lr": 0.01, "initial": {"m": 0.5}}
    model = onward.prepare(models.digits_mlp(), loss="cross_entropy", optimizer=optimizer)
    assert onward.check(model) == []
    expected, m = {n: model.array(n) for n in PARAMETERS}, dict.fromkeys(PARAMETERS, np.float32(0.5))
    for _ in range(2):
        g = gradients_of(model)
        _, model = steps(model, 1)
        for name in PARAMETERS:
            expected[name] = expected[name] - 0.01 * np.sign(0.9 * m[name] + 0.1 * g[name])
            m[name] = 0.99 * m[name] + 0.01 * g[name]
            np.testing.assert_allclose(model.array(name), expected[name], atol=1e-6)
            np.testing.assert_allclose(model.array(f"{name}/m"), m[name], atol=1e-6)


def longest_step(parameters, lr=0.1):
    """Gradients over the norm of all of them, but never over less than the largest norm so far, which is state.

    The state `length` of each parameter is how long its own gradients were in sum.
    """
    nodes, floats = [], lambda name, shape: helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
    sizes = {value.name: list(value.dims) for value in models.digits_mlp().graph.initializer}
    for name in parameters:
        nodes += [
            helper.make_node("ReduceSumSquare", [f"{name}/grad"], [f"{name}/square"], keepdims=0),
            helper.make_node("Sqrt", [f"{name}/square"], [f"{name}/norm"]),
            helper.make_node("Add", [f"{name}/length", f"{name}/norm"], [f"{name}/length_new"]),
        ]
    nodes += [
        helper.make_node("Sum", [f"{name}/square" for name in parameters], ["square"]),
        helper.make_node("Sqrt", ["square"], ["norm"]),
        helper.make_node("Max", ["norm", "largest"], ["largest_new"]),
        helper.make_node("Cast", ["lr"], ["rate"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Div", ["rate", "largest_new"], ["factor"]),
    ]
    for name in parameters:
        nodes += [
            helper.make_node("Mul", ["factor", f"{name}/grad"], [f"{name}/step"]),
            helper.make_node("Sub", [name, f"{name}/step"], [f"{name}/new"]),
        ]
    graph = helper.make_graph(
        nodes,
        "LongestStep",
        [
            helper.make_tensor_value_info("lr", onnx.TensorProto.DOUBLE, []),
            *(floats(name, sizes[name]) for name in parameters),
            *(floats(f"{name}/grad", sizes[name]) for name in parameters),
            floats("largest", []),
            *(floats(f"{name}/length", []) for name in parameters),
        ],
        [
            *(floats(f"{name}/new", sizes[name]) for name in parameters),
            floats("largest_new", []),
            *(floats(f"{name}/length_new", []) for name in parameters),
        ],
        [
            numpy_helper.from_array(np.float64(lr), "lr"),
            numpy_helper.from_array(np.float32(0.25), "largest"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def test_a_model_of_all_parameters_at_once():
    """Its state begins as the defaults of its inputs, and belongs to parameters or to the group."""
    model = onward.prepare(models.digits_mlp(), loss="cross_entropy", optimizer=longest_step(PARAMETERS))
    assert onward.check(model) == []
    largest = 0.25
    for _ in range(3):
        g, before = gradients_of(model), arrays(model)
        _, model = steps(model, 1)
        largest = max(largest, np.sqrt(sum((g[name].astype(float) ** 2).sum() for name in PARAMETERS)))
        assert model.array("group0/largest") == pytest.approx(largest, rel=1e-6)
        for name in PARAMETERS:
            np.testing.assert_allclose(model.array(name), before[name] - 0.1 / largest * g[name], atol=1e-7)
            longer = before[f"{name}/length"] + np.linalg.norm(g[name].ravel())
            assert model.array(f"{name}/length") == pytest.approx(longer, rel=1e-6)


def test_what_a_summary_says():
    model = onward.prepare(models.digits_mlp(), loss="cross_entropy", optimizer=longest_step(PARAMETERS))
    (group,) = onward.describe(model).steps[0].groups
    assert (group.optimizer, group.operators) == ("LongestStep", ("onward.optimizers.LongestStep",))
    assert (group.hyper, group.slots) == ({"lr": 0.1}, ("largest", "length"))
    assert "LongestStep: lr 0.1" in shown(model)
    each = onward.prepare(models.digits_mlp(), loss="cross_entropy", optimizer=LION)
    assert "Lion: lr 0.001" in shown(each)


def shown(model):
    console = Console(width=120)
    with console.capture() as capture:
        render(onward.describe(model), console)
    return capture.get()


RECIPES = {
    "schedule, clipping": {
        "optimizer": longest_step(PARAMETERS),
        "schedule": "cosine:steps=10,warmup=2",
        "clip": {"norm": 0.5, "variant": "optax"},
    },
    "accumulated, averaged": {"optimizer": {"function": LION, "lr": 1e-3}, "accumulate": 2, "ema": 0.9},
    "groups": {
        "optimizer": "adam:lr=1e-2",
        "groups": [
            {"match": "fc1*", "optimizer": longest_step(PARAMETERS[:2]), "lr": 0.05},
            {"match": "fc2*", "optimizer": LION},
        ],
    },
    "two of a name": {
        "optimizer": {"function": LION, "lr": 1e-3, "initial": {"m": 0.1}},
        "groups": [{"match": "*bias", "optimizer": {"function": LION, "lr": 1e-4}}],
    },
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_goes_on(name, tmp_path):
    """Taken apart and put together, also from a file, it is the same training; and so it is after a reset."""
    _, model = steps(onward.prepare(models.digits_mlp(), loss="cross_entropy", **RECIPES[name]))
    model.save(tmp_path / "training.onnx")
    again = to_training_model(from_training_model(onward.load(tmp_path / "training.onnx")))
    assert onward.check(again) == []
    (losses, end), (expected, other) = steps(again), steps(model)
    assert losses == expected
    assert list(arrays(end)) == list(arrays(other))
    for key, array in arrays(end).items():
        np.testing.assert_array_equal(array, arrays(other)[key], key)
    fresh = [onward.lower(one, part="initialization") for one in (model, again)]
    first = [dict(zip([v.name for v in m.outputs], evaluated(m), strict=True)) for m in fresh]
    for key, array in first[0].items():
        if key not in PARAMETERS and not key.startswith("ema/fc"):  # which another run begins with as they are now
            np.testing.assert_array_equal(first[1][key], array, key)


def evaluated(model):
    return ReferenceEvaluator(model.to_proto()).run(None, {})


FRAMEWORKS = [pytest.param(name, marks=[needs(name), pytest.mark.slow]) for name in ("torch", "jax", "tensorflow")]


@pytest.mark.parametrize("engine", ["numpy", *FRAMEWORKS])
def test_engines_agree(engine):
    model = onward.prepare(models.digits_mlp(), loss="cross_entropy", **RECIPES["groups"])
    options = {} if engine == "numpy" else {"compile": False}
    np.testing.assert_allclose(steps(model, engine=engine, **options)[0], steps(model)[0], rtol=1e-5)


def test_renamed_parameters():
    model = onward.prepare(models.digits_mlp(), loss="cross_entropy", optimizer=longest_step(PARAMETERS))
    renamed = onward.transform.rename(model, {"fc1.weight": "first/grad", "fc2.bias": "last"})
    assert steps(to_training_model(from_training_model(renamed)))[0] == steps(model)[0]


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (longest_step(PARAMETERS[:2]), "`LongestStep` does not update `fc2.weight`, `fc2.bias`"),
        ({"function": LION, "lr": "fast"}, "`lr` of optimizer `Lion` is `fast`"),
        ({"function": LION, "initial": {"n": 0}}, "the state of the optimizer `Lion` has no option `n`"),
        (models.digits_mlp(), "`digits_mlp` has no parameters among its inputs"),
        ({"function": LION, "momentum": 0.9}, "has no option `momentum`"),
    ],
)
def test_refusals(optimizer, message):
    with pytest.raises(RecipeError, match=message):
        onward.prepare(models.digits_mlp(), loss="cross_entropy", optimizer=optimizer)


def test_outputs_that_are_missing():
    function = onnx.FunctionProto()
    function.CopyFrom(LION)
    del function.output[1]
    with pytest.raises(RecipeError, match="has 1 outputs, but 1 parameters and 1 tensors of state"):
        onward.prepare(models.digits_mlp(), loss="cross_entropy", optimizer=ir.from_proto(function))


def test_depth_cannot_divide_it():
    with pytest.raises(RecipeError, match="`lr_decay` cannot divide the optimizer `Lion`"):
        onward.prepare(models.digits_mlp(), loss="cross_entropy", optimizer=LION, lr_decay=0.8)
