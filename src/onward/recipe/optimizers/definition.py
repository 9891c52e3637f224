"""Definition of an optimizer: numbers, choices, slots, and the nodes that update one parameter."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr, Function
from onward.constants import HALVES
from onward.errors import RecipeError, alternatives
from onward.model import TRAINING_DOMAIN
from onward.recipe.optimizers.arithmetic import add_scaled, coupled_decay, declared_scalar, decoupled_decay, mul, single
from onward.recipe.spec import NOT_NEGATIVE, OF_OPTIMIZERS, check_options, checked_number

Settings = SimpleNamespace
"""Every number and choice of a configured optimizer, as attributes."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Slot:
    """A tensor that an optimizer keeps per parameter, and its initial value."""

    name: str
    dtype: ir.DataType
    shape: Shape
    initial: float = 0.0


SCALAR_SLOTS = {"mu_product"}
"""Slots of one float64 number, for any parameter shape."""


class Update:
    """The functions of an optimizer's update, one per treatment of weight decay."""

    def __init__(
        self,
        body: Callable[..., Any],
        name: str | None = None,
        doc: str | None = None,
        coupled_decay: Callable[[Expr, Expr, Expr], Expr] = coupled_decay,
        decoupled_decay: Callable[[Expr, Expr, Expr], Expr] = decoupled_decay,
    ):
        self._body = body
        self._doc = inspect.cleandoc(body.__doc__ or "") if doc is None else doc
        self._coupled_decay = coupled_decay
        self._decoupled_decay = decoupled_decay
        self.name = name or "".join(word.capitalize() for word in body.__name__.split("_"))
        self.in_16_bits: dict[bool, Update] = {}
        """The update in 16 bits as PyTorch rounds it, if known; the key: in its fused kernel."""

    @functools.cached_property
    def plain(self) -> Function:
        """Update without weight decay, except in the signature."""
        return self._function("", "", lambda x, g, lr, weight_decay: (x, g))

    @functools.cached_property
    def coupled(self) -> Function:
        """Update with an L2 penalty: the decay is part of the gradient."""
        doc = "\n\nBefore that, weight decay as an L2 penalty: g ← g + λ·x."
        return self._function("L2", doc, lambda x, g, lr, weight_decay: (x, self._coupled_decay(x, g, weight_decay)))

    @functools.cached_property
    def decoupled(self) -> Function:
        """Update whose decay acts on the weights alone."""
        doc = "\n\nBefore that, decoupled weight decay: x ← x·(1 − lr·λ)."
        return self._function("W", doc, lambda x, g, lr, weight_decay: (self._decoupled_decay(x, lr, weight_decay), g))

    def half(self, body: Callable[..., Any]) -> Update:
        """Decorate the 16-bit form of the formula, with each operation rounded."""
        return self._narrow(
            False,
            body,
            "Half",
            "each operation rounds, as PyTorch's does",
            lambda x, g, rate: add_scaled(g, x, rate),
            lambda x, lr, rate: mul(x, 1.0 - lr * rate),
        )

    def fused(self, body: Callable[..., Any]) -> Update:
        """Decorate the 16-bit form of the formula, computed in float32 and rounded when stored."""
        return self._narrow(
            True,
            body,
            "Fused",
            "in float32, and what is stored is rounded",
            lambda x, g, rate: single(g) + single(x) * single(rate),
            lambda x, lr, rate: single(x) * single(1.0 - lr * rate),
        )

    def _narrow(self, fused: bool, body: Callable[..., Any], suffix: str, remark: str, *decays: Any) -> Update:
        doc = f"{self._doc}\n\nFor 16 bits: {remark}."
        self.in_16_bits[fused] = Update(body, self.name + suffix, doc, *decays)
        return self.in_16_bits[fused]

    def _function(self, suffix: str, doc: str, decay: Callable[..., tuple[Expr, Expr]]) -> Function:
        signature = inspect.signature(self._body, eval_str=True)
        parameters = list(signature.parameters.values())
        if suffix:
            last = 1 + max(i for i, p in enumerate(parameters) if p.kind is not p.KEYWORD_ONLY)
            parameters.insert(last, inspect.Parameter("weight_decay", inspect.Parameter.POSITIONAL_OR_KEYWORD))
        names = [p.name for p in parameters[1:] if p.kind is not p.KEYWORD_ONLY]
        slots = names[2 : names.index("lr")]

        def body(op: Builder, *inputs: Expr, **attributes: Any) -> Any:
            values = dict(zip(names, inputs, strict=True))
            for name in (*SCALAR_SLOTS.intersection(slots), *names[names.index("lr") :]):
                declared_scalar(values[name], ir.DataType.INT64 if name == "t" else ir.DataType.DOUBLE)
            if suffix:
                values["x"], values["g"] = decay(values["x"], values["g"], values["lr"], values.pop("weight_decay"))
            return self._body(op, **values, **attributes)

        body.__doc__ = self._doc + doc
        body.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return Function(body, ["x_new", *(f"{slot}_new" for slot in slots)], self.name + suffix)


