"""Write a model with the shapes of Llama as an .onnx file without weight data.

    python examples/llama.py 7b 70b       # llama-7b.onnx and llama-70b.onnx, in seconds

For `onward plan`, which needs shapes and types only. Blocks are made of basic operators, as PyTorch
exports them: normalization, rotary embedding and attention.
"""

from __future__ import annotations

import dataclasses
import sys

import onnx
from onnx import TensorProto, helper


@dataclasses.dataclass(frozen=True)
class Size:
    width: int
    hidden: int
    layers: int
    heads: int
    groups: int
    """Heads of keys and values, shared by several heads of queries."""
    words: int = 32000


SIZES = {
    "tiny": Size(64, 172, 2, 4, 2, 256),
    "7b": Size(4096, 11008, 32, 32, 32),
    "70b": Size(8192, 28672, 80, 64, 8),
}


class _Graph:
    def __init__(self, size: Size, type_: int):
        self.size, self.type = size, type_
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[TensorProto] = []
        self._at = 0

    def weight(self, name: str, *dims: int) -> str:
        """Add an initializer with external data that does not exist."""
        tensor = TensorProto(name=name, dims=dims, data_type=self.type, data_location=TensorProto.EXTERNAL)
        length = helper.tensor_dtype_to_np_dtype(self.type).itemsize
        for dim in dims:
            length *= dim
        for key, value in {"location": "weights.data", "offset": self._at, "length": length}.items():
            tensor.external_data.add(key=key, value=str(value))
        self._at += length
        self.tensors.append(tensor)
        return name

    def constant(self, name: str, values: list[float], dims: list[int], type_: int | None = None) -> str:
        if all(tensor.name != name for tensor in self.tensors):
            self.tensors.append(helper.make_tensor(name, type_ or self.type, dims, values))
        return name

    def ints(self, *values: int) -> str:
        return self.constant(f"ints_{'_'.join(map(str, values))}", list(values), [len(values)], TensorProto.INT64)

    def number(self, value: float) -> str:
        return self.constant(f"number_{value}", [value], [])

    def add(self, operator: str, *inputs: str, outputs: int = 1, **attributes: object) -> str:
        name = f"{operator}_{len(self.nodes)}"
        names = [name] if outputs == 1 else [f"{name}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(operator, inputs, names, name=name, **attributes))
        return names[0]

    def linear(self, name: str, x: str, inputs: int, outputs: int) -> str:
        return self.add("MatMul", x, self.weight(f"{name}.weight", inputs, outputs))

    def norm(self, name: str, x: str) -> str:
        square = self.add("ReduceMean", self.add("Mul", x, x), self.ints(-1))
        scale = self.add("Reciprocal", self.add("Sqrt", self.add("Add", square, self.number(1e-5))))
        return self.add("Mul", self.add("Mul", x, scale), self.weight(f"{name}.weight", self.size.width))

    def rotate(self, x: str, cos: str, sin: str, half: int) -> str:
        """Apply the rotary embedding: rotate pairs of numbers of each head by an angle that grows with the position."""
        first = self.add("Slice", x, self.ints(0), self.ints(half), self.ints(3))
        second = self.add("Slice", x, self.ints(half), self.ints(2 * half), self.ints(3))
        rotated = self.add("Concat", self.add("Neg", second), first, axis=3)
        return self.add("Add", self.add("Mul", x, cos), self.add("Mul", rotated, sin))

    def heads(self, x: str, count: int, width: int) -> str:
        """Split heads: [N, T, count * width] to [N, count, T, width]."""
        return self.add("Transpose", self.add("Reshape", x, self.ints(0, 0, count, width)), perm=[0, 2, 1, 3])

    def attention(self, name: str, x: str, cos: str, sin: str) -> str:
        size = self.size
        head = size.width // size.heads
        q = self.heads(self.linear(f"{name}.q_proj", x, size.width, size.width), size.heads, head)
        k = self.heads(self.linear(f"{name}.k_proj", x, size.width, size.groups * head), size.groups, head)
        v = self.heads(self.linear(f"{name}.v_proj", x, size.width, size.groups * head), size.groups, head)
        q, k = self.rotate(q, cos, sin, head // 2), self.rotate(k, cos, sin, head // 2)
        if size.groups != size.heads:
            k, v = self.repeat(k), self.repeat(v)
        scores = self.add("MatMul", q, self.add("Transpose", k, perm=[0, 1, 3, 2]))
        scaled = self.add("Mul", scores, self.number(head**-0.5))
        weights = self.add("Softmax", self.add("Add", scaled, "mask"), axis=-1)
        mixed = self.add("Transpose", self.add("MatMul", weights, v), perm=[0, 2, 1, 3])
        joined = self.add("Reshape", mixed, self.ints(0, 0, size.width))
        return self.linear(f"{name}.o_proj", joined, size.width, size.width)

    def repeat(self, x: str) -> str:
        """Repeat each head of keys and values for all heads of queries that share it."""
        size = self.size
        head = size.width // size.heads
        wide = self.add("Unsqueeze", x, self.ints(2))
        wide = self.add("Expand", wide, self.ints(1, 1, size.heads // size.groups, 1, 1))
        return self.add("Reshape", wide, self.ints(0, size.heads, -1, head))

    def mlp(self, name: str, x: str) -> str:
        size = self.size
        gate = self.linear(f"{name}.gate_proj", x, size.width, size.hidden)
        up = self.linear(f"{name}.up_proj", x, size.width, size.hidden)
        opened = self.add("Mul", self.add("Mul", gate, self.add("Sigmoid", gate)), up)
        return self.linear(f"{name}.down_proj", opened, size.hidden, size.width)


def llama(size: Size, type_: int = TensorProto.BFLOAT16) -> onnx.ModelProto:
    """Return the model (tokens, cos, sin, mask) -> logits."""
    graph = _Graph(size, type_)
    x = graph.add("Gather", graph.weight("model.embed_tokens.weight", size.words, size.width), "tokens")
    for i in range(size.layers):
        name = f"model.layers.{i}"
        x = graph.add("Add", x, graph.attention(f"{name}.self_attn", graph.norm(f"{name}.input_norm", x), "cos", "sin"))
        x = graph.add("Add", x, graph.mlp(f"{name}.mlp", graph.norm(f"{name}.post_norm", x)))
    logits = graph.linear("lm_head", graph.norm("model.norm", x), size.width, size.words)
    graph.nodes.append(helper.make_node("Identity", [logits], ["logits"], name="logits"))
    head = size.width // size.heads
    inputs = [
        helper.make_tensor_value_info("tokens", TensorProto.INT64, ["N", "T"]),
        helper.make_tensor_value_info("cos", type_, ["T", head]),
        helper.make_tensor_value_info("sin", type_, ["T", head]),
        helper.make_tensor_value_info("mask", type_, ["T", "T"]),
    ]
    outputs = [helper.make_tensor_value_info("logits", type_, ["N", "T", size.words])]
    proto = helper.make_graph(graph.nodes, "llama", inputs, outputs, graph.tensors)
    return helper.make_model(proto, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])


if __name__ == "__main__":
    for name in sys.argv[1:] or SIZES:
        onnx.save(llama(SIZES[name]), f"llama-{name}.onnx")
