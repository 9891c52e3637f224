"""Models whose every text is a statement, a word of Python or of a program, or a character that ends a line.

What is made of them must compute the same, and leave no file called `marker` behind.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

MARK = "open('marker', 'w')"
STATEMENTS = [
    f'"; {MARK}; "',
    f"'); {MARK}; ('",
    f'"""\n{MARK}\n"""',
    f"'''\n{MARK}\n'''",
    f"\n{MARK}\n",
    f"\r{MARK}\r",
    f"\\\n{MARK}",
    f'\\"; {MARK} #',
    f"a\u0085{MARK}",
    f"a\u2028{MARK}",
    f"{{{MARK}}}",
    f"# {MARK}",
]
WORDS = [
    "class", "lambda", "in", "None", "True", "import", "print", "input", "len", "self", "ops", "as_single",
    "keras", "np", "torch", "F", "nn", "jax", "jnp", "params", "state", "batch", "inputs", "metrics", "changed",
    "loss", "forward", "training", "built", "watched", "keys", "axis", "__class__", "__init__", "__metadata__",
    "{}", "{0}", "%s", "é", "\ufb01", "fi", "0", "a b", "a-b", "x.weight", "x/weight", "\N{GRINNING FACE}", "_",
    "__", "y", "optimizer", "load", "call", "constant_1", "dropout", "Update", "exact", "step_1", "new_w",
    "eval", "save", "hub",
]  # fmt: skip
ROLES = ("weights", "inputs", "hidden", "outputs", "sizes")
WIDTH, SAMPLES = 4, 6


def strings(turn: int) -> dict[str, list[str]]:
    """A share of all for each role; `turn` is which."""
    found: dict[str, list[str]] = {role: [] for role in ROLES}
    for i, string in enumerate([*STATEMENTS, *WORDS]):
        found[ROLES[(i + turn) % len(ROLES)]].append(string)
    return found


def model(turn: int = 0) -> onnx.ModelProto:
    """A model of one training input for each of some strings, and a weight, an inner value or an output for others."""
    rng, roles = np.random.default_rng(turn), strings(turn)
    sentence = _Sentences()
    nodes, inputs, weights = [], [], []
    sizes = iter([*roles["sizes"], *(f"n{i}" for i in range(len(roles["inputs"])))])
    names = iter([*roles["hidden"], *(f"h{i}" for i in range(200))])
    for name in ("first", *roles["inputs"]):
        inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", next(sizes)], next(sentence)))
    now = next(names)
    nodes.append(helper.make_node("ReduceMean", ["first", "axes"], [now], next(sentence), next(sentence), keepdims=1))

    def then(op: str, *given: str, domain: str = "", **attributes: object) -> None:
        nonlocal now
        made = next(names)
        nodes.append(helper.make_node(op, [now, *given], [made], next(sentence), next(sentence), domain, **attributes))
        now = made

    for name in roles["inputs"]:  # a sum over a size that the program has to know
        total, count, number = f"total {name}", f"count {name}", f"number {name}"
        nodes.append(helper.make_node("ReduceSum", [name, "axes"], [total], next(sentence), keepdims=1))
        nodes.append(helper.make_node("Size", [name], [count], next(sentence)))
        nodes.append(helper.make_node("Cast", [count], [number], next(sentence), to=TensorProto.FLOAT))
        nodes.append(helper.make_node("Div", [total, number], [f"share {name}"], next(sentence)))
        then("Add", f"share {name}")
    for name in roles["weights"]:
        weights.append(numpy_helper.from_array(rng.normal(1, 0.1, (1, WIDTH)).astype("f"), name))
        weights[-1].doc_string = next(sentence)
        then("Mul", name)
        then("Tanh")
    then("Gelu", approximate="tanh")
    then(FUNCTION, domain=DOMAIN, **{"class": "tanh"})
    then("Einsum", "square", equation="ij,jk->ik")
    outputs = ["result", *roles["outputs"]]
    for name in outputs:
        nodes.append(helper.make_node("Mul", [now, "two"], [name], next(sentence), next(sentence)))
    return _finished(nodes, inputs, weights, outputs, rng, sentence)


DOMAIN, FUNCTION = f'"; {MARK}; "', f"f\n{MARK}\n"


class _Sentences(Iterator[str]):
    """Statements, over and over, each but for a number at its end."""

    def __init__(self) -> None:
        self._count = 0

    def __next__(self) -> str:
        self._count += 1
        return f"{STATEMENTS[self._count % len(STATEMENTS)]} # {self._count}"


def _finished(nodes, inputs, weights, outputs, rng, sentence) -> onnx.ModelProto:  # type: ignore[no-untyped-def]
    weights += [
        numpy_helper.from_array(rng.normal(size=(WIDTH, WIDTH)).astype("f"), "square"),
        numpy_helper.from_array(np.float32(2.0), "two"),
        numpy_helper.from_array(np.array([1]), "axes"),
    ]
    shape = ["N", WIDTH]
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape, next(sentence)) for name in outputs]
    graph = helper.make_graph(nodes, next(sentence), inputs, made, weights, next(sentence))
    proto = helper.make_model(
        graph,
        functions=[_function(sentence)],
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)],
        producer_name=next(sentence),
        producer_version=next(sentence),
        domain=next(sentence),
        doc_string=next(sentence),
        ir_version=10,
    )
    helper.set_model_props(proto, {next(sentence): next(sentence)})
    for holder in (proto.graph, *proto.graph.node, *proto.graph.input, *proto.graph.initializer):
        entry = holder.metadata_props.add()
        entry.key, entry.value = next(sentence), next(sentence)
    return proto


def _function(sentence: Iterator[str]) -> onnx.FunctionProto:
    inner = helper.make_node("Gelu", ["x"], ["gelu"], next(sentence), next(sentence))
    inner.attribute.append(onnx.AttributeProto(name="approximate", ref_attr_name="class", type=3))
    last = helper.make_node("Sin", ["gelu"], [f"y\n{MARK}"], next(sentence))
    opsets = [helper.make_opsetid("", 21)]
    return helper.make_function(
        DOMAIN, FUNCTION, ["x"], [f"y\n{MARK}"], [inner, last], opsets, ["class"], doc_string=next(sentence)
    )


def batch(names: list[str], rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {name: rng.normal(size=(SAMPLES, WIDTH)).astype("f") for name in names}
