"""Three rules about imports, enforced by reading the source, and a fourth by running it.

1. A module imports only from layers above its own.
2. A framework is imported only in a file that serves it, and such a file only inside functions or by another like it.
3. Protobuf stays at the edge: `onnx`, but for its schemas, is imported only in the modules listed here, with reasons.
4. `import onward` and `onward --help` load no framework.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from paths import ROOT, TESTS

SOURCE = ROOT / "src"

# From the ground up. A module of a tier imports from earlier tiers and from its own package, not from its neighbours.
TIERS = [
    ["lazy_sympy"],
    ["errors"],
    ["arguments"],
    ["options"],
    ["standard", "constants"],
    ["shapes"],
    ["build"],
    ["model"],
    ["runtime"],
    ["transform", "configuration"],
    ["rules"],
    ["differentiate"],
    ["recipe"],
    ["vocabulary", "analysis"],
    ["checker", "lowering"],
    ["run_state"],
    ["inspect", "kernels"],
    ["engines"],
    ["planning"],
    ["agreement"],
    ["backend"],
    ["frameworks", "checkpoint"],
    ["importing"],
    ["training"],
    ["distribute", "pipelines"],
    ["cli", "web"],
    ["__main__"],
]
TIER = {unit: level for level, units in enumerate(TIERS) for unit in units}
MAY_USE_PUBLIC_NAMES = {"cli", "web", "__main__"}  # `from onward import ...`, as a user would

# A framework, and the words of which a file that imports it has one in its path: engines/torch/.
_TORCH, _JAX, _TENSORFLOW = {"torch", "torchrun"}, {"jax", "flax", "orbax"}, {"tensorflow", "keras"}
FRAMEWORKS = {
    "torch": _TORCH,
    "torchvision": _TORCH,
    "onnxscript": _TORCH,
    "transformers": _TORCH,
    "pytorch_lightning": _TORCH,
    "deepspeed": _TORCH,
    "lightning": _TORCH,
    "jax": _JAX,
    "jaxlib": _JAX,
    "optax": _JAX,
    "flax": _JAX,
    "orbax": _JAX,
    "tensorflow": _TENSORFLOW,
    "keras": _TENSORFLOW,
    "tf2onnx": _TENSORFLOW,
    "ray": {"ray"},
}

PROTOBUF = {"onnx", "google"}
SCHEMAS = "onnx.defs"  # what operators there are is not protobuf, and free everywhere, as onnx_ir is
PROTOBUF_EDGE = {
    "onward.model": "reads and writes ModelProto, and keeps what onnx_ir would drop",
    "onward.runtime": "sessions of ONNX Runtime start from ModelProto",
    "onward.run_state.standard_steps": "steps that others wrote arrive as ModelProto",
    "onward.transform": "the version converter and the inliner of `onnx` work on ModelProto",
    "onward.checker": "runs onnx.checker and shape inference, and checks the file as it is, not as we read it",
    "onward.backend": "the interface for backends that `onnx` has, and its test runner drives",
    "onward.frameworks": "exporters of other frameworks hand over ModelProto, and expect it",
    "onward.engines.numpy.host": "takes rare operators from the reference implementation of `onnx`",
    "onward.lowering.standard_operators": "the body of a standard operator that is a function arrives as FunctionProto",
}


# ---- reading imports -------------------------------------------------------------------------------------------------


class Module(NamedTuple):
    name: str  # onward.engines.torch
    source: str
    is_package: bool = False

    @property
    def unit(self) -> str:
        """The name that has a place in TIERS; empty for the package `onward` itself."""
        return self.name.partition(".")[2].partition(".")[0]

    @property
    def serves(self) -> set[str]:
        """The frameworks that this file exists for. Vocabularies and checkpoints name frameworks, and import none."""
        if self.unit in ("vocabulary", "checkpoint"):
            return set()
        words = {word for part in self.name.split(".") for word in part.split("_")}
        return {framework for framework, served_by in FRAMEWORKS.items() if words & served_by}


class Import(NamedTuple):
    target: str  # what is imported, in full: a module, or a name in a module that is not ours
    line: int
    on_load: bool  # happens when the importing module is loaded: not in a function, not for type checkers only


def modules() -> dict[str, Module]:
    found = {}
    for path in sorted((SOURCE / "onward").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        found[name] = Module(name, path.read_text(encoding="utf-8"), is_package)
    return found


def imports(module: Module, known: dict[str, Module]) -> Iterator[Import]:
    """All imports of a module; `from package import x` counts as package.x, unless package is ours and x no module."""

    def visit(node: ast.AST, on_load: bool) -> Iterator[Import]:
        match node:
            case ast.Import():
                for alias in node.names:
                    yield Import(alias.name, node.lineno, on_load)
            case ast.ImportFrom():
                base = origin(node)
                for alias in node.names:
                    full = f"{base}.{alias.name}"
                    ours = base.partition(".")[0] == "onward"
                    yield Import(base if ours and full not in known else full, node.lineno, on_load)
            case ast.Call(
                func=ast.Name("import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(str(name)), *_],
            ):
                yield Import(name, node.lineno, on_load)
            case ast.If(test=ast.Name("TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                for child in node.body:
                    yield from visit(child, False)
                for child in node.orelse:
                    yield from visit(child, on_load)
                return
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                on_load = False
        for child in ast.iter_child_nodes(node):
            yield from visit(child, on_load)

    def origin(node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = module.name.split(".")
        package = package[: len(package) - node.level + module.is_package]
        return ".".join([*package, *([node.module] if node.module else [])])

    yield from visit(ast.parse(module.source), True)


# ---- the rules -------------------------------------------------------------------------------------------------------

Rule = Callable[[Module, Import, dict[str, Module]], str | None]


def order(module: Module, imported: Import, known: dict[str, Module]) -> str | None:
    if module.name == "onward" or imported.target.partition(".")[0] != "onward":
        return None
    unit = imported.target.partition(".")[2].partition(".")[0]
    if not unit:
        if module.unit in MAY_USE_PUBLIC_NAMES:
            return None
        return "imports a public name from `onward`; import it from the module that defines it"
    if unit == module.unit or module.unit not in TIER or unit not in TIER or TIER[unit] < TIER[module.unit]:
        return None
    where = "beside" if TIER[unit] == TIER[module.unit] else "below"
    return f"imports `{imported.target}`, but `{unit}` is {where} `{module.unit}` in the order of layers"


def framework(module: Module, imported: Import, known: dict[str, Module]) -> str | None:
    root = imported.target.partition(".")[0]
    if root in FRAMEWORKS and root not in module.serves:
        return (
            f"imports `{root}`, but only a file that serves it may, such as onward/engines/{min(FRAMEWORKS[root])}.py"
        )
    target = known.get(imported.target)
    if target and imported.on_load and target.serves - module.serves:
        return f"imports `{target.name}` when it is loaded, and so a framework; import it inside a function"
    return None


def protobuf(module: Module, imported: Import, known: dict[str, Module]) -> str | None:
    if imported.target.partition(".")[0] not in PROTOBUF or f"{imported.target}.".startswith(f"{SCHEMAS}."):
        return None
    if any(module.name == edge or module.name.startswith(f"{edge}.") for edge in PROTOBUF_EDGE):
        return None
    return f"imports `{imported.target}`, but it is not in PROTOBUF_EDGE; use onnx_ir, or move this to the edge"


def violations(rule: Rule, known: dict[str, Module]) -> list[str]:
    return [
        f"{module.name}, line {imported.line}: {complaint}"
        for module in known.values()
        for imported in imports(module, known)
        if (complaint := rule(module, imported, known))
    ]


def test_every_module_has_a_place() -> None:
    unplaced = sorted({module.unit for module in modules().values()} - TIER.keys() - {""})
    assert not unplaced, f"place these in a tier of TIERS in {Path(__file__).name}: {', '.join(unplaced)}"


@pytest.mark.parametrize("rule", [order, framework, protobuf], ids=lambda rule: rule.__name__)
def test_the_source_keeps(rule: Rule) -> None:
    found = violations(rule, modules())
    assert not found, "\n".join(["", *found])


# ---- the rules catch what they should --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "name", "source", "caught"),
    [
        (order, "onward.recipe.losses", "from ..build import op", ""),
        (order, "onward.recipe.losses", "from .parts import chain", ""),
        (
            order,
            "onward.recipe.losses",
            "def f():\n    from ..lowering import lower",
            "line 2: .*`lowering` is below",
        ),
        (order, "onward.model", "from onward import cli", "`onward.cli`, but `cli` is below `model`"),
        (order, "onward.checker", "import onward.lowering as l", "`lowering` is beside `checker`"),
        (order, "onward.model", "from onward import Model", "public name"),
        (order, "onward.cli.show", "from onward import Model", ""),
        (order, "onward", "from .cli import main", ""),
        (framework, "onward.engines.torch", "import torch.nn", ""),
        (framework, "onward.frameworks.from_torch", "from torch import nn", ""),
        (framework, "onward.frameworks.jax", "import torch", "imports `torch`"),
        (framework, "onward.training.loop", "def f():\n    import keras", "imports `keras`"),
        (framework, "onward.training.loop", "f = lambda: importlib.import_module('torch')", "imports `torch`"),
        (framework, "onward", "import jax", "imports `jax`"),
        (framework, "onward.engines", "from . import torch", "when it is loaded"),
        (framework, "onward.engines", "def door():\n    from . import torch", ""),
        (framework, "onward.engines", "if TYPE_CHECKING:\n    from .torch import Engine", ""),
        (framework, "onward.frameworks.torch", "from onward.engines.torch import table", ""),
        (protobuf, "onward.lowering.standard_operators", "import onnx", ""),
        (protobuf, "onward.lowering.passes", "from onnx import helper", "not in PROTOBUF_EDGE"),
        (protobuf, "onward.modelling", "import onnx", "not in PROTOBUF_EDGE"),
        (protobuf, "onward.lowering.passes", "from google.protobuf import message", "`google.protobuf.message`"),
        (protobuf, "onward.rules.basic", "from onnx import defs\nfrom onnx.defs import get_schema", ""),
        (protobuf, "onward.rules.basic", "import onnx_ir as ir", ""),
    ],
)
def test_a_rule_catches(rule: Rule, name: str, source: str, caught: str) -> None:
    others = ["onward.build", "onward.cli", "onward.lowering", "onward.recipe.parts", "onward.engines.torch"]
    known = {other: Module(other, "") for other in others}
    known[name] = Module(name, source, is_package=name in ("onward", "onward.engines"))
    found = "\n".join(violations(rule, known))
    assert bool(found) == bool(caught), found
    assert re.search(caught, found)


# ---- size ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("part", "folder"), [("src", ""), ("frameworks", "frameworks")])
def test_the_source_is_within_its_budget(part: str, folder: str) -> None:
    budget = tomllib.loads((ROOT / "budget.toml").read_text())[part]
    texts = [path.read_text(encoding="utf-8") for path in (SOURCE / "onward" / folder).rglob("*.py")]
    size = {"files": len(texts), "lines": sum(len(text.splitlines()) for text in texts)}
    over = {unit: f"{size[unit]} of {budget[unit]}" for unit in size if size[unit] > budget[unit]}
    assert not over, f"{part} is over the budget of budget.toml: {over}"


# ---- tests -----------------------------------------------------------------------------------------------------------


def test_no_test_imports_another() -> None:
    """What several need is in a file of its own, so that each can be run, moved or marked by itself."""
    for path in TESTS.rglob("*.py"):
        imports = re.findall(r"^\s*(?:from|import) +(test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert not imports, f"{path.name} imports {imports}"


# ---- nothing heavy is loaded -----------------------------------------------------------------------------------------


def loaded_frameworks(code: str) -> set[str]:
    """The frameworks in memory after a fresh interpreter has run this."""
    report = f"{code}\nimport json, sys\nprint(json.dumps(sorted(m for m in sys.modules if '.' not in m)))"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1])) & FRAMEWORKS.keys()


def test_import_loads_no_framework() -> None:
    assert not loaded_frameworks("import onward")


@pytest.mark.skipif(importlib.util.find_spec("onward.cli") is None, reason="there is no onward.cli yet")
def test_help_loads_no_framework() -> None:
    assert not loaded_frameworks("""
import sys
from onward.cli import main
sys.argv = ["onward", "--help"]
try:
    main()
except SystemExit as exit:
    assert not exit.code, exit.code
""")
