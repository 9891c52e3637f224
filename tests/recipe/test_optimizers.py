"""Every optimizer against the framework that defines it: twenty updates in float64, on two runtimes, slots included.

Keras runs in a process of its own, since its backend is fixed once imported: `python test_optimizers.py keras RESULTS`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from marks import needs
from node_tests import onnx_node_tests
from onnx.reference import ReferenceEvaluator
from optimizer_tables import KERAS, OPTAX, TORCH, torch_arguments
from representatives import chosen

from onward.build import DOMAIN, Builder, Expr, Names
from onward.errors import InvalidModelError, RecipeError, UnknownNameError
from onward.lowering.standard_operators import LOWERINGS
from onward.model import TRAINING_DOMAIN
from onward.recipe.optimizers import OPTIMIZERS, optimizer
from onward.recipe.optimizers.clip import clip_by_global_norm, clip_by_norm, clip_by_value
from onward.recipe.optimizers.definition import ConfiguredOptimizer
from onward.vocabulary.optax import SETTINGS
from onward.vocabulary.optimizers import KERAS_ROWS, OPTAX_ROWS
from onward.vocabulary.rows import row_for

Arrays = dict[str, np.ndarray]
Trajectory = list[Arrays]
"""After each update: the parameters `p0`, `p1`, ... and their slots `p0/exp_avg`, ..."""

STEPS = 20
SHAPES: list[tuple[int, ...]] = [(), (7,), (5, 3), (3, 6), (2, 3, 4, 2)]
MATRICES = [(5, 3), (3, 6), (4, 4)]
LR = [0.1 * (1 + 0.5 * np.sin(t)) for t in range(STEPS)]
OPSETS = (18, 21, 23, 26)  # what stock ONNX Runtime loads, from the first with axes as inputs to the last


class Data(NamedTuple):
    """Where training starts, and the gradients of every step: each element keeps to a size between 1e-9 and 1."""

    start: list[np.ndarray]
    gradients: list[list[np.ndarray]]


@functools.cache
def data(matrices: bool = False) -> Data:
    random = np.random.default_rng(0)
    start, sizes = [], []
    for shape in MATRICES if matrices else SHAPES:
        start.append(random.normal(size=shape))
        sizes.append(10 ** random.permutation(np.linspace(-9, 0, int(np.prod(shape)))).reshape(shape))
    return Data(start, [[np.asarray(size * random.normal(size=size.shape)) for size in sizes] for _ in range(STEPS)])


def difference(ours: Trajectory, theirs: Trajectory, *, by_tensor: bool = False) -> float:
    """The largest difference after any update, relative to the largest value that the element, or tensor, has had."""
    largest, worst = {name: np.zeros(()) for name in theirs[0]}, 0.0
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for name, value in other.items():
            assert mine[name].shape == value.shape, name
            size = np.abs(value).max() if by_tensor else np.abs(value)
            largest[name] = np.maximum(largest[name], size)
            error = np.abs(mine[name] - value) / np.where(largest[name] > 0, largest[name], 1)
            assert np.isfinite(error).all(), name
            worst = max(worst, float(error.max()))
    return worst


# ---- running ours ----------------------------------------------------------------------------------------------------


def builder(opset: int = 18) -> Builder:
    return Builder(ir.Graph([], [], nodes=[], opset_imports={"": opset}, name="step"), opset=opset)


def add_input(op: Builder, name: str, dtype: ir.DataType, shape: tuple[int | str, ...]) -> Expr:
    value = ir.Value(name=op.names.fresh(name), type=ir.TensorType(dtype), shape=ir.Shape(shape))
    op.graph.inputs.append(value)
    return op(value)


def add_number(op: Builder, name: str, number: float) -> Expr:
    value = ir.Value(name=op.names.fresh(name), const_value=ir.tensor(np.float64(number), name=name))
    value.type, value.shape = ir.TensorType(ir.DataType.DOUBLE), ir.Shape(())
    op.graph.register_initializer(value)
    return op(value)


def add_output(op: Builder, expr: Expr, name: str) -> None:
    op.graph.outputs.append(expr.named(name).value)


def to_proto(op: Builder) -> onnx.ModelProto:
    model = ir.to_proto(ir.Model(op.graph, ir_version=10, functions=list(op.functions.values())))
    onnx.checker.check_model(model, full_check=True)
    return model


def parameter(dtype: ir.DataType = ir.DataType.DOUBLE, shape: tuple[int, ...] = (3, 2)) -> ir.Value:
    return ir.Value(name="p", type=ir.TensorType(dtype), shape=ir.Shape(shape))


def step_model(
    configured: ConfiguredOptimizer, shapes: list[tuple[int, ...]], dtype: ir.DataType, opset: int = 18
) -> onnx.ModelProto:
    """(lr, t, parameters, gradients, slots) -> (new parameters, new slots); the gradients' shapes are left open."""
    op = builder(opset)
    lr = add_input(op, "lr", ir.DataType.DOUBLE, ())
    t = add_input(op, "t", ir.DataType.INT64, ())
    used = dict.fromkeys(name for shape in shapes for name in configured.inputs(parameter(dtype, shape)))
    hyper = {name: add_number(op, name, configured.values[name]) for name in used if name != "lr"}
    for i, shape in enumerate(shapes):
        x = add_input(op, f"p{i}", dtype, shape)
        g = add_input(op, f"g{i}", dtype, tuple(f"g{i}_{axis}" for axis in range(len(shape))))
        slots = {s.name: add_input(op, f"p{i}/{s.name}", s.dtype, s.shape) for s in configured.slots(x.value)}
        x, slots = configured.update(op, x, g, slots, lr=lr, t=t, hyper=hyper)
        add_output(op, x, f"new/p{i}")
        for name, slot in slots.items():
            add_output(op, slot, f"new/p{i}/{name}")
    return to_proto(op)


