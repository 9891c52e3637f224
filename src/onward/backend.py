"""ONNX's backend interface on each engine, as its test suite needs it.

    prepared = onward.backend.prepare(model, "CPU", engine="torch")
    y, *others = prepared.run([x])

    BackendTest(onward.backend.for_engine("torch"), __name__)      # onnx.backend.test

The main graph of any model is executed, with or without training information.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import defs, helper
from onnx.backend.base import Backend, BackendRep, namedtupledict

from onward.arguments import coerce
from onward.engines import check_engine, function, is_installed
from onward.engines.availability import devices
from onward.errors import DataError, UnsupportedError
from onward.model import Model, Source, load
from onward.standard import is_standard

__all__ = ["Prepared", "for_engine", "is_compatible", "prepare", "run_model", "run_node", "supports_device"]


def __dir__() -> list[str]:
    return __all__


class Prepared(BackendRep):
    """A model that is ready to run."""

    def __init__(self, model: Model, compute: Callable[[Mapping[str, Any]], Mapping[str, Any]]):
        self._required = [value.name or "" for value in model.inputs]
        self._declared = {value.name or "": value for value in model.graph.inputs}
        self._compute = compute
        self._names = [value.name or "" for value in model.outputs]
        self._results = namedtupledict("Outputs", self._names)

    def run(self, inputs: Any, **_: Any) -> tuple[Any, ...]:
        """Return the outputs as a named tuple. Inputs are a mapping, a list in order, or the only input.

        A tensor is an array, a sequence is a list, an empty optional is None.
        """
        values = {name: _value(self._declared.get(name), value) for name, value in self._named(inputs).items()}
        with _skip_unsupported():
            results = self._compute(values)
        return self._results(*(results[name] for name in self._names))

    def _named(self, inputs: Any) -> Mapping[str, Any]:
        if isinstance(inputs, Mapping):
            return inputs
        values = inputs if isinstance(inputs, list | tuple) else [inputs]
        names = self._required if len(values) <= len(self._required) else list(self._declared)
        if len(values) > len(names):
            raise DataError(
                f"got {len(values)} inputs, but the model has {len(names)}", hint=f"pass {', '.join(names)}"
            )
        return dict(zip(names, values, strict=False))


def prepare(model: Source, device: str = "CPU", *, engine: str = "onnxruntime", **options: Any) -> Prepared:
    """Make a model ready to run.

        y, *others = onward.backend.prepare("model.onnx", "CPU", engine="torch").run([x])

    - `model`: any model; its main graph is executed
    - `device`: `CPU`, `CUDA`, `CUDA:1`
    - `engine`, `options`: as for `onward.engines.start`
    """
    for name in ("rtol", "atol"):  # ONNX's test runner passes its tolerances on to the backend
        options.pop(name, None)
    opened = load(model)
    with _skip_unsupported():
        return Prepared(opened, function(opened, engine=engine, device=_device(device), **options))


def run_model(
    model: Source, inputs: Any, device: str = "CPU", *, engine: str = "onnxruntime", **options: Any
) -> tuple[Any, ...]:
    """Return the outputs of a model: `prepare` and `run` in one.

    - `model`, `device`, `engine`, `options`: as for `prepare`
    - `inputs`: as for `Prepared.run`
    """
    return prepare(model, device, engine=engine, **options).run(inputs)


def run_node(
    node: onnx.NodeProto,
    inputs: Any,
    device: str = "CPU",
    outputs_info: Sequence[tuple[np.dtype, tuple[int, ...]]] | None = None,
    *,
    engine: str = "onnxruntime",
    opset_version: int | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """Return the outputs of a single operator.

    - `node`: the operator
    - `inputs`, `device`, `engine`, `options`: as for `run_model`
    - `outputs_info`: ignored
    - `opset_version`: version of the operator set (default: the newest)
    """
    arrays = inputs if isinstance(inputs, list | tuple) else [inputs]
    names = dict.fromkeys(name for name in node.input if name)
    typed = [helper.make_value_info(name, _type(value)) for name, value in zip(names, arrays, strict=True)]
    outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
    version = opset_version or defs.onnx_opset_version()
    imports = [helper.make_opsetid("", version)]
    if not is_standard(node):
        imports.append(helper.make_opsetid(node.domain, defs.get_schema(node.op_type, node.domain).since_version))
    graph = helper.make_graph([node], "node", typed, outputs)
    return run_model(helper.make_model(graph, opset_imports=imports), list(arrays), device, engine=engine, **options)


def supports_device(device: str, *, engine: str = "onnxruntime") -> bool:
    """True if an engine is installed and has a device.

    - `device`, `engine`: as for `prepare`
    """
    check_engine(engine)
    return is_installed(engine) and _device(device) in devices(engine)


def is_compatible(model: Source, device: str = "CPU", *, engine: str = "onnxruntime", **options: Any) -> bool:
    """True if an engine can execute a model.

    - `model`, `device`, `engine`, `options`: as for `prepare`
    """
    try:
        prepare(model, device, engine=engine, **options)
    except UnsupportedError:
        return False
    return True


@functools.cache
def for_engine(engine: str) -> type[Backend]:
    """Return the five functions for one engine as a class for `onnx.backend.test.BackendTest`.

    - `engine`: name of the engine
    """
    check_engine(engine)
    functions = (is_compatible, prepare, run_model, run_node, supports_device)
    bound = {f.__name__: staticmethod(functools.partial(f, engine=engine)) for f in functions}
    return type(f"{engine}_backend", (Backend,), bound)


def _device(name: str) -> str:
    """Return the device of an engine that ONNX calls `CUDA:0`."""
    return str(coerce("`device`", name, str)).lower().removesuffix(":0")


def _value(declared: ir.Value | None, value: Any) -> Any:
    """Return an input for an engine: numbers become arrays of the type that the model declares."""
    is_tensor = declared is not None and isinstance(declared.type, ir.TensorType)
    if value is None or (isinstance(value, list) and not is_tensor):
        return value and [_value(None, item) for item in value]
    dtype = declared.dtype if declared is not None and not hasattr(value, "dtype") else None
    return np.asarray(value, dtype.numpy() if dtype is not None else None)


def _type(value: Any) -> onnx.TypeProto:
    if isinstance(value, list):
        return helper.make_sequence_type_proto(_type(value[0]))
    return helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(np.asarray(value).dtype), np.shape(value))


@contextmanager
def _skip_unsupported() -> Iterator[None]:
    """Raise refusals as an error that is also the one by which ONNX's test runner skips a test."""
    try:
        yield
    except UnsupportedError as error:
        raise _not_implemented()(error.message, hint=error.hint) from error


@functools.cache
def _not_implemented() -> type[UnsupportedError]:
    from onnx.backend.test.runner import BackendIsNotSupposedToImplementIt  # slow to import

    return type("NotImplementedByEngine", (UnsupportedError, BackendIsNotSupposedToImplementIt), {})
