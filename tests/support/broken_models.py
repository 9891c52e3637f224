"""Good training models, written by hand, and a table of ways to break them: each damages a good one in one way.

`GOOD` maps names to functions that build a model; `DAMAGES` is the table. The checker must find exactly the code of
each row, and nothing worth a warning in a good model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    SparseTensorProto,
    TensorProto,
    TrainingInfoProto,
    helper,
    numpy_helper,
)

from onward.model.serde import FINGERPRINT, fingerprint

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
TRAINING = "ai.onnx.preview.training"

# ---- building --------------------------------------------------------------------------------------------------------


def node(op: str, inputs: str, outputs: str, **attributes: Any) -> NodeProto:
    """`node("onward.SGD", "w dw lr", "w_new", momentum=0.9)`; `-` leaves an input or output out."""
    domain, _, op_type = op.rpartition(".")
    args, results = ([name.replace("-", "") for name in names.split()] for names in (inputs, outputs))
    return helper.make_node(op_type, args, results, domain=domain, **attributes)


def value(name: str, dims: Iterable[int | str], elem: int = FLOAT) -> Any:
    return helper.make_tensor_value_info(name, elem, list(dims))


def tensor(name: str, array: Any, dtype: Any = np.float32, **metadata: str) -> TensorProto:
    made = numpy_helper.from_array(np.asarray(array, dtype), name)
    for key, text in metadata.items():
        made.metadata_props.add(key=f"train.{key}", value=text)
    return made


def slot(param: str, name: str, dims: Iterable[int]) -> TensorProto:
    return tensor(f"{param}/{name}", np.zeros(tuple(dims)), role="optimizer_state", param=param, slot=name)


def entry(
    initialization: GraphProto, algorithm: GraphProto, resets: dict[str, str], updates: dict[str, str]
) -> TrainingInfoProto:
    made = TrainingInfoProto(initialization=initialization, algorithm=algorithm)
    for key, text in resets.items():
        made.initialization_binding.add(key=key, value=text)
    for key, text in updates.items():
        made.update_binding.add(key=key, value=text)
    return made


def model(
    graph: GraphProto, *entries: TrainingInfoProto, functions: Iterable[FunctionProto] = (), **opsets: int
) -> ModelProto:
    imports = {"": 21, TRAINING: 1, **opsets}
    made = helper.make_model(
        graph,
        ir_version=10,
        opset_imports=[helper.make_opsetid(domain, version) for domain, version in imports.items()],
        functions=list(functions),
    )
    made.training_info.extend(entries)
    for one in made.training_info:
        one.algorithm.metadata_props.add(key=FINGERPRINT, value=fingerprint(made.graph))
    return made


def starting(shapes: dict[str, tuple[int, ...]], counters: Iterable[str] = ()) -> tuple[GraphProto, dict[str, str]]:
    """An initialization graph: random weights, zeros where the name has a slash, counters from 0; and its bindings."""
    nodes, outputs, resets = [], [], {}
    for i, (name, shape) in enumerate(shapes.items()):
        made = f"{name}_start"
        if "/" in name:
            nodes.append(node("Constant", "", made, value=tensor("", np.zeros(shape))))
        else:
            nodes.append(node("RandomNormal", "", made, shape=shape, scale=0.1, seed=float(i)))
        outputs.append(value(made, shape))
        resets[name] = made
    for name in counters:
        nodes.append(node("Constant", "", f"{name}_start", value=tensor("", 0, np.int64)))
        outputs.append(value(f"{name}_start", (), INT64))
        resets[name] = f"{name}_start"
    return helper.make_graph(nodes, "start", [], outputs), resets


# ---- good models -----------------------------------------------------------------------------------------------------

WEIGHTS = {"w1": (4, 8), "b1": (8,), "w2": (8, 3), "b2": (3,)}


def mlp_graph() -> GraphProto:
    return helper.make_graph(
        [node("Gemm", "x w1 b1", "h"), node("Relu", "h", "a"), node("Gemm", "a w2 b2", "logits")],
        "mlp",
        [value("x", ["batch", 4])],
        [value("logits", ["batch", 3])],
        [tensor(name, np.full(dims, 0.1)) for name, dims in WEIGHTS.items()],
    )


def good() -> ModelProto:
    """A perceptron trained by Adam, with a counter, every slot tagged, every variable initialised."""
    names = list(WEIGHTS)
    slots = {f"{name}/{which}": dims for which in ("exp_avg", "exp_avg_sq") for name, dims in WEIGHTS.items()}
    gradients, averages = [f"d_{name}" for name in names], list(slots)
    new = [f"{name}_new" for name in (*names, *slots)]
    algorithm = helper.make_graph(
        [
            node("SoftmaxCrossEntropyLoss", "logits labels", "loss"),
            node(
                f"{TRAINING}.Gradient",
                " ".join([*names, "x", "labels"]),
                " ".join(gradients),
                name="grad",
                xs=names,
                zs=["x", "labels"],
                y="loss",
            ),
            node("Add", "step one", "step_new"),
            node(f"{TRAINING}.Adam", " ".join(["lr", "step_new", *names, *gradients, *averages]), " ".join(new)),
        ],
        "training",
        [value("labels", ["batch"], INT64)],
        [value("loss", [])]
        + [value(f"{name}_new", dims) for name, dims in {**WEIGHTS, **slots}.items()]
        + [value("step_new", [], INT64)],
        [slot(*name.split("/"), dims) for name, dims in slots.items()]
        + [tensor("lr", 0.001), tensor("one", 1, np.int64), tensor("step", 0, np.int64)],
    )
    groups = [{"class": "Adam", "hyper": {"lr": 0.001}, "params": names}]
    algorithm.metadata_props.add(key="train.optimizer", value=json.dumps(groups))
    algorithm.metadata_props.add(key="train.progress", value='{"step": 0}')
    start, resets = starting({**WEIGHTS, **slots}, ["step"])
    return model(
        mlp_graph(), entry(start, algorithm, resets, {name: f"{name}_new" for name in (*WEIGHTS, *slots, "step")})
    )


def gan() -> ModelProto:
    """Two steps: a discriminator trained by Momentum, a generator by Adagrad, on the same inference graph."""
    graph = helper.make_graph(
        [node("MatMul", "noise g", "sample")],
        "generator",
        [value("noise", ["n", 2])],
        [value("sample", ["n", 3])],
        [tensor("g", np.ones((2, 3))), tensor("d", np.ones((3, 1)))],
    )

    def judge(what: str) -> list[NodeProto]:
        return [node("MatMul", f"{what} d", f"{what}_s"), node("Softplus", f"{what}_s", f"{what}_p")]

    def algorithm(loss: list[NodeProto], var: str, zs: list[str], op: str, rest: str, **attributes: Any) -> GraphProto:
        inputs = [value("real", ["n", 3])] if "real" in zs else []
        shape = [2, 3] if var == "g" else [3, 1]
        return helper.make_graph(
            [
                *loss,
                node(f"{TRAINING}.Gradient", " ".join([var, *zs]), "dv", xs=[var], zs=zs, y="loss"),
                node(f"{TRAINING}.{op}", f"lr count {var} dv {var}/{rest}", "new slot_new", **attributes),
                node("Add", "count one", "count_new"),
            ],
            f"train_{var}",
            inputs,
            [value("loss", []), value("new", shape), value("slot_new", shape), value("count_new", [], INT64)],
            [tensor("lr", 0.1), tensor("count", 0, np.int64), tensor("one", 1, np.int64), slot(var, rest, shape)],
        )

    critic = [*judge("sample"), *judge("real"), node("Sub", "sample_p real_p", "gap")]
    critic.append(node("ReduceMean", "gap", "loss", keepdims=0))
    maker = [*judge("sample"), node("Neg", "sample_p", "hope"), node("ReduceMean", "hope", "loss", keepdims=0)]
    momentum = {"alpha": 0.9, "beta": 1.0, "norm_coefficient": 0.0, "mode": "nesterov"}
    entries = []
    for var, shape, graph_of_step in (
        ("d", (3, 1), algorithm(critic, "d", ["noise", "real"], "Momentum", "momentum", **momentum)),
        ("g", (2, 3), algorithm(maker, "g", ["noise"], "Adagrad", "sum", decay_factor=0.01)),
    ):
        name = next(t.name for t in graph_of_step.initializer if "/" in t.name)
        start, resets = starting({var: shape, name: shape}, ["count"])
        entries.append(entry(start, graph_of_step, resets, {var: "new", name: "slot_new", "count": "count_new"}))
    return model(graph, *entries)


def with_functions() -> ModelProto:
    """The optimizer and the schedule are functions of the model; the schedule calls another one."""
    half = helper.make_function(
        "onward", "Half", ["x"], ["y"], [node("Constant", "", "two", value_float=2.0), node("Div", "x two", "y")],
        [helper.make_opsetid("", 21)],
    )  # fmt: skip
    decay = helper.make_function(
        "onward",
        "Decay",
        ["base", "step"],
        ["rate"],
        [
            node("Cast", "step", "t", to=FLOAT),
            node("Exp", "t", "grown"),
            node("Div", "base grown", "whole"),
            node("onward.Half", "whole", "rate"),
        ],
        [helper.make_opsetid("", 21), helper.make_opsetid("onward", 1)],
    )
    sgd = helper.make_function(
        "onward",
        "SGD",
        ["x", "g", "rate"],
        ["new"],
        [
            node("Constant", "", "decay"),
            node("Mul", "x decay", "pull"),
            node("Add", "g pull", "total"),
            node("Mul", "rate total", "change"),
            node("Sub", "x change", "new"),
        ],
        [helper.make_opsetid("", 21)],
        ["weight_decay"],
    )
    reference = AttributeProto(name="value_float", ref_attr_name="weight_decay", type=AttributeProto.FLOAT)
    sgd.node[0].attribute.append(reference)
    names = list(WEIGHTS)
    algorithm = helper.make_graph(
        [
            node("SoftmaxCrossEntropyLoss", "logits labels", "loss"),
            node(
                f"{TRAINING}.Gradient",
                " ".join([*names, "x", "labels"]),
                " ".join(f"d_{name}" for name in names),
                xs=names,
                zs=["x", "labels"],
                y="loss",
            ),
            node("onward.Decay", "lr step", "rate"),
            *(node("onward.SGD", f"{name} d_{name} rate", f"{name}_new", weight_decay=0.01) for name in names),
            node("Add", "step one", "step_new"),
        ],
        "training",
        [value("labels", ["batch"], INT64)],
        [value("loss", [])]
        + [value(f"{name}_new", dims) for name, dims in WEIGHTS.items()]
        + [value("step_new", [], INT64)],
        [tensor("lr", 0.1), tensor("one", 1, np.int64), tensor("step", 0, np.int64)],
    )
    start, resets = starting(WEIGHTS, ["step"])
    updates = {name: f"{name}_new" for name in (*WEIGHTS, "step")}
    return model(mlp_graph(), entry(start, algorithm, resets, updates), functions=[half, decay, sgd], onward=1)


def control_flow() -> ModelProto:
    """A recurrence as a Loop whose body reads a weight from around it, and an update under If."""
    body = helper.make_graph(
        [node("MatMul", "state w", "inner"), node("Tanh", "inner", "state_new"), node("Identity", "go", "go_on")],
        "body",
        [value("i", [], INT64), value("go", [], TensorProto.BOOL), value("state", ["n", 3])],
        [value("go_on", [], TensorProto.BOOL), value("state_new", ["n", 3])],
    )
    graph = helper.make_graph(
        [node("Loop", "times - x", "y", body=body)],
        "recurrence",
        [value("x", ["n", 3])],
        [value("y", ["n", 3])],
        [tensor("w", np.eye(3)), tensor("times", 4, np.int64)],
    )
    step = helper.make_graph([node("Sub", "w change", "moved")], "step", [], [value("moved", [3, 3])])
    stay = helper.make_graph([node("Identity", "w", "kept")], "stay", [], [value("kept", [3, 3])])
    algorithm = helper.make_graph(
        [
            node("Sub", "y target", "error"),
            node("ReduceSumSquare", "error", "loss", keepdims=0),
            node(f"{TRAINING}.Gradient", "w x target", "dw", xs=["w"], zs=["x", "target"], y="loss"),
            node("Mul", "dw lr", "change"),
            node("IsNaN", "loss", "lost"),
            node("If", "lost", "w_new", then_branch=stay, else_branch=step),
        ],
        "training",
        [value("target", ["n", 3])],
        [value("loss", []), value("w_new", [3, 3])],
        [tensor("lr", 0.1)],
    )
    start, resets = starting({"w": (3, 3)})
    return model(graph, entry(start, algorithm, resets, {"w": "w_new"}))


def statistics() -> ModelProto:
    """Running statistics are updated from data; gradients are accumulated in one step and applied from state."""
    graph = helper.make_graph(
        [node("BatchNormalization", "x scale bias mean var", "y")],
        "norm",
        [value("x", ["n", 3])],
        [value("y", ["n", 3])],
        [tensor("scale", np.ones(3))] + [tensor(name, np.zeros(3)) for name in ("bias", "mean", "var")],
    )
    algorithm = helper.make_graph(
        [
            node("BatchNormalization", "x scale bias mean var", "z mean_new var_new", training_mode=1),
            node("ReduceSumSquare", "z", "loss", keepdims=0),
            node(f"{TRAINING}.Gradient", "scale bias x", "dscale dbias", xs=["scale", "bias"], zs=["x"], y="loss"),
            node("Add", "accum/scale dscale", "sum_scale"),
            node("Add", "accum/bias dbias", "sum_bias"),
            node("Mul", "accum/scale lr", "by_scale"),
            node("Mul", "accum/bias lr", "by_bias"),
            node("Sub", "scale by_scale", "scale_new"),
            node("Sub", "bias by_bias", "bias_new"),
        ],
        "training",
        [],
        [value(f"{name}_new", [3]) for name in ("scale", "bias", "mean", "var")]
        + [value("loss", []), value("sum_scale", [3]), value("sum_bias", [3])],
        [tensor("lr", 0.1)]
        + [tensor(f"accum/{name}", np.zeros(3), role="accum", param=name) for name in ("scale", "bias")],
    )
    state = dict.fromkeys(("scale", "bias", "mean", "var", "accum/scale", "accum/bias"), (3,))
    start, resets = starting(state)
    updates = {name: f"{name}_new" for name in ("scale", "bias", "mean", "var")}
    updates |= {"accum/scale": "sum_scale", "accum/bias": "sum_bias"}
    return model(graph, entry(start, algorithm, resets, updates))


def second_order() -> ModelProto:
    """A penalty on the gradient by the input: one Gradient differentiates what another computes."""
    graph = helper.make_graph(
        [node("MatMul", "x w", "h"), node("Tanh", "h", "y")],
        "critic",
        [value("x", ["n", 3])],
        [value("y", ["n", 1])],
        [tensor("w", np.ones((3, 1)))],
    )
    algorithm = helper.make_graph(
        [
            node("ReduceMean", "y", "score", keepdims=0),
            node(f"{TRAINING}.Gradient", "x w", "dx", xs=["x"], zs=["w"], y="score"),
            node("ReduceSumSquare", "dx", "penalty", keepdims=0),
            node("Add", "score penalty", "loss"),
            node(f"{TRAINING}.Gradient", "w x", "dw", xs=["w"], zs=["x"], y="loss"),
            node("Mul", "dw lr", "change"),
            node("Sub", "w change", "w_new"),
        ],
        "training",
        [],
        [value("loss", []), value("w_new", [3, 1])],
        [tensor("lr", 0.1)],
    )
    start, resets = starting({"w": (3, 1)})
    return model(graph, entry(start, algorithm, resets, {"w": "w_new"}))


GOOD: dict[str, Callable[[], ModelProto]] = {
    "adam": good,
    "gan": gan,
    "functions": with_functions,
    "control_flow": control_flow,
    "statistics": statistics,
    "second_order": second_order,
}

# ---- damages ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Damage:
    name: str
    apply: Callable[[ModelProto], None]
    code: str
    of: str = "adam"
    also: frozenset[str] = field(default=frozenset())
    """What follows from the damage and is worth saying too."""
    target: str | None = None


DAMAGES: list[Damage] = []


def damage(
    code: str, of: str = "adam", *, also: Iterable[str] = (), target: str | None = None
) -> Callable[[Callable[[ModelProto], None]], Callable[[ModelProto], None]]:
    """Enter a function that damages a model into the table; its name says what is wrong."""

    def enter(apply: Callable[[ModelProto], None]) -> Callable[[ModelProto], None]:
        row(code, apply.__name__, apply, of=of, also=also, target=target)
        return apply

    return enter


def row(
    code: str,
    name: str,
    apply: Callable[[ModelProto], object],
    *,
    of: str = "adam",
    also: Iterable[str] = (),
    target: str | None = None,
    refreshed: bool = False,
) -> None:
    """Enter a damage into the table; `refreshed` if it is not meant to be one to the fingerprint."""

    def change(m: ModelProto) -> None:
        apply(m)
        if refreshed:
            stale_free(m)

    DAMAGES.append(Damage(name, change, code, of, frozenset(also), target))


# What damages are made of.


def step_of(m: ModelProto, index: int = 0) -> TrainingInfoProto:
    return m.training_info[index]


def algorithm_of(m: ModelProto, index: int = 0) -> GraphProto:
    return step_of(m, index).algorithm


def first(graph: GraphProto, op: str) -> NodeProto:
    return nodes_of(graph, op)[0]


def nodes_of(graph: GraphProto, op: str) -> list[NodeProto]:
    return [n for n in graph.node if n.op_type == op]


def gradient(m: ModelProto) -> NodeProto:
    return nodes_of(algorithm_of(m), "Gradient")[-1]


def optimizer(m: ModelProto, index: int = 0) -> NodeProto:
    return next(n for n in step_of(m, index).algorithm.node if n.op_type in ("Adam", "Momentum", "Adagrad"))


def attribute(n: NodeProto, name: str) -> AttributeProto:
    return next(a for a in n.attribute if a.name == name)


def drop(items: Any, name: str) -> None:
    """Remove what has this name, key or the like from a repeated field."""
    index = next(i for i, item in enumerate(items) if name in (getattr(item, "name", None), getattr(item, "key", None)))
    del items[index]


def initializer(m: ModelProto, name: str) -> TensorProto:
    graphs = [m.graph, *(one.algorithm for one in m.training_info)]
    return next(t for g in graphs for t in g.initializer if t.name == name)


def binding(m: ModelProto, key: str, kind: str = "update_binding") -> Any:
    return next(b for b in getattr(step_of(m), kind) if b.key == key)


def bind(m: ModelProto, key: str, text: str, index: int = 0) -> None:
    step_of(m, index).update_binding.add(key=key, value=text)


def put(owner: Any, key: str | int, new: object) -> None:
    """Assign an attribute of a message, or an element of a repeated field."""
    if isinstance(key, str):
        setattr(owner, key, new)
    else:
        owner[key] = new


def append(graph: GraphProto, *nodes: NodeProto) -> None:
    graph.node.extend(nodes)


def insert(graph: GraphProto, index: int, new: NodeProto) -> None:
    nodes = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes[:index], new, *nodes[index:]])


def stale_free(m: ModelProto) -> None:
    """A damage to the inference graph is not meant to be one to its fingerprint."""
    for one in m.training_info:
        for prop in one.algorithm.metadata_props:
            if prop.key == FINGERPRINT:
                prop.value = fingerprint(m.graph)


# File and structure.


@damage("OW101")
def no_graph(m: ModelProto) -> None:
    del m.training_info[:]
    m.ClearField("graph")


row("OW102", "no_ir_version", lambda m: m.ClearField("ir_version"))
row("OW103", "ir_version_of_the_future", lambda m: put(m, "ir_version", 99))


@damage("OW104")
def name_is_not_text(m: ModelProto) -> None:
    m.graph.doc_string = "12345678"
    m.ParseFromString(m.SerializeToString().replace(b"12345678", b"\xff\xfe\xfd\xfc\xff\xfe\xfd\xfc"))


@damage("OW105")
def nested_without_end(m: ModelProto) -> None:
    graph = m.graph
    for _ in range(2000):
        graph = graph.node.add().attribute.add(name="body").g


@damage("OW106")
def training_of_the_prototype(m: ModelProto) -> None:
    inner = step_of(m).SerializeToString()
    size = len(inner)
    length = bytes(
        (size >> 7 * i & 0x7F) | (0x80 if size >> 7 * (i + 1) else 0) for i in range((size.bit_length() + 6) // 7)
    )
    del m.training_info[:]
    m.MergeFromString(b"\xaa\x01" + length + inner)  # field 21


row("OW107", "graph_call", lambda m: append(algorithm_of(m), node("GraphCall", "x", "called", graph_name="mlp")))
row(
    "OW115",
    "graph_call_of_nothing",
    lambda m: append(algorithm_of(m), node("GraphCall", "x", "called", graph_name="nothing")),
)
row("OW108", "algorithm_without_name", lambda m: algorithm_of(m).ClearField("name"))
row("OW108", "initialization_without_name", lambda m: step_of(m).initialization.ClearField("name"))
row("OW110", "unknown_standard_operator", lambda m: put(first(m.graph, "Relu"), "op_type", "Relooo"), refreshed=True)
row(
    "OW110",
    "unknown_attribute_in_inference",
    lambda m: first(m.graph, "Relu").attribute.append(helper.make_attribute("slope", 0.1)),
    refreshed=True,
)


@damage("OW111")
def attribute_twice(m: ModelProto) -> None:
    loss = algorithm_of(m).node[0]
    loss.attribute.extend([helper.make_attribute("reduction", "mean")] * 2)


row(
    "OW112",
    "initialization_with_unknown_operator",
    lambda m: put(first(step_of(m).initialization, "RandomNormal"), "op_type", "RandomGaussian"),
)


row(
    "OW117",
    "declared_shape_is_wrong",
    lambda m: m.graph.value_info.append(value("a", ["batch", 9, 9], TensorProto.FLOAT)),
    refreshed=True,
)
row(
    "OW118",
    "size_below_zero",
    lambda m: put(m.graph.input[0].type.tensor_type.shape.dim[0], "dim_value", -1),
    refreshed=True,
)


@damage("OW113")
def shapes_contradict(m: ModelProto) -> None:
    algorithm = algorithm_of(m)
    append(algorithm, node("MatMul", "w1 w1", "impossible"))


row(
    "OW113", "declared_type_is_wrong", lambda m: m.graph.value_info.append(value("a", ["batch", 8], TensorProto.DOUBLE))
)
row("OW120", "two_nodes_compute_one_name", lambda m: append(algorithm_of(m), node("Add", "step one", "step_new")))
row(
    "OW120",
    "two_initializers_of_one_name",
    lambda m: m.graph.initializer.append(m.graph.initializer[0]),
    refreshed=True,
)
row("OW121", "algorithm_declares_the_inference_input", lambda m: algorithm_of(m).input.append(m.graph.input[0]))
row(
    "OW121",
    "algorithm_declares_an_inference_weight",
    lambda m: algorithm_of(m).initializer.append(m.graph.initializer[0]),
)
row("OW121", "algorithm_computes_an_inference_value", lambda m: append(algorithm_of(m), node("Identity", "step", "h")))
row("OW122", "inference_reads_the_algorithm", lambda m: put(first(m.graph, "Relu").input, 0, "lr"), refreshed=True)
row("OW123", "inference_reads_nothing", lambda m: put(nodes_of(m.graph, "Gemm")[1].input, 2, "b3"), refreshed=True)
row(
    "OW123",
    "initialization_reads_nothing",
    lambda m: insert(step_of(m).initialization, 0, node("Identity", "nothing", "unused")),
)
row(
    "OW123",
    "body_reads_nothing",
    lambda m: put(attribute(m.graph.node[0], "body").g.node[0].input, 1, "w_"),
    of="control_flow",
    refreshed=True,
)


@damage("OW124")
def circle(m: ModelProto) -> None:
    first(algorithm_of(m), "Add").input[0] = "turn"
    append(algorithm_of(m), node("Identity", "step_new", "turn"))


@damage("OW125")
def unsorted(m: ModelProto) -> None:
    algorithm = algorithm_of(m)
    reordered = list(reversed(algorithm.node))
    del algorithm.node[:]
    algorithm.node.extend(reordered)


row("OW126", "output_of_nothing", lambda m: algorithm_of(m).output.append(value("accuracy", [])))
row("OW127", "output_of_inference_again", lambda m: algorithm_of(m).output.append(m.graph.output[0]))
row("OW128", "step_reads_another_step", lambda m: put(nodes_of(algorithm_of(m, 1), "Neg")[0].input, 0, "gap"), of="gan")
row("OW130", "weight_is_cut_off", lambda m: put(initializer(m, "w1"), "raw_data", initializer(m, "w1").raw_data[:-4]))
row("OW130", "weight_has_two_sorts_of_data", lambda m: initializer(m, "w1").float_data.append(1.0))


def outside(m: ModelProto, location: str | None, **entries: str) -> None:
    weight = initializer(m, "w1")
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    if location is not None:
        entries["location"] = location
    for key, text in entries.items():
        weight.external_data.add(key=key, value=text)


row("OW131", "external_data_nowhere", lambda m: outside(m, None))
row("OW131", "external_data_outside", lambda m: outside(m, "../../etc/passwd"))
row("OW131", "external_data_at_an_absolute_path", lambda m: outside(m, "/etc/passwd"))
row("OW131", "external_data_at_no_number", lambda m: outside(m, "w.data", offset="first"))
row("OW132", "external_data_too_short", lambda m: outside(m, "w.data", offset="0", length="8"))


@damage("OW133")
def external_data_overlaps(m: ModelProto) -> None:
    outside(m, "w.data", offset="0", length="128")
    weight = initializer(m, "w2")
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, text in {"location": "w.data", "offset": "64", "length": "96"}.items():
        weight.external_data.add(key=key, value=text)


def on_two_devices(m: ModelProto, **spec: Any) -> Any:
    """A weight that is divided among two devices, and the specification to damage."""
    m.ir_version = 11
    m.configuration.add(name="two", num_devices=2, device=["a", "b"])
    reader = first(m.graph, "Gemm")
    made = reader.device_configurations.add(configuration_id="two").sharding_spec.add(
        tensor_name=reader.input[1], device=[0, 1]
    )
    made.sharded_dim.add(axis=-1).simple_sharding.add(num_shards=2)
    return made


@damage("OW140")
def fewer_names_than_devices(m: ModelProto) -> None:
    on_two_devices(m)
    del m.configuration[0].device[1:]


@damage("OW140")
def two_configurations_of_one_name(m: ModelProto) -> None:
    on_two_devices(m)
    m.configuration.add(name="two", num_devices=2)


@damage("OW141")
def configuration_that_is_not_there(m: ModelProto) -> None:
    on_two_devices(m)
    m.configuration[0].name = "three"


row("OW142", "divided_along_an_axis_that_is_not_there", lambda m: put(on_two_devices(m).sharded_dim[0], "axis", 2))
row("OW142", "given_to_a_third_of_two_devices", lambda m: put(on_two_devices(m).device, 1, 2))
row(
    "OW142",
    "more_parts_than_devices",
    lambda m: put(on_two_devices(m).sharded_dim[0].simple_sharding[0], "num_shards", 4),
)
row("OW142", "divided_and_not_read", lambda m: put(on_two_devices(m), "tensor_name", "elsewhere"))


@damage("OW143")
def devices_before_their_time(m: ModelProto) -> None:
    on_two_devices(m)
    m.ir_version = 10


# Bindings and state.


row("OW201", "key_is_misspelt", lambda m: bind(m, "w1x", "loss"))
row("OW201", "key_is_an_input", lambda m: bind(m, "labels", "loss"))
row("OW201", "key_is_computed", lambda m: bind(m, "h", "loss"))
row("OW201", "key_belongs_to_another_step", lambda m: bind(m, "d/momentum", "loss", 1), of="gan")
row("OW202", "key_is_bound_twice", lambda m: bind(m, "w1", "w1_new"))
row("OW202", "key_is_initialized_twice", lambda m: step_of(m).initialization_binding.add(key="w1", value="w1_start"))


@damage("OW203", "gan", also=["OW419"])
def two_steps_update_one_variable(m: ModelProto) -> None:
    append(algorithm_of(m), node("Neg", "g", "g_turned"))
    algorithm_of(m).output.append(value("g_turned", [2, 3]))
    bind(m, "g", "g_turned")


@damage("OW204", "gan")
def two_steps_initialize_one_variable(m: ModelProto) -> None:
    insert(step_of(m).initialization, 0, node("RandomNormal", "", "g_again", shape=[2, 3], seed=1.0))
    step_of(m).initialization.output.append(value("g_again", [2, 3]))
    step_of(m).initialization_binding.add(key="g", value="g_again")


row("OW205", "update_is_not_an_output", lambda m: drop(algorithm_of(m).output, "w1_new"))
row("OW205", "update_does_not_exist", lambda m: put(binding(m, "w1"), "value", "w1_neu"), also=["OW213"])


@damage("OW206", "statistics")
def update_is_an_inference_output(m: ModelProto) -> None:
    m.graph.initializer.append(tensor("last", np.zeros((2, 3))))
    stale_free(m)
    insert(step_of(m).initialization, 0, node("RandomNormal", "", "last_start", shape=[2, 3], seed=1.0))
    step_of(m).initialization.output.append(value("last_start", [2, 3]))
    step_of(m).initialization_binding.add(key="last", value="last_start")
    bind(m, "last", "y")


@damage("OW207")
def update_of_another_type(m: ModelProto) -> None:
    append(algorithm_of(m), node("Cast", "step_new", "step_float", to=FLOAT))
    algorithm_of(m).output.append(value("step_float", []))
    binding(m, "step").value = "step_float"


@damage("OW208", "second_order")
def update_of_another_shape(m: ModelProto) -> None:
    append(algorithm_of(m), node("Transpose", "w_new", "w_turned"))
    algorithm_of(m).output.append(value("w_turned", [1, 3]))
    binding(m, "w").value = "w_turned"


@damage("OW209")
def key_is_sparse(m: ModelProto) -> None:
    sparse = SparseTensorProto(values=tensor("few", [1.0]), indices=tensor("where", [2], np.int64), dims=[8])
    algorithm_of(m).sparse_initializer.append(sparse)
    append(algorithm_of(m), node("Neg", "b1", "few_new"))
    algorithm_of(m).output.append(value("few_new", [8]))
    bind(m, "few", "few_new")


row("OW210", "variable_is_an_input_too", lambda m: m.graph.input.append(value("w1", WEIGHTS["w1"])), refreshed=True)
row(
    "OW211",
    "one_value_for_two_variables",
    lambda m: put(binding(m, "w1/exp_avg"), "value", "w1/exp_avg_sq_new"),
    also=["OW213", "OW219"],
)


@damage("OW212", also=["OW213", "OW419"])
def variable_is_assigned_to_itself(m: ModelProto) -> None:
    algorithm_of(m).output.append(value("w1", WEIGHTS["w1"]))
    binding(m, "w1").value = "w1"


row("OW213", "slot_is_not_bound", lambda m: drop(step_of(m).update_binding, "w1/exp_avg"), also=["OW215"])


@damage("OW214")
def large_output_is_not_bound(m: ModelProto) -> None:
    append(algorithm_of(m), node("Neg", "w1", "turned"))
    algorithm_of(m).output.append(value("turned", WEIGHTS["w1"]))


@damage("OW215", "second_order")
def state_is_never_updated(m: ModelProto) -> None:
    insert(step_of(m).initialization, 0, node("Constant", "", "lr_start", value=tensor("", 0.1)))
    step_of(m).initialization.output.append(value("lr_start", []))
    step_of(m).initialization_binding.add(key="lr", value="lr_start")


row(
    "OW216", "state_is_not_initialised", lambda m: drop(step_of(m).initialization_binding, "w1/exp_avg"), also=["OW307"]
)
row("OW217", "empty_step", lambda m: m.training_info.add())


@damage("OW218")
def step_that_only_evaluates(m: ModelProto) -> None:
    algorithm = m.training_info.add().algorithm
    algorithm.name = "evaluate"
    append(algorithm, node("ArgMax", "logits", "class", axis=1, keepdims=0), node("Equal", "class labels", "right"))
    append(algorithm, node("Cast", "right", "hits", to=FLOAT), node("ReduceMean", "hits", "accuracy", keepdims=0))
    algorithm.input.append(value("labels", ["batch"], INT64))
    algorithm.output.append(value("accuracy", []))


@damage("OW219")
def slots_are_swapped(m: ModelProto) -> None:
    binding(m, "w1/exp_avg").value = "w1/exp_avg_sq_new"
    binding(m, "w1/exp_avg_sq").value = "w1/exp_avg_new"


row("OW220", "binding_without_key", lambda m: bind(m, "", "loss"))
row("OW220", "binding_without_value", lambda m: put(binding(m, "w1"), "value", ""), also=["OW213"])


# Initialization.


row("OW301", "initialization_has_inputs", lambda m: step_of(m).initialization.input.append(value("seed", [])))
row("OW302", "initialization_is_missing", lambda m: step_of(m).ClearField("initialization"))
row(
    "OW303",
    "initialization_reads_a_weight",
    lambda m: insert(step_of(m).initialization, 0, node("Neg", "w1", "turned")),
)
row(
    "OW304",
    "initial_value_does_not_exist",
    lambda m: put(binding(m, "w1", "initialization_binding"), "value", "w1_begin"),
    also=["OW307"],
)
row("OW304", "initial_value_is_not_an_output", lambda m: drop(step_of(m).initialization.output, "w1_start"))


@damage("OW305", "second_order")
def initial_value_of_another_type(m: ModelProto) -> None:
    attr = first(step_of(m).initialization, "RandomNormal").attribute
    attr.append(helper.make_attribute("dtype", TensorProto.DOUBLE))
    step_of(m).initialization.output[0].type.tensor_type.elem_type = TensorProto.DOUBLE


@damage("OW306", "second_order")
def initial_value_of_another_shape(m: ModelProto) -> None:
    made = first(step_of(m).initialization, "RandomNormal")
    attribute(made, "shape").ints[:] = [1, 3]
    step_of(m).initialization.output[0].CopyFrom(value("w_start", [1, 3]))


@damage("OW307")
def initial_value_for_nothing(m: ModelProto) -> None:
    insert(step_of(m).initialization, 0, node("RandomNormal", "", "more", shape=[1], seed=1.0))
    step_of(m).initialization.output.append(value("more", [1]))


row("OW308", "no_seed", lambda m: drop(first(step_of(m).initialization, "RandomNormal").attribute, "seed"))


# Gradient.


row("OW401", "gradient_without_xs", lambda m: drop(gradient(m).attribute, "xs"))
row("OW402", "gradient_without_y", lambda m: drop(gradient(m).attribute, "y"))


@damage("OW402")
def gradient_with_y_of_another_sort(m: ModelProto) -> None:
    drop(gradient(m).attribute, "y")
    gradient(m).attribute.append(helper.make_attribute("y", ["loss"]))


row("OW403", "gradient_of_an_unknown_y", lambda m: put(attribute(gradient(m), "y"), "s", b"los"))
row("OW403", "gradient_by_an_unknown_x", lambda m: put(attribute(gradient(m), "xs").strings, 0, b"w_1"))


@damage("OW404")
def gradient_lacks_an_input(m: ModelProto) -> None:
    del gradient(m).input[-1]


row("OW404", "gradient_skips_an_input", lambda m: put(gradient(m).input, 0, ""))
row("OW405", "gradient_has_too_many_outputs", lambda m: gradient(m).output.append("dx2"), of="second_order")


@damage("OW406")
def gradient_by_one_name_twice(m: ModelProto) -> None:
    attribute(gradient(m), "zs").strings.append(b"x")
    gradient(m).input.append("x")


@damage("OW407")
def gradient_by_a_constant(m: ModelProto) -> None:
    attribute(gradient(m), "zs").strings.append(b"w1")
    gradient(m).input.append("w1")


@damage("OW408")
def loss_does_not_depend_on_a_weight(m: ModelProto) -> None:
    m.graph.initializer.append(tensor("spare", np.zeros(8)))
    first(m.graph, "Gemm").input[2] = "spare"
    stale_free(m)


row("OW409", "way_to_the_loss_is_rounded", lambda m: put(first(m.graph, "Relu"), "op_type", "Round"), refreshed=True)


@damage("OW409", "second_order")
def way_to_the_loss_is_cast(m: ModelProto) -> None:
    del m.graph.node[1:]
    append(m.graph, node("Cast", "h", "whole", to=INT64), node("Cast", "whole", "y", to=FLOAT))
    stale_free(m)


@damage("OW410", "second_order")
def variables_are_not_independent(m: ModelProto) -> None:
    attribute(gradient(m), "zs").strings.append(b"h")
    gradient(m).input.append("h")


row("OW411", "loss_is_not_scalar", lambda m: put(attribute(gradient(m), "y"), "s", b"y"), of="second_order")


@damage("OW412")
def loss_depends_on_an_unnamed_input(m: ModelProto) -> None:
    attribute(gradient(m), "zs").strings[:] = [b"x"]
    del gradient(m).input[-1]


@damage("OW413", "second_order")
def gradient_by_an_integer(m: ModelProto) -> None:
    algorithm_of(m).initializer.append(tensor("k", 1, np.int64))
    attribute(gradient(m), "xs").strings.append(b"k")
    gradient(m).input[:] = ["w", "k", "x"]


@damage("OW414")
def gradient_of_an_integer(m: ModelProto) -> None:
    insert(algorithm_of(m), 1, node("Cast", "loss", "loss_whole", to=INT64))
    attribute(gradient(m), "y").s = b"loss_whole"


@damage("OW415", "second_order")
def gradient_of_its_own_result(m: ModelProto) -> None:
    attribute(gradient(m), "y").s = b"norm"
    append(algorithm_of(m), node("ReduceSumSquare", "dw", "norm", keepdims=0))


@damage("OW416", "control_flow")
def gradient_in_a_branch(m: ModelProto) -> None:
    branch = attribute(first(algorithm_of(m), "If"), "else_branch").g
    insert(branch, 0, node(f"{TRAINING}.Gradient", "w x target", "dw2", xs=["w"], zs=["x", "target"], y="loss"))


@damage("OW417")
def gradient_inputs_in_the_wrong_order(m: ModelProto) -> None:
    gradient(m).input[4:] = ["labels", "x"]


@damage("OW418", "second_order")
def gradient_is_not_used(m: ModelProto) -> None:
    attribute(gradient(m), "xs").strings.append(b"x")
    attribute(gradient(m), "zs").strings[:] = []
    gradient(m).output.append("dx_again")


@damage("OW419")
def gradients_are_swapped(m: ModelProto) -> None:
    """Of two weights of equal shape, each is updated by the gradient of the other."""
    m.graph.initializer.append(tensor("spare", np.zeros(8)))
    insert(m.graph, 1, node("Add", "h spare", "h2"))
    first(m.graph, "Relu").input[0] = "h2"
    stale_free(m)
    one = step_of(m)
    attribute(gradient(m), "xs").strings.append(b"spare")
    gradient(m).input[:] = [*gradient(m).input[:4], "spare", *gradient(m).input[4:]]
    gradient(m).output.append("d_spare")
    append(one.algorithm, node("Sub", "spare d_b1", "spare_new"), node("Mul", "d_spare d_spare", "kept"))
    append(one.algorithm, node("ReduceSum", "kept", "size", keepdims=0))
    one.algorithm.output.extend([value("spare_new", [8]), value("size", [])])
    insert(one.initialization, 0, node("RandomNormal", "", "spare_start", shape=[8], seed=1.0))
    one.initialization.output.append(value("spare_start", [8]))
    one.initialization_binding.add(key="spare", value="spare_start")
    bind(m, "spare", "spare_new")


row(
    "OW419",
    "weight_only_decays",
    lambda m: put(first(algorithm_of(m), "Mul").input, 0, "w"),
    of="second_order",
    also=["OW418"],
)
row(
    "OW420",
    "weight_with_gradient_is_not_updated",
    lambda m: drop(step_of(m).update_binding, "w"),
    of="second_order",
    also=["OW215"],
)


# Optimizers.


row("OW501", "unknown_training_operator", lambda m: put(optimizer(m), "op_type", "AdamW"))


@damage("OW502")
def adam_lacks_an_input(m: ModelProto) -> None:
    del optimizer(m).input[-1]


row("OW502", "adam_skips_an_input", lambda m: put(optimizer(m).input, 6, ""), also=["OW418", "OW419"])


@damage("OW503", also=["OW205"])
def adam_lacks_an_output(m: ModelProto) -> None:
    drop(algorithm_of(m).output, optimizer(m).output[-1])
    del optimizer(m).output[-1]


row("OW504", "momentum_without_alpha", lambda m: drop(optimizer(m).attribute, "alpha"), of="gan")
row(
    "OW505", "momentum_of_an_unknown_mode", lambda m: put(attribute(optimizer(m), "mode"), "s", b"heavy_ball"), of="gan"
)
row("OW506", "learning_rate_is_an_integer", lambda m: initializer(m, "lr").CopyFrom(tensor("lr", 1, np.int64)))
row("OW506", "learning_rate_is_a_vector", lambda m: initializer(m, "lr").CopyFrom(tensor("lr", [0.1, 0.1])))


@damage("OW507", "gan")
def count_is_a_float(m: ModelProto) -> None:
    insert(algorithm_of(m), 0, node("Cast", "count", "count_float", to=FLOAT))
    optimizer(m).input[1] = "count_float"


@damage("OW508")
def slot_of_another_type(m: ModelProto) -> None:
    insert(algorithm_of(m), 3, node("Cast", "w1/exp_avg", "wide", to=TensorProto.DOUBLE))
    args = optimizer(m).input
    args[list(args).index("w1/exp_avg")] = "wide"


@damage("OW509", also=["OW419"])
def gradients_in_the_wrong_order(m: ModelProto) -> None:
    args = optimizer(m).input
    args[6], args[7] = args[7], args[6]


row("OW510", "adam_counts_from_zero", lambda m: put(optimizer(m).input, 1, "step"))
row("OW511", "adam_does_not_count", lambda m: put(optimizer(m).input, 1, "one"))
row("OW512", "adam_never_forgets", lambda m: optimizer(m).attribute.append(helper.make_attribute("beta", 1.0)))


# Functions, operator sets, runtimes.


@damage("OW601")
def training_domain_is_not_imported(m: ModelProto) -> None:
    del m.opset_import[1]


row("OW602", "training_domain_of_another_version", lambda m: put(m.opset_import[1], "version", 2))
row("OW603", "training_before_its_time", lambda m: put(m, "ir_version", 6), also=["OW708"])
row("OW604", "functions_before_their_time", lambda m: put(m, "ir_version", 7), of="functions", also=["OW708"])
row("OW605", "domain_is_not_imported", lambda m: append(algorithm_of(m), node("com.example.Log", "loss", "logged")))


@damage("OW605", "functions")
def domain_is_not_imported_by_a_function(m: ModelProto) -> None:
    del m.functions[1].opset_import[1]


@damage("OW606")
def operator_nobody_defines(m: ModelProto) -> None:
    append(algorithm_of(m), node("com.example.Log", "loss", "logged"))
    m.opset_import.add(domain="com.example", version=1)


row("OW607", "function_was_removed", lambda m: drop(m.functions, "SGD"), of="functions")
row("OW607", "all_functions_were_removed", lambda m: m.ClearField("functions"), of="functions")


@damage("OW608", "functions")
def recursion(m: ModelProto) -> None:
    m.functions[0].node[1].CopyFrom(node("onward.Decay", "x x", "y"))
    m.functions[0].opset_import.add(domain="onward", version=1)


row("OW609", "call_with_too_many_inputs", lambda m: first(algorithm_of(m), "SGD").input.append("lr"), of="functions")
row(
    "OW609", "call_with_too_many_outputs", lambda m: first(algorithm_of(m), "SGD").output.append("rest"), of="functions"
)


@damage("OW610", "functions")
def call_with_too_few_inputs(m: ModelProto) -> None:
    del first(algorithm_of(m), "Decay").input[-1]


row(
    "OW611",
    "call_without_an_attribute",
    lambda m: drop(first(algorithm_of(m), "SGD").attribute, "weight_decay"),
    of="functions",
)
row(
    "OW612",
    "call_with_an_unknown_attribute",
    lambda m: first(algorithm_of(m), "SGD").attribute.append(helper.make_attribute("momentum", 0.9)),
    of="functions",
)
row("OW613", "function_is_defined_twice", lambda m: m.functions.append(m.functions[2]), of="functions")


@damage("OW614", "functions")
def functions_that_double(m: ModelProto) -> None:
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("onward", 1)]
    for i in range(60):
        inner = f"onward.Twice{i - 1}" if i else "Neg"
        body = [node(inner, "x", "half"), node(inner, "half", "y")]
        m.functions.append(helper.make_function("onward", f"Twice{i}", ["x"], ["y"], body, imports))
    append(algorithm_of(m), node("onward.Twice59", "loss", "never"))


@damage("OW615", "functions")
def function_is_not_called(m: ModelProto) -> None:
    m.functions.append(m.functions[0])
    m.functions[-1].name = "Third"


row("OW616", "operator_set_in_two_versions", lambda m: m.opset_import.add(domain="ai.onnx", version=20))
row("OW617", "operator_set_of_the_future", lambda m: put(m.opset_import[0], "version", 999))


@damage("OW618", "functions")
def function_with_another_version_of_an_operator(m: ModelProto) -> None:
    """LabelEncoder has other attributes from version 2 of its domain on."""
    m.opset_import.add(domain="ai.onnx.ml", version=3)
    m.functions[0].opset_import.add(domain="ai.onnx.ml", version=1)
    m.functions[0].node.append(node("ai.onnx.ml.LabelEncoder", m.functions[0].input[0], "label"))


row(
    "OW618",
    "function_of_an_older_operator_set",
    lambda m: put(next(opset for opset in m.functions[0].opset_import if not opset.domain), "version", 13),
    of="functions",
)


@damage("OW650", target="onnxruntime")
def operator_set_is_too_new_for_the_runtime(m: ModelProto) -> None:
    """And at that operator set the runtime has no random numbers either."""
    m.opset_import[0].version = 28
    for made in nodes_of(step_of(m).initialization, "RandomNormal"):
        dims = list(attribute(made, "shape").ints)
        made.CopyFrom(node("Constant", "", made.output[0], value=tensor("", np.ones(dims))))


row("OW651", "ir_version_is_too_new_for_the_runtime", lambda m: put(m, "ir_version", 14), target="onnxruntime")


@damage("OW652", target="onnxruntime")
def training_operators_for_the_runtime(m: ModelProto) -> None:
    """Not a damage: what is true of every training model."""


row("OW653", "no_kernel_in_the_runtime", lambda m: put(m.opset_import[0], "version", 22), target="onnxruntime")
row(
    "OW654",
    "domain_is_unknown_to_the_runtime",
    lambda m: operator_nobody_defines(m),
    also=["OW606"],
    target="onnxruntime",
)


@damage("OW655", "second_order", target="onnxruntime")
def gradient_in_the_inference_graph(m: ModelProto) -> None:
    append(m.graph, node("ReduceMean", "y", "whole", keepdims=0))
    append(m.graph, node(f"{TRAINING}.Gradient", "x", "slope", xs=["x"], y="whole"))
    m.graph.output.append(value("slope", ["n", 3]))
    stale_free(m)


# Metadata and staleness.


row("OW701", "inference_graph_was_changed", lambda m: put(first(m.graph, "Relu"), "op_type", "Tanh"))


@damage("OW702", also=["OW701"])
def inference_value_was_renamed(m: ModelProto) -> None:
    m.graph.node[2].output[0] = m.graph.output[0].name = "logits_1"


row("OW702", "algorithm_reads_nothing", lambda m: put(first(algorithm_of(m), "Add").input, 1, "on"))
row(
    "OW703",
    "metadata_is_not_json",
    lambda m: put(next(p for p in algorithm_of(m).metadata_props if p.key == "train.progress"), "value", "{step: 1}"),
)
row("OW703", "metadata_is_json_without_end", lambda m: m.metadata_props.add(key="train.args", value="[" * 100_000))


@damage("OW704")
def slot_of_an_unknown_parameter(m: ModelProto) -> None:
    props = initializer(m, "w1/exp_avg").metadata_props
    next(p for p in props if p.key == "train.param").value = "w9"


row(
    "OW704",
    "optimizer_of_an_unknown_parameter",
    lambda m: put(
        next(p for p in algorithm_of(m).metadata_props if p.key == "train.optimizer"), "value", '[{"params": ["w9"]}]'
    ),
)


@damage("OW705")
def role_is_unknown(m: ModelProto) -> None:
    props = initializer(m, "w1/exp_avg").metadata_props
    next(p for p in props if p.key == "train.role").value = "villain"


row("OW706", "metadata_key_twice", lambda m: algorithm_of(m).metadata_props.add(key="train.progress", value="{}"))


@damage("OW707")
def metadata_key_of_the_model_twice(m: ModelProto) -> None:
    for text in ("a", "b"):
        m.metadata_props.add(key="author", value=text)


row("OW708", "metadata_before_its_time", lambda m: put(m, "ir_version", 9))