def on_onnxruntime(model: onnx.ModelProto) -> Callable[[Arrays], Arrays]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(lowered(model).SerializeToString(), options)
    names = [output.name for output in session.get_outputs()]
    return lambda feeds: {name: np.asarray(a) for name, a in zip(names, session.run(None, feeds), strict=True)}


def on_reference(model: onnx.ModelProto) -> Callable[[Arrays], Arrays]:
    session = ReferenceEvaluator(model)
    return lambda feeds: {
        name: np.asarray(a) for name, a in zip(session.output_names, session.run(None, feeds), strict=True)
    }


ENGINES = {"onnxruntime": on_onnxruntime, "reference": on_reference}


def run(
    configured: ConfiguredOptimizer,
    data: Data,
    *,
    engine: str = "onnxruntime",
    dtype: ir.DataType = ir.DataType.DOUBLE,
    opset: int = 18,
) -> Trajectory:
    """Train as `data` says."""
    model = step_model(configured, [x.shape for x in data.start], dtype, opset)
    step = ENGINES[engine](model)
    state = {f"p{i}": x.astype(dtype.numpy()) for i, x in enumerate(data.start)}
    for i, x in enumerate(data.start):
        for slot in configured.slots(parameter(dtype, x.shape)):
            state[f"p{i}/{slot.name}"] = np.full(slot.shape, slot.initial, slot.dtype.numpy())
    after = []
    for t, gradients in enumerate(data.gradients):
        feeds = {f"g{i}": np.asarray(g, dtype.numpy()) for i, g in enumerate(gradients)}
        feeds |= {"lr": np.array(LR[t]), "t": np.array(t + 1)}
        new = step({**state, **feeds})
        # The reference evaluator answers Adam in float64, whatever the inputs.
        state = {name: np.asarray(new[f"new/{name}"], old.dtype) for name, old in state.items()}
        after.append(state)
    return after


# ---- the standard's operators in plain ones --------------------------------------------------------------------------


