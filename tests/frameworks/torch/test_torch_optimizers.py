"""Optimizers move between PyTorch and training models in the middle of training, and go on as if they had not."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from marks import needs
from optimizer_tables import BETAS, KERAS, OPTAX, TORCH, torch_arguments
from representatives import chosen

import onward
from onward.engines import start
from onward.errors import UnsupportedError
from onward.recipe.optimizers import optimizer
from onward.run_state.state import RunState
from onward.run_state.training_models import from_training_model, to_training_model
from onward.vocabulary.optimizers import TORCH_ROWS
from onward.vocabulary.torch import REFUSED_OPTIMIZERS

torch = pytest.importorskip("torch")

from onward.frameworks.torch.exact import ExactOptimizer, Together  # noqa: E402
from onward.frameworks.torch.formulas import EXACT  # noqa: E402
from onward.frameworks.torch.optimizer import CLASSES, class_of, make_optimizer, read_optimizer  # noqa: E402

pytestmark = [needs("torch"), pytest.mark.usefixtures("one_torch_thread", "torch_in_float64")]

BEFORE, AFTER = 5, 7
SHAPES: list[tuple[int, ...]] = [(7,), (5, 3), (3, 6), (2, 3, 4, 2), ()]
MATRICES: list[tuple[int, ...]] = [(5, 3), (3, 6), (4, 4)]


@pytest.fixture
def torch_in_float64() -> Iterator[None]:
    """NAdam keeps the product of its momenta in the default type."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default)


# ---- a model whose gradients are its inputs --------------------------------------------------------------------------


@functools.cache
def data(
    shapes: tuple[tuple[int, ...], ...], seed: int = 0
) -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
    """Parameters, and the gradients of each step: of sizes between 1e-6 and 1."""
    rng = np.random.default_rng(seed)
    sizes = [10 ** rng.uniform(-6, 0, size=shape) for shape in shapes]
    start = {f"layer.{i}": np.asarray(rng.normal(size=shape)) for i, shape in enumerate(shapes)}
    steps = [
        {f"g{i}": np.asarray(size * rng.normal(size=size.shape)) for i, size in enumerate(sizes)}
        for _ in range(BEFORE + AFTER)
    ]
    return start, steps


