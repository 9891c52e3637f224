"""Native kernels: one by itself, in a session around a single node, and the same graph with them and without."""

from __future__ import annotations

from typing import Any

import gradcheck
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

import onward
from onward.differentiate.gradients import lower_gradients
from onward.engines import start
from onward.kernels import DOMAIN, find_rule, finish_with_kernels, library, use_kernels
from onward.lowering.runtime import for_onnxruntime
from onward.model import load
from onward.standard import OLDEST_OPSET
from onward.transform.context import Context
from onward.transform.opset import of_one_opset
from onward.transform.training import remove_unused

needs_kernels = pytest.mark.skipif(library().path is None, reason=f"no native kernels: {library().note}")


def run_kernel(name: str, *inputs: np.ndarray | None, outputs: int = 1, threads: int = 2, **attributes: Any) -> list:
    """What a kernel makes of some arrays; None stands for an input that is left out."""
    given = {f"x{i}": array for i, array in enumerate(inputs) if array is not None}
    names = [f"x{i}" if array is not None else "" for i, array in enumerate(inputs)]
    node = onnx.helper.make_node(name, names, [f"y{i}" for i in range(outputs)], domain=DOMAIN, **attributes)
    kinds = {key: onnx.helper.np_dtype_to_tensor_dtype(array.dtype) for key, array in given.items()}
    graph = onnx.helper.make_graph(
        [node],
        "kernel",
        [onnx.helper.make_tensor_value_info(key, kinds[key], array.shape) for key, array in given.items()],
        [onnx.helper.make_tensor_value_info(f"y{i}", onnx.TensorProto.FLOAT, None) for i in range(outputs)],
    )
    imports = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid(DOMAIN, 1)]
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    options.register_custom_ops_library(str(library().path))
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=10)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(None, given)


def _steps_of(model: onward.Model, batch: dict[str, np.ndarray], kernels: bool) -> tuple[list, dict, dict]:
    engine = start(model, kernels=kernels, threads=2)
    batch = {name: array for name, array in batch.items() if name in engine.inputs}
    gradients = engine.gradients(batch)
    losses = [float(engine.step(batch)[engine.loss]) for _ in range(3)]
    return losses, gradients, engine.evaluate(batch)


def assert_the_same_with_kernels(model: onward.Model, batch: dict[str, np.ndarray]) -> None:
    """Losses of a few steps, gradients and outputs are those of the plain graph."""
    (losses, gradients, results), (expected, plain, others) = (_steps_of(model, batch, use) for use in (True, False))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for name, gradient in plain.items():
        size = max(1, np.abs(gradient).max())  # sums of both signs are as exact as their terms
        np.testing.assert_allclose(gradients[name], gradient, rtol=1e-4, atol=1e-6 * size, err_msg=name)
    for name, result in others.items():
        np.testing.assert_allclose(results[name], result, rtol=1e-4, atol=1e-5, err_msg=name)


def add_gradient(proto: onnx.ModelProto, y: str, xs: list[str]) -> None:
    """Let a model also give `y`, and the gradients by `xs`, in their order."""
    gradients = [f"gradient{i}" for i in range(len(xs))]
    domain = "ai.onnx.preview.training"
    proto.graph.node.append(
        onnx.helper.make_node("Gradient", xs, gradients, domain=domain, xs=xs, y=y, name="Gradient")
    )
    proto.opset_import.append(onnx.helper.make_opsetid(domain, 1))
    made = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in (y, *gradients))
    proto.graph.output.extend(made)


def with_gradient(proto: onnx.ModelProto, inputs: dict[str, Any], xs: list[str]) -> onnx.ModelProto:
    """The model with its outputs, weighted at random and added up, as a loss, and the gradients as outputs."""
    made = onnx.ModelProto.FromString(proto.SerializeToString())
    graph, rng = made.graph, np.random.default_rng(0)
    parts = []
    for i, (name, value) in enumerate(gradcheck.evaluate(proto, inputs).items()):
        if name not in gradcheck.float_outputs(proto):
            continue
        weights = gradcheck.direction(rng, value).astype(np.float32)
        graph.initializer.append(numpy_helper.from_array(np.asarray(weights), f"weights{i}"))
        graph.node.append(helper.make_node("Mul", [name, f"weights{i}"], [f"weighted{i}"]))
        graph.node.append(helper.make_node("ReduceSum", [f"weighted{i}"], [f"part{i}"], keepdims=0))
        parts.append(f"part{i}")
    graph.node.append(helper.make_node("Sum", parts, ["total"]))
    add_gradient(made, "total", xs)
    return made


def lowered_gradient(proto: onnx.ModelProto, kernels: bool) -> onward.Model:
    """A model in which gradients are computed, by kernels where these can."""
    model = of_one_opset(load(proto), OLDEST_OPSET).copy()
    context = Context(model)
    if kernels:
        use_kernels(context)
        lower_gradients(context, find=find_rule)
        finish_with_kernels(context)
    else:
        lower_gradients(context)
    model = context.model
    remove_unused(model.graph)
    return for_onnxruntime(model)
