"""Graph construction by expressions: `op.MatMul(a, b)`, `1 - y * y`, `op.call(adamw, ...)`.

A `Builder` appends nodes to one graph. Operators are its attributes; tensors are `Expr`, with the
usual arithmetic. Numbers take the type of the other tensor. If that is unknown (inside a function
for several types), they are stored in double precision and cast at run time.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import numpy as np
import onnx_ir as ir
from onnx import defs

from onward.shapes import content_type, element_of, is_optional, is_sequence, output_shape, result_type
from onward.standard import STANDARD, is_standard, schema_domain

DOMAIN = "onward"
"""Domain of Onward's functions, for computations without a standard operator."""
DOMAIN_VERSION = 1


class Names:
    """Value names in use, and a generator of fresh ones."""

    def __init__(self, taken: Iterable[str] = ()):
        self._taken = set(taken)
        self._next: dict[str, int] = {}

    def take(self, names: Iterable[str]) -> None:
        """Reserve names that are in use elsewhere."""
        self._taken.update(names)

    def release(self, names: Iterable[str]) -> None:
        """Release names for reuse."""
        self._taken.difference_update(names)

    def fresh(self, base: str) -> str:
        name, count = base, self._next.get(base, 0)
        while name in self._taken:
            count += 1
            name = f"{base}_{count}"
        self._next[base] = count
        self._taken.add(name)
        return name


def copy_node(node: ir.Node, inputs: Iterable[ir.Value | None], names: Names, pattern: str) -> ir.Node:
    """Return a copy of a node with other inputs. Names follow `pattern`, with {} for the old."""
    copy = ir.Node(
        node.domain,
        node.op_type,
        list(inputs),
        list(node.attributes.values()),
        overload=node.overload,
        num_outputs=len(node.outputs),
        name=names.fresh(pattern.format(node.name or node.op_type)),
    )
    for old, output in zip(node.outputs, copy.outputs, strict=True):
        output.name = names.fresh(pattern.format(old.name)) if old.name else ""
        output.type, output.shape = old.type, old.shape
    return copy


def replace_operator(node: ir.Node, op_type: str, inputs: Sequence[ir.Value | None], *attributes: ir.Attr) -> None:
    """Replace the operator, inputs and attributes of a node, in place."""
    node.op_type = op_type
    node.resize_inputs(len(inputs))
    for i, value in enumerate(inputs):
        node.replace_input_with(i, value)
    node.attributes.clear()
    node.attributes.update({attribute.name: attribute for attribute in attributes})


def _binary(op_type: str, *, is_reflected: bool = False) -> Callable[[Expr, Operand], Expr]:
    def apply(expr: Expr, other: Operand) -> Expr:
        result: Expr = expr.op.node("", op_type, *((other, expr) if is_reflected else (expr, other)))
        return result

    return apply


class Expr:
    """A tensor in a graph under construction; or a sequence, which is added by elements."""

    __slots__ = ("op", "value")

    def __init__(self, op: Builder, value: ir.Value):
        self.op = op
        self.value = value

    @property
    def dtype(self) -> ir.DataType | None:
        return self.value.dtype

    @property
    def name(self) -> str:
        assert self.value.name is not None
        return self.value.name

    def named(self, name: str) -> Expr:
        """Return the tensor under a fresh name like `name`."""
        self.value.name = self.op.names.fresh(name)
        return self

    def like(self, other: ir.Value) -> Expr:
        """Return the tensor declared with the type and shape of `other` or of its content."""
        self.value.type = content_type(other)
        self.value.shape = other.shape
        return self

    def __add__(self, other: Operand) -> Expr:
        if is_sequence(self.value) and isinstance(other, Expr):
            return self.op.each(lambda op, a, b: a + b, self, other)
        return self.op.Add(self, other)

    def __neg__(self) -> Expr:
        return self.op.Neg(self)

    __radd__ = _binary("Add", is_reflected=True)
    __sub__, __rsub__ = _binary("Sub"), _binary("Sub", is_reflected=True)
    __mul__, __rmul__ = _binary("Mul"), _binary("Mul", is_reflected=True)
    __truediv__, __rtruediv__ = _binary("Div"), _binary("Div", is_reflected=True)
    __pow__, __rpow__ = _binary("Pow"), _binary("Pow", is_reflected=True)
    __matmul__ = _binary("MatMul")
    __lt__, __le__ = _binary("Less"), _binary("LessOrEqual")
    __gt__, __ge__ = _binary("Greater"), _binary("GreaterOrEqual")


