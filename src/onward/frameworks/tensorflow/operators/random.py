"""Random numbers, of which only those that dropout draws have a counterpart."""

from __future__ import annotations

from onward.engines.framework import Operators
from onward.frameworks.tensorflow.graph import Refused

operators = Operators()

DRAWN = ("RandomUniform", "StatelessRandomUniform", "StatelessRandomUniformV2")


@operators.define(*DRAWN, "RandomStandardNormal", "StatelessRandomNormalV2", "TruncatedNormal")
def random(op, *_):
    raise Refused("random numbers other than those of `tf.nn.dropout`")


@operators.define("SelectV2")
def select(op, condition, x, y, *, node):
    """`tf.nn.dropout` chooses what is left, larger by as much as is missing, or 0."""
    drawn, rate, source = _dropout(node)
    if drawn:
        return op.Dropout(node.value(source), rate)
    return op.Where(condition, x, y)


def _dropout(node):
    """Whether it is one, its rate and the tensor behind it."""
    condition, scaled, otherwise = (x.op for x in node.operation.inputs)
    if condition.type != "GreaterEqual" or condition.inputs[0].op.type not in DRAWN or scaled.type != "Mul":
        return False, None, None
    rate, scale = node.constant(condition.inputs[1]), node.constant(scaled.inputs[1])
    nothing = node.constant(otherwise.outputs[0])
    if rate is None or scale is None or nothing is None or nothing.any() or abs(scale * (1 - rate) - 1) > 1e-5:
        return False, None, None
    return True, rate.astype("f4"), scaled.inputs[0]