def lowered(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model with every optimizer of the standard replaced by what LOWERINGS makes of it."""
    if all(node.domain != TRAINING_DOMAIN for node in model.graph.node):
        return model
    loaded = ir.from_proto(model)
    graph = loaded.graph
    opset = graph.opset_imports.setdefault("", 18)
    nodes, op = list(graph), Builder(graph, opset=opset, names=Names(_names(graph)))
    for node in nodes:
        graph.remove(node)
    for node in nodes:
        lowering = LOWERINGS.get((node.domain, node.op_type))
        if lowering is None:
            graph.append(node)
            continue
        inputs = [value and op(value) for value in node.inputs]
        results = lowering(op, inputs, attributes_of(node), len(node.outputs))
        for old, new in zip(node.outputs, results, strict=True):
            new.value.name = old.name
            ir.convenience.replace_all_uses_with(old, new.like(old).value, replace_graph_outputs=True)
    del graph.opset_imports[TRAINING_DOMAIN]
    proto = ir.to_proto(loaded)
    proto.ir_version = 10
    onnx.checker.check_model(proto, full_check=True)
    return proto


def _names(graph: ir.Graph) -> Iterator[str]:
    yield from (value.name or "" for value in graph.inputs)
    yield from graph.initializers
    yield from (output.name or "" for node in graph for output in node.outputs)


def attributes_of(node: ir.Node) -> dict[str, Any]:
    schema = onnx.defs.get_schema(node.op_type, 1, node.domain)
    defaults = {
        name: onnx.helper.get_attribute_value(attribute.default_value)
        for name, attribute in schema.attributes.items()
        if not attribute.required
    }
    return {**defaults, **{name: attribute.value for name, attribute in node.attributes.items()}}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "name",
    [
        "test_adagrad",
        "test_adagrad_multiple",
        "test_adam",
        "test_adam_multiple",
        "test_momentum",
        "test_momentum_multiple",
        "test_nesterov_momentum",
    ],
)
def test_node_test(name: str, engine: str) -> None:
    """The standard's own tests: of its operators in the reference evaluator, of our lowering in ONNX Runtime."""
    case = onnx_node_tests()[name]
    model = case.proto()
    assert (lowered(model) is model) is False
    for inputs, expected in case.data:
        feeds = {value.name: array for value, array in zip(model.graph.input, inputs, strict=True)}
        for actual, wanted in zip(ENGINES[engine](model)(feeds).values(), expected, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=case.rtol, atol=case.atol)


@pytest.mark.parametrize("t", [0, 1, 5])
@pytest.mark.parametrize(
    ("op_type", "attributes"),
    [
        ("Momentum", {"alpha": 0.9, "beta": 0.7, "norm_coefficient": 0.01, "mode": "standard"}),
        ("Momentum", {"alpha": 0.9, "beta": 0.7, "norm_coefficient": 0.0, "mode": "nesterov"}),
        ("Adagrad", {"decay_factor": 0.1, "norm_coefficient": 0.01}),
        ("Adam", {"norm_coefficient": 0.01, "norm_coefficient_post": 0.25}),  # the reference has 1 - post in float32
    ],
    ids=lambda value: "" if isinstance(value, dict) else None,
)
def test_lowering_of_every_attribute(op_type: str, attributes: dict[str, Any], t: int) -> None:
    """All attributes, T = 0, R of another type than X, two tensors at once; against the reference, in float64."""
    states = 2 if op_type == "Adam" else 1
    op, random = builder(), np.random.default_rng(1)
    feeds = {"r": np.array(0.1, np.float64), "t": np.array(t)}
    inputs = [add_input(op, "r", ir.DataType.DOUBLE, ()), add_input(op, "t", ir.DataType.INT64, ())]
    for i in range(2 + states):
        feeds[f"i{i}"] = np.abs(random.normal(size=(3, 2)))
        inputs.append(add_input(op, f"i{i}", ir.DataType.DOUBLE, (3, 2)))
    op.graph.opset_imports[TRAINING_DOMAIN] = 1
    results = op.node(TRAINING_DOMAIN, op_type, *inputs, outputs=1 + states, **attributes)
    for i, result in enumerate(results):
        add_output(op, result.like(inputs[2].value), f"o{i}")
    model = to_proto(op)
    ours, theirs = on_onnxruntime(model)(feeds), on_reference(model)(feeds)
    assert difference([ours], [theirs]) < 1e-14


def test_lowering_refuses_what_is_not_an_optimizer_call() -> None:
    op = builder()
    inputs = [add_input(op, f"i{i}", ir.DataType.FLOAT, ()) for i in range(6)]
    defaults = {"alpha": 0.9, "beta": 1.0, "norm_coefficient": 0.0}
    lower = LOWERINGS[TRAINING_DOMAIN, "Momentum"]
    with pytest.raises(InvalidModelError, match="4 inputs after R and T"):
        lower(op, inputs, {**defaults, "mode": "standard"}, 2)
    with pytest.raises(InvalidModelError, match="no mode `heavy`"):
        lower(op, inputs[:5], {**defaults, "mode": "heavy"}, 2)


# ---- against PyTorch -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def torch_in_float64() -> Iterator[None]:
    """PyTorch keeps the mu_product of NAdam in its default type, and orthogonalizes for Muon in bfloat16: not here."""
    import torch
    from torch.optim import _muon

    default, newton_schulz = torch.get_default_dtype(), _muon._zeropower_via_newtonschulz
    source = inspect.getsource(newton_schulz)
    assert "grad.bfloat16()" in source
    names: dict[str, Any] = {"torch": torch, "Tensor": torch.Tensor}
    exec(source.replace("grad.bfloat16()", "grad.clone()"), names)
    torch.set_default_dtype(torch.float64)
    _muon._zeropower_via_newtonschulz = names[newton_schulz.__name__]
    try:
        yield
    finally:
        torch.set_default_dtype(default)
        _muon._zeropower_via_newtonschulz = newton_schulz


def run_torch(cls: str, configured: ConfiguredOptimizer, data: Data, dtype: str = "float64") -> Trajectory:
    import torch

    kind = getattr(torch.optim, cls)
    parameters = [torch.nn.Parameter(torch.tensor(x, dtype=getattr(torch, dtype))) for x in data.start]
    theirs = kind(parameters, **torch_arguments(configured, kind))
    after = []
    for lr, gradients in zip(LR, data.gradients, strict=True):
        theirs.param_groups[0]["lr"] = lr
        for parameter, g in zip(parameters, gradients, strict=True):
            parameter.grad = torch.tensor(g, dtype=parameter.dtype)
        theirs.step()
        state = {}
        for i, parameter in enumerate(parameters):
            state[f"p{i}"] = parameter.detach().numpy().copy()
            slots = {name: value for name, value in theirs.state[parameter].items() if name != "step"}
            state |= {f"p{i}/{name}": value.numpy().copy() for name, value in slots.items() if value is not None}
        after.append(state)
    return after


def case_id(value: Any) -> str | None:
    return ",".join(f"{k}={v}" for k, v in value.items()) or "defaults" if isinstance(value, dict) else None


@needs("torch")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("name", "cls", "settings"), TORCH, ids=case_id)
def test_torch(name: str, cls: str, settings: dict[str, Any], engine: str) -> None:
    configured = optimizer(name).configure(**settings)
    examples = data(matrices=name == "muon")
    with torch_in_float64():
        theirs = run_torch(cls, configured, examples)
    assert difference(run(configured, examples, engine=engine), theirs) < 1e-12


