"""Products that a Scan sums over its iterations, as one product after it.

The gradient of a matrix by which every iteration multiplies is the sum of A' B over the iterations. Instead of carrying
that sum, which is as large as the matrix, from iteration to iteration, the Scan puts out A and B, and the rows of all
A are multiplied with those of all B.
"""

import onnx_ir as ir

from onward.build import Builder
from onward.rules.indexing import along, join_shape
from onward.transform.unused import remove_unused


def defer(op, body, positions, stacked):
    """Take states to which a body adds nothing but products out of it: the factors by position, and what it puts out.

    The body puts out the factors that are not among `stacked`, the values of which there is a stack anyway.
    """
    found = {i: _products(body.inputs[i], body.outputs[i]) for i in positions}
    sums = {i: pairs for i, pairs in found.items() if pairs}
    factors = dict.fromkeys(value for pairs in sums.values() for pair in pairs for value in pair)
    more = [value for value in factors if value not in stacked]
    inner = Builder(body, opset=op.opset, names=op.names, functions=op.functions, imports=op.imports)
    body.outputs.extend(inner.Identity(value).value for value in more)
    for i in sorted(sums, reverse=True):
        body.outputs.pop(i)
    remove_unused(body)
    for i in sorted(sums, reverse=True):
        body.inputs.pop(i)
    return sums, more


def sum_of_products(op, pairs, stacks):
    """The sum of A' B over all iterations, whose A and B are in `stacks`."""

    def all_rows(value):
        stack = stacks[value]
        stack.value.shape = ir.Shape([None, *value.shape])
        return op.Reshape(stack, join_shape(op, [-1], along(op, stack, -1)))

    products = [op.Gemm(all_rows(a), all_rows(b), transA=1) for a, b in pairs]
    return products[0] if len(products) == 1 else op.Sum(*products)


def _products(before, after):
    """The factors of all that is added to a state, if they are those of products."""
    pairs = []
    while after is not before:
        node = after.producer()
        pair = _factors(node.inputs[1]) if node is not None and node.op_type == "Add" else None
        if pair is None:
            return None
        pairs.append(pair)
        after = node.inputs[0]
    return pairs


def _factors(value):
    """A and B, matrices of known width, if the value is A' B."""
    node = value.producer()
    if node is None:
        return None
    attributes = node.attributes
    plain = not attributes.get_int("transB", 0) and attributes.get_float("alpha", 1.0) == 1 and len(node.inputs) == 2
    if node.op_type == "Gemm" and attributes.get_int("transA", 0) and plain:
        pair = tuple(node.inputs)
    elif node.op_type == "MatMul" and (turned := node.inputs[0].producer()) and turned.op_type == "Transpose":
        pair = turned.inputs[0], node.inputs[1]
    else:
        return None
    return pair if all(factor.shape is not None and factor.shape.rank() == 2 for factor in pair) else None
