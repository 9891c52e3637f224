"""Division of a forward pass into micro-batches of equal size.

To the graph of one of several processes (see data_parallel.py), a micro-batch is the batch of
another process. But micro-batches follow one another, so none can wait for a sum with the others.
Values that all need beforehand, such as the number of counted labels, are computed from the whole
batch. The loss is the sum over the micro-batches.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from onward.build import Builder
from onward.errors import UnsupportedError
from onward.lowering.data_parallel import extract_values, is_all_reduce, is_common
from onward.model import Model
from onward.model.walk import ancestors, read_by

COUNT, NUMBER = "micro-batches", "number of the micro-batch"
"""New inputs: the count as a float; two uint32 that seed the random numbers of a micro-batch."""
_OF_SHAPES = ("Shape", "Size")
_SUMS = ("Add", "Sub", "Sum")
_LINEAR = ("Identity", "Cast", "CastLike", "Neg", "Squeeze", "Unsqueeze", "Reshape", "Mul", "Div")
"""Operators that may act on terms of a sum, as the first input; a factor may be the other."""
_HINT = "use another strategy: `--strategy fsdp`"


def divide_into_micro_batches(model: Model, state: Collection[str], updated: Collection[str]) -> Model:
    """Let a forward pass compute one micro-batch, in place. Its metrics become terms of sums.

    Return a model that computes, once per batch, the values that all micro-batches read, and the
    `updated` state.
    """
    return _Dividing(model, state, updated).divide()


class _Dividing:
    def __init__(self, model: Model, state: Collection[str], updated: Collection[str]):
        self._model, self._graph = model, model.graph
        self._op = Builder(model.graph, opset=model.opset, names=model.names())
        self._state = {value for value in self._graph.inputs if value.name in state}
        self._updated = [value for value in self._graph.outputs if value.name in updated]
        self._totals: list[tuple[ir.Value, ir.Value]] = []
        """Values computed from the whole batch, with the inputs that take them."""

    def divide(self) -> Model:
        for value in self._updated:
            self._refuse_if_learned(value)
        self._graph.outputs[:] = [value for value in self._graph.outputs if value not in self._updated]
        self._draw_apart()
        terms = []
        for node in [node for node in self._graph if is_all_reduce(node)]:
            (source,) = node.inputs
            assert source is not None
            if is_common(node):
                terms.append(self._replace(node, self._op.Identity(source).value))
            elif self._follows_from_shapes(source):
                self._replace(node, (self._op(source) * self._input(COUNT, ir.DataType.FLOAT, ())).value)
            else:
                self._take_total(node, source)
        self._graph.sort()
        self._refuse_unless_summed(terms)
        totals = extract_values(self._model, [*self._updated, *(value for value, _ in self._totals)])
        for value, (_, input_) in zip(totals.outputs[len(self._updated) :], self._totals, strict=True):
            value.name = input_.name
        return totals

    def _input(self, name: str, dtype: ir.DataType, shape: tuple[int, ...]) -> ir.Value:
        input_ = next((value for value in self._graph.inputs if value.name == name), None)
        if input_ is None:
            input_ = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
            self._graph.inputs.append(input_)
        return input_

    def _draw_apart(self) -> None:
        """Let each micro-batch draw its own random numbers, as each process would."""
        for value in self._state:
            for node in value.consumers():
                if node.op_type == "BitwiseXor" and value.dtype == ir.DataType.UINT32:
                    node.replace_input_with(1, self._input(NUMBER, ir.DataType.UINT32, (2,)))

    def _take_total(self, node: ir.Node, source: ir.Value) -> None:
        assert source.dtype is not None
        self._refuse_if_learned(source)
        total = self._input(self._op.names.fresh(f"{source.name}/total"), source.dtype, ())
        total.shape = source.shape
        self._state.add(total)  # values that depend on it are not of one batch alone
        self._replace(node, total)
        self._totals.append((source, total))

    def _replace(self, node: ir.Node, new: ir.Value) -> ir.Value:
        old = node.outputs[0]
        if old.is_graph_output():
            name, old.name = old.name, self._op.names.fresh(f"{old.name}/all")
            new.name, new.type, new.shape = name, old.type, old.shape
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        self._graph.remove(node, safe=True)
        return new

    def _follows_from_shapes(self, value: ir.Value) -> bool:
        """True if a value is the same for all micro-batches, since they are of the same size."""
        _, reached = ancestors([value], reads=lambda node: () if node.op_type in _OF_SHAPES else read_by(node))
        return reached.isdisjoint(self._graph.inputs)

    def _refuse_if_learned(self, value: ir.Value) -> None:
        _, reached = ancestors([value])
        learned = [v for v in reached & self._state if v.dtype is None or v.dtype.is_floating_point()]
        if learned:
            raise UnsupportedError(
                f"`{value.name}` needs the whole batch, like statistics of BatchNormalization; a pipeline divides it",
                hint=_HINT,
            )

    def _refuse_unless_summed(self, terms: list[ir.Value]) -> None:
        """Raise unless metrics are sums of terms: not the root of a sum, nor a sum plus a constant."""
        of_terms = set(terms)
        wrong: list[ir.Value] = []
        for node in self._graph:
            is_term = [value in of_terms for value in read_by(node)]
            if node.op_type == "CastLike":  # the second input gives only the type
                is_term = is_term[:1]
            if any(is_term):
                of_terms.update(node.outputs)
                is_sum = node.op_type in _SUMS and all(is_term)
                is_linear = node.op_type in _LINEAR and sum(is_term) == 1 and (is_term[0] or node.op_type == "Mul")
                wrong += [] if is_sum or is_linear else node.outputs
        wrong += [value for value in self._graph.outputs if value not in of_terms]
        if wrong:
            raise UnsupportedError(
                f"`{wrong[0].name}` is not a sum over samples; a pipeline divides the batch", hint=_HINT
            )