Operand = Expr | ir.Value | np.ndarray | np.generic | int | float | bool | Sequence[int] | None


class Builder:
    """A builder of one graph. `op.Softmax(x, axis=-1)` adds a node and returns its output.

    `names` holds every name that could clash; `functions` collects functions that are called. A
    builder that shares returns the existing node for an equal one.
    """

    def __init__(
        self,
        graph: ir.Graph,
        *,
        opset: int,
        names: Names | None = None,
        functions: dict[ir.OperatorIdentifier, ir.Function] | None = None,
        imports: dict[str, int] | None = None,
        scope: str = "",
        share: bool = False,
    ):
        self.graph = graph
        self.opset = opset
        self.names = Names() if names is None else names
        self.functions = {} if functions is None else functions
        # A nested graph has no imports: the outermost graph imports for it.
        self.imports = graph.opset_imports if imports is None else imports
        self._scope = scope
        self._share = share
        self._made: dict[tuple[object, ...], tuple[ir.Value, ...]] = {}
        if share:
            self._made.update(_by_identity(graph))

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if not op_type[0].isupper():
            raise AttributeError(op_type)
        return functools.partial(self.node, "", op_type)

    def __call__(self, value: ir.Value) -> Expr:
        """Return an expression for a value of the graph, or of one around it."""
        return Expr(self, value)

    def scoped(self, scope: str) -> Self:
        """Return a builder of the same graph that prefixes the names of new nodes."""
        inner = copy.copy(self)
        inner._scope = scope
        return inner

    def _for(self, graph: ir.Graph, scope: str) -> Self:
        return type(self)(
            graph,
            opset=self.opset,
            names=self.names,
            functions=self.functions,
            imports=self.imports,
            scope=scope,
            share=self._share,
        )

    def node(self, domain: str, op_type: str, *inputs: Operand, outputs: int = 1, **attributes: Any) -> Any:
        """Add one node; return its output, or a tuple. Attributes that are None are left out."""
        values = self._operands(domain, op_type, inputs)
        attributes = {name: value for name, value in attributes.items() if value is not None}
        key = identity_of(op_type, values, outputs, attributes) if self._share and domain == "" else None
        if key is not None and key in self._made:
            shared = tuple(Expr(self, value) for value in self._made[key])
            return shared[0] if outputs == 1 else shared
        node = ir.Node(
            domain,
            op_type,
            values,
            attributes=[_attribute(name, value) for name, value in attributes.items()],
            num_outputs=outputs,
            name=self._fresh(op_type),
        )
        for i, output in enumerate(node.outputs):
            output.name = node.name if i == 0 else self._fresh(op_type)
        declare(node, self.opset)
        if domain:
            self.imports.setdefault(domain, DOMAIN_VERSION)
        self.graph.append(node)
        if key is not None:
            self._made[key] = tuple(node.outputs)
        exprs = tuple(Expr(self, output) for output in node.outputs)
        return exprs[0] if outputs == 1 else exprs

    def call(self, function: Function, *inputs: Operand, **attributes: Any) -> Any:
        """Add a call of a function, and its definition if it is new."""
        function.define(self.functions, self.opset)
        return self.node(DOMAIN, function.name, *inputs, outputs=len(function.outputs), **attributes)

    def constant(self, value: Any, dtype: ir.DataType | None = None) -> Expr:
        """Return a constant; equal ones share a node."""
        if isinstance(value, ir.Tensor):
            array, dtype = value.numpy(), value.dtype
        else:
            array = np.asarray(value) if dtype is None else np.asarray(value).astype(dtype.numpy())
        key = ("Constant", array.dtype, array.shape, array.tobytes())
        if key not in self._made:
            tensor = ir.Tensor(array, dtype=dtype)
            node = ir.Node("", "Constant", [], [ir.AttrTensor("value", tensor)], name=self._fresh("Constant"))
            node.outputs[0].name = node.name
            node.outputs[0].type = ir.TensorType(tensor.dtype)
            node.outputs[0].shape = ir.Shape(tensor.shape.numpy())
            self.graph.append(node)
            self._made[key] = (node.outputs[0],)
        return Expr(self, self._made[key][0])

    def scalar(self, value: float, like: Expr) -> Expr:
        """Return a number of the type of `like`, exact even if that is known only at run time."""
        if like.dtype is not None:
            return self.constant(_scalar_tensor(value, like.dtype))
        return self.CastLike(self.constant(np.asarray(value, np.float64)), like)

    def filled_like(self, value: ir.Value, number: float) -> Expr:
        """Return a tensor of the type and shape of `value`, filled with `number`.

        A sequence gives a sequence. An Optional gives its content, or if it is empty the smallest
        possible tensor.
        """
        assert value.dtype is not None, value.name
        if is_optional(value):
            return self._filled_like_content(value, number)
        if is_sequence(value):
            return self.each(lambda op, x: op.filled_like(x.value, number), Expr(self, value)).like(value)
        element = _scalar_tensor(number, value.dtype, (1,))
        if value.dtype is ir.DataType.BFLOAT16 and self.opset < 20:  # ConstantOfShape lacks bfloat16 before
            return self.Expand(self.constant(element), self.Shape(value)).like(value)
        return self.ConstantOfShape(self.Shape(value), value=element).like(value)

    def _filled_like_content(self, value: ir.Value, number: float) -> Expr:
        def filled(op: Builder) -> Expr:
            return op.filled_like(op.OptionalGetElement(value).like(value).value, number)

        def empty(op: Builder) -> Expr:
            if is_sequence(value):
                return op.SequenceEmpty(dtype=value.dtype).like(value)
            shape = [0] if value.shape is None else [n if isinstance(n, int) else 0 for n in value.shape]
            return op.filled_like(op.constant(np.zeros(shape), value.dtype).value, number)

        has_element = self.OptionalHasElement(value)
        return self.If(has_element, then_branch=self.subgraph(filled), else_branch=self.subgraph(empty)).like(value)

    def each(self, body: Callable[..., Expr], *sequences: Expr) -> Expr:
        """Map `body(op, *elements)` over sequences of one length; return the results."""
        graph = self.subgraph(body, [element_of(sequence.value) for sequence in sequences])
        result: Expr = self.SequenceMap(*sequences, body=graph)
        output = graph.outputs[0]
        result.value.type = None if output.type is None else ir.SequenceType(output.type)
        return result

    def subgraph(self, body: Callable[..., Any], inputs: Sequence[ir.Value] = (), name: str = "body") -> ir.Graph:
        """Return a graph for If, Loop or Scan: `body(op, *inputs)` returns its outputs."""
        graph = ir.Graph(list(inputs), [], nodes=[], name=name)
        for value in inputs:
            value.name = self.names.fresh(value.name or "item")
        inner = self._for(graph, self._scope)
        outputs = body(inner, *(Expr(inner, value) for value in inputs))
        for expr in outputs if isinstance(outputs, tuple | list) else (outputs,):
            inner.add_output(expr)
        return graph

    def add_output(self, expr: Expr | ir.Value) -> ir.Value:
        """Append an output to a body: it must be computed in the body itself, and be output once.

        Other results get no Identity: when ONNX Runtime 1.31 removes it, a fused Gemm loses its input.
        """
        value = expr.value if isinstance(expr, Expr) else expr
        computed_here = value.graph is self.graph and not value.is_graph_input()
        if not computed_here or value.is_graph_output():
            value = self.Identity(value).value
        self.graph.outputs.append(value)
        return value

    def _fresh(self, op_type: str) -> str:
        return self.names.fresh(f"{self._scope}/{op_type}" if self._scope else op_type)

    def _operands(self, domain: str, op_type: str, inputs: Sequence[Operand]) -> list[ir.Value | None]:
        types = _input_types(domain, op_type, self.opset)
        tensors = {i: Expr(self, x) for i, x in enumerate(inputs) if isinstance(x, ir.Value)}
        tensors |= {i: x for i, x in enumerate(inputs) if isinstance(x, Expr)}
        ordered = sorted(tensors)

        def type_of(i: int) -> str:
            return types[min(i, len(types) - 1)]

        def like(i: int) -> Expr | None:
            """Return the tensor that shares input `i`'s type, e.g. Where's other branch."""
            same = (tensors[j] for j in ordered if types and type_of(j) == type_of(i))
            return next(same, tensors[ordered[0]] if ordered else None)

        values = [self._operand(x, like(i)) for i, x in enumerate(inputs)]
        while values and values[-1] is None:  # an empty name at the end can crash ONNX Runtime
            values.pop()
        return values

    def _operand(self, x: Operand, like: Expr | None) -> ir.Value | None:
        if x is None:
            return None
        if isinstance(x, ir.Value):
            return x
        if isinstance(x, Expr):
            return x.value
        if isinstance(x, int | float) and not isinstance(x, bool | np.generic) and like is not None:
            return self.scalar(x, like).value
        if isinstance(x, int | float | np.ndarray | np.generic):
            return self.constant(x).value
        return self.constant(list(x), ir.DataType.INT64).value