def inference(weights: dict[str, np.ndarray]) -> onnx.ModelProto:
    """Σ p·g: with the absolute error from a far lower target as the loss, g is the gradient of p."""
    helper, nodes = onnx.helper, []
    kind = helper.np_dtype_to_tensor_dtype(next(iter(weights.values())).dtype)
    for i, name in enumerate(weights):
        nodes.append(helper.make_node("Mul", [name, f"g{i}"], [f"product{i}"]))
        nodes.append(helper.make_node("ReduceSum", [f"product{i}"], [f"sum{i}"], keepdims=0))
    nodes.append(helper.make_node("Sum", [f"sum{i}" for i in range(len(weights))], ["total"]))
    graph = helper.make_graph(
        nodes,
        "sum",
        [helper.make_tensor_value_info(f"g{i}", kind, array.shape) for i, array in enumerate(weights.values())],
        [helper.make_tensor_value_info("total", kind, ())],
        [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


LOSS = {"name": "l1", "reduction": "sum"}
TARGET = {"target": np.asarray(-1e9)}


def on_onnxruntime(model: Any, gradients: list[dict[str, np.ndarray]]) -> Any:
    with start(model, threads=1) as engine:
        for step in gradients:
            engine.step({**step, **TARGET})
        return engine.updated()


def weights_of(model: Any) -> dict[str, np.ndarray]:
    found = {name: value.const_value.numpy() for name, value in model.graph.initializers.items()}
    return {name: array for name, array in found.items() if name.startswith("layer.") and "/" not in name}


def on_torch(optimizer: Any, parameters: dict[str, Any], gradients: list[dict[str, np.ndarray]]) -> None:
    for step in gradients:
        for parameter, g in zip(parameters.values(), step.values(), strict=True):
            parameter.grad = torch.tensor(g) if parameter.requires_grad else None
        optimizer.step()


def as_parameters(weights: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: torch.nn.Parameter(torch.tensor(array)) for name, array in weights.items()}


def names_of(parameters: dict[str, Any]) -> dict[int, str]:
    return {id(parameter): name for name, parameter in parameters.items()}


def agree(found: dict[str, np.ndarray], parameters: dict[str, Any], tolerance: float = 1e-10) -> None:
    for name, parameter in parameters.items():
        expected = parameter.detach().numpy()
        np.testing.assert_allclose(found[name], expected, rtol=tolerance, atol=tolerance, err_msg=name)


def goes_on_in_onnx(optimizer: Any, parameters: dict[str, Any], gradients: list[dict[str, np.ndarray]]) -> RunState:
    """Read an optimizer, and let both sides make further steps."""
    groups, slots, step = read_optimizer(optimizer, names_of(parameters))
    weights = {name: parameter.detach().numpy().copy() for name, parameter in parameters.items()}
    run = RunState(onward.load(inference(weights)), LOSS, groups, slots, step)
    model = on_onnxruntime(to_training_model(run), gradients)
    on_torch(optimizer, parameters, gradients)
    agree(weights_of(model), parameters)
    return run


def case_id(value: Any) -> str | None:
    return ",".join(f"{k}={v}" for k, v in value.items()) or "defaults" if isinstance(value, dict) else None


# ---- from PyTorch ----------------------------------------------------------------------------------------------------

MORE = [
    ("sgd", "SGD", {"momentum": 0.9, "dampening": 0.5, "maximize": True}),
    ("sgd", "SGD", {"momentum": 0.9, "nesterov": True}),
    ("adam", "Adam", {**BETAS, "maximize": True}),
    ("adamw", "AdamW", {**BETAS, "weight_decay": 0.1, "maximize": True}),
    ("rmsprop", "RMSprop", {"alpha": 0.9, "eps": 1e-3, "centered": True, "momentum": 0.8, "weight_decay": 0.1}),
]
NATIVE = [case for case in [*TORCH, *MORE] if case[1] != "Muon"]


@pytest.mark.parametrize("before", chosen([0, BEFORE], [BEFORE]))
@pytest.mark.parametrize(("name", "cls", "settings"), NATIVE, ids=case_id)
def test_from_torch(name: str, cls: str, settings: dict[str, Any], before: int) -> None:
    start, gradients = data(tuple(SHAPES))
    parameters = as_parameters(start)
    kind = getattr(torch.optim, cls)
    theirs = kind(parameters.values(), **{**torch_arguments(optimizer(name).configure(**settings), kind), "lr": 0.05})
    on_torch(theirs, parameters, gradients[:before])
    run = goes_on_in_onnx(theirs, parameters, gradients[before:])
    assert run.groups[0].optimizer.options["variant"] == "torch"


def test_every_class_of_torch_is_known() -> None:
    traced = {torch.optim.ASGD, torch.optim.Rprop}
    public = {value for value in vars(torch.optim).values() if inspect.isclass(value)} - {torch.optim.Optimizer}
    assert {kind.__name__ for kind in public - traced - {*CLASSES}} == {*REFUSED_OPTIMIZERS}
    assert {cls for _, cls, _ in NATIVE} == {kind.__name__ for kind in public & {*CLASSES}}


def test_groups_and_frozen_parameters() -> None:
    start, gradients = data(tuple(SHAPES))
    parameters = as_parameters(start)
    parameters["layer.1"].requires_grad_(False)
    first, frozen, *others = parameters.values()
    theirs = torch.optim.AdamW(
        [{"params": [first, frozen], "lr": 0.1, "weight_decay": 0.0}, {"params": others}], lr=0.02, eps=1e-3
    )
    on_torch(theirs, parameters, gradients[:BEFORE])
    run = goes_on_in_onnx(theirs, parameters, gradients[BEFORE:])
    assert [list(group.parameters) for group in run.groups] == [["layer.0"], ["layer.2", "layer.3", "layer.4"]]
    assert run.step == BEFORE


def with_another(parameters: Any) -> list[Any]:
    """Parameters, and one that the model does not use. It has no gradient, and no state but the initial one."""
    return [*parameters, torch.nn.Parameter(torch.ones(3))]


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.01), eps=1e-3),
        lambda parameters: torch.optim.Adafactor(parameters),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, dampening=0.5),
        lambda parameters: torch.optim.Adagrad(with_another(parameters), lr=0.1),
        lambda parameters: torch.optim.Adam(with_another(parameters), lr=0.1),
    ],
    ids=["a rate that is a tensor", "an eps that depends on the type", "a number without effect",
         "another parameter, of Adagrad", "another parameter, of Adam"],
)  # fmt: skip
def test_settings_as_torch_has_them(make: Any) -> None:
    start, gradients = data(tuple(SHAPES))
    parameters = as_parameters(start)
    theirs = make(parameters.values())
    on_torch(theirs, parameters, gradients[:BEFORE])
    goes_on_in_onnx(theirs, parameters, gradients[BEFORE:])


