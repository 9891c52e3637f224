"""Writes the files beside it: a linear model and its training, in forms that onnx had before the present one.

Field by field, by their numbers, so that no onnx of those days is needed. docs/older-forms.md says where they are from.
"""

from __future__ import annotations

import struct
from pathlib import Path

FLOAT, INT64 = 1, 7


# ---- protobuf --------------------------------------------------------------------------------------------------------


def varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def message(*fields: tuple[int, int | float | str | bytes]) -> bytes:
    return b"".join(field(number, value) for number, value in fields)


def field(number: int, value: int | float | str | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


# ---- parts that have not changed since -------------------------------------------------------------------------------


def node(op_type, inputs, outputs, *attributes, name="", domain=""):
    ports = [(1, name) for name in inputs] + [(2, name) for name in outputs]
    return message(*ports, (3, name), (4, op_type), *((5, a) for a in attributes), (7, domain))


def number(name, value):
    return message((1, name), (2, float(value)), (20, 1))


def text(name, value):
    return message((1, name), (4, value), (20, 3))


def texts(name, values):
    return message((1, name), *((9, value) for value in values), (20, 8))


def numbers(name, values):
    return message((1, name), *((8, value) for value in values), (20, 7))


def tensor(name, dims, *values, kind=FLOAT):
    data = struct.pack(f"<{len(values)}{'f' if kind == FLOAT else 'q'}", *values)
    return message(*((1, size) for size in dims), (2, kind), (8, name), (9, data))


def value(name, dims, kind=FLOAT):
    shape = message(*((1, message((1, size))) for size in dims))
    return message((1, name), (2, message((1, message((1, kind), (2, shape))))))


def graph(name, nodes, inputs, outputs, initializers=()):
    kinds = ((1, nodes), (5, initializers), (11, inputs), (12, outputs))
    return message((2, name), *((field, item) for field, items in kinds for item in items))


def function(name, inputs, outputs, nodes):
    ports = [(4, name) for name in inputs] + [(5, name) for name in outputs]
    return message((1, name), *ports, *((7, item) for item in nodes))


def pairs(number, bindings):
    return [(number, message((1, key), (2, value))) for key, value in bindings.items()]


def model(inference, *more, ir_version=3, opsets=(("", 9),)):
    imports = [(8, message((1, domain), (2, version))) for domain, version in opsets]
    return message((1, ir_version), (2, "older forms"), (7, inference), *imports, *more)


# ---- a linear model, as exporters of 2019 named its values -----------------------------------------------------------

X, LABEL, Y = value("input", (5, 1)), value("label", (5, 1)), value("3", (5, 1))
WEIGHT, STATE = value("1", (1, 1)), value("squared_grad_sum1", (1, 1))
NODES = [node("Transpose", ["1"], ["2"], numbers("perm", (1, 0))), node("MatMul", ["input", "2"], ["3"])]
LINEAR = graph("linear", NODES, [X, WEIGHT], [Y], [tensor("1", (1, 1), -0.25)])

SETTINGS = (number("decay_factor", 0), number("epsilon", 1e-7), number("norm_coefficient", 0))
INITIALIZERS = [tensor("T", (), 0, kind=INT64), tensor("R", (), 0.2), tensor("squared_grad_sum1", (1, 1), 1.0)]
RESULTS = [value("loss_value", ()), value("new_1", (1, 1)), value("new_squared_grad_sum_1", (1, 1))]
LOSS = node("MSE", ["label", "3"], ["loss_value"])


def adagrad(domain=""):
    inputs = ["R", "T", "1", "grad_1", "squared_grad_sum1"]
    return node("Adagrad", inputs, ["new_1", "new_squared_grad_sum_1"], *SETTINGS, name="Optimizer", domain=domain)


def linear_model():
    return model(LINEAR)


def may_2019():
    """A loss and an optimizer, each a node, and names for the gradients between them."""
    training = message(
        *((1, item) for item in INITIALIZERS),
        (2, LABEL),
        *((3, item) for item in RESULTS),
        (4, LOSS),
        *pairs(5, {"1": "grad_1"}),
        (6, adagrad()),
        *pairs(7, {"1": "new_1", "squared_grad_sum1": "new_squared_grad_sum_1"}),
    )
    return model(LINEAR, (21, training))


def training_linear_model():
    """July 2019: the inference graph calls a function, and so does the function that is the algorithm."""
    call = node("MyInferenceFunction", ["input", "1"], ["3"])
    called = function("MyInferenceFunction", ["input", "1"], ["3"], NODES)
    gradient = node("Gradient", ["input", "1"], ["grad_1"], texts("xs", ["1"]), text("y", "loss_value"))
    names = ["input", "label", "1", "T", "R", "squared_grad_sum1"]
    nodes = [call, LOSS, gradient, adagrad()]
    training = message(
        *((1, item) for item in INITIALIZERS),
        *((2, item) for item in (X, LABEL)),
        *((3, item) for item in RESULTS),
        (4, function("MyTrainingFunction", names, ["new_1", "new_squared_grad_sum_1"], nodes)),
        *pairs(7, {"new_1": "1", "new_squared_grad_sum_1": "squared_grad_sum1"}),
    )
    inference = graph("linear", [call], [X, WEIGHT], [Y], [tensor("1", (1, 1), -0.25)])
    return model(inference, (9, called), (21, training))


def calling(call, domain):
    """An algorithm with names of its own, which calls the inference graph."""
    nodes = [
        call,
        node("Sub", ["label", "score"], ["difference"]),
        node("Mul", ["difference", "difference"], ["squares"]),
        node("ReduceMean", ["squares"], ["loss_value"], message((1, "keepdims"), (3, 0), (20, 2))),
        node(
            "Gradient",
            ["1", "data", "label"],
            ["grad_1"],
            texts("xs", ["1"]),
            texts("zs", ["data", "label"]),
            text("y", "loss_value"),
            domain=domain,
        ),
        adagrad(domain),
    ]
    return graph("step", nodes, [value("data", (5, 1)), LABEL], RESULTS, INITIALIZERS)


def january_2020():
    """Graphs, but bindings lead from outputs to initializers, and a call is a node named like the graph."""
    algorithm = calling(node("Graph", ["data", "1"], ["score"], name="linear"), "")
    bindings = pairs(3, {"new_1": "1", "new_squared_grad_sum_1": "squared_grad_sum1"})
    return model(LINEAR, (21, message((2, algorithm), *bindings)))


def onnx_1_7():
    """The first release with training: as today, but for the call, whose values stand for others by position."""
    domain = "ai.onnx.preview.training"
    call = node("GraphCall", ["data", ""], ["score"], text("graph_name", "linear"), domain=domain)
    bindings = pairs(4, {"1": "new_1", "squared_grad_sum1": "new_squared_grad_sum_1"})
    training = message((2, calling(call, domain)), *bindings)
    return model(LINEAR, (20, training), ir_version=7, opsets=(("", 12), (domain, 1)))


FILES = (linear_model, training_linear_model, may_2019, january_2020, onnx_1_7)
FOLDER = Path(__file__).parent

if __name__ == "__main__":
    for write in FILES:
        (FOLDER / f"{write.__name__}.onnx").write_bytes(write())
