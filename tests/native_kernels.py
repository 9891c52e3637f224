"""One kernel by itself: a session of ONNX Runtime around a single node of the native library."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onward.kernels import DOMAIN, library

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
