"""Cross entropy of rows of scores, which is computed without a matrix of probabilities."""

from __future__ import annotations

import onnx_ir as ir

from onward.kernels.library import DOMAIN
from onward.kernels.rewriting import made_by, with_gradient
from onward.model.walk import attributes
from onward.transform.context import Context

_INTEGERS = (ir.DataType.INT64, ir.DataType.INT32)


def use_cross_entropy(context: Context) -> None:
    """Let kernels compute the cross entropy in the outermost graph, in place."""
    graph = context.graph
    trained = with_gradient(graph)
    for node in list(graph):
        if made_by(node.outputs[0], "SoftmaxCrossEntropyLoss") is None:
            continue
        scores, labels, weights = (*node.inputs, None)[:3]
        given = attributes(node, context.model.opset)
        alone = all(not output.uses() and not output.is_graph_output() for output in node.outputs[1:])
        is_plain = alone and given["reduction"] in ("mean", "sum") and weights not in trained
        if not is_plain or not _are_rows(scores, labels) or scores is None or labels is None:
            continue
        with context.before(node) as op:
            loss, logarithms = op.node(
                DOMAIN,
                "CrossEntropy",
                scores,
                labels if labels.dtype == ir.DataType.INT64 else op.Cast(labels, to=ir.DataType.INT64),
                weights,
                mean=int(given["reduction"] == "mean"),
                ignores=int(given["ignore_index"] is not None),
                ignore_index=given["ignore_index"],
                outputs=2,
            )
            logarithms.value.type = ir.TensorType(ir.DataType.FLOAT)
            context.replace(node.outputs[0], loss)
        graph.remove(node, safe=True)


def _are_rows(scores: ir.Value | None, labels: ir.Value | None) -> bool:
    """Whether scores are a matrix of floats, and each row has a label."""
    if scores is None or labels is None or scores.shape is None or labels.shape is None:
        return False
    fit = scores.shape.rank() == 2 and labels.shape.rank() == 1
    return fit and scores.dtype == ir.DataType.FLOAT and labels.dtype in _INTEGERS
