"""AffineGrid, which the reference of `onnx` computes in float32, and where its node tests do not go."""

import numpy as np
from onnx import parser
from onnx.reference.op_run import OpRun


class AffineGrid(OpRun):
    def _run(self, theta, size, align_corners=0):
        axes = [self._places(n, align_corners) for n in size[2:]]
        places = np.meshgrid(*axes, indexing="ij")[::-1]
        rows = np.stack([*places, np.ones_like(places[0])], axis=-1).astype(theta.dtype)
        return (np.einsum("nij,...j->n...i", theta, rows),)

    def _places(self, count, align_corners):
        return np.linspace(-1, 1, count) if align_corners else (np.arange(count) * 2 + 1) / count - 1


EVALUATORS = [AffineGrid]

_THETA = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)

CASES = {
    "affine_grid_in_three_dimensions": (
        parser.parse_model(
            '<ir_version: 10, opset_import: ["": 20]> g (float[N, 3, 4] theta, int64[5] size) '
            "=> (float[N, D, H, W, C] y) { y = AffineGrid<align_corners = 1>(theta, size) }"
        ),
        {"theta": _THETA, "size": np.array([2, 1, 2, 3, 4])},
    ),
}
