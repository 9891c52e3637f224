"""Devices of ONNX Runtime, values in their memory, and interruptible runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from onward.errors import UnknownNameError, UnsupportedError, suggest
from onward.model import Model
from onward.model.walk import graphs_of
from onward.runtime.sessions import LARGE, contiguous, open_session
from onward.standard import COMMON_OPSET, IR_VERSION

_PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "rocm": "ROCMExecutionProvider",
    "directml": "DmlExecutionProvider",
    "coreml": "CoreMLExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
    "webgpu": "WebGpuExecutionProvider",
}
WITH_MEMORY = {"cuda": "cuda", "rocm": "cuda", "directml": "dml"}
"""Devices with own memory for state; on others, state is in CPU memory."""


def devices() -> list[str]:
    """Return the values of `device` that this build of ONNX Runtime supports."""
    available = ort.get_available_providers()
    return [name for name, provider in _PROVIDERS.items() if provider in available]


def providers_of(device: str) -> list[str]:
    """Return the providers that a session on a device has."""
    provider = _PROVIDERS.get(device)
    if provider is None:
        raise UnknownNameError(
            f"unknown device `{device}`",
            hint="; ".join(filter(None, [suggest(device, _PROVIDERS), f"devices: {', '.join(_PROVIDERS)}"])),
        )
    if device not in devices():
        raise UnsupportedError(
            f"this build of ONNX Runtime has no {provider}",
            hint=f"use {', '.join(devices())}, or install another wheel of ONNX Runtime",
        )
    return [provider] if device == "cpu" else [provider, _PROVIDERS["cpu"]]


# ---- runs, and values in memory --------------------------------------------------------------------------------------

Run = Callable[[ort.RunOptions | None], Any]


def has_loops(model: Model) -> bool:
    """True if a model or one of its steps has a Loop, which may never end."""
    graphs = graphs_of(model)
    graphs += [step.algorithm for step in model.steps]
    return any(node.op_type == "Loop" for graph in graphs for node in graph.all_nodes())


def runner(model: Model) -> Callable[[Run], Any]:
    """Return a function that runs a model; Ctrl-C interrupts it, even inside a Loop."""
    return _stoppable if has_loops(model) else lambda run: run(None)


def _stoppable(run: Run) -> Any:
    """Run a call that may never end in another thread: ONNX Runtime itself ignores Ctrl-C."""
    options = ort.RunOptions()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(run, options)
        try:
            while not wait([future], timeout=1).done:  # some systems ignore Ctrl-C in a wait without a timeout
                pass
        except BaseException:
            options.terminate = True
            raise
        return future.result()


def write_buffer(buffer: ort.OrtValue, array: np.ndarray) -> None:
    """Copy an array into memory; types unknown to numpy as integers of the same width."""
    is_plain = array.dtype.isbuiltin == 1
    if is_plain and array.nbytes >= LARGE and buffer.device_name() == "cpu":
        np.copyto(buffer.numpy(), array)  # no intermediate copy, also of broadcast and strided arrays
        return
    buffer.update_inplace(contiguous(array if is_plain else array.view(f"u{array.itemsize}")))


def is_text(array: np.ndarray) -> bool:
    return array.dtype.kind in "UO"


def to_array(value: ort.OrtValue) -> np.ndarray:
    """Return a value as an array, which may share its memory."""
    dtype = ir.DataType(value.element_type())
    if dtype != ir.DataType.BFLOAT16:
        is_narrow = dtype.is_floating_point() and dtype.bitwidth == 8  # ONNX Runtime returns their bits as integers
        return value.numpy().view(dtype.numpy()) if is_narrow else value.numpy()
    (wide,) = _from_bfloat16().run_with_ort_values(["y"], {"x": value})
    return wide.numpy().astype(ir.DataType.BFLOAT16.numpy())


@functools.cache
def _from_bfloat16() -> ort.InferenceSession:
    """Return a session that casts bfloat16 to float32, as ONNX Runtime has no such arrays."""
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.BFLOAT16))
    cast = ir.node("Cast", [x], attributes={"to": ir.DataType.FLOAT.value})
    cast.outputs[0].name, cast.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph([x], cast.outputs, nodes=[cast], opset_imports={"": COMMON_OPSET}, name="cast")
    return open_session(Model(ir.Model(graph, ir_version=IR_VERSION)), threads=1)