@pytest.mark.parametrize(("name", "cls", "settings"), NATIVE, ids=case_id)
def test_there_and_back_nothing_changes(name: str, cls: str, settings: dict[str, Any]) -> None:
    """In float32, as most people have it."""
    torch.set_default_dtype(torch.float32)
    start, gradients = data(tuple(SHAPES))
    parameters = {key: torch.nn.Parameter(torch.tensor(array.astype("f"))) for key, array in start.items()}
    kind = getattr(torch.optim, cls)
    theirs = kind(parameters.values(), **torch_arguments(optimizer(name).configure(**settings), kind))
    on_torch(theirs, parameters, [{key: g.astype("f") for key, g in step.items()} for step in gradients[:BEFORE]])
    groups, slots, step = read_optimizer(theirs, names_of(parameters))
    weights = {name: parameter.detach().numpy() for name, parameter in parameters.items()}
    run = from_training_model(to_training_model(RunState(onward.load(inference(weights)), LOSS, groups, slots, step)))
    found, expected = make_optimizer(run, parameters).state_dict(), theirs.state_dict()
    [found_group], [group] = found["param_groups"], expected["param_groups"]
    assert {**found_group, "dampening": None} == {**group, "dampening": None}
    assert found_group.get("dampening", 0) == pytest.approx(group.get("dampening", 0))  # the operator has 1 - dampening
    assert found["state"].keys() == expected["state"].keys()
    for i, state in expected["state"].items():
        assert found["state"][i].keys() == {slot for slot, value in state.items() if value is not None}
        for slot, value in found["state"][i].items():
            torch.testing.assert_close(value, state[slot], rtol=0, atol=0)


# ---- to PyTorch ------------------------------------------------------------------------------------------------------

