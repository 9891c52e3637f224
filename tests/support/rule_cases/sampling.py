"""Sampling between pixels, where the node tests of `onnx` do not go."""

import itertools

import numpy as np
from onnx import parser
from onnx.reference.op_run import OpRun
from onnx.reference.ops import op_grid_sample

ON_PIXELS = "it samples on pixels, or halfway, where there are kinks and jumps"

EXCLUDED = {
    "test_basic_deform_conv_with_padding": ON_PIXELS,
    "test_basic_deform_conv_without_padding": ON_PIXELS,
    "test_deform_conv_with_mask_bias": ON_PIXELS,
    "test_deform_conv_with_multiple_offset_groups": ON_PIXELS,
    "test_gridsample_reflection_padding": ON_PIXELS,
    "test_gridsample_bilinear": ON_PIXELS,
    "test_gridsample_aligncorners_true": ON_PIXELS,
    "test_gridsample_nearest": ON_PIXELS,
    "test_gridsample_nearest_align_corners_0_additional_1": ON_PIXELS,
    "test_gridsample_nearest_align_corners_1_additional_1": ON_PIXELS,
    "test_gridsample_bilinear_align_corners_0_additional_1": ON_PIXELS,
    "test_gridsample_bilinear_align_corners_1_additional_1": ON_PIXELS,
    "test_gridsample_volumetric_nearest_align_corners_0": ON_PIXELS,
    "test_gridsample_volumetric_nearest_align_corners_1": ON_PIXELS,
    "test_gridsample_volumetric_bilinear_align_corners_0": ON_PIXELS,
    "test_gridsample_volumetric_bilinear_align_corners_1": ON_PIXELS,
    "test_roialign_aligned_false": ON_PIXELS,
    "test_roialign_mode_max": ON_PIXELS,
}
"""Node tests that cannot be compared, and why."""


class GridSample(op_grid_sample.GridSample):
    """The reference rounds coordinates to float32, and fails to mirror them in one pixel.

    With cubic interpolation it moves coordinates to the border. PyTorch and ONNX Runtime move each pixel that they
    read.
    """

    def _gs_denormalize_coordinates(self, n, dims, align_corners):
        return np.array([self._gs_denormalize(v, d, align_corners) for v, d in zip(n, dims, strict=True)])

    def _gs_reflect(self, x, x_min, x_max):
        return super()._gs_reflect(x, x_min, x_max) if x_max > x_min else x_min

    def _run(self, x, grid, mode=None, padding_mode=None, align_corners=None):
        mode = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
        if (mode, padding_mode) == ("cubic", "border"):
            size = 4 * max(x.shape)  # more than coordinates go beyond the image
            x = np.pad(x, [(0, 0), (0, 0), *[(size, size)] * (x.ndim - 2)], "edge")
            inner = [n - 2 * size for n in x.shape[:1:-1]]
            grow = [(n - 1) / (n + 2 * size - 1) if align_corners else n / (n + 2 * size) for n in inner]
            return super()._run(x, grid * np.array(grow, grid.dtype), mode, "zeros", align_corners)
        return super()._run(x, grid, mode, padding_mode, align_corners)


class GatherElements(OpRun):
    """The reference takes up to 64 elements along the axis."""

    def _run(self, x, indices, axis=0):
        return (np.take_along_axis(x, indices, axis),)


class DeformConv(OpRun):
    """The reference rounds coordinates to float32."""

    def _run(self, x, w, offset, b=None, mask=None, dilations=None, group=1, kernel_shape=None, offset_group=1,
             pads=None, strides=None):  # fmt: skip
        kernel, (dh, dw), (sh, sw) = w.shape[2:], dilations or (1, 1), strides or (1, 1)
        top, left = (pads or (0, 0))[:2]
        count, channels, height, width = x.shape
        out = offset.shape[2:]
        offset = offset.reshape(count, offset_group, *kernel, 2, *out)
        mask = np.ones((count, offset_group, *kernel, *out)) if mask is None else mask
        mask = mask.reshape(count, offset_group, *kernel, *out)
        y = np.zeros((count, w.shape[0], *out), x.dtype)
        per_offset, per_group, outputs = channels // offset_group, channels // group, w.shape[0] // group
        for n, c, k, m, i, j in itertools.product(*map(range, (count, channels, *kernel, *out))):
            of, g = c // per_offset, c // per_group
            p = i * sh - top + k * dh + offset[n, of, k, m, 0, i, j]
            q = j * sw - left + m * dw + offset[n, of, k, m, 1, i, j]
            value = 0.0
            for row, column in itertools.product(*((int(np.floor(v)), int(np.floor(v)) + 1) for v in (p, q))):
                if 0 <= row < height and 0 <= column < width:
                    value += (1 - abs(p - row)) * (1 - abs(q - column)) * x[n, c, row, column]
            filters = slice(g * outputs, (g + 1) * outputs)
            y[n, filters, i, j] += w[filters, c % per_group, k, m] * value * mask[n, of, k, m, i, j]
        return (y if b is None else y + b.reshape(-1, 1, 1),)


EVALUATORS = [GridSample, GatherElements, DeformConv]
"""Operators that the reference of `onnx` does not compute in float64, or gets wrong."""


def _random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _model(text, opset=22):
    return parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> {text}')


