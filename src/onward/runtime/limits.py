"""What the ONNX Runtime at hand loads."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from onnx import IR_VERSION, TensorProto, defs, helper

from onward.errors import UnsupportedError
from onward.runtime.sessions import open_session

NO_KERNEL = {
    **dict.fromkeys(("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"), 22),
    **dict.fromkeys(("Bernoulli", "Multinomial", "RoiAlign", "MaxRoiPool", "GlobalLpPool"), 22),
    "ImageDecoder": 20,
    "Swish": 25,
}
"""Standard operators that stock ONNX Runtime 1.31 cannot run on a CPU, from this operator set on. Tried, one by one:
the list of its kernels misleads, as a kernel matches only the version of an operator with which its range begins."""

NO_ATTRIBUTES = {"left_window_size", "right_window_size"}
"""Attributes (of Attention) that the standard has added to versions of operators that ONNX Runtime had before."""


class Limits(NamedTuple):
    opset: int
    ir: int
    runtime: str


@cache
def onnxruntime_limits() -> Limits:
    """The newest operator set and IR version that the installed ONNX Runtime loads: it is asked, with tiny models."""
    try:
        import onnxruntime
    except ImportError:
        return Limits(26, 13, "ONNX Runtime 1.31")

    def loads(opset: int, ir: int) -> bool:
        values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
        graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "probe", values[:1], values[1:])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)
        try:
            open_session(model)
        except UnsupportedError:
            return False
        return True

    opset = next((version for version in range(defs.onnx_opset_version(), 13, -1) if loads(version, 8)), 13)
    ir = next((version for version in range(IR_VERSION, 8, -1) if loads(13, version)), 8)
    return Limits(opset, ir, f"ONNX Runtime {onnxruntime.__version__}")