class UpdateCall(NamedTuple):
    """The function that updates a parameter, its attributes, and slots of other shapes."""

    update: Update
    decay: Literal["plain", "coupled", "decoupled"] = "plain"
    attributes: Mapping[str, Any] = {}
    shapes: Mapping[str, Shape] = {}

    @property
    def function(self) -> Function:
        return getattr(self.update, self.decay)

    @property
    def slots(self) -> tuple[str, ...]:
        """Names between `x`, `g` and `lr`."""
        return self.function.inputs[2 : self.function.inputs.index("lr")]

    @property
    def numbers(self) -> tuple[str, ...]:
        """Names from `lr` on, without the counter."""
        inputs = self.function.inputs
        return tuple(name for name in inputs[inputs.index("lr") :] if name != "t")


class Standard(NamedTuple):
    """An equivalent operator of the standard, and the offset of its counter from `t`."""

    op_type: str
    attributes: Mapping[str, float | str]
    behind: int

    def fits(self, dtype: ir.DataType | None) -> bool:
        """True if the operator supports the type and float32 attributes are exact enough."""
        if dtype == ir.DataType.DOUBLE:
            numbers = [value for value in self.attributes.values() if not isinstance(value, str)]
            return all(float(np.float32(value)) == value for value in numbers)
        return dtype == ir.DataType.FLOAT


@dataclass(frozen=True)
class Optimizer:
    """An optimizer of the table; `configure` sets its numbers and choices."""

    name: str
    summary: str
    hyper: Mapping[str, float]
    """Numbers and their defaults, `lr` first."""
    update: Callable[[Settings, Shape | None], Update | UpdateCall]
    """The update for a shape or None, with the weight decay of `choose`; else a call."""
    variants: Mapping[str, Mapping[str, float]]
    """Frameworks, the default first, and their defaults that differ from `hyper`."""
    options: Mapping[str, tuple[Any, ...] | int] = field(default_factory=dict)
    """Further choices: the allowed values, the default first; or an integer default."""
    standard: Callable[[Settings], Standard | None] | None = None
    initial: Mapping[str, str | float] = field(default_factory=dict)
    """Slots that do not start as zero: a number, or the name of a hyper-parameter."""
    follows_signs: bool = False
    """True if its steps have the sign of gradients, so that rounding errors near zero decide them."""
    is_scale_free: bool = True
    """False if step lengths follow gradient lengths; other optimizers divide these out."""

    @property
    def choices(self) -> dict[str, tuple[Any, ...] | int]:
        """All choices; `standard` allows the standard's operator in place of the function."""
        common = {"variant": tuple(self.variants), "maximize": (False, True)}
        return {**self.options, **common, **({"standard": (True, False)} if self.standard else {})}

    def choose(self, s: Settings, shape: Shape | None) -> UpdateCall:
        """Return the function for a parameter of a shape, or for any.

        Keras decouples weight decay; others make it part of the gradient (default).
        """
        update = self.update(s, shape)
        if isinstance(update, UpdateCall):
            return update
        if not s.weight_decay:
            return UpdateCall(update)
        is_decoupled = s.variant == "keras" or getattr(s, "decoupled_weight_decay", False)
        return UpdateCall(update, "decoupled" if is_decoupled else "coupled")

    def configure(self, **settings: Any) -> ConfiguredOptimizer:
        """Return an optimizer with these numbers and choices, and defaults for the rest."""
        check_options(f"optimizer `{self.name}`", settings, {**self.hyper, **self.choices})
        options = {name: self._choice(name, allowed, settings.get(name)) for name, allowed in self.choices.items()}
        overrides = {name: self.number(name, settings[name]) for name in self.hyper if name in settings}
        configured = ConfiguredOptimizer(
            self, {**self.hyper, **self.variants[options["variant"]], **overrides}, options
        )
        unused = {name for name, value in overrides.items() if value} - configured.effective
        if unused:
            names = " and ".join(f"`{name}`" for name in overrides if name in unused)
            raise RecipeError(
                f"optimizer `{self.name}` with these settings has no use for {names}",
                hint=f"leave it out, or change {alternatives([f'`{choice}`' for choice in self.choices])}",
            )
        return configured

    def number(self, name: str, setting: Any) -> float:
        """Convert the value of a hyper-parameter."""
        within = OF_OPTIMIZERS.get(name, NOT_NEGATIVE)
        return checked_number(f"`{name}` of optimizer `{self.name}`", setting, within)

    def _choice(self, name: str, allowed: tuple[Any, ...] | int, setting: Any) -> Any:
        """Return the allowed value for a value, or for its text from a command line."""
        if setting is None:
            return allowed if isinstance(allowed, int) else allowed[0]
        text = str(setting).lower()
        if isinstance(allowed, int):
            expected, choices = "an integer, at least 1", [int(text)] if text.isdecimal() and int(text) >= 1 else []
        else:
            expected = " or ".join(f"`{value}`".lower() for value in allowed)
            choices = [value for value in allowed if str(value).lower() == text]
        if not choices:
            raise RecipeError(f"`{name}` of optimizer `{self.name}` is `{setting}`, but must be {expected}")
        return choices[0]