def declare(node: ir.Node, opset: int) -> None:
    """Set types and shapes of a node's outputs, as far as they follow from its inputs."""
    for i, output in enumerate(node.outputs):
        if output.type is None:
            output.type = _output_type(node, i, opset)
        if output.type is not None and output.shape is None:
            output.shape = output_shape(node, i)


class Function:
    """A function in the domain `onward`, with a body of standard operators.

    Made from a Python function `(op, *inputs, **attributes) -> outputs`: positional parameters are
    inputs, keyword-only parameters attributes (typed `int`, `float`, `str` or `list[int]`), and the
    docstring goes to the file.
    """

    def __init__(self, body: Callable[..., Any], outputs: Sequence[str], name: str):
        self.name = name
        self.outputs = tuple(outputs)
        self._body = body

    # Cached properties, since few of the loaded functions are used.

    @functools.cached_property
    def doc(self) -> str:
        return inspect.getdoc(self._body) or ""

    @functools.cached_property
    def inputs(self) -> tuple[str, ...]:
        return tuple(p.name for p in self._parameters if p.kind is not p.KEYWORD_ONLY)

    @functools.cached_property
    def _attributes(self) -> dict[str, ir.Attr]:
        return {p.name: _declare_attribute(p) for p in self._parameters if p.kind is p.KEYWORD_ONLY}

    @functools.cached_property
    def _parameters(self) -> list[inspect.Parameter]:
        return list(inspect.signature(self._body, eval_str=True).parameters.values())[1:]

    def define(self, functions: dict[ir.OperatorIdentifier, ir.Function], opset: int) -> None:
        """Add this function and its callees to `functions`."""
        identifier = (DOMAIN, self.name, "")
        if identifier in functions:
            return
        inputs = [ir.Value(name=name) for name in self.inputs]
        graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": opset}, name=self.name)
        op = Builder(graph, opset=opset, names=Names((*self.inputs, *self.outputs)), functions=functions)
        refs = {name: ir.RefAttr(name, name, attr.type) for name, attr in self._attributes.items()}
        results = self._body(op, *(Expr(op, value) for value in inputs), **refs)
        for name, expr in zip(self.outputs, results if isinstance(results, tuple) else (results,), strict=True):
            expr = expr if expr.value.producer() and not expr.value.is_graph_output() else op.Identity(expr)
            expr.value.name = name
            graph.outputs.append(expr.value)
        function = ir.Function(DOMAIN, self.name, graph=graph, attributes=list(self._attributes.values()))
        function.doc_string = self.doc
        functions[identifier] = function


