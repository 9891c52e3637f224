"""Gradients with native kernels and without, of every case of the table of derivatives that has a use for one."""

from __future__ import annotations

from typing import Any

import gradcheck
import numpy as np
import pytest
from native_kernels import lowered_gradient, needs_kernels, with_gradient
from representatives import chosen
from rule_tables import ALL, without_onnxruntime

from onward.errors import UnsupportedError
from onward.kernels import DOMAIN, library
from onward.runtime.sessions import open_session

pytestmark = needs_kernels
ON_ONNXRUNTIME = [name for name in ALL if not without_onnxruntime(name)]
QUICK = {"normalization_softmax_of_masked_rows", "test_attention_23_boolmask_fullymasked_row_nan_robustness_expanded"}


def is_plain(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype in (np.float32, np.int64, np.int32, np.bool_)


@pytest.mark.parametrize("name", chosen(ON_ONNXRUNTIME, QUICK))
def test_kernels_agree_with_the_plain_graph(name: str) -> None:
    proto, inputs = ALL[name]
    xs = gradcheck.differentiable(proto, inputs)
    results = gradcheck.evaluate(proto, inputs)
    floats = [results[y] for y in gradcheck.float_outputs(proto)]
    if not xs or not floats or not all(map(is_plain, (*inputs.values(), *floats))):
        pytest.skip("kernels compute in float32")
    given = with_gradient(proto, inputs, xs)
    made = lowered_gradient(given, kernels=True)
    if not any(node.domain == DOMAIN for node in made.graph.all_nodes()):
        pytest.skip("no use for a kernel")
    try:
        expected = open_session(lowered_gradient(given, kernels=False), threads=2).run(None, inputs)
    except UnsupportedError as error:
        pytest.skip(str(error))
    found = open_session(made, threads=2, library=library().path).run(None, inputs)
    for one, other in zip(found, expected, strict=True):
        size = max(1.0, float(np.abs(other[np.isfinite(other)]).max(initial=0)))
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-6 * size)