# ---- against Keras ---------------------------------------------------------------------------------------------------


def run_keras(cls: str, configured: ConfiguredOptimizer, data: Data) -> Trajectory:
    import keras

    kind, row = getattr(keras.optimizers, cls), KERAS_ROWS[cls]
    names = {**row.settings, "lr": "learning_rate"}
    settings = {names.get(k, k): v for k, v in {**configured.values, **configured.options}.items()}
    arguments = {name: settings[name] for name in inspect.signature(kind).parameters if name in settings}
    if not arguments["weight_decay"]:
        del arguments["weight_decay"]
    theirs = kind(**arguments)
    parameters = [keras.Variable(x, dtype="float64") for x in data.start]
    theirs.build(parameters)
    after = []
    for lr, gradients in zip(LR, data.gradients, strict=True):
        theirs.learning_rate = lr
        theirs.apply(gradients)
        state = {f"p{i}": np.asarray(parameter.numpy()) for i, parameter in enumerate(parameters)}
        for slot, attribute in {**row.slots, **row.shared}.items():
            values = getattr(theirs, attribute, [])
            values = values if isinstance(values, list) else [values] * len(parameters)  # Nadam has one for all
            state |= {f"p{i}/{slot}": np.asarray(value.numpy()) for i, value in enumerate(values)}
        after.append(state)
    return after


def write_keras_results(path: str) -> None:
    import keras

    keras.config.set_floatx("float64")  # also the type of its learning rate
    results = {}
    for number, (name, cls, settings) in enumerate(KERAS):
        after = run_keras(cls, optimizer(name).configure(variant="keras", **settings), data())
        results |= {f"{number} {t} {key}": value for t, state in enumerate(after) for key, value in state.items()}
    np.savez(path, **results)