CASES = [
    *((name, "torch", settings) for name, _, settings in [*TORCH, *MORE]),
    *((name, "keras", settings) for name, _, settings in KERAS),
    *((name, "optax", settings) for name, _, settings in OPTAX),
    ("sgdw", "torch", {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    ("adafactor", "transformers", {"weight_decay": 0.1}),
    ("adafactor", "transformers", {"scale_parameter": False, "d": 1.5}),
    ("sgdw", "optax", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("sgdw", "keras", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True}),
    ("adamw", "optax", {**BETAS, "amsgrad": True, "weight_decay": 0.1}),
    ("adam", "optax", {**BETAS, "amsgrad": True, "weight_decay": 0.1}),
    ("nadam", "optax", {**BETAS, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("radam", "optax", {**BETAS, "weight_decay": 0.1}),
    ("adagrad", "optax", {"eps": 1e-3, "weight_decay": 0.1}),
    ("rmsprop", "optax", {"eps": 1e-3, "momentum": 0.8, "weight_decay": 0.1}),
    ("adamax", "keras", {**BETAS, "weight_decay": 0.1}),
    ("adadelta", "keras", {"eps": 1e-3}),
    ("lion", "optax", {"weight_decay": 0.1, "maximize": True}),
    ("adamw", "transformers", {**BETAS, "weight_decay": 0.1}),
]


@pytest.mark.parametrize("before", chosen([0, BEFORE], [BEFORE]))
@pytest.mark.parametrize(("name", "variant", "settings"), CASES, ids=case_id)
def test_to_torch_and_back(name: str, variant: str, settings: dict[str, Any], before: int) -> None:
    start, gradients = data(tuple(MATRICES if name == "muon" else SHAPES))
    spec = {"name": name, **settings, "variant": variant, "lr": 0.05}
    model = onward.prepare(onward.load(inference(start)), loss=LOSS, optimizer=spec)
    model = on_onnxruntime(model, gradients[:before])
    run = from_training_model(model)
    parameters = as_parameters(weights_of(model))
    made = make_optimizer(run, parameters)
    row = next(row for row in TORCH_ROWS if row.fits(optimizer(name).configure(**settings, variant=variant)))
    assert type(made) is class_of(row)
    assert isinstance(made, ExactOptimizer) == (not row.is_native)

    loaded_parameters = as_parameters(weights_of(model))
    loaded = make_optimizer(RunState(run.model, run.loss, run.groups), loaded_parameters)
    loaded.load_state_dict(copy.deepcopy(made.state_dict()))

    middle = before + AFTER // 2
    model = on_onnxruntime(model, gradients[before:middle])
    on_torch(made, parameters, gradients[before:middle])
    agree(weights_of(model), parameters)
    on_torch(loaded, loaded_parameters, gradients[before:middle])
    agree(weights_of(model), loaded_parameters)
    goes_on_in_onnx(made, parameters, gradients[middle:])


def test_every_row_is_tested() -> None:
    tested = [optimizer(name).configure(**settings, variant=variant) for name, variant, settings in CASES]
    for row in TORCH_ROWS:
        assert any(next(r for r in TORCH_ROWS if r.fits(one)) is row for one in tested), row
    for name, variant in {(name, variant) for row in TORCH_ROWS for name in row.optimizers for variant in row.variants}:
        assert variant in optimizer(name).variants


@pytest.mark.parametrize("kinds", [("adamw", "adamw"), ("sgd", "adamw"), ("lion", "sgd")])
def test_groups_of_several_optimizers(kinds: tuple[str, str]) -> None:
    start, gradients = data(tuple(SHAPES))
    groups = [{"match": ["layer.1", "layer.3"], "optimizer": {"name": kinds[1], "lr": 0.03, "weight_decay": 0.1}}]
    spec = {"name": kinds[0], "lr": 0.02}
    model = onward.prepare(onward.load(inference(start)), loss=LOSS, optimizer=spec, groups=groups)
    model = on_onnxruntime(model, gradients[:BEFORE])
    parameters = as_parameters(weights_of(model))
    made = make_optimizer(from_training_model(model), parameters)
    assert isinstance(made, Together) == (kinds[0] != kinds[1])
    made.load_state_dict(copy.deepcopy(made.state_dict()))
    parameters, made = copy.deepcopy((parameters, made))
    model = on_onnxruntime(model, gradients[BEFORE : BEFORE + 3])
    on_torch(made, parameters, gradients[BEFORE : BEFORE + 3])
    agree(weights_of(model), parameters)
    goes_on_in_onnx(made, parameters, gradients[BEFORE + 3 :])


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (torch.optim.LBFGS, "evaluates the model several times"),
        (torch.optim.SparseAdam, "no sparse gradients"),
        (torch.optim.Muon, "orthogonalizes in bfloat16"),
    ],
)
def test_refused_classes(make: Any, message: str) -> None:
    parameters = as_parameters({"layer.0": np.ones((2, 2))})
    with pytest.raises(UnsupportedError, match=message) as caught:
        read_optimizer(make(parameters.values()), names_of(parameters))
    assert caught.value.hint


def test_all_that_is_wrong_is_said_at_once() -> None:
    parameters = as_parameters({"a": np.ones((3, 2)), "b": np.ones((3, 2)), "c": np.ones(2)})
    theirs = torch.optim.Adam(parameters.values())
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    theirs.step()
    parameters["a"].grad = torch.ones(3, 2).to_sparse()
    names = names_of(parameters)
    del names[id(parameters["c"])]
    with pytest.raises(UnsupportedError, match=r"gradient of `a` is sparse; .*shape \[2\] that the model does not use"):
        read_optimizer(theirs, names)
    theirs = torch.optim.SparseAdam(parameters.values())
    theirs.register_step_pre_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match="no sparse gradients; it has hooks"):
        read_optimizer(theirs, names)
    together = Together([torch.optim.SGD([parameters["a"]]), torch.optim.Adam([parameters["b"]])])
    together.register_step_post_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match="it has hooks"):
        read_optimizer(together, names)


