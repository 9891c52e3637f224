"""Optimizers that PyTorch has no class for, printed from the definitions of their updates.

A definition is the function of a training model (`recipe/optimizers/updates.py`). Its graph becomes
lines of Python: float64 and integers become Python numbers, the rest tensors. Values that are read
more than once keep the names of the definition. The text is executed here, and programs contain it.
"""

from __future__ import annotations

import linecache
import re
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onward.build import DOMAIN, Expr, Function
from onward.frameworks.program.printing import ATOM, COMPARISON, POWER, PRODUCT, SUM, WIDE, Expression
from onward.frameworks.program.source_text import break_lines, indent
from onward.frameworks.torch import exact
from onward.frameworks.torch.exact import ExactOptimizer
from onward.standard import COMMON_OPSET
from onward.vocabulary.optimizers import TORCH_ROWS
from onward.vocabulary.rows import TorchOptimizer

# ---- an update as statements -----------------------------------------------------------------------------------------


_INFIX = {
    "And": ("and", WIDE), "Greater": (">", COMPARISON), "Add": ("+", SUM), "Sub": ("-", SUM), "Mul": ("*", PRODUCT),
    "Div": ("/", PRODUCT),
}  # fmt: skip
_LONG = 60
"""Length from which an expression gets the name that its definition has."""
_ARGUMENTS = ("x", "g", "lr", "t")
_BETAS = ("beta1", "beta2")


def _expression(node: ir.Node, texts: Mapping[ir.Value, Expression], numbers: set[ir.Value]) -> Expression:
    """Return a node as an expression, and note whether it is a number of Python."""
    inputs = [value for value in node.inputs if value is not None]
    operands = [texts[value] for value in inputs]
    is_number = numbers.issuperset(inputs[:1] if node.op_type in ("Cast", "CastLike") else inputs)
    if is_number or node.op_type in ("Pow", "ReduceSumSquare"):
        numbers.add(node.outputs[0])
    match node.op_type:
        case "Constant":
            return Expression(f"{node.attributes['value'].as_tensor().numpy().item():.17g}")
        case "Cast" | "CastLike":  # to the type of a tensor, which a number of Python becomes by itself
            return operands[0]
        case "Pow":
            return Expression(f"{operands[0].within(ATOM)}**{operands[1].within(ATOM)}", POWER)
        case "Mul" if inputs[1] in numbers and not is_number:
            return Expression(f"{operands[1].within(PRODUCT)} * {operands[0].within(POWER)}", PRODUCT)
        case operator if operator in _INFIX:
            sign, looseness = _INFIX[operator]
            return Expression(f"{operands[0].within(looseness)} {sign} {operands[1].within(looseness - 1)}", looseness)
        case "Sqrt" if is_number:
            return Expression(f"math.sqrt({operands[0].text})")
        case ("Sqrt" | "Abs" | "Sign") as operator:
            return Expression(f"{operands[0].within(ATOM)}.{operator.lower()}()")
        case "Max":
            return Expression(f"{'max' if is_number else 'torch.maximum'}({operands[0].text}, {operands[1].text})")
        case "Where":
            return Expression(f"{operands[1].within(WIDE)} if {operands[0].text} else {operands[2].text}", WIDE + 1)
        case "ReduceSumSquare":
            return Expression(f"float({operands[0].within(ATOM)}.square().sum())")
    raise NotImplementedError(node.op_type)


def _graph_of(function: Function) -> tuple[ir.Function, dict[ir.Value, str]]:
    """Return the body of a function, and the names of its values in the Python code that builds it."""
    names: dict[ir.Value, str] = {}

    def note(frame: types.FrameType, event: str, _: Any) -> None:
        if event == "return" and frame.f_globals["__name__"].startswith("onward.recipe.optimizers."):
            names.update({x.value: name for name, x in frame.f_locals.items() if isinstance(x, Expr)})

    functions: dict[ir.OperatorIdentifier, ir.Function] = {}
    profiler = sys.getprofile()
    sys.setprofile(note)
    try:
        function.define(functions, COMMON_OPSET)
    finally:
        sys.setprofile(profiler)
    return functions[DOMAIN, function.name, ""], names


