"""Training models of nothing but the standard's operators, and what they compute by others than us.

Losses and gradients are PyTorch's; an optimizer's update is that of ONNX's reference implementation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

STEPS = 5
_DOMAIN = "ai.onnx.preview.training"
_OPSETS = [helper.make_opsetid("", 21), helper.make_opsetid(_DOMAIN, 1)]
_NET = """net (float[N, 4] x) => (float[N, 3] scores) {
    product = MatMul(x, W)
    hidden = Tanh(product)
    raised = MatMul(hidden, V)
    scores = Add(raised, b)
}"""
_SHAPES = {"W": (4, 5), "V": (5, 3), "b": (3,)}
Losses = Callable[..., Any]


def _cross_entropy(f: Any, scores: Any, labels: Any) -> Any:
    return f.cross_entropy(scores, labels)


@dataclasses.dataclass(frozen=True)
class Case:
    """A training model: a loss, Gradient, and an optimizer with its attributes and the slots of each parameter."""

    summary: str
    loss: str = "loss = SoftmaxCrossEntropyLoss(scores, labels)"
    torch_loss: Losses = _cross_entropy
    optimizer: str | None = None
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    slots: int = 0
    first: int = 0
    """The number of the first update."""
    at: str = ""
    """What the gradient is taken at, if not at the parameters: half of them."""
    zs: Sequence[str] = ()


def _weighted(f: Any, scores: Any, labels: Any) -> Any:
    weight = scores.new_tensor([1.0, 2.0, 0.5])
    return f.cross_entropy(scores, labels, weight, ignore_index=1, reduction="sum")


def _penalised(f: Any, scores: Any, labels: Any, x: Any) -> Any:
    import torch

    loss = f.cross_entropy(scores, labels)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + slope.square().sum()


CASES = {
    "Gradient": Case("gradients by parameters; plain descent"),
    "Gradient, other values": Case("gradients at half the parameters, which the inputs of the node are", at="half"),
    "Gradient, `zs`": Case("what is not differentiated by is given, too", zs=("x", "labels")),
    "Gradient, twice": Case(
        "the loss has the square of its own gradient by the inputs",
        f"""plain = SoftmaxCrossEntropyLoss(scores, labels)
        slope = {_DOMAIN}.Gradient<xs = ["x"], y = "plain">(x)
        square = ReduceSumSquare<keepdims = 0>(slope)
        loss = Add(plain, square)""",
        _penalised,
    ),
    "SoftmaxCrossEntropyLoss": Case(
        "a sum with weights, and a class that is ignored",
        """weights = Constant<value_floats = [1.0, 2.0, 0.5]>()
        loss = SoftmaxCrossEntropyLoss<reduction = "sum", ignore_index = 1>(scores, labels, weights)""",
        _weighted,
    ),
    "NegativeLogLikelihoodLoss": Case(
        "of LogSoftmax",
        """log = LogSoftmax(scores)
        loss = NegativeLogLikelihoodLoss(log, labels)""",
    ),
    "Adagrad": Case(
        "a rate that decays, and a norm",
        optimizer="Adagrad",
        attributes={"decay_factor": 0.1, "norm_coefficient": 0.01},
        slots=1,
    ),
    "Adam": Case(
        "both norms, and updates that are counted from 1",
        optimizer="Adam",
        attributes={"norm_coefficient": 0.01, "norm_coefficient_post": 0.001, "epsilon": 1e-3},
        slots=2,
        first=1,
    ),
    **{
        f"Momentum, `{mode}`": Case(
            "a first update without `beta`",
            optimizer="Momentum",
            attributes={"mode": mode, "alpha": 0.9, "beta": 0.7, "norm_coefficient": 0.01},
            slots=1,
        )
        for mode in ("standard", "nesterov")
    },
}


def batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    return [
        {"x": rng.standard_normal((6, 4)).astype(np.float32), "labels": rng.integers(0, 3, 6)} for _ in range(STEPS)
    ]


def _start(case: Case) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    parameters = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in _SHAPES.items()}
    slots = {f"{name}_{i}": np.zeros(shape, np.float32) for i in range(case.slots) for name, shape in _SHAPES.items()}
    return {**parameters, **slots, "T": np.array(case.first), "R": np.array(0.1, np.float32)}


def training_model(case: Case) -> onnx.ModelProto:
    """The model, field by field."""
    start, names = _start(case), list(_SHAPES)
    slots = [f"{name}_{i}" for i in range(case.slots) for name in names]
    new = [f"new_{name}" for name in (*names, *slots)]
    gradients = [f"d_{name}" for name in names]
    at = [f"{case.at}_{name}" if case.at else name for name in names]
    lines = [case.loss, *(f"{a} = Div({name}, two)" for a, name in zip(at, names, strict=True) if a != name)]
    quoted = {key: ", ".join(f'"{name}"' for name in given) for key, given in (("xs", names), ("zs", case.zs)) if given}
    named = ", ".join(f"{key} = [{values}]" for key, values in quoted.items())
    lines.append(f'{", ".join(gradients)} = {_DOMAIN}.Gradient<{named}, y = "loss">({", ".join((*at, *case.zs))})')
    if case.optimizer is None:
        for name in names:
            lines += [f"move_{name} = Mul(R, d_{name})", f"new_{name} = Sub({name}, move_{name})"]
    lines.append("new_T = Add(T, one)")
    outputs = ", ".join(["float loss", "int64 new_T", *(f"float[{_sizes(start[n[4:]])}] {n}" for n in new)])
    text = "\n".join(lines)
    algorithm = onnx.parser.parse_graph(f"step (int64[N] labels) => ({outputs}) {{ {text} }}")
    if case.optimizer is not None:
        algorithm.node.append(_optimizer(case, ["R", "T", *names, *gradients, *slots], new))
    graph = onnx.parser.parse_graph(_NET)
    graph.initializer.extend(numpy_helper.from_array(start[name], name) for name in names)
    constants = {"one": np.array(1), **({"two": np.array(2, np.float32)} if case.at else {})}
    own = {name: array for name, array in start.items() if name not in names} | constants
    algorithm.initializer.extend(numpy_helper.from_array(array, name) for name, array in own.items())
    model = helper.make_model(graph, opset_imports=_OPSETS, ir_version=10)
    info = model.training_info.add()
    info.algorithm.CopyFrom(algorithm)
    for name in ("T", *names, *slots):
        info.update_binding.add(key=name, value=f"new_{name}")
    return model


def _sizes(array: np.ndarray) -> str:
    return ", ".join(map(str, array.shape))


def _optimizer(case: Case, inputs: Sequence[str], outputs: Sequence[str]) -> onnx.NodeProto:
    assert case.optimizer is not None
    return helper.make_node(case.optimizer, inputs, outputs, domain=_DOMAIN, **case.attributes)


def expected(case: Case) -> tuple[list[float], dict[str, np.ndarray]]:
    """The loss of each step, and the state after the last."""
    state, losses = _start(case), []
    for batch in batches():
        loss, gradients = _gradients(case, state, batch)
        losses.append(loss)
        state |= _updated(case, state, gradients) | {"T": state["T"] + 1}
    return losses, state


def _gradients(case: Case, state: Mapping[str, np.ndarray], batch: Mapping[str, np.ndarray]) -> tuple[float, list[Any]]:
    import torch

    def loss_at(share: float) -> tuple[Any, list[Any]]:
        weights = [torch.tensor(state[name] * np.float32(share), requires_grad=True) for name in _SHAPES]
        x = torch.tensor(batch["x"], requires_grad=True)
        scores = torch.tanh(x @ weights[0]) @ weights[1] + weights[2]
        more = [x] if case.torch_loss is _penalised else []
        return case.torch_loss(torch.nn.functional, scores, torch.tensor(batch["labels"]), *more), weights

    loss, _ = loss_at(1)
    y, weights = loss_at(0.5 if case.at else 1)
    return loss.item(), [gradient.numpy() for gradient in torch.autograd.grad(y, weights)]


def _updated(case: Case, state: Mapping[str, np.ndarray], gradients: list[Any]) -> dict[str, np.ndarray]:
    names = list(_SHAPES)
    if case.optimizer is None:
        return {name: state[name] - state["R"] * gradient for name, gradient in zip(names, gradients, strict=True)}
    slots = [f"{name}_{i}" for i in range(case.slots) for name in names]
    given = [f"d_{name}" for name in names]
    inputs = ["R", "T", *names, *given, *slots]
    feeds = {**{name: state[name] for name in inputs if name in state}, **dict(zip(given, gradients, strict=True))}
    typed = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(feeds[name].dtype), feeds[name].shape)
        for name in inputs
    ]
    outputs = [f"new_{name}" for name in (*names, *slots)]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph([_optimizer(case, inputs, outputs)], "update", typed, results)
    computed = ReferenceEvaluator(helper.make_model(graph, opset_imports=_OPSETS)).run(None, feeds)
    return dict(zip((*names, *slots), computed, strict=True))
