"""What an exporter seems to have folded away, by what it has left: what can no longer be trained as it was."""

from __future__ import annotations

import re
from collections.abc import Iterator

import onnx_ir as ir

from onward.constants import constant_tensor
from onward.errors import list_names
from onward.model import Model
from onward.recipe.constants import in_bodies, stored_shape
from onward.recipe.layers import layers as find_layers

_BATCH_NORM = re.compile(r"batch_?norm", re.IGNORECASE)
"""A trace in the names of a layer, or in what an exporter has noted, of the BatchNormalization behind it."""
_NOTES = ("pkg.onnxscript.rewriter.rule_name", "pkg.torch.onnx.class_hierarchy")
_RENAMED = re.compile(r"onnx::Conv_\d+")
"""What PyTorch's tracing exporter calls weights of a convolution that it has computed; others keep their names."""
_RESIDUAL_BLOCKS = 3
_AGAIN = (
    "export it again without the exporter's optimizations (PyTorch: `optimize=False`, or with `dynamo=False` "
    "`do_constant_folding=False`)"
)


def folding_remarks(model: Model) -> Iterator[str]:
    """A sentence for each thing that looks as if it was folded away."""
    nodes = list(model.graph)
    operators = {node.op_type for node in nodes}
    layers = [node for node in nodes if node.op_type in ("Conv", "ConvTranspose", "Gemm") and _has_bias(node)]
    traces = [node for node in layers if _had_batch_norm(node)]
    normalizes = any(name.endswith("Normalization") or name == "Sqrt" for name in operators)
    is_quantised = "DequantizeLinear" in operators  # then it is meant to be so
    if not normalizes and not is_quantised and (traces or _is_residual(layers)):
        where = f", such as `{traces[0].name or traces[0].outputs[0].name}`" if traces else ""
        yield (
            f"it looks as if BatchNormalization was folded into {len(traces or layers)} of its layers{where}: they "
            f"train with a weight and a bias each, and without statistics of the batch; to train it as it was, {_AGAIN}"
        )
    if "Dropout" not in operators and any(_was_dropout(node) for node in nodes):
        yield f"it looks as if Dropout was taken out: nothing is dropped in training; to have it again, {_AGAIN}"
    if model.ir.producer_name == "tf2onnx":
        without = [layer.names[0] for layer in find_layers(model.graph) if layer.bias() is None]
        if without:
            yield (
                f"{len(without)} layers have no bias, such as {list_names(without, 1)}: tf2onnx drops biases of zeros "
                "and scales of ones, as fresh models have them; if yours has them, convert it with `onward.from_keras`"
            )
    bodies = [value.name for value in in_bodies(model.graph) if len(stored_shape(value) or ()) > 1]
    if bodies:
        yield (
            f"{len(bodies)} tensors in bodies of If, Loop or Scan, such as `{bodies[0]}`, may be weights, and are "
            "trained only if `trainable` (`--trainable`) names them"
        )
    integers = [node for node in nodes if node.op_type in _QUANTISED]
    if integers:
        yield (
            f"it computes with integers in {len(integers)} places, such as `{integers[0].op_type}`, whose weights are "
            "not trained; train the model before it is quantised, or quantise it in the format QDQ"
        )


_QUANTISED = {"QLinearConv", "QLinearMatMul", "MatMulInteger", "ConvInteger", "QGemm", "DynamicQuantizeMatMul"}


def _has_bias(node: ir.Node) -> bool:
    return len(node.inputs) > 2 and constant_tensor(node.inputs[2]) is not None


def _had_batch_norm(node: ir.Node) -> bool:
    names = [node.name or "", *(value.name or "" for value in (*node.inputs[1:], *node.outputs) if value is not None)]
    if any(_BATCH_NORM.search(text) for text in (*names, *(node.metadata_props.get(key, "") for key in _NOTES))):
        return True
    return node.op_type == "Conv" and any(_RENAMED.fullmatch(name) for name in names)


def _is_residual(layers: list[ir.Node]) -> bool:
    """Whether sums of convolutions go into a Relu, again and again: such networks have BatchNormalization in them."""
    sums = {
        reader
        for node in layers
        if node.op_type == "Conv"
        for reader in node.outputs[0].consumers()
        if reader.op_type in ("Add", "Sum") and [r.op_type for r in reader.outputs[0].consumers()][:1] == ["Relu"]
    }
    return len(sums) >= _RESIDUAL_BLOCKS


def _was_dropout(node: ir.Node) -> bool:
    names = (node.name or "", *(value.name or "" for value in node.outputs))
    return node.op_type == "Identity" and any("dropout" in name.lower() for name in names)