def function(*outputs: str, name: str | None = None) -> Callable[[Callable[..., Any]], Function]:
    """Return a decorator that makes a `Function` in CamelCase with the named outputs."""
    return lambda body: Function(body, outputs, name or _camel(body.__name__))


def _camel(name: str) -> str:
    return "".join(word[:1].upper() + word[1:] for word in name.split("_"))


_ATTRIBUTE_TYPES = {
    int: ir.AttributeType.INT,
    float: ir.AttributeType.FLOAT,
    str: ir.AttributeType.STRING,
    list[int]: ir.AttributeType.INTS,
}


def _declare_attribute(parameter: inspect.Parameter) -> ir.Attr:
    default = None if parameter.default is parameter.empty else parameter.default
    return ir.Attr(parameter.name, _ATTRIBUTE_TYPES[parameter.annotation], default)


def _attribute(name: str, value: Any) -> ir.Attr:
    # The common types first: `convert_attribute` checks protocols, which takes longer than all the rest.
    value_type = type(value)
    if value_type is int or value_type is bool:
        return ir.AttrInt64(name, int(value))
    if value_type is float:
        return ir.AttrFloat32(name, value)
    if value_type is str:
        return ir.AttrString(name, value)
    if value_type is ir.DataType:
        return ir.AttrInt64(name, value.value)
    if (value_type is list or value_type is tuple) and value and all(type(item) is int for item in value):
        return ir.AttrInt64s(name, value)
    if value_type is ir.Tensor:
        return ir.AttrTensor(name, value)
    if value_type is np.ndarray:
        return ir.AttrTensor(name, ir.Tensor(value))
    if isinstance(value, ir.Attr):  # inside a function: a reference to the function's own attribute
        return ir.RefAttr(name, value.ref_attr_name or name, value.type) if value.is_ref() else value
    return ir.convenience.convert_attribute(name, value)


