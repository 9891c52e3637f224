"""Builder of ONNX graphs from jaxprs: each equation calls the function of its primitive in a table.

Such a function takes a builder and the operands, and returns the result or several. Its keywords
are parameters of the equation, `ins` and `outs`, the types and shapes of operands and results, and
`eqn` itself.

    primitives(tanh=lambda op, x: op.Tanh(x))

    @primitives.define("squeeze")
    def squeeze(op, x, *, dimensions):
        return op.Squeeze(x, dimensions)
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import onnx_ir as ir
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from onward.build import Builder, Expr, Names
from onward.engines.framework import Operators, collect_operators, keywords
from onward.errors import UnsupportedError

FAMILIES = ("elementwise", "bitwise", "reduction", "movement", "convolution", "control")
FLOAT_BITS = {"float16": (5, 10), "bfloat16": (8, 7), "float32": (8, 23), "float64": (11, 52)}
"""Bits of exponent and fraction, by type."""


@functools.cache
def primitives() -> Operators:
    return collect_operators("onward.frameworks.jax.jaxpr", FAMILIES, "primitives")


@functools.cache
def complex_primitives() -> Operators:
    """Return the rows of equations with complex operands or results."""
    from onward.frameworks.jax.jaxpr.convolution import OF_ANY_PARTS

    rows = collect_operators("onward.frameworks.jax.jaxpr", ("convolution",), "complex_primitives")
    return Operators({**{name: row for name, row in primitives().items() if name in OF_ANY_PARTS}, **rows})


class JaxprBuilder(Builder):
    """Builder that knows symbolic sizes, and collects the equations that it cannot express."""

    sizes: dict[str, ir.Value]  # scalars by symbol
    refused: list[str]

    @classmethod
    def of(cls, graph: ir.Graph, opset: int, names: Names) -> JaxprBuilder:
        """Return a builder for a graph, with a scalar for each symbol in the shapes of inputs."""
        op = cls(graph, opset=opset, names=names, share=True)
        op.refused, op.sizes = [], {}
        for value in graph.inputs:
            for axis, size in enumerate(value.shape or ()):
                if isinstance(size, ir.SymbolicDim) and size.value is not None and size.value not in op.sizes:
                    op.sizes[size.value] = op.Squeeze(op.Shape(value, start=axis, end=axis + 1)).value
        return op

    def _for(self, graph: ir.Graph, scope: str) -> JaxprBuilder:
        inner = super()._for(graph, scope)
        inner.sizes, inner.refused = self.sizes, self.refused
        return inner

    def size(self, size: Any) -> Expr:
        """Return a size as a scalar: a number, or a symbolic expression at run time."""
        if isinstance(size, int | np.integer):
            return self.constant(np.int64(size))
        return self._evaluate(ast.parse(str(size).replace("^", "**"), mode="eval").body)

    def shape(self, sizes: Sequence[Any]) -> Expr:
        """Return a shape as a vector."""
        if all(isinstance(size, int | np.integer) for size in sizes):
            return self.constant(np.asarray(sizes, np.int64))
        return self.Concat(*(self.Unsqueeze(self.size(size), [0]) for size in sizes), axis=0)

    def _evaluate(self, node: ast.expr) -> Expr:
        match node:
            case ast.Constant(int(number)):
                return self.constant(np.int64(number))
            case ast.Name(symbol):
                return self(self.sizes[symbol])
            case ast.UnaryOp(ast.USub(), operand):
                return -self._evaluate(operand)
            case ast.BinOp(left, operator, right):
                return _ARITHMETIC[type(operator).__name__](self, self._evaluate(left), self._evaluate(right))
            case ast.Call(ast.Name(function), [left, right]):
                return _ARITHMETIC[function](self, self._evaluate(left), self._evaluate(right))
        raise UnsupportedError(f"the size `{ast.unparse(node)}` cannot be computed")

    def inline(self, closed: ClosedJaxpr | Jaxpr, *operands: Expr) -> list[Expr]:
        """Return the results of a jaxpr for these operands."""
        consts = [self.constant(data_of(const)) for const in getattr(closed, "consts", ())]
        jaxpr: Jaxpr = getattr(closed, "jaxpr", closed)
        values = [expr.value for expr in (*consts, *operands)]
        environment = dict(zip([*jaxpr.constvars, *jaxpr.invars], values, strict=True))
        for eqn in _live(jaxpr):
            op = self.scoped(str(eqn.source_info.name_stack))
            results = op._equation(eqn, [op._read(atom, environment) for atom in eqn.invars])
            environment.update(zip(eqn.outvars, results, strict=True))
        return [self._read(atom, environment) for atom in jaxpr.outvars]

    def check(self) -> None:
        """Raise an error that lists all refused equations."""
        if self.refused:
            listed = "".join(f"\n  {line}" for line in dict.fromkeys(self.refused))
            raise UnsupportedError(
                f"ONNX operators cannot express these operations of the function:{listed}",
                hint="write these parts with other functions of jax.numpy or jax.lax",
            )

    def _read(self, atom: Any, environment: dict[Var, ir.Value]) -> Expr:
        if isinstance(atom, Literal):
            return self.constant(data_of(np.asarray(atom.val, atom.aval.dtype)))
        return Expr(self, environment[atom])

    def _equation(self, eqn: JaxprEqn, operands: list[Expr]) -> list[ir.Value]:
        is_complex = any(_is_complex(atom.aval) for atom in (*eqn.invars, *eqn.outvars))
        row = (complex_primitives() if is_complex else primitives()).get(eqn.primitive.name)
        try:
            if row is None:
                raise UnsupportedError("no ONNX operator computes it")
            settings = {
                **{name: int(value) if isinstance(value, np.integer) else value for name, value in eqn.params.items()},
                "eqn": eqn,
                "ins": [stored_type(atom.aval) for atom in eqn.invars],
                "outs": [stored_type(var.aval) for var in eqn.outvars],
            }
            results = row(self, *operands, **{name: settings[name] for name in keywords(row)})
        except UnsupportedError as error:
            where = source_info_util.summarize(eqn.source_info)
            self.refused.append(f"{eqn.primitive.name} ({where}): {error.message}")
            return [declare_value(var.aval, "refused") for var in eqn.outvars]
        results = results if isinstance(results, tuple | list) else (results,)
        return [_typed_value(expr, var) for expr, var in zip(results, eqn.outvars, strict=True)]


_ARITHMETIC: dict[str, Callable[[Builder, Expr, Expr], Expr]] = {
    "Add": lambda op, a, b: a + b,
    "Sub": lambda op, a, b: a - b,
    "Mult": lambda op, a, b: a * b,
    "Pow": lambda op, a, b: a**b,
    "max": lambda op, a, b: op.Max(a, b),
    "min": lambda op, a, b: op.Min(a, b),
    "mod": lambda op, a, b: op.Mod(a, b),
    "floordiv": lambda op, a, b: (a - op.Mod(a, b)) / b,
}


def _live(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Return the equations on which the results depend."""
    needed = {atom for atom in jaxpr.outvars if isinstance(atom, Var)}
    live = []
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            live.append(eqn)
            needed.update(atom for atom in eqn.invars if isinstance(atom, Var))
    return reversed(live)