@pytest.fixture(scope="module")
def keras_results(tmp_path_factory: pytest.TempPathFactory) -> list[Trajectory]:
    path = tmp_path_factory.mktemp("keras") / "results.npz"
    # On JAX, Keras computes float64 in float64; on TensorFlow it rounds settings to float32, on numpy even products.
    environment = {**os.environ, "KERAS_BACKEND": "jax", "JAX_ENABLE_X64": "1", "KERAS_HOME": str(path.parent)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, __file__, "keras", str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    results: list[Trajectory] = [[{} for _ in range(STEPS)] for _ in KERAS]
    with np.load(path) as arrays:
        for key, value in arrays.items():
            number, t, name = key.split(" ")
            results[int(number)][int(t)][name] = value
    return results


@needs("keras", "jax")
@pytest.mark.parametrize("number", range(len(KERAS)), ids=lambda i: f"{KERAS[i][0]}-{case_id(KERAS[i][2])}")
def test_keras(number: int, keras_results: list[Trajectory]) -> None:
    name, _, settings = KERAS[number]
    configured = optimizer(name).configure(variant="keras", **settings)
    for engine in ENGINES:
        assert difference(run(configured, data(), engine=engine), keras_results[number]) < 1e-12


# ---- against optax ---------------------------------------------------------------------------------------------------


def optax_adafactor(schedule: Any, values: Mapping[str, float], options: Mapping[str, Any]) -> Any:
    """optax.adafactor, but for the decay rate of the moments, which it computes in float32."""
    import optax

    return optax.chain(
        optax.scale_by_factored_rms(
            decay_rate=-values["beta2_decay"],
            epsilon=values["eps1"],
            min_dim_size_to_factor=options["min_dim_size_to_factor"],
            decay_rate_fn=lambda count, rate: 1 - (count + 1.0) ** -rate,
        ),
        optax.clip_by_block_rms(values["d"]),
        optax.scale_by_learning_rate(schedule, flip_sign=False),
        optax.scale_by_param_block_rms(values["eps2"]),
        optax.add_decayed_weights(values["weight_decay"]),
        optax.scale(-1),
    )


def run_optax(name: str, configured: ConfiguredOptimizer, data: Data) -> Trajectory:
    import jax.numpy as jnp
    import optax

    row = row_for(OPTAX_ROWS, configured)
    assert row is not None
    schedule = lambda count: jnp.asarray(LR)[count]
    if name == "adafactor":
        theirs = optax_adafactor(schedule, configured.values, configured.options)
    else:
        settings = {**configured.values, **configured.options}
        names = {theirs: SETTINGS.get(theirs, theirs) for theirs in inspect.signature(getattr(optax, name)).parameters}
        arguments = {theirs: settings[ours] for theirs, ours in names.items() if ours in settings and ours != "lr"}
        if not settings.get("momentum"):
            arguments.pop("momentum", None)
        theirs = getattr(optax, name)(schedule, **arguments)
    parameters = [jnp.asarray(x) for x in data.start]
    state = theirs.init(parameters)
    after = []
    for gradients in data.gradients:
        updates, state = theirs.update([jnp.asarray(g) for g in gradients], state, parameters)
        parameters = optax.apply_updates(parameters, updates)
        found = {f"p{i}": np.asarray(x) for i, x in enumerate(parameters)}
        sign = -1 if name == "rmsprop" else 1
        for slot, field in row.slots.items():
            for part in (part for part in state if hasattr(part, field)):
                factor = sign if field == "trace" else 1  # RMSprop has its momentum after the learning rate
                found |= {f"p{i}/{slot}": factor * np.asarray(value) for i, value in enumerate(getattr(part, field))}
        after.append(found)
    return after


def as_optax_has_them(ours: Trajectory) -> Trajectory:
    """The factors of Adafactor without the axis of their mean; what a parameter does not use is one zero in optax."""
    return [{name: value.squeeze() if "_var" in name else value for name, value in state.items()} for state in ours]


def without_placeholders(theirs: Trajectory, ours: Trajectory) -> Trajectory:
    return [{name: state[name].squeeze() if "_var" in name else state[name] for name in ours[0]} for state in theirs]


@pytest.mark.slow("radam-radam-beta1=0.85,beta2=0.99,eps=0.001")
@needs("jax", "optax")
@pytest.mark.parametrize(("name", "theirs", "settings"), OPTAX, ids=case_id)
def test_optax(name: str, theirs: str, settings: dict[str, Any]) -> None:
    import jax

    configured = optimizer(name).configure(variant="optax", **settings)
    with jax.enable_x64(True):
        expected = run_optax(theirs, configured, data())
    for engine in ENGINES:
        ours = as_optax_has_them(run(configured, data(), engine=engine))
        assert difference(ours, without_placeholders(expected, ours)) < 1e-12


# ---- float32, and the standard's operators ---------------------------------------------------------------------------


@needs("torch")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("name", "cls", "settings"), TORCH, ids=case_id)
def test_torch_in_float32(name: str, cls: str, settings: dict[str, Any], engine: str) -> None:
    configured = optimizer(name).configure(**settings)
    examples = data(matrices=name == "muon")
    with torch_in_float64():
        theirs = run_torch(cls, configured, examples, "float32")
    ours = run(configured, examples, engine=engine, dtype=ir.DataType.FLOAT)
    is_standard = configured.standard(parameter(ir.DataType.FLOAT)) is not None
    assert difference(ours, theirs, by_tensor=True) < (1e-6 if is_standard else 1e-5)


@needs("keras", "jax")
@pytest.mark.parametrize("engine", ENGINES)
def test_standard_adam_in_float32(keras_results: list[Trajectory], engine: str) -> None:
    """Keras's Adam is the standard's. Its float32 attribute 0.999 makes 1 - beta 1.3e-5 larger, and v with it; the
    bias correction takes that out of the step again.
    """
    configured = optimizer("adam").configure(variant="keras")
    assert configured.standard(parameter(ir.DataType.FLOAT)) is not None
    ours = run(configured, data(), engine=engine, dtype=ir.DataType.FLOAT)
    theirs = keras_results[KERAS.index(("adam", "Adam", {}))]
    assert difference(ours, theirs, by_tensor=True) < 2e-5
    parameters = lambda states: [{k: v for k, v in state.items() if "/" not in k} for state in states]
    assert difference(parameters(ours), parameters(theirs), by_tensor=True) < 1e-6


