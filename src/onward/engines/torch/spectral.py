"""Fourier transforms. A complex number is two real ones, along the last axis."""

from __future__ import annotations

import torch

from onward.engines.framework import Operators

operators = Operators()


@operators.define("DFT")
def dft(x, length=None, axis=None, *, inverse, onesided):
    axis = (-2 if axis is None else axis.item()) % x.ndim
    length = None if length is None else length.item()
    is_real = x.shape[-1] == 1
    if inverse and onesided:
        return torch.fft.irfft(torch.view_as_complex(x.contiguous()), length, axis).unsqueeze(-1)
    values = x.squeeze(-1) if is_real else torch.view_as_complex(x.contiguous())
    if onesided:
        return torch.view_as_real(torch.fft.rfft(values, length, axis))
    return torch.view_as_real((torch.fft.ifft if inverse else torch.fft.fft)(values, length, axis))
