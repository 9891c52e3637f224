"""Frequencies. The two parts of complex numbers are the last axis."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from onward.engines.framework import Operators
from onward.engines.jax.values import dtype_of

operators = Operators()


def _complex(x):
    exact = x.astype(jnp.promote_types(x.dtype, np.float32))
    return exact[..., 0] if x.shape[-1] == 1 else lax.complex(exact[..., 0], exact[..., 1])


def _parts(y, dtype):
    return jnp.stack([y.real, y.imag], -1).astype(dtype)


@operators.define("DFT")
def dft(x, length=None, axis=None, *, inverse, onesided):
    place = (-2 if axis is None else axis.item()) % x.ndim
    count = None if length is None else length.item()
    values = _complex(x)
    if inverse and onesided:
        return jnp.fft.irfft(values, count, place)[..., None].astype(x.dtype)
    transform = jnp.fft.ifft if inverse else jnp.fft.rfft if onesided else jnp.fft.fft
    return _parts(transform(values, count, place), x.dtype)


@operators.define("MelWeightMatrix")
def mel_weight_matrix(bands, dft_length, sample_rate, lowest, highest, *, output_datatype):
    count, rate = bands.item(), sample_rate.item()
    spectrogram = dft_length.item() // 2 + 1
    low, high = (2595 * np.log10(1 + hertz.item() / 700) for hertz in (lowest, highest))
    mels = low + np.arange(count + 2) * ((high - low) / (count + 2))
    bins = ((dft_length.item() + 1) * (700 * (10 ** (mels / 2595) - 1)) // rate).astype(np.int64)
    weights = np.zeros((spectrogram, count))
    for band, (start, centre, end) in enumerate(zip(bins, bins[1:], bins[2:], strict=False)):
        if start == centre:
            weights[centre, band] = 1
        else:
            weights[start : centre + 1, band] = (np.arange(start, centre + 1) - start) / (centre - start)
        if centre < end:
            weights[centre:end, band] = (end - np.arange(centre, end)) / (end - centre)
    return weights.astype(dtype_of(output_datatype))


def _window(*coefficients):
    """A sum of cosines."""

    def window(size, *, output_datatype, periodic):
        count = size.item()
        turns = 2 * np.pi * np.arange(count) / (count if periodic else count - 1)
        terms = (a * np.cos(i * turns) for i, a in enumerate(coefficients))
        return np.asarray(sum(terms)).astype(dtype_of(output_datatype))

    return window


operators(
    HannWindow=_window(0.5, -0.5),
    HammingWindow=_window(25 / 46, -21 / 46),
    BlackmanWindow=_window(0.42, -0.5, 0.08),
)