def _grid_sample(mode, padding, align_corners, opset=22, size=(4, 3), out=(2, 3), reach=1.7):
    x, grid = _random(2, 2, *size), _random(2, *out, len(size), seed=1)
    grid = (reach * np.tanh(grid)).astype(np.float32)
    dims = [",".join(map(str, shape)) for shape in (x.shape, grid.shape, (2, 2, *out))]
    attributes = f'mode = "{mode}", padding_mode = "{padding}", align_corners = {align_corners}'
    signature = f"g (float[{dims[0]}] x, float[{dims[1]}] grid) => (float[{dims[2]}] y)"
    return _model(f"{signature} {{ y = GridSample<{attributes}>(x, grid) }}", opset), {"x": x, "grid": grid}


def _deform_conv(inputs, attributes, x, w, out, offset_group=1, mask=False, bias=False):
    kernel = int(np.prod(w[2:]))
    shapes = {"x": x, "w": w, "offset": (x[0], 2 * kernel * offset_group, *out)}
    shapes |= {"b": w[:1]} if bias else {}
    shapes |= {"mask": (x[0], kernel * offset_group, *out)} if mask else {}
    arrays = {name: _random(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    given = ", ".join(f"float[{','.join(map(str, array.shape))}] {name}" for name, array in arrays.items())
    result = f"float[{x[0]},{w[0]},{out[0]},{out[1]}] y"
    return _model(f"g ({given}) => ({result}) {{ y = DeformConv<{attributes}>({inputs}) }}"), arrays


def _roi_align(attributes):
    rois = np.array([[0.3, 0.4, 6.2, 5.1], [2.1, 1.7, 3.3, 6.8], [-3.2, -1.83, 12.7, 8.37]], np.float32)
    arrays = {"x": _random(2, 3, 7, 9), "rois": rois, "images": np.array([1, 0, 1])}
    signature = "g (float[2,3,7,9] x, float[3,4] rois, int64[3] images) => (float[3,3,2,3] y)"
    attributes = f"{attributes}, output_height = 2, output_width = 3"
    return _model(f"{signature} {{ y = RoiAlign<{attributes}>(x, rois, images) }}"), arrays


CASES = {
    f"grid_sample_{mode}_{padding}_{'corners' if align else 'edges'}": _grid_sample(mode, padding, align)
    for mode in ("nearest", "linear", "cubic")
    for padding in ("zeros", "border", "reflection")
    for align in (0, 1)
}
CASES |= {
    "grid_sample_bilinear": _grid_sample("bilinear", "zeros", 0, opset=18),
    "grid_sample_bicubic": _grid_sample("bicubic", "reflection", 0, opset=18),
    "grid_sample_far_outside": _grid_sample("linear", "reflection", 1, reach=7),
    "grid_sample_3d": _grid_sample("linear", "border", 0, size=(3, 2, 4), out=(2, 1, 3)),
    "grid_sample_one_pixel": _grid_sample("linear", "reflection", 1, size=(1, 4)),
    "deform_conv_groups": _deform_conv(
        "x, w, offset, b, mask",
        "group = 2, offset_group = 2, strides = [2, 1], dilations = [1, 2], pads = [1, 2, 0, 1]",
        (2, 4, 5, 6), (6, 2, 3, 2), (2, 7), offset_group=2, mask=True, bias=True),
    "deform_conv_mask_without_bias": _deform_conv(
        "x, w, offset, , mask", "kernel_shape = [2, 2]", (1, 2, 3, 4), (3, 2, 2, 2), (2, 3), mask=True),
    "roi_align_adaptive": _roi_align("sampling_ratio = 0, spatial_scale = 0.7"),
    "roi_align_adaptive_max": _roi_align('sampling_ratio = 0, mode = "max"'),
    "roi_align_max": _roi_align('sampling_ratio = 2, mode = "max", spatial_scale = 0.9'),
    "roi_align_output_half_pixel": _roi_align(
        'sampling_ratio = 3, coordinate_transformation_mode = "output_half_pixel"'
    ),
    "tensor_scatter_from_the_beginning": (
        _model("g (float[2,4,3] cache, float[2,2,3] update) => (float[2,4,3] y)"
               " { y = TensorScatter(cache, update) }", 24),
        {"cache": _random(2, 4, 3), "update": _random(2, 2, 3, seed=1)},
    ),
    "tensor_scatter_last_axis": (
        _model("g (float[2,3,4] cache, float[2,3,2] update, int64[2] at) => (float[2,3,4] y)"
               ' { y = TensorScatter<axis = -1, mode = "circular">(cache, update, at) }', 24),
        {"cache": _random(2, 3, 4), "update": _random(2, 3, 2, seed=1), "at": np.array([3, 1])},
    ),
}  # fmt: skip


def _on_pixels(padding, slopes):
    """The three pixels of a row, each read where it is."""
    model = _model(
        "g (float[1,1,1,3] x, float[1,1,3,2] grid) => (float[1,1,1,3] y)"
        f' {{ y = GridSample<align_corners = 1, padding_mode = "{padding}">(x, grid) }}'
    )
    grid = np.array([[-1, 0], [0, 0], [1, 0]], np.float32).reshape(1, 1, 3, 2)
    inputs = {"x": np.array([1, 4, 9], np.float32).reshape(1, 1, 1, 3), "grid": grid}
    dgrid = np.array([[slope, 0] for slope in slopes]).reshape(grid.shape)
    return model, inputs, np.ones((1, 1, 1, 3)), {"x": np.ones((1, 1, 1, 3)), "grid": dgrid}


EDGES = {
    "grid_sample_on_pixels_among_zeros": _on_pixels("zeros", [3, 5, -9]),
    "grid_sample_on_pixels_in_a_border": _on_pixels("border", [0, 5, 0]),
    "grid_sample_on_pixels_mirrored": _on_pixels("reflection", [0, 5, 0]),
}
"""As PyTorch has it."""