@dataclass(frozen=True)
class ConfiguredOptimizer:
    """An optimizer with all numbers and choices set."""

    definition: Optimizer
    values: Mapping[str, float]
    """Every number. The graph holds those in `inputs`, where they can be edited."""
    options: Mapping[str, Any]

    @property
    def settings(self) -> Settings:
        return Settings(**self.values, **self.options)

    @property
    def effective(self) -> set[str]:
        """Numbers that change the result."""
        initial = (name for name in self.definition.initial.values() if isinstance(name, str))
        return {*self.definition.choose(self.settings, None).numbers, *initial}

    @property
    def decouples(self) -> bool:
        """True if weight decay acts on the weights alone."""
        call = self.definition.choose(self.settings, None)
        return call.decay == "decoupled" or "weight_decay" in call.update.plain.inputs

    def slots(self, parameter: ir.Value) -> tuple[Slot, ...]:
        """Return the slots that a parameter needs."""
        call, shape = self._call(parameter), _static_shape(parameter)
        assert parameter.dtype is not None, parameter.name
        return tuple(
            Slot(name, ir.DataType.DOUBLE, (), self._initial(name))
            if name in SCALAR_SLOTS
            else Slot(name, parameter.dtype, call.shapes.get(name, shape), self._initial(name))
            for name in call.slots
        )

    def standard(self, parameter: ir.Value) -> Standard | None:
        """Return the exact operator of the standard for this parameter, or None."""
        if self.definition.standard is None or not self.options["standard"]:
            return None
        standard = self.definition.standard(self.settings)
        return standard if standard and standard.fits(parameter.dtype) else None

    def inputs(self, parameter: ir.Value) -> tuple[str, ...]:
        """Return the numbers that the update reads, `lr` first; a standard operator has attributes."""
        return ("lr",) if self.standard(parameter) else self._call(parameter).numbers

    def update(
        self, op: Builder, x: Expr, g: Expr, slots: Mapping[str, Expr], *, lr: Expr, t: Expr, hyper: Mapping[str, Expr]
    ) -> tuple[Expr, dict[str, Expr]]:
        """Append the update of one parameter; return its new value and its new slots.

        `lr` and the `inputs` in `hyper` are float64 scalars; `t`, an int64 scalar, starts at 1.
        """
        call = self._call(x.value)
        g = -g if self.options["maximize"] else g
        old = {"x": x, **{name: slots[name] for name in call.slots}}
        if standard := self.standard(x.value):
            new = _append_standard(op, standard, g, list(old.values()), lr, t)
        else:
            values = {**hyper, **old, "g": g, "lr": lr, "t": t}
            new = op.call(call.function, *(values[name] for name in call.function.inputs), **call.attributes)
        new = new if isinstance(new, tuple) else (new,)
        results = {name: after.like(before.value) for (name, before), after in zip(old.items(), new, strict=True)}
        return results.pop("x"), results

    def _call(self, parameter: ir.Value) -> UpdateCall:
        call = self.definition.choose(self.settings, _static_shape(parameter))
        if parameter.dtype not in HALVES:
            return call
        fused = self.options.get("fused", False)
        if self.options["variant"] == "torch":
            return call._replace(update=call.update.in_16_bits.get(fused, call.update))
        if fused:
            raise RecipeError("`fused` needs `variant=torch`", hint="leave it out, or write `variant=torch`")
        return call

    def _initial(self, slot: str) -> float:
        initial = self.definition.initial.get(slot, 0.0)
        return self.values[initial] if isinstance(initial, str) else initial


def _append_standard(op: Builder, standard: Standard, g: Expr, old: list[Expr], lr: Expr, t: Expr) -> Any:
    op.imports.setdefault(TRAINING_DOMAIN, 1)
    x, *slots = old
    rate = lr if x.dtype == lr.dtype else _shared_node(op, "Cast", lr, to=x.dtype)
    count = _shared_node(op, "Sub", t, op.scalar(standard.behind, t)) if standard.behind else t
    inputs = (rate, count, x, g, *slots)
    return op.node(TRAINING_DOMAIN, standard.op_type, *inputs, outputs=len(old), **standard.attributes)


def _shared_node(op: Builder, op_type: str, *inputs: Expr, **attributes: Any) -> Expr:
    values = [expr.value for expr in inputs]
    for node, _ in values[0].uses():
        same = node.op_type == op_type and node.graph is op.graph and list(node.inputs) == values
        if same and all(node.attributes[name].value == value for name, value in attributes.items()):
            return op(node.outputs[0])
    return op.node("", op_type, *inputs, **attributes)


def _static_shape(parameter: ir.Value) -> Shape:
    if parameter.shape is None or not parameter.shape.is_static():
        raise RecipeError(f"the shape of parameter `{parameter.name}` is unknown")
    return tuple(parameter.shape.numpy())