def _scalar_tensor(value: float, dtype: ir.DataType, shape: tuple[int, ...] = ()) -> ir.Tensor:
    return ir.Tensor(np.full(shape, value).astype(dtype.numpy()), dtype=dtype)


RANDOM = frozenset(
    ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
)
_NEVER_SHARED = RANDOM | {"Dropout", "Identity"}
"""Operators whose equal nodes differ: they draw random numbers, or exist for their name."""


def identity_of(
    op_type: str, inputs: Sequence[ir.Value | None], outputs: int, attributes: dict[str, Any]
) -> tuple[object, ...] | None:
    """Return a key that is equal for standard nodes with equal results; None without one."""
    if op_type in _NEVER_SHARED:
        return None
    settings = tuple((name, _comparable(attributes[name])) for name in sorted(attributes))
    return (op_type, tuple(inputs), outputs, settings)


def _by_identity(graph: ir.Graph) -> Iterator[tuple[tuple[object, ...], tuple[ir.Value, ...]]]:
    for node in graph:
        key = identity(node)
        if key is not None and node.op_type != "Constant":
            yield key, tuple(node.outputs)


def identity(node: ir.Node) -> tuple[object, ...] | None:
    """Return the key of `identity_of` for an existing node."""
    if not is_standard(node):
        return None
    settings = {name: attribute.value for name, attribute in node.attributes.items()}
    return identity_of(node.op_type, node.inputs, len(node.outputs), settings)


def _comparable(value: Any) -> object:
    if isinstance(value, ir.Tensor | ir.serde.TensorProtoTensor) and value.size < 64:
        value = value.numpy()
    if isinstance(value, np.ndarray):
        return (value.dtype, value.shape, value.tobytes())
    if isinstance(value, list | tuple):
        return tuple(value)
    return value if isinstance(value, int | float | str) else object()  # a graph equals nothing but itself


