"""The table of derivatives, and how to write a rule.

    elementwise(Tanh=lambda op, x, y: 1 - y * y)              # f'(x) of y = f(x); the driver multiplies by dy

    @gradient("Softmax")
    def softmax(op, dy, x, *, y, axis):
        return dy * y - y * op.ReduceSum(dy * y, [axis], keepdims=1)

    @rewrite("BiasGelu", domain="com.microsoft")              # replaced before differentiation
    def bias_gelu(op, x, bias):
        return op.Gelu(x + bias)

    no_gradient("the result is a truth value", "Equal", "Less")

    @simplification("SequenceAt")                             # in addition to the rule: a shortcut for some nodes
    def known_element(op, sequence, position):
        return NotImplemented                                 # not for this node: use the rule

    @body("STFT", gradient=(0, 2))                            # the operator in terms of others, also for its derivative
    def stft(op, signal, frame_step, window, frame_length, *, onesided):
        return op.DFT(...)

A rule gets a builder, the gradient of the output, and the inputs in the order of the operator's documentation; omitted
inputs are None. By keyword it may request the output `y` and attributes, which have the defaults of the schema. If an
operator has several outputs, the rule requests `dys` and `ys`; the gradient of an output that nothing depends on is
None. A rule returns one gradient per input, or None for an input without one; missing gradients at the end count as
None. If only a small slice of an input has a gradient, the rule may return a function from the gradient so far (None at
first) to the sum. A rewrite gets a builder and the inputs, and returns the outputs, computed by operators with rules. A
body does the same, but replaces an operator only on engines that lack it.

The driver, not the rule, handles: inputs that need no gradient (unused results are removed afterwards), broadcasting
(`broadcasts=True`, or the indices of inputs), the type of the result, accumulation, and names.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

import onnx_ir as ir

from onward.build import Builder, Expr
from onward.errors import Error, InvalidModelError, UnsupportedError
from onward.model.walk import attributes
from onward.standard import domain_of, schema_domain
from onward.transform.types import fault_of


@dataclasses.dataclass(frozen=True)
class Rule:
    """The derivative of one operator."""

    operator: tuple[str, str]
    function: Callable[..., Any]
    broadcasts: bool | tuple[int, ...] = False
    """Inputs (True: all) whose gradient the driver sums over broadcast axes."""
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Keyword parameters of the rule -> defaults."""
    many: bool = False
    """True for a rule with the gradients of all outputs (`dys`), not of the first alone (`dy`)."""
    positional: int | None = None
    """Number of inputs of the rule; None for any number."""
    inputs: tuple[int, ...] | None = None
    """Inputs that have a derivative; None for all except integers."""

    def broadcasts_input(self, index: int) -> bool:
        return self.broadcasts if isinstance(self.broadcasts, bool) else index in self.broadcasts


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """An operator that is replaced by others before differentiation."""

    operator: tuple[str, str]
    function: Callable[..., Any]
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    positional: int | None = None


@dataclasses.dataclass(frozen=True)
class NoGradient:
    """An operator through which no gradient flows, with the reason."""

    operator: tuple[str, str]
    reason: str


RULES: dict[tuple[str, str], Rule | Rewrite | NoGradient] = {}
"""(domain, operator) -> its derivative."""

_MODULES: dict[tuple[str, str], str] = {}
"""(domain, operator) -> the module with its rule."""
_CONFLICTS: dict[tuple[str, str], tuple[str, str]] = {}
"""(domain, operator) -> two modules of different packages that both have a rule for it."""

SIMPLIFICATIONS: dict[tuple[str, str], Rewrite] = {}
"""(domain, operator) -> a rewrite before differentiation that applies to some nodes, although there is a rule."""

BODIES: dict[tuple[str, str], Rewrite] = {}
"""(domain, operator) -> the replacement on engines that lack the operator."""