@pytest.mark.parametrize(
    ("name", "settings", "in_float32", "in_float64"),
    [
        ("sgd", {}, "Sgd", "Sgd"),
        ("momentum", {"weight_decay": 0.1}, "Momentum", "SgdMomentumL2"),
        ("momentum", {"momentum": 0.5}, "Momentum", "Momentum"),
        ("momentum", {"momentum": 0.5, "standard": False}, "SgdMomentum", "SgdMomentum"),
        ("nesterov", {}, "Momentum", "SgdNesterov"),
        ("momentum", {"variant": "keras"}, "SgdMomentumKeras", "SgdMomentumKeras"),
        ("sgdw", {"momentum": 0.9}, "SgdMomentumW", "SgdMomentumW"),
        ("adagrad", {}, "Adagrad", "Adagrad"),
        ("adagrad", {"variant": "keras"}, "AdagradKeras", "AdagradKeras"),
        ("adam", {}, "Adam", "Adam"),
        ("adam", {"weight_decay": 0.1}, "AdamL2", "AdamL2"),
        ("adam", {"variant": "keras"}, "Adam", "AdamKeras"),
        ("adam", {"variant": "keras", "weight_decay": 0.1}, "AdamKerasW", "AdamKerasW"),
        ("adamw", {"weight_decay": 0.0}, "AdamW", "AdamW"),
        ("amsgrad", {"variant": "keras"}, "AmsgradKeras", "AmsgradKeras"),
        ("muon", {"ns_steps": "3"}, "MuonTallSteps3", "MuonTallSteps3"),
    ],
    ids=lambda value: case_id(value),
)
def test_operator(name: str, settings: dict[str, Any], in_float32: str, in_float64: str) -> None:
    """Which node it is: the standard's operator where float32 attributes say the same, else a function of ours."""
    configured = optimizer(name).configure(**settings)
    for dtype, wanted in ((ir.DataType.FLOAT, in_float32), (ir.DataType.DOUBLE, in_float64)):
        nodes = step_model(configured, [(3, 2), (4, 1)], dtype).graph.node
        found = [node for node in nodes if node.domain]
        assert [node.op_type for node in found] == [wanted] * 2
        assert len(nodes) <= len(found) + 3  # R in float32 and T from 0 are made once, for all parameters
        standard = configured.standard(parameter(dtype))
        assert (found[0].domain == TRAINING_DOMAIN) == (standard is not None)
        if standard:
            assert configured.inputs(parameter(dtype)) == ("lr",)
        else:
            assert set(configured.inputs(parameter(dtype))) - {"lr"} <= set(found[0].input)


# ---- every optimizer -------------------------------------------------------------------------------------------------

EVERY = [(name, variant) for name, kind in OPTIMIZERS.items() for variant in kind.variants]


@pytest.mark.parametrize("opset", chosen(OPSETS, (OPSETS[0], OPSETS[-1])))
@pytest.mark.parametrize(("name", "variant"), EVERY)
def test_every_optimizer_on_every_opset(name: str, variant: str, opset: int) -> None:
    """One call with a described body, valid and the same on each opset."""
    configured = optimizer(name).configure(variant=variant)
    examples = data(matrices=name == "muon")
    short = Data(examples.start, examples.gradients[:2])
    ours = run(configured, short, opset=opset)
    assert difference(ours, run(configured, short)) == 0
    model = step_model(configured, [(4, 3)], ir.DataType.DOUBLE, opset)
    assert len([node for node in model.graph.node if node.domain]) == 1
    assert all(function.domain == DOMAIN and "x ←" in function.doc_string for function in model.functions)


@pytest.mark.parametrize(("name", "variant"), EVERY)
def test_every_optimizer_in_float16(name: str, variant: str) -> None:
    """It runs; what it is worth there is another matter."""
    settings = {"eps": 1e-3} if "eps" in OPTIMIZERS[name].hyper else {}
    settings |= {"eps1": 2e-3} if "eps1" in OPTIMIZERS[name].hyper else {}
    examples = data(matrices=name == "muon")
    run(optimizer(name).configure(variant=variant, **settings), examples, dtype=ir.DataType.FLOAT16)


