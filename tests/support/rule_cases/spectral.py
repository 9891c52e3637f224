"""Fourier transforms, where the node tests of `onnx` do not go."""

import numpy as np
from onnx import parser
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_dft import DFT_20


class DFT(OpRun):
    """The reference does not know the default axis."""

    def _run(self, x, dft_length=None, axis=None, inverse=0, onesided=0):
        return DFT_20._run(self, x, dft_length, -2 if axis is None else axis, inverse, onesided)


EVALUATORS = [DFT]
"""Operators that the reference of `onnx` gets wrong."""


def _random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _model(text, opset=21):
    return parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> {text}')


def _dft(call, shape, out, opset=21, **arrays):
    inputs = {"x": _random(*shape)} | arrays
    types = {"f": "float", "i": "int64"}
    dims = {name: f"[{','.join(map(str, array.shape))}]" if array.ndim else "" for name, array in inputs.items()}
    given = ", ".join(f"{types[array.dtype.kind]}{dims[name]} {name}" for name, array in inputs.items())
    return _model(f"g ({given}) => (float[{','.join(map(str, out))}] y) {{ {call} }}", opset), inputs


LENGTH = "n = Constant<value = int64 {%d}>()"
AXIS = "axis = Constant<value = int64 {%d}>()"

CASES = {
    "dft_default_axis": _dft("y = DFT(x)", (2, 5, 2), (2, 5, 2)),
    "dft_padded": _dft(f"{LENGTH % 7} y = DFT(x, n)", (2, 5, 1), (2, 7, 2)),
    "dft_cut": _dft(f"{LENGTH % 4} {AXIS % -3} y = DFT(x, n, axis)", (6, 3, 2), (4, 3, 2)),
    "dft_inverse_padded": _dft(f"{LENGTH % 7} y = DFT<inverse = 1>(x, n)", (2, 5, 2), (2, 7, 2)),
    "dft_inverse_real": _dft("y = DFT<inverse = 1>(x)", (2, 5, 1), (2, 5, 2)),
    "dft_onesided_odd": _dft("y = DFT<onesided = 1>(x)", (2, 5, 1), (2, 3, 2)),
    "dft_onesided_padded": _dft(f"{LENGTH % 8} y = DFT<onesided = 1>(x, n)", (2, 5, 1), (2, 5, 2)),
    "dft_onesided_inverse_odd": _dft(
        f"{LENGTH % 7} {AXIS % 1} y = DFT<inverse = 1, onesided = 1>(x, n, axis)", (2, 4, 3, 2), (2, 7, 3, 1)
    ),
    "dft_length_at_run_time": _dft("y = DFT(x, n)", (2, 5, 2), (2, "N", 2), n=np.array(6)),
    "dft_axis_attribute": _dft(f"{LENGTH % 4} y = DFT<axis = -2>(x, n)", (3, 2, 5, 2), (3, 2, 4, 2), opset=18),
    "stft_two_sided_complex": _dft(
        "y = STFT<onesided = 0>(x, step, window)",
        (2, 11, 2), (2, 3, 4, 2), step=np.array(3), window=_random(4, seed=1),
    ),
    "stft_odd": _dft(
        "y = STFT(x, step, window, length)",
        (2, 13, 1), (2, 5, 3, 2), step=np.array(2), window=_random(5, seed=1), length=np.array(5),
    ),
}  # fmt: skip
