"""Sessions of ONNX Runtime: opening, errors, memory, devices, and limits."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from onnx import IR_VERSION, ModelProto, TensorProto, defs, helper

from onward.errors import DataError, UnsupportedError
from onward.model import Model
from onward.model.storage.tensor_sites import inside, is_external, is_where_it_was_read

CPU = ("CPUExecutionProvider",)
LARGE = 2**20


def open_session(
    model: Model | ModelProto,
    *,
    threads: int | None = None,
    providers: Sequence[str] = CPU,
    optimize: bool = True,
    integers: bool = True,
    library: Path | None = None,
) -> Any:
    """Open a session for an inference graph. Large tensors leave a `Model`, so pass a copy.

    `optimize` enables graph optimizations, whose time grows with the square of the nodes.
    `integers` enables integer kernels between DequantizeLinear and QuantizeLinear. A `library` adds
    custom operators.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors are raised, too
    options.enable_mem_pattern = False  # keeps a second copy of the memory of the first run, and is not faster
    if threads is not None:
        options.intra_op_num_threads = threads
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if not integers:
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    if library is not None:
        options.register_custom_ops_library(str(library))
    handed = _hand_over_large_tensors(model, options) if isinstance(model, Model) else []
    proto = model.to_proto() if isinstance(model, Model) else model
    with explain_failures(UnsupportedError, "does not run this model"):
        session = ort.InferenceSession(proto.SerializeToString(), options, providers=list(providers))
    session.handed = handed  # the session reads their memory
    return session


def evaluate(model: Model, inputs: Mapping[str, np.ndarray] | None = None) -> list[np.ndarray]:
    """Run a small graph once: constants, shapes, a learning rate. Return its outputs in order."""
    session = open_session(model)
    with explain_failures(DataError, "fails on these inputs"):
        return [np.asarray(array) for array in session.run(None, dict(inputs or {}))]


@contextlib.contextmanager
def explain_failures(error_type: type[DataError | UnsupportedError], what: str) -> Iterator[None]:
    """Convert exceptions of ONNX Runtime, which have no common base, to an error of ours."""
    try:
        yield
    except _failures() as error:
        reason = re.sub(r"^(\[ONNXRuntimeError\] : \d+ : \w+|Error in execution) ?: ", "", str(error)).splitlines()[0]
        hint = "`onward check MODEL --for onnxruntime` finds the cause"
        raise error_type(f"ONNX Runtime {what}: {reason}", hint=hint) from error


@functools.cache
def _failures() -> tuple[type[Exception], ...]:
    from onnxruntime.capi import onnxruntime_pybind11_state as native

    names = ("EPFail", "Fail", "InvalidArgument", "InvalidGraph", "InvalidProtobuf", "NotImplemented")
    return (*(getattr(native, name) for name in names), native.RuntimeException, RuntimeError)


# ---- large tensors ---------------------------------------------------------------------------------------------------


def _hand_over_large_tensors(model: Model, options: Any) -> list[Any]:
    """Pass frozen weights outside the serialized model, which holds 2 GiB at most.

    Those in data files of one folder are mapped. Others leave the model for the session options.
    The return value must live as long as the session, which reads the same memory.
    """
    import onnxruntime as ort

    _map_from_one_folder(model, options)
    handed: dict[str, Any] = {}
    for name, value in model.graph.initializers.items():
        if (tensor := value.const_value) is None or not _is_large(tensor):
            continue
        if not value.uses() and not value.is_graph_output():  # ONNX Runtime drops these, and then misses them
            continue
        array, element_type, shape = contiguous(tensor.numpy()), tensor.dtype.value, ir.Shape(tensor.shape.numpy())
        handed[name] = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, element_type)
        value.const_value = ir.ExternalTensor("memory", 0, tensor.nbytes, tensor.dtype, shape=shape, name=name)
        options.add_initializer(name, handed[name])
    if handed:
        options.add_external_initializers(list(handed), list(handed.values()))
    return list(handed.values())


def _map_from_one_folder(model: Model, options: Any) -> None:
    """Map files of one folder; tensors elsewhere stay in memory: files are looked up by name."""
    folder = None
    for value in model.graph.initializers.values():
        if not is_external(tensor := value.const_value):
            continue
        assert isinstance(tensor, ir.ExternalTensor)
        folder = str(tensor.base_dir) if folder is None else folder
        if str(tensor.base_dir) != folder or not is_where_it_was_read(tensor):
            value.const_value = inside(tensor)
    if folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)


def _is_large(tensor: ir.TensorProtocol) -> bool:
    """True if handing over is worth it. numpy has no arrays below a byte, nor of strings."""
    plain = tensor.dtype != ir.DataType.STRING and tensor.dtype.bitwidth >= 8
    return plain and tensor.nbytes >= LARGE and not isinstance(tensor, ir.ExternalTensor)


def contiguous(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(array.shape)  # `ascontiguousarray` gives scalars an axis


# ---- limits of the installed ONNX Runtime ----------------------------------------------------------------------------

NO_KERNEL = {
    **dict.fromkeys(("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"), 22),
    **dict.fromkeys(("Bernoulli", "Multinomial", "RoiAlign", "MaxRoiPool", "GlobalLpPool"), 22),
    "ImageDecoder": 20,
    "Swish": 25,
}
"""Standard operators that stock ONNX Runtime 1.31 cannot run on a CPU, from this operator set on.

Found by running each operator: its list of kernels is wrong, since a kernel matches only the first
version of an operator in its range.
"""

NO_ATTRIBUTES = {"left_window_size", "right_window_size"}
"""Attributes of Attention that the standard added to versions that ONNX Runtime already had."""


class Limits(NamedTuple):
    opset: int
    ir: int
    runtime: str


@functools.cache
def onnxruntime_limits() -> Limits:
    """Return the newest operator set and IR version that ONNX Runtime loads, by tiny models."""
    try:
        import onnxruntime
    except ImportError:
        return Limits(26, 13, "ONNX Runtime 1.31")

    def loads(opset: int, ir_version: int) -> bool:
        values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
        graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "probe", values[:1], values[1:])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)
        try:
            open_session(model)
        except UnsupportedError:
            return False
        return True

    opset = next((version for version in range(defs.onnx_opset_version(), 13, -1) if loads(version, 8)), 13)
    ir_version = next((version for version in range(IR_VERSION, 8, -1) if loads(13, version)), 8)
    return Limits(opset, ir_version, f"ONNX Runtime {onnxruntime.__version__}")
