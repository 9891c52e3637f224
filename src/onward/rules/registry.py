"""The table of derivatives, and how a rule is written.

    elementwise(Tanh=lambda op, x, y: 1 - y * y)              # y = f(x): the derivative f'(x); times dy by the driver

    @gradient("Softmax")
    def softmax(op, dy, x, *, y, axis):
        return dy * y - y * op.ReduceSum(dy * y, [axis], keepdims=1)

    @rewrite("BiasGelu", domain="com.microsoft")              # what is best differentiated as something else
    def bias_gelu(op, x, bias):
        return op.Gelu(x + bias)

    no_gradient("the result is a truth value", "Equal", "Less")

    @simplification("SequenceAt")                             # besides the rule: where something simpler is known
    def known_element(op, sequence, position):
        return NotImplemented                                 # here it is not: the rule it is

    @body("STFT", gradient=(0, 2))                            # what it computes, and by that its derivative
    def stft(op, signal, frame_step, window, frame_length, *, onesided):
        return op.DFT(...)

A rule gets a builder, the gradient of the output, and the inputs in the order of the operator's documentation; those
that a node leaves out are None. By keyword it may ask for the output `y` and for attributes, which come with the
schema's defaults. Of an operator with several outputs it asks for `dys` and `ys`, where an output that nothing depends
on has the gradient None. It returns one gradient per input, None where there is none; what is left out at the end
counts as None. Where only a small part of an input has one, it may return a function instead, from the gradient so far
(None at first) to the sum. A rewrite gets a builder and the inputs, and returns the outputs; what it is made of has
rules. So does a body, which takes the place of an operator only on engines that lack it.

What a rule need not think about: which inputs need a gradient (what nobody asks for is removed afterwards),
broadcasting (`broadcasts=True`, or the positions of inputs), the type of the result, accumulation, and names.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
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
    """Inputs (True: all) whose gradient is to be summed over the axes along which the input was broadcast."""
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What the rule asks for by name, and what it gets where there is no such thing."""
    many: bool = False
    """Whether the rule takes the gradients of all outputs (`dys`), not of the first alone (`dy`)."""
    positional: int | None = None
    """How many inputs the rule takes; None for any number."""
    inputs: tuple[int, ...] | None = None
    """The inputs that have a derivative; None for all that are no integers."""

    def broadcasts_input(self, index: int) -> bool:
        return self.broadcasts if isinstance(self.broadcasts, bool) else index in self.broadcasts

    @property
    def doc(self) -> str:
        return inspect.getdoc(self.function) or ""


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """An operator that is replaced by others before differentiation."""

    operator: tuple[str, str]
    function: Callable[..., Any]
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    positional: int | None = None


@dataclasses.dataclass(frozen=True)
class NoGradient:
    """An operator through which no gradient flows, and why."""

    operator: tuple[str, str]
    reason: str


RULES: dict[tuple[str, str], Rule | Rewrite | NoGradient] = {}
"""(domain, operator) -> its derivative."""

_MODULES: dict[tuple[str, str], str] = {}
"""(domain, operator) -> the module that has its rule."""
_CONFLICTS: dict[tuple[str, str], tuple[str, str]] = {}
"""(domain, operator) -> two modules of different packages that both have a rule for it."""

SIMPLIFICATIONS: dict[tuple[str, str], Rewrite] = {}
"""(domain, operator) -> what a node is replaced by before differentiation in some cases, although there is a rule."""


BODIES: dict[tuple[str, str], Rewrite] = {}
"""(domain, operator) -> what a node is replaced by on engines that lack the operator."""


