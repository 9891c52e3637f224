"""sympy is loaded when it is needed, and nobody but the graph library can tell. Each test runs a new interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest

TRAINED = """
import sys
import onward
import numpy as np
import onnx_ir as ir

graph = ir.from_onnx_text('''<ir_version: 10, opset_import: ["": 20]>
g (float["batch", 2] x) => (float["batch", 3] y) <float[2, 3] w = {1, 2, 3, 4, 5, 6}> { y = MatMul(x, w) }''')
model = onward.prepare(ir.to_proto(graph), loss="mse", optimizer="sgd:lr=0.1")
engine = onward.engines.start(model)
engine.step({"x": np.ones((4, 2), np.float32), "target": np.ones((4, 3), np.float32)})
"""

ARITHMETIC = """
import onnx_ir as ir
a, b = ir.SymbolicDim("a"), ir.SymbolicDim("b")
assert str((a + 1) * b // 2) == "floor(b*(a + 1)/2)", (a + 1) * b // 2
assert (ir.SymbolicDim("max(a, mod(b, 3))") + 1).evaluate({"a": 1, "b": 5}) == 3
import sympy
assert ir.SymbolicDim(sympy.Symbol("c") * 2).value == "2*c"
assert type(sympy) is type(sys) and isinstance(a._expr, sympy.Symbol)
"""

UNSEEN = """
import sys
assert all(type(finder).__module__ != "onward.lazy_sympy" for finder in sys.meta_path)
assert ir._core.__spec__.loader is ir._core.__loader__ and type(ir._core.__loader__) is type(ir.__loader__)
"""


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_training_step_needs_no_sympy() -> None:
    run(TRAINED + "assert 'sympy' not in sys.modules")


@pytest.mark.parametrize(
    "first", ["import onward", "import onnx_ir, onward", "import sympy, onward", "import onward, sympy"]
)
def test_dimensions_compute_whatever_was_imported_first(first: str) -> None:
    run(f"import sys\n{first}\n{ARITHMETIC}\n{UNSEEN}")


def test_a_submodule_of_sympy_can_be_imported_first() -> None:
    run(f"import onward, onnx_ir, sys\nfrom sympy.core import Expr\nassert 'sympy.core' in sys.modules\n{ARITHMETIC}")


def test_describing_a_model_needs_little() -> None:
    run(
        "import onward, sys\nimport onnx_ir as ir\n"
        "text = '<ir_version: 10, opset_import: [\"\": 20]> g (float[2] x) => (float[2] y) { y = Relu(x) }'\n"
        "graph = ir.from_onnx_text(text)\n"
        "onward.describe(ir.to_proto(graph))\n"
        "late = {'onnxruntime', 'ssl', 'onward.checkpoint', 'onward.differentiate', 'onward.recipe.prepare'}\n"
        "assert not late & {*sys.modules}, late & {*sys.modules}"
    )
