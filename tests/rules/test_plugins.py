"""Rules of other packages: found by entry points, loaded when they are needed, and no danger to anything else."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import onnx
import pytest
from onnx import parser
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

import onward
from onward.rules import gradient, no_gradient, registry

CODE = """
    from onward.rules import gradient, rewrite

    @gradient("Twist", domain="acme")
    def twist(op, dy, x, *, y, angle=1.0):
        return dy * op.node("acme", "Twist", x, angle=angle)  # an exponential

    @rewrite("Double", domain="acme")
    def double(op, x):
        return x + x
"""


class Twist(OpRun):
    op_domain = "acme"

    def _run(self, x, angle=None):
        return ((angle or 1.0) * np.exp(x),)


MODEL = """
    <ir_version: 10, opset_import: ["": 21, "acme": 3]>
    g (float[2, 3] x) => (float[2, 3] y) { a = acme.Double(x)  b = acme.Twist<angle = 0.5>(a)  y = Relu(b) }
"""


@pytest.fixture
def folder(tmp_path):
    onnx.save(parser.parse_model(MODEL), tmp_path / "model.onnx")
    return tmp_path


def install(folder, name, code):
    """A package with rules, as an installer leaves it."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("")
    (folder / name / "rules.py").write_text(textwrap.dedent(code))
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[onward.rules]\nmine = {name}.rules\n")


def run(folder, *command):
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)


def test_rules_of_a_package_serve_the_command_line(folder):
    """Also where another package is broken: a warning names it."""
    install(folder, "acme_rules", CODE)
    install(folder, "broken_rules", "import nothing_of_this_name")
    done = run(folder, "-m", "onward", "grad", "model.onnx", "--of", "y", "--wrt", "x", "-o", "grad.onnx")
    assert done.returncode == 0, done.stderr
    assert "the rules `broken_rules.rules` of broken_rules cannot be loaded: ModuleNotFoundError" in done.stderr
    made = onnx.load(folder / "grad.onnx")
    assert {opset.domain: opset.version for opset in made.opset_import}["acme"] == 3
    assert [node.op_type for node in made.graph.node if node.domain] == ["Twist", "Twist"]
    x = np.float32([[1, -2, 0.5], [0, 0.1, -1]])
    _, grad = ReferenceEvaluator(made, new_ops=[Twist]).run(None, {"x": x})
    np.testing.assert_allclose(grad, 2 * 0.5 * np.exp(2 * x), rtol=1e-5)


def test_rules_are_loaded_when_they_are_needed(folder):
    install(folder, "acme_rules", CODE)
    script = """
import sys
import onward.rules
assert "acme_rules" not in sys.modules
onward.gradient("model.onnx", "y", ["x"])
assert "acme_rules.rules" in sys.modules
"""
    done = run(folder, "-c", script)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_two_packages_with_a_rule_for_one_operator(folder):
    install(folder, "acme_rules", CODE)
    install(folder, "other_rules", CODE)
    script = """
import onward
onward.gradient("model.onnx", "y", ["b"])
try:
    onward.gradient("model.onnx", "y", ["x"])
except onward.errors.UnsupportedError as error:
    print(error)
"""
    done = run(folder, "-c", script)
    assert done.returncode == 0, done.stderr
    assert "there are two rules for `Twist`" in done.stdout or "there are two rules for `Double`" in done.stdout
    assert "`acme_rules.rules`" in done.stdout and "`other_rules.rules`" in done.stdout


@pytest.fixture
def table(monkeypatch):
    """A table of rules that is forgotten afterwards."""
    for name in ("RULES", "_MODULES", "_CONFLICTS"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))
    return registry.RULES


def test_a_rule_may_be_defined_again_where_it_was(table):
    for factor in (2, 3):

        @gradient("Twist", domain="acme")
        def twist(op, dy, x, *, factor=factor):
            return dy * factor

    assert table["acme", "Twist"].keywords["factor"] == 3


def test_two_rules_for_an_operator_in_one_package(table):
    no_gradient("it is so", "Twist", domain="acme")
    with pytest.raises(ValueError, match="two rules for Twist"):

        @gradient("Twist", domain="acme")
        def twist(op, dy, x):
            return dy


def test_a_rule_of_ours_is_not_replaced(table):
    @gradient("Relu")
    def relu(op, dy, x):
        return dy

    assert table["", "Relu"].function is not relu
    with pytest.raises(onward.errors.UnsupportedError, match=r"`onward\.rules\.elementwise`, one in `test_plugins`"):
        onward.gradient(
            parser.parse_model('<ir_version: 10, opset_import: ["": 21]> g (float x) => (float y) { y = Relu(x) }'),
            "y",
            ["x"],
        )


def test_a_result_of_unknown_type_is_refused(table):
    @gradient("Twist", domain="acme")
    def twist(op, dy, x):
        return dy

    with pytest.raises(onward.errors.UnsupportedError, match="the type of `b` is not known"):
        onward.gradient(parser.parse_model(MODEL), "b", ["a"])


def test_an_operator_without_a_rule_says_how_to_write_one():
    with pytest.raises(onward.errors.UnsupportedError, match="no gradient rule for `Twist`") as caught:
        onward.gradient(parser.parse_model(MODEL), "y", ["a"])
    assert '@gradient("Twist", domain="acme")' in caught.value.hint


def test_rules_are_a_public_name():
    """Of `onward` itself, loaded when it is first used: both decorators, as the documentation has them."""
    code = "import sys, onward; assert 'onward.rules' not in sys.modules; onward.rules.gradient, onward.rules.rewrite"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "rules" in dir(onward) and onward.rules.gradient is gradient