@pytest.mark.parametrize(("name", "variant"), EVERY)
def test_maximize_is_descent_on_the_negated_gradient(name: str, variant: str) -> None:
    examples = data(matrices=name == "muon")
    negated = Data(examples.start, [[-g for g in gradients] for gradients in examples.gradients])
    up = optimizer(name).configure(variant=variant, maximize=True)
    down = optimizer(name).configure(variant=variant)
    assert difference(run(up, examples), run(down, negated)) == 0


@needs("torch")
def test_defaults_are_those_of_torch() -> None:
    import torch

    for name, cls in {(name, cls) for name, cls, _ in TORCH if name not in ("momentum", "nesterov", "amsgrad")}:
        kind = getattr(torch.optim, cls)
        defaults = {key: p.default for key, p in inspect.signature(kind).parameters.items()}
        ours = torch_arguments(optimizer(name).configure(), kind)
        for key, value in ours.items():
            if (name, key) == ("adafactor", "eps"):  # PyTorch's first is the machine epsilon of the parameter's type
                assert defaults[key] == (None, value[1]) and value[0] == np.finfo(np.float32).eps
            elif defaults[key] is not None:
                assert value == defaults[key], (name, key)


def test_slots() -> None:
    kernel = parameter(ir.DataType.FLOAT, (8, 4, 3, 3))
    slots = {slot.name: slot for slot in optimizer("adafactor").configure().slots(kernel)}
    assert {name: slot.shape for name, slot in slots.items()} == {"row_var": (8, 4, 3, 1), "col_var": (8, 4, 1, 3)}
    largest = optimizer("adafactor").configure(variant="optax", min_dim_size_to_factor=4).slots(kernel)
    assert [slot.shape for slot in largest] == [(1, 4, 3, 3), (8, 1, 3, 3)]
    assert [slot.name for slot in optimizer("adafactor").configure(variant="optax").slots(kernel)] == ["variance"]
    (total,) = optimizer("adagrad").configure(initial_accumulator_value=0.25).slots(kernel)
    assert (total.name, total.dtype, total.initial) == ("sum", ir.DataType.FLOAT, 0.25)
    product = optimizer("nadam").configure().slots(kernel)[-1]
    assert (product.name, product.dtype, product.shape, product.initial) == ("mu_product", ir.DataType.DOUBLE, (), 1)
    assert optimizer("sgd").configure().slots(kernel) == ()


@pytest.mark.parametrize(
    ("name", "settings", "message", "hint"),
    [
        ("adam", {"learning_rate": 0.1}, "`adam` has no option `learning_rate`", ""),
        ("adam", {"beta": 0.1}, "`adam` has no option `beta`", "did you mean `beta"),
        ("adam", {"beta1": 1.0}, "`beta1` .* is 1, but must be at least 0 and less than 1", ""),
        ("adam", {"lr": "fast"}, "`lr` .* is `fast`, which is not a number", ""),
        ("adam", {"lr": float("nan")}, "`lr` .* is nan", ""),
        ("sgd", {"lr": -1}, "`lr` .* is -1, but must be at least 0", ""),
        ("sgd", {"variant": "jax"}, "`variant` .* is `jax`, but must be `torch` or `optax` or `keras`", ""),
        ("sgd", {"nesterov": True}, "needs a momentum", "momentum=0.9"),
        ("sgd", {"dampening": 0.5}, "no use for `dampening`", "leave it out"),
        ("adagrad", {"variant": "keras", "lr_decay": 0.1}, "no use for `lr_decay`", "variant"),
        ("muon", {"ns_steps": 0}, "`ns_steps` .* is `0`, but must be an integer", ""),
    ],
    ids=lambda value: case_id(value) if isinstance(value, dict) else None,
)
def test_a_wrong_setting_is_explained(name: str, settings: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        optimizer(name).configure(**settings)
    assert hint in (caught.value.hint or "")


def test_a_wrong_name_or_parameter_is_explained() -> None:
    with pytest.raises(UnknownNameError, match="unknown optimizer `adaw`") as caught:
        optimizer("adaw")
    assert caught.value.hint and "`adamw`" in caught.value.hint
    with pytest.raises(RecipeError, match=r"for matrices, but a parameter has the shape \[3\]"):
        optimizer("muon").configure().slots(parameter(shape=(3,)))
    with pytest.raises(RecipeError, match="shape of parameter `p` is unknown"):
        optimizer("adam").configure().slots(ir.Value(name="p", type=ir.TensorType(ir.DataType.FLOAT)))


def test_words_of_a_command_line_are_understood() -> None:
    configured = optimizer("sgd").configure(lr="1e-2", momentum="0.9", nesterov="true")
    assert configured.values["lr"] == 0.01 and configured.options["nesterov"] is True


# ---- clipping --------------------------------------------------------------------------------------------------------

Clip = Callable[[Builder, list[Expr], Expr], Any]


def clipped(clip: Clip, gradients: list[np.ndarray], limit: float, engine: str = "onnxruntime") -> list[np.ndarray]:
    """What becomes of the gradients, and their norm where `clip` tells it."""
    op = builder()
    inputs = [add_input(op, f"g{i}", ir.DataType.from_numpy(g.dtype), g.shape) for i, g in enumerate(gradients)]
    results = clip(op, inputs, add_number(op, "limit", limit))
    grads, norm = results if isinstance(results, tuple) else (results, None)
    for i, result in enumerate([*grads, norm] if norm else grads):
        add_output(op, result, f"o{i}")
    feeds = {f"g{i}": g for i, g in enumerate(gradients)}
    outputs = list(ENGINES[engine](to_proto(op))(feeds).values())
    assert all(output.dtype == g.dtype for output, g in zip(outputs, gradients, strict=False))
    return outputs


def clipped_by_torch(gradients: list[np.ndarray], limit: float) -> list[np.ndarray]:
    import torch

    parameters = [torch.nn.Parameter(torch.tensor(g)) for g in gradients]
    for parameter, g in zip(parameters, gradients, strict=True):
        parameter.grad = torch.tensor(g)
    norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
    return [*(parameter.grad.numpy() for parameter in parameters), norm.numpy()]


def same(ours: list[np.ndarray], theirs: list[np.ndarray], rtol: float) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=rtol, atol=0)