def test_steps_that_differ() -> None:
    start, gradients = data(tuple(SHAPES))
    parameters = as_parameters(start)
    for kind, settings in [(torch.optim.Adam, {}), (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5})]:
        theirs = kind(parameters.values(), **settings)
        parameters["layer.2"].requires_grad_(False)
        on_torch(theirs, parameters, gradients[:2])
        parameters["layer.2"].requires_grad_(True)
        on_torch(theirs, parameters, gradients[2:3] if kind is torch.optim.Adam else [])
        with pytest.raises(UnsupportedError, match="had fewer updates"):
            read_optimizer(theirs, names_of(parameters))


def test_where_steps_do_not_matter_they_may_differ() -> None:
    start, gradients = data(tuple(SHAPES))
    parameters = as_parameters(start)
    theirs = torch.optim.RMSprop(parameters.values(), momentum=0.9, eps=1e-3)
    parameters["layer.2"].requires_grad_(False)
    on_torch(theirs, parameters, gradients[:2])
    parameters["layer.2"].requires_grad_(True)
    goes_on_in_onnx(theirs, parameters, gradients[2:])


# ---- programs that run without us ------------------------------------------------------------------------------------


def test_exact_classes_need_nothing_but_torch() -> None:
    """Put together in one file, they work without this package."""
    printed = inspect.getsource(inspect.getmodule(EXACT["Lion"]))
    lines = [
        line for text in (Path(inspect.getfile(ExactOptimizer)).read_text(), printed) for line in text.splitlines()
    ]
    ours = [line for line in lines if "onward" in line]
    assert all(line.startswith("from onward.frameworks.torch.exact ") for line in ours), ours
    program = "\n".join(line for line in lines if line not in ours and "__future__" not in line)
    names: dict[str, Any] = {}
    exec(compile("from __future__ import annotations\n" + program, "program", "exec"), names)
    parameter = torch.nn.Parameter(torch.ones(3, 2))
    parameter.grad = torch.ones(3, 2)
    names["Lion"]([parameter], lr=0.1).step()
    torch.testing.assert_close(parameter.detach(), torch.full((3, 2), 0.9))


def test_a_printed_update_reads_like_its_formula() -> None:
    lines = [line.strip() for line in inspect.getsource(EXACT["OptaxNAdam"].update).splitlines()]
    assert lines[3:] == [
        'beta1, beta2 = group["betas"]',
        'm = beta1 * state["exp_avg"] + (1 - beta1) * g',
        'v = beta2 * state["exp_avg_sq"] + (1 - beta2) * (g * g)',
        "root = math.sqrt(1 - beta2**t)",
        "d = beta1 / (1 - beta1**(t + 1)) * m + (1 - beta1) / (1 - beta1**t) * g",
        'x.copy_(x - lr * root * (d / (v.sqrt() + group["eps"] * root)))',
        'state["exp_avg"].copy_(m)',
        'state["exp_avg_sq"].copy_(v)',
    ]
