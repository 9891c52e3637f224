"""Stored tensors that are fixed transforms: bases of STFT and CQT, mel filters, windows, positions, anchors.

The numbers tell, never a name. Each test holds for a whole tensor of at least a few rows, which no trained tensor and
no usual initial value satisfies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onward.constants import constant_tensor

FIXED_TRANSFORM = "a fixed transform"
_LEAST_ROWS, _LEAST_TAPS = 8, 32
_LARGEST = 1 << 23
"""Most elements of a tensor that is looked at in full."""
_CONCENTRATION = 0.9
"""Least fraction of the energy of a windowed sinusoid that is within three bins of its frequency."""
_ADDED = {"Add", "Div", "Mul", "Sub"}


def fixed_transform(value: ir.Value, readers: Sequence[tuple[ir.Node, int]]) -> str | None:
    """Return the kind of transform whose numbers a stored tensor has; None for other tensors."""
    tensor = constant_tensor(value)
    if tensor is None or not tensor.dtype.is_floating_point() or not 16 <= tensor.size <= _LARGEST or not readers:
        return None
    if tensor.numpy().size != tensor.size:
        return None  # the numbers are not at hand
    if all(node.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul") and i < 2 for node, i in readers):
        node, index = readers[0]
        matrix = _matrix(node, index, tensor.numpy())
        return None if matrix is None else _of_matrix(matrix)
    if all(node.op_type in _ADDED for node, _ in readers):
        return _of_table(np.asarray(tensor.numpy(), np.float64))
    return None


def _matrix(node: ir.Node, index: int, array: np.ndarray) -> np.ndarray | None:
    """Return the weight of a matmul or of a convolution of one channel, with a row for each output."""
    if node.op_type in ("Conv", "ConvTranspose"):
        spread = [size for size in array.shape[1:] if size > 1]
        if len(spread) > 1:
            return None
        return array.reshape(array.shape[0], -1)
    if array.ndim > 2:
        array = array.reshape(-1, *array.shape[-2:])[0] if np.prod(array.shape[:-2]) == 1 else array
    if array.ndim != 2:
        return None
    is_transposed = bool(node.attributes.get_int("transB" if index else "transA", 0))
    return array if is_transposed == (index == 1) else array.T


def _of_matrix(matrix: np.ndarray) -> str | None:
    if min(matrix.shape) < 1 or len(matrix) < _LEAST_ROWS:
        return None
    if matrix.shape[1] >= _LEAST_TAPS and _are_sinusoids(matrix):
        return "a basis of sinusoids, as of an STFT"
    if matrix.shape[1] >= _LEAST_TAPS and _are_bands(matrix):
        return "a filter bank, as of a mel spectrogram"
    return None


def _are_sinusoids(matrix: np.ndarray) -> bool:
    """True if all rows are windowed sinusoids with frequencies in order, of which halves may be sines and cosines."""
    few = matrix[:: max(1, len(matrix) // 4)]
    if _frequencies(few) is None:
        return False
    frequencies = _frequencies(matrix)
    if frequencies is None or len(set(frequencies[~np.isnan(frequencies)].round(4))) < _LEAST_ROWS / 2:
        return False
    return any(map(_are_in_order, ([frequencies], np.array_split(frequencies, 2))))


def _are_in_order(parts: Sequence[np.ndarray]) -> bool:
    """True if the numbers of each array rise or fall throughout; NaN is left out."""
    steps = np.concatenate([np.diff(part[~np.isnan(part)]) for part in parts])
    return bool((steps >= -1e-3).all() or (steps <= 1e-3).all())


def _frequencies(matrix: np.ndarray) -> np.ndarray | None:
    """Return the frequency of each row, in cycles per number, NaN for zeros; None if not all are windowed sinusoids."""
    result, largest = [], np.abs(matrix).max()
    for row in np.asarray(matrix, np.float64):
        if np.abs(row).max() <= 1e-4 * largest:
            result.append(np.nan)  # a sine of frequency 0
            continue
        support = np.flatnonzero(np.abs(row) > 1e-6 * np.abs(row).max())
        inside = row[support[0] : support[-1] + 1]
        energy = np.abs(np.fft.rfft(inside)) ** 2
        peak = int(energy.argmax())
        if energy[max(peak - 3, 0) : peak + 4].sum() < _CONCENTRATION * energy.sum():
            return None
        if len(inside) < 8 or len(energy) < 12:
            return None
        result.append(peak / len(inside))
    return np.array(result) if np.isnan(result).mean() < 0.5 else None


def _are_bands(matrix: np.ndarray) -> bool:
    """True if each row rises to a peak and falls again, is zero elsewhere, and peaks are in order."""
    if (matrix < 0).any() or (matrix == 0).mean() < 0.5 or np.count_nonzero(matrix) < 2 * len(matrix):
        return False
    peaks = []
    for row in matrix:
        support = np.flatnonzero(row)
        if not len(support):
            continue
        if support[-1] - support[0] + 1 != len(support):
            return False
        steps = np.diff(row[support])
        peak = int(row[support].argmax())
        if (steps[:peak] < -1e-6).any() or (steps[peak:] > 1e-6).any():
            return False
        peaks.append(support[0] + peak)
    return len(peaks) >= len(matrix) / 2 and bool((np.diff(peaks) >= 0).all())


def _of_table(array: np.ndarray) -> str | None:
    flat = array.ravel()
    if _is_window(flat) and max(array.shape, default=0) == array.size:
        return "a window of an STFT"
    if array.ndim >= 2 and array.shape[-1] % 2 == 0 and array.shape[-2] >= _LEAST_ROWS and array.shape[-1] >= 4:
        halves = (array[..., ::2], array[..., 1::2]), np.split(array, 2, axis=-1)
        if any(np.abs(a * a + b * b - 1).max() < 1e-3 and np.ptp(a) > 0.1 for a, b in halves):
            return "sines and cosines of positions"
    doubled = flat * 2
    if (
        array.size >= 64
        and (doubled == np.rint(doubled)).all()
        and len(set(flat[:: -(-array.size // 4096)])) > 2
        and np.ptp(flat) >= 4
    ):
        return "a grid of positions, as of anchors"
    return None


def _is_window(flat: np.ndarray) -> bool:
    scale = np.abs(flat).max()
    if len(flat) < _LEAST_TAPS or not scale:
        return False
    for periods in (len(flat), len(flat) - 1):
        turns = np.cos(2 * np.pi * np.arange(len(flat)) / periods)
        for a in (0.5, 0.54):
            window = a - (1 - a) * turns
            candidates = (window, np.sqrt(np.maximum(window, 0)))
            if any(np.abs(flat / scale - c / c.max()).max() < 1e-4 for c in candidates):
                return True
    return False