def _statements(function: Function) -> list[str]:
    """Return lines that update parameter and state in place."""
    graph, names = _graph_of(function)
    slots = _slots_of(function)
    tensors = ("x", "g", *slots)
    betas = _BETAS if {*_BETAS} <= {*function.inputs} else ()
    texts: dict[ir.Value, Expression] = {}
    for value in graph.inputs:
        name = value.name or ""
        entry = f'{"state" if name in slots else "group"}["{name}"]'
        texts[value] = Expression(name if name in (*_ARGUMENTS, *betas) else entry)
    numbers = {value for value in graph.inputs if value.name not in tensors}
    taken = {*function.inputs, "self", "state", "group"}
    lines = ['beta1, beta2 = group["betas"]'] if betas else []
    for node in graph:
        value = node.outputs[0]
        expression = _expression(node, texts, numbers)
        reads = sum(use.node.op_type != "CastLike" or use.idx == 0 for use in value.uses()) + value.is_graph_output()
        name = names.get(value, "")
        if node.op_type not in ("Constant", "Cast", "CastLike") and (
            reads > 1 or (name and len(expression.text) > _LONG)
        ):
            if not name or name in taken:
                name = next(letter for letter in "dehk" if letter not in taken)
            taken.add(name)
            lines.append(f"{name} = {expression.text}")
            expression = Expression(name)
        texts[value] = expression
    targets = ["x", *(f'state["{slot}"]' for slot in slots)]
    results = [texts[value].text for value in graph.outputs]
    for i, result in enumerate(results):  # nothing may be read after it was written
        assert not any(re.search(rf"(?<!\w){re.escape(x)}(?!\w)", result) for x in targets[:i]), function.name
    return lines + [f"{target}.copy_({result})" for target, result in zip(targets, results, strict=True)]


def _slots_of(function: Function) -> tuple[str, ...]:
    return function.inputs[2 : function.inputs.index("lr")]


# ---- classes ---------------------------------------------------------------------------------------------------------

_STATE = "x: Tensor, g: Tensor, state: dict[str, Any], lr: float, t: int, group: dict[str, Any]"


def _class_text(row: TorchOptimizer) -> str:
    """Return the text of the class of a row, from its settings and updates."""
    functions = {condition: update.plain for condition, update in row.updates.items()}
    docs = [f"{_words(condition)}{function.doc}" for condition, function in functions.items()]
    slots = {condition: [f"return {_literal(_slots_of(function))}"] for condition, function in functions.items()}
    lines = {condition: _statements(function) for condition, function in functions.items()}
    text = "\n\n".join(reversed(docs))
    first, *more = text.splitlines()
    docstring = [f'"""{first}', *more, '"""'] if more else [f'"""{text}"""']
    return break_lines("\n".join([
        f"class {row.name}(ExactOptimizer):",
        *indent([*docstring, "", f"SETTINGS = {_literal(row.defaults)}", ""]),
        *indent(["def slots(self, group: dict[str, Any]) -> tuple[str, ...]:", *indent(_branches(slots)), ""]),
        *_decay(functions),
        *indent([f"def update(self, {_STATE}) -> None:", *indent(_branches(lines))]),
    ]))  # fmt: skip


def _decay(functions: Mapping[str, Function]) -> list[str]:
    """Return the method that leaves weight decay to updates that have it as an input."""
    plain = [condition for condition, function in functions.items() if "weight_decay" not in function.inputs]
    if len(plain) == len(functions):
        return []
    result = f"super().decay(x, g, lr, group) if {plain[0]} else g" if plain else "g"
    head = "def decay(self, x: Tensor, g: Tensor, lr: float, group: dict[str, Any]) -> Tensor:"
    return indent([head, f"    return {result}", ""])


def _literal(value: Any) -> str:
    return repr(value).replace("'", '"')


def _words(condition: str) -> str:
    names = re.sub(r'group\["(\w+)"\]', r"`\1`", condition)
    return f"{'Without' if names.startswith('not ') else 'With'} {names.removeprefix('not ')}: " if names else ""


def _branches(lines: Mapping[str, Sequence[str]]) -> list[str]:
    """Return lines under their conditions, the last without one."""
    blocks = list(lines.items())
    while len(blocks) > 1 and blocks[-2][1] == blocks[-1][1]:
        del blocks[-2]
    *others, (_, last) = blocks
    if not others:
        return list(last)
    starts = [f"{'elif' if i else 'if'} {condition}:" for i, (condition, _) in enumerate(others)]
    return [line for start, (_, own) in zip([*starts, "else:"], blocks, strict=True) for line in (start, *indent(own))]


_OWN = [row for row in TORCH_ROWS if not row.is_native]
_HOME = "onward.frameworks.torch.exact.formulas"
_IMPORTS = f"""from __future__ import annotations
import math
from typing import Any
import torch
from torch import Tensor
from {ExactOptimizer.__module__} import ExactOptimizer
"""


def _execute(text: str) -> types.ModuleType:
    """Return a module with this text, whose source `inspect` can find."""
    module = types.ModuleType(_HOME)
    module.__file__ = f"<{_HOME}>"
    linecache.cache[module.__file__] = len(text), None, text.splitlines(True), module.__file__
    exec(compile(text, module.__file__, "exec"), vars(module))
    sys.modules[_HOME] = module
    return module


_MODULE = _execute("\n\n\n".join([_IMPORTS, *(_class_text(row) for row in _OWN if row.updates)]))
EXACT: dict[str, type[ExactOptimizer]] = {
    row.name: getattr(_MODULE if row.updates else exact, row.name) for row in _OWN
}
"""Printed and hand-written classes by name."""