GRADIENTS = data().gradients[0]
SPECIAL = {
    "long": (GRADIENTS, 0.5),
    "short": (GRADIENTS, 1e3),
    "zero": ([np.zeros(3), np.zeros(())], 1.0),
    "infinite": ([np.array([1.0, np.inf]), np.ones(2)], 1.0),
    "undefined": ([np.array([1.0, np.nan]), np.ones(2)], 1.0),
}


@needs("torch")
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", SPECIAL)
def test_global_norm_as_torch(case: str, engine: str) -> None:
    gradients, limit = SPECIAL[case]
    same(clipped(clip_by_global_norm, gradients, limit, engine), clipped_by_torch(gradients, limit), rtol=1e-12)


@needs("jax", "optax")
@pytest.mark.filterwarnings("ignore:(invalid value|divide by zero):RuntimeWarning")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", SPECIAL)
def test_global_norm_as_optax(case: str, engine: str) -> None:
    import jax
    import optax

    gradients, limit = SPECIAL[case]
    with jax.enable_x64(True):
        theirs, _ = optax.clip_by_global_norm(limit).update(gradients, None)
        norm = optax.global_norm(gradients)
    clip = functools.partial(clip_by_global_norm, variant="optax")
    same(clipped(clip, gradients, limit, engine), [*theirs, norm], rtol=1e-12)


def test_global_norm_of_mixed_types() -> None:
    """Squares of float16 would overflow: 300² > 65504."""
    gradients = [np.full(1000, 300, np.float16), np.ones(5, np.float32), np.full(2, 1e4)]
    *ours, norm = clipped(clip_by_global_norm, gradients, 2.0)
    exact = np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in gradients))
    np.testing.assert_allclose(norm, exact, rtol=1e-6)
    for mine, g in zip(ours, gradients, strict=True):
        np.testing.assert_allclose(mine, g * (2 / (exact + 1e-6)), rtol=1e-3 if g.dtype == np.float16 else 1e-6)


@needs("torch")
def test_norm_of_each_as_torch() -> None:
    theirs = [clipped_by_torch([g], 0.1)[0] for g in GRADIENTS]
    same(clipped(clip_by_norm, GRADIENTS, 0.1), theirs, rtol=1e-12)


def test_norm_of_each_as_keras() -> None:
    """Keras: g · clipnorm / max(‖g‖, clipnorm)."""
    theirs = [g * 0.1 / np.maximum(np.sqrt(np.sum(g * g)), 0.1) for g in GRADIENTS]
    same(clipped(functools.partial(clip_by_norm, variant="keras"), GRADIENTS, 0.1), theirs, rtol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_value(engine: str) -> None:
    gradients = [*GRADIENTS, np.array([np.inf, -np.inf, 3.0, np.nan])]
    same(clipped(clip_by_value, gradients, 0.1, engine), [np.clip(g, -0.1, 0.1) for g in gradients], rtol=0)


def test_an_unknown_way_to_clip_is_refused() -> None:
    with pytest.raises(RecipeError, match="no variant `jax`"):
        clipped(functools.partial(clip_by_global_norm, variant="jax"), GRADIENTS, 1.0)


if __name__ == "__main__":
    write_keras_results(sys.argv[2])
