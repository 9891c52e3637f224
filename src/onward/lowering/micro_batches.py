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
from onward.lowering.data_parallel import extract, is_all_reduce, is_common
from onward.model import Model
from onward.model.walk import ancestors, read_by

COUNT, NUMBER = "micro-batches", "number of the micro-batch"
"""Inputs that the graph gets: how many there are, as a float; and two uint32 that random numbers of one depend on."""
_OF_SHAPES = ("Shape", "Size")
_SUMS = ("Add", "Sub", "Sum")
_LINEAR = ("Identity", "Cast", "CastLike", "Neg", "Squeeze", "Unsqueeze", "Reshape", "Mul", "Div")
"""What may be done to the terms of a sum one by one, if only the first input is one; factors may be the other."""
_HINT = "take another strategy: `--strategy fsdp`"


def divide_into_micro_batches(model: Model, state: Collection[str], updated: Collection[str]) -> Model:
    """Let a forward pass that is shared compute a part of a batch, in place. Its metrics are terms of sums.

    What comes back computes, once for the whole batch, what all parts read, and the state that is `updated`.
    """
    return _Dividing(model, state, updated).divide()


class _Dividing:
    def __init__(self, model: Model, state: Collection[str], updated: Collection[str]):
        self._model, self._graph = model, model.graph
        self._op = Builder(model.graph, opset=model.opset, names=model.names())
        self._state = {value for value in self._graph.inputs if value.name in state}
        self._updated = [value for value in self._graph.outputs if value.name in updated]
        self._totals: list[tuple[ir.Value, ir.Value]] = []
        """What is computed from the whole batch, and the input that has it."""

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
        made = extract(self._model, [*self._updated, *(value for value, _ in self._totals)])
        for value, (_, given) in zip(made.outputs[len(self._updated) :], self._totals, strict=True):
            value.name = given.name
        return made

    def _input(self, name: str, dtype: ir.DataType, shape: tuple[int, ...]) -> ir.Value:
        known = next((value for value in self._graph.inputs if value.name == name), None)
        if known is None:
            known = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
            self._graph.inputs.append(known)
        return known

    def _draw_apart(self) -> None:
        """Let the numbers that processes draw for themselves be those that micro-batches draw."""
        for value in self._state:
            for node in value.consumers():
                if node.op_type == "BitwiseXor" and value.dtype == ir.DataType.UINT32:
                    node.replace_input_with(1, self._input(NUMBER, ir.DataType.UINT32, (2,)))

    def _take_total(self, node: ir.Node, source: ir.Value) -> None:
        assert source.dtype is not None
        self._refuse_if_learned(source)
        given = self._input(self._op.names.fresh(f"{source.name}/total"), source.dtype, ())
        given.shape = source.shape
        self._state.add(given)  # what depends on it is none of a batch alone
        self._replace(node, given)
        self._totals.append((source, given))

    def _replace(self, node: ir.Node, new: ir.Value) -> ir.Value:
        old = node.outputs[0]
        for user, at in list(old.uses()):
            user.replace_input_with(at, new)
        outputs = self._graph.outputs
        if old.is_graph_output():
            name, old.name = old.name, self._op.names.fresh(f"{old.name}/all")
            new.name, new.type, new.shape = name, old.type, old.shape
            outputs[:] = [new if value is old else value for value in outputs]
        self._graph.remove(node, safe=True)
        return new

    def _follows_from_shapes(self, value: ir.Value) -> bool:
        """Whether a value is the same for all parts of a batch, as they are of the same size."""
        _, reached = ancestors([value], reads=lambda node: () if node.op_type in _OF_SHAPES else read_by(node))
        return reached.isdisjoint(self._graph.inputs)

    def _refuse_if_learned(self, value: ir.Value) -> None:
        _, reached = ancestors([value])
        learned = [v for v in reached & self._state if v.dtype is None or v.dtype.is_floating_point()]
        if learned:
            raise UnsupportedError(
                f"`{value.name}` depends on all samples of a batch at once, as statistics of BatchNormalization do, "
                "and a pipeline has them part by part",
                hint=_HINT,
            )

    def _refuse_unless_summed(self, terms: list[ir.Value]) -> None:
        """Metrics must be sums of terms: not the root of one, or one and something else."""
        of_terms = set(terms)
        wrong: list[ir.Value] = []
        for node in self._graph:
            read = [value in of_terms for value in read_by(node)]
            if node.op_type == "CastLike":  # of the other, it is only the type
                read = read[:1]
            if any(read):
                of_terms.update(node.outputs)
                is_sum = node.op_type in _SUMS and all(read)
                is_linear = node.op_type in _LINEAR and sum(read) == 1 and (read[0] or node.op_type == "Mul")
                wrong += [] if is_sum or is_linear else node.outputs
        wrong += [value for value in self._graph.outputs if value not in of_terms]
        if wrong:
            raise UnsupportedError(
                f"`{wrong[0].name}` is no sum of what samples add to it, and a pipeline has them part by part",
                hint=_HINT,
            )
