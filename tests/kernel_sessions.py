"""Running one native kernel by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import helper

from onward.kernels import DOMAIN, library


def run_kernel(name: str, *inputs: np.ndarray, outputs: int = 1, threads: int = 2, **settings: Any) -> list[np.ndarray]:
    """What it makes of arrays."""
    names, made = [f"x{i}" for i in range(len(inputs))], [f"y{i}" for i in range(outputs)]
    node = helper.make_node(name, names, made, domain=DOMAIN, **settings)
    types = [helper.np_dtype_to_tensor_dtype(array.dtype) for array in inputs]
    given = [helper.make_tensor_value_info(x, kind, None) for x, kind in zip(names, types, strict=True)]
    results = [helper.make_tensor_value_info(y, helper.np_dtype_to_tensor_dtype(np.dtype("f4")), None) for y in made]
    graph = helper.make_graph([node], "kernel", given, results)
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.register_custom_ops_library(str(library().path))
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, dict(zip(names, inputs, strict=True)))