def gradient(
    *operators: str,
    domain: str = "",
    broadcasts: bool | tuple[int, ...] = False,
    inputs: tuple[int, ...] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the derivative of these operators: `(op, dy, *inputs) -> gradients`.

    By keyword it may ask for attributes, for the outputs `y` and `ys`, the gradients `dys` of all outputs, and `node`.

    - `operators`: their names
    - `domain`: that of the operators (default: the standard's)
    - `broadcasts`: inputs whose gradient is summed over the axes along which they were broadcast (True: all)
    - `inputs`: those that have a derivative (default: all floating-point inputs)
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in operators:
            _add(make_rule((domain, name), function, broadcasts, inputs), function.__module__)
        return function

    return register


def rewrite(*operators: str, domain: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as what these operators are replaced by: `(op, *inputs) -> outputs`.

    By keyword it may ask for attributes, and for `node`. For an output that the node leaves out it may return None.

    - `operators`: their names
    - `domain`: that of the operators (default: the standard's)
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in operators:
            _add(make_rewrite((domain, name), function), function.__module__)
        return function

    return register


def simplification(*operators: str, domain: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as a rewrite that may decline: it returns NotImplemented, and builds nothing.

    It may also ask for `xs`, the names of the values that are differentiated by, which must not be passed over.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in operators:
            SIMPLIFICATIONS[domain, name] = make_rewrite((domain, name), function)
        return function

    return register


def body(
    *operators: str, domain: str = "", gradient: tuple[int, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as what these operators compute: `(op, *inputs) -> outputs`, as a rewrite does.

    Engines that lack an operator execute that. The derivative with respect to the inputs `gradient` is that of the
    body; where these are none, there is a rule besides, or no derivative.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in operators:
            BODIES[domain, name] = make_rewrite((domain, name), function)
            if gradient:
                _add(_rule_of_body(BODIES[domain, name], gradient), function.__module__)
        return function

    return register


def _rule_of_body(entry: Rewrite, inputs: tuple[int, ...]) -> Rule:
    @functools.wraps(entry.function)
    def rule(op: Any, dy: Expr, *given: Expr | None, pull_back: Callable[..., Any], **attributes: Any) -> Any:
        variables = [op.Identity(x) if i in inputs and x is not None else x for i, x in enumerate(given)]
        sources = [x.value for i, x in enumerate(variables) if i in inputs and x is not None]
        y = entry.function(op, *variables, **attributes)
        since = itertools.takewhile(lambda node: node is not sources[-1].producer(), reversed(op.graph))
        found = pull_back(op, list(since)[::-1], {y.value: dy}, sources)
        return tuple(None if x is None else found.get(x.value) for x in variables)

    return Rule(entry.operator, rule, False, {**entry.keywords, "pull_back": None}, False, entry.positional, inputs)


def make_rewrite(operator: tuple[str, str], function: Callable[..., Any]) -> Rewrite:
    """A rewrite that is not in the table."""
    return Rewrite(operator, function, *_keywords_of(function, leading=1))


def elementwise(domain: str = "", **derivatives: Callable[..., Any]) -> None:
    """Register operators y = f(x) by their derivative: `(op, x, y) -> f'(x)`, attributes by keyword.

    - `domain`: that of the operators (default: the standard's)
    - `derivatives`: the derivative of each operator, by its name
    """
    for name, derivative in derivatives.items():
        _add(make_rule((domain, name), _times_dy(derivative), broadcasts=False), derivative.__module__)


def no_gradient(reason: str, *operators: str, domain: str = "") -> None:
    """Register operators that have no derivative, or a zero one.

    - `reason`: what a user is told where a gradient would have to flow
    - `operators`: their names
    - `domain`: that of the operators (default: the standard's)
    """
    caller = sys._getframe(1).f_globals["__name__"]
    for name in operators:
        _add(NoGradient((domain, name), reason), caller)


def lookup(node: ir.Node) -> Rule | Rewrite | NoGradient | None:
    """What is known about the derivative of a node, by rules of ours and of other packages."""
    load_plugins()
    operator = _operator(node)
    if operator in _CONFLICTS:
        first, second = _CONFLICTS[operator]
        raise UnsupportedError(
            f"there are two rules for `{operator[1]}`: one in `{first}`, one in `{second}`",
            hint="do without one of these packages, or without its rule",
        )
    return RULES.get(operator)


def has_gradient(domain: str, operator: str, index: int) -> bool:
    """Whether a gradient flows into an input of an operator, as far as the table knows; of what it does not, it may."""
    entry = RULES.get((schema_domain(domain), operator))
    if isinstance(entry, NoGradient):
        return False
    return not isinstance(entry, Rule) or entry.inputs is None or index in entry.inputs


def lookup_rewrite(node: ir.Node) -> Rewrite | None:
    """How a node is replaced before differentiation, or may be."""
    entry = RULES.get(_operator(node))
    return entry if isinstance(entry, Rewrite) else SIMPLIFICATIONS.get(_operator(node))


def lookup_body(node: ir.Node) -> Rewrite | None:
    """What a node may be replaced by where its operator is lacking."""
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
    """Call a rule for a node: with `leading`, its inputs (or others for them), and what it asks for by keyword.

    Rules take valid nodes for granted. Where one fails, the model is to blame if the node is not; else the rule is.
    """
    given = [op(value) if value is not None else None for value in (node.inputs if inputs is None else inputs)]
    if rule.positional is not None:
        given += [None] * (rule.positional - len(given))
    available = attributes(node, op.opset) | {"node": node} | available
    keywords = {name: available.get(name, default) for name, default in rule.keywords.items()}
    try:
        return rule.function(op, *leading, *given, **keywords)
    except Error:
        raise
    except Exception as error:
        fault = fault_of(node, {**op.imports, "": op.opset})
        if fault is None:
            error.add_note(f"in the rule for `{node.op_type}`, at the node `{node.name}`")
            raise
        raise InvalidModelError(
            f"node `{node.name}` cannot be differentiated, because it is no valid `{node.op_type}`: {fault}",
            hint="see what `onward check` says",
        ) from error


def _times_dy(derivative: Callable[..., Any]) -> Callable[..., Any]:
    names = [p.name for p in inspect.signature(derivative).parameters.values() if p.kind is p.KEYWORD_ONLY]

    def rule(op: Any, dy: Expr, x: Expr, *, y: Expr, **attributes: Any) -> Expr:
        return dy * derivative(op, x, y, **attributes)

    rule.__doc__ = derivative.__doc__
    keywords = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("y", *names)]
    ends = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in ("op", "dy", "x")]
    rule.__signature__ = inspect.Signature([*ends, *keywords])  # type: ignore[attr-defined]
    return rule


def make_rule(
    operator: tuple[str, str],
    function: Callable[..., Any],
    broadcasts: bool | tuple[int, ...] = False,
    inputs: tuple[int, ...] | None = None,
) -> Rule:
    """A rule of an operator that is in no table."""
    gradients = _parameters(function)[1].name
    keywords, positional = _keywords_of(function, leading=2)
    return Rule(operator, function, broadcasts, keywords, gradients == "dys", positional, inputs)


@functools.cache  # many operators share a rule
def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def _keywords_of(function: Callable[..., Any], leading: int) -> tuple[dict[str, Any], int | None]:
    """What a rule asks for by keyword, with defaults, and how many inputs it takes after the `leading` parameters."""
    parameters = _parameters(function)
    keywords = {p.name: None if p.default is p.empty else p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    positional = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in positional)
    return keywords, None if variadic else len(positional) - leading


def _add(entry: Rule | Rewrite | NoGradient, module: str) -> None:
    """Put a rule of a module into the table. One that is defined again, as in a notebook, replaces the first."""
    known = _MODULES.get(entry.operator, module)
    if known != module and known.partition(".")[0] != module.partition(".")[0]:
        _CONFLICTS[entry.operator] = (known, module)
        return
    if entry.operator in RULES and (known != module or _name(entry) != _name(RULES[entry.operator])):
        raise ValueError(f"there are two rules for {entry.operator[1]}, in {known} and {module}")
    RULES[entry.operator], _MODULES[entry.operator] = entry, module


def _name(entry: Rule | Rewrite | NoGradient) -> str:
    return "" if isinstance(entry, NoGradient) else entry.function.__qualname__


# ---- rules of other packages -----------------------------------------------------------------------------------------


_plugins_loaded = False


def load_plugins() -> None:
    """Import the rules of other packages, when they are first needed. What cannot be imported is left out."""
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