def _is_complex(aval: Any) -> bool:
    return bool(jax.dtypes.issubdtype(getattr(aval, "dtype", bool), np.complexfloating))


def stored_type(aval: Any) -> Any:
    """Return the stored type and shape of a value: a random key or a complex number is two numbers."""
    if _is_complex(aval):
        return jax.ShapeDtypeStruct((*aval.shape, 2), np.zeros((), aval.dtype).real.dtype)
    if not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return aval
    return jax.ShapeDtypeStruct((*aval.shape, 2), np.dtype(np.uint32))


def data_of(const: Any) -> np.ndarray:
    is_key = jax.dtypes.issubdtype(const.dtype, jax.dtypes.prng_key)
    array = np.asarray(jax.random.key_data(const) if is_key else const)
    return np.stack([array.real, array.imag], -1) if array.dtype.kind == "c" else array


def declare_value(aval: Any, name: str | None = None) -> ir.Value:
    stored = stored_type(aval)
    shape = [size if isinstance(size, int) else str(size) for size in stored.shape]
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.from_numpy(stored.dtype)), shape=ir.Shape(shape))


def _typed_value(expr: Expr, var: Var) -> ir.Value:
    """Return the result of an equation, with the type and shape of JAX."""
    value, expected = expr.value, declare_value(var.aval)
    assert value.dtype in (None, expected.dtype), f"{value.name} is {value.dtype} and should be {expected.dtype}"
    if value.producer() is not None and (value.shape is None or list(value.shape) != list(expected.shape or ())):
        value.type, value.shape = expected.type, expected.shape
    return value


def add_last_axes(op: Any, x: Expr, rank: int, count: int) -> Expr:
    """Return `x`, which has `count` axes, with axes of size 1 after them up to a rank."""
    return op.Unsqueeze(x, list(range(count, rank))) if rank > count else x


def reshape_to(op: Any, x: Expr, sizes: Sequence[Any]) -> Expr:
    """Reshape `x`. One symbolic size is not computed."""
    unknown = [i for i, size in enumerate(sizes) if not isinstance(size, int)]
    if len(unknown) == 1 and 0 not in sizes:
        return op.Reshape(x, [-1 if i in unknown else size for i, size in enumerate(sizes)])
    return op.Reshape(x, op.shape(sizes), allowzero=1 if 0 in sizes else None)


def fill(op: Any, sizes: Sequence[Any], number: Any, dtype: Any) -> Expr:
    """Return a tensor of one number."""
    return op.ConstantOfShape(op.shape(sizes), value=ir.Tensor(np.full((1,), number, dtype)))


def extreme(dtype: Any, largest: bool) -> Any:
    resolved = np.dtype(dtype)
    if resolved.kind == "b":
        return largest
    if resolved.kind in "iu":
        return np.iinfo(resolved).max if largest else np.iinfo(resolved).min
    return np.inf if largest else -np.inf