_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _decorator(
    domain: str, operators: Iterable[str], register: Callable[[tuple[str, str], Callable[..., Any]], None]
) -> _Decorator:
    """Return a decorator that registers a function for several operators of a domain."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in operators:
            register((domain, name), function)
        return function

    return decorate


def gradient(
    *operators: str,
    domain: str = "",
    broadcasts: bool | tuple[int, ...] = False,
    inputs: tuple[int, ...] | None = None,
) -> _Decorator:
    """Register the decorated function as the derivative of these operators: `(op, dy, *inputs) -> gradients`.

    By keyword it may request attributes, the outputs `y` and `ys`, the gradients `dys` of all outputs, and `node`.

    - `operators`: their names
    - `domain`: domain of the operators (default: the standard's)
    - `broadcasts`: inputs whose gradient is summed over the axes along which they were broadcast (True: all)
    - `inputs`: inputs that have a derivative (default: all floating-point inputs)
    """
    return _decorator(domain, operators, lambda key, f: _add(make_rule(key, f, broadcasts, inputs), f.__module__))


def rewrite(*operators: str, domain: str = "") -> _Decorator:
    """Register the decorated function as the replacement of these operators: `(op, *inputs) -> outputs`.

    By keyword it may request attributes, and `node`. For an output that the node omits it may return None.

    - `operators`: their names
    - `domain`: domain of the operators (default: the standard's)
    """
    return _decorator(domain, operators, lambda key, f: _add(make_rewrite(key, f), f.__module__))


def simplification(*operators: str) -> _Decorator:
    """Register the decorated function as a rewrite that may decline: then it returns NotImplemented and builds nothing.

    It may also request `xs`, the names of the values to differentiate by, which the rewrite must keep.
    """
    return _decorator("", operators, lambda key, f: SIMPLIFICATIONS.update({key: make_rewrite(key, f)}))


def body(*operators: str, domain: str = "", gradient: tuple[int, ...] = ()) -> _Decorator:
    """Register the decorated function as the definition of these operators, like a rewrite: `(op, *inputs) -> outputs`.

    Engines that lack an operator execute it. Its derivative is also the operator's with respect to the inputs
    `gradient`; without them, the operator has a rule of its kind, or no derivative.
    """

    def register(key: tuple[str, str], function: Callable[..., Any]) -> None:
        BODIES[key] = make_rewrite(key, function)
        if gradient:
            _add(_rule_of_body(BODIES[key], gradient), function.__module__)

    return _decorator(domain, operators, register)


def _rule_of_body(entry: Rewrite, inputs: tuple[int, ...]) -> Rule:
    @functools.wraps(entry.function)
    def rule(op: Any, dy: Expr, *operands: Expr | None, pull_back: Callable[..., Any], **attributes: Any) -> Any:
        variables = [op.Identity(x) if i in inputs and x is not None else x for i, x in enumerate(operands)]
        sources = [x.value for i, x in enumerate(variables) if i in inputs and x is not None]
        y = entry.function(op, *variables, **attributes)
        since = itertools.takewhile(lambda node: node is not sources[-1].producer(), reversed(op.graph))
        gradients = pull_back(op, list(since)[::-1], {y.value: dy}, sources)
        return tuple(None if x is None else gradients.get(x.value) for x in variables)

    return Rule(entry.operator, rule, False, {**entry.keywords, "pull_back": None}, False, entry.positional, inputs)


def make_rewrite(operator: tuple[str, str], function: Callable[..., Any]) -> Rewrite:
    """Return a rewrite without adding it to the table."""
    return Rewrite(operator, function, *_keywords_of(function, leading=1))


def elementwise(domain: str = "", **derivatives: Callable[..., Any]) -> None:
    """Register operators y = f(x) by their derivative: `(op, x, y) -> f'(x)`, attributes by keyword.

    - `domain`: domain of the operators (default: the standard's)
    - `derivatives`: operator -> its derivative
    """
    for name, derivative in derivatives.items():
        keywords, _ = _keywords_of(derivative, leading=3)
        rule = Rule((domain, name), _times_dy(derivative), keywords={"y": None, **keywords}, positional=1)
        _add(rule, derivative.__module__)


def _times_dy(derivative: Callable[..., Any]) -> Callable[..., Any]:
    return lambda op, dy, x, *, y, **attributes: dy * derivative(op, x, y, **attributes)


def no_gradient(reason: str, *operators: str, domain: str = "") -> None:
    """Register operators that have no derivative, or a zero one.

    - `reason`: the reason that errors state
    - `operators`: their names
    - `domain`: domain of the operators (default: the standard's)
    """
    caller = sys._getframe(1).f_globals["__name__"]
    for name in operators:
        _add(NoGradient((domain, name), reason), caller)


def lookup(node: ir.Node) -> Rule | Rewrite | NoGradient | None:
    """Return the entry for a node, from Onward or another package; None if there is none."""
    load_plugins()
    operator = _operator(node)
    if operator in _CONFLICTS:
        first, second = _CONFLICTS[operator]
        raise UnsupportedError(
            f"there are two rules for `{operator[1]}`: one in `{first}`, one in `{second}`",
            hint="uninstall one of these packages, or remove its rule",
        )
    return RULES.get(operator)


def has_gradient(domain: str, operator: str, index: int) -> bool:
    """True if a gradient may flow into an input of an operator; operators outside the table may have one."""
    entry = RULES.get((schema_domain(domain), operator))
    if isinstance(entry, NoGradient):
        return False
    return not isinstance(entry, Rule) or entry.inputs is None or index in entry.inputs


def lookup_rewrite(node: ir.Node) -> Rewrite | None:
    """Return the rewrite or simplification of a node before differentiation."""
    entry = RULES.get(_operator(node))
    return entry if isinstance(entry, Rewrite) else SIMPLIFICATIONS.get(_operator(node))


def lookup_body(node: ir.Node) -> Rewrite | None:
    """Return the replacement of a node for engines that lack its operator."""
    entry = lookup(node)
    return entry if isinstance(entry, Rewrite) else BODIES.get(_operator(node))


def _operator(node: ir.Node) -> tuple[str, str]:
    return domain_of(node), node.op_type


def apply(
    rule: Rule | Rewrite,
    op: Builder,
    node: ir.Node,
    *leading: Any,
    inputs: Sequence[ir.Value | None] | None = None,
    **available: Any,
) -> Any:
    """Call a rule for a node with `leading`, the inputs (default: those of the node) and its keywords.

    Rules assume valid nodes. If a rule fails, the error blames the model if the node is invalid, else the rule.
    """
    operands = [op(value) if value is not None else None for value in (node.inputs if inputs is None else inputs)]
    if rule.positional is not None:
        operands += [None] * (rule.positional - len(operands))
    available = attributes(node, op.opset) | {"node": node} | available
    keywords = {name: available.get(name, default) for name, default in rule.keywords.items()}
    try:
        return rule.function(op, *leading, *operands, **keywords)
    except Error:
        raise
    except Exception as error:
        fault = fault_of(node, {**op.imports, "": op.opset})
        if fault is None:
            error.add_note(f"in the rule for `{node.op_type}`, at the node `{node.name}`")
            raise
        raise InvalidModelError(
            f"cannot differentiate `{node.name}`, an invalid `{node.op_type}`: {fault}",
            hint="run `onward check MODEL`",
        ) from error


def make_rule(
    operator: tuple[str, str],
    function: Callable[..., Any],
    broadcasts: bool | tuple[int, ...] = False,
    inputs: tuple[int, ...] | None = None,
) -> Rule:
    """Return a rule without adding it to the table."""
    gradients = _parameters(function)[1].name
    keywords, positional = _keywords_of(function, leading=2)
    return Rule(operator, function, broadcasts, keywords, gradients == "dys", positional, inputs)


@functools.cache  # many operators share a rule
def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def _keywords_of(function: Callable[..., Any], leading: int) -> tuple[dict[str, Any], int | None]:
    """Return the keyword parameters of a rule with defaults, and the number of its inputs; None for any number."""
    parameters = _parameters(function)
    keywords = {p.name: None if p.default is p.empty else p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    positional = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in positional)
    return keywords, None if variadic else len(positional) - leading


def _add(entry: Rule | Rewrite | NoGradient, module: str) -> None:
    """Add a rule of a module to the table. A rule that a notebook defines again replaces the first."""
    earlier = _MODULES.get(entry.operator, module)
    if earlier != module and earlier.partition(".")[0] != module.partition(".")[0]:
        _CONFLICTS[entry.operator] = (earlier, module)
        return
    if entry.operator in RULES and (earlier != module or _name(entry) != _name(RULES[entry.operator])):
        raise ValueError(f"there are two rules for {entry.operator[1]}, in {earlier} and {module}")
    RULES[entry.operator], _MODULES[entry.operator] = entry, module


def _name(entry: Rule | Rewrite | NoGradient) -> str:
    return "" if isinstance(entry, NoGradient) else entry.function.__qualname__


_plugins_loaded = False


def load_plugins() -> None:
    """Import the rules of other packages, at the first call. A warning names those that fail to import."""
    global _plugins_loaded
    if _plugins_loaded:
        return
    _plugins_loaded = True
    for entry in entry_points(group="onward.rules"):
        try:
            entry.load()
        except Exception as error:
            package = f" of {entry.dist.name}" if entry.dist is not None else ""
            reason = f"{type(error).__name__}: {error}"
            warnings.warn(f"the rules `{entry.value}`{package} cannot be loaded: {reason}", stacklevel=2)