_DTYPE_ATTRIBUTE = {"Cast": "to", "EyeLike": "dtype", "RandomUniform": "dtype", "RandomNormal": "dtype"}


def _output_type(node: ir.Node, index: int, opset: int) -> ir.TypeProtocol | None:
    if (inferred := result_type(node)) is not None:
        return inferred
    if node.op_type == "Identity" and node.inputs[0] is not None:
        return node.inputs[0].type
    if is_standard(node) and (nested := _NESTED_OUTPUTS.get(node.op_type)) is not None:
        return _nested_output_type(node, *nested, index)
    dtype = _output_dtype(node, index, opset)
    return None if dtype is None else ir.TensorType(dtype)


_NESTED_OUTPUTS = {"If": ("then_branch", 0), "Loop": ("body", 1), "Scan": ("body", 0), "SequenceMap": ("body", 0)}
"""Attribute of the graph that computes the outputs, and its outputs that come first."""


def _nested_output_type(node: ir.Node, graph: str, before: int, index: int) -> ir.TypeProtocol | None:
    attribute = node.attributes.get(graph)
    outputs = attribute.as_graph().outputs if attribute is not None and not attribute.is_ref() else ()
    inferred = outputs[before + index].type if before + index < len(outputs) else None
    return ir.SequenceType(inferred) if inferred is not None and node.op_type == "SequenceMap" else inferred


def _output_dtype(node: ir.Node, index: int, opset: int) -> ir.DataType | None:
    """Return the type of an output by the schema; for our functions, that of an input."""
    if (attribute := _DTYPE_ATTRIBUTE.get(node.op_type)) and attribute in node.attributes:
        return ir.DataType(node.attributes[attribute].as_int())
    if node.op_type == "ConstantOfShape" and "value" in node.attributes:
        return node.attributes["value"].value.dtype
    if node.op_type == "Constant":
        return None
    if node.domain == DOMAIN:
        dtypes = [value.dtype for value in node.inputs if value is not None]
        leading = itertools.takewhile(lambda dtype: dtype is not None, dtypes)
        return next((dtype for dtype in leading if dtype is not None and dtype.is_floating_point()), None)
    source = _type_source(node.domain, node.op_type, index, opset)
    if isinstance(source, ir.DataType):
        return source
    for i in source:
        if i < len(node.inputs) and (value := node.inputs[i]) is not None and value.dtype is not None:
            return value.dtype
    return None


@functools.cache
def _type_source(domain: str, op_type: str, index: int, opset: int) -> ir.DataType | tuple[int, ...]:
    """Return the source of an output's type: a fixed type, or the inputs that share it."""
    schema = _schema(domain, op_type, opset)
    if schema is None:
        return ()
    output = schema.outputs[min(index, len(schema.outputs) - 1)]
    shared = tuple(i for i, formal in enumerate(schema.inputs) if formal.type_str == output.type_str)
    if shared:
        return shared
    allowed = next((c.allowed_type_strs for c in schema.type_constraints if c.type_param_str == output.type_str), None)
    fixed = [output.type_str] if allowed is None else list(allowed)
    if len(fixed) == 1 and fixed[0].startswith("tensor("):
        return ir.DataType[fixed[0].removeprefix("tensor(").removesuffix(")").upper()]
    return ()


@functools.cache
def _input_types(domain: str, op_type: str, opset: int) -> tuple[str, ...]:
    """Return the type variables of inputs, e.g. ("B", "T", "T") for Where; the last repeats."""
    schema = _schema(domain, op_type, opset)
    return tuple(formal.type_str for formal in schema.inputs) if schema else ()


def _schema(domain: str, op_type: str, opset: int) -> defs.OpSchema | None:
    try:
        return defs.get_schema(op_type, opset if domain in STANDARD else 1, schema_domain(domain))
    except defs.SchemaError:
        return None
