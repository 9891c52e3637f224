"""Engines: what executes training models.

engine = onward.run.load(model)               # on stock ONNX Runtime
metrics = engine.step({"image": images, "labels": labels})
results = engine.evaluate({"image": images, "labels": labels})
model = engine.updated()                      # the training model with the state as it is now
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from onward.errors import UnknownNameError, near
from onward.model import Source, read
from onward.run.engine import Engine

ENGINES = ("onnxruntime", "numpy", "torch", "jax", "tensorflow")

__all__ = ["ENGINES", "Engine", "function", "load"]


def load(source: Source, step: int = 0, *, engine: str = "onnxruntime", **options: Any) -> Engine:
    """Make a step of a training model ready to run. Options are the engine's: `device`, `threads`, `recompute`."""
    _check(engine, ENGINES)
    if engine == "onnxruntime":
        from onward.run.onnxruntime import OnnxRuntime

        return OnnxRuntime(read(source), step, **options)
    from onward.run.interpreted import Interpreted

    return Interpreted.on(engine, read(source), step, **options)


def function(source: Source, *, engine: str = "numpy", **options: Any) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """The graph of any model as a function of arrays by name, executed by a framework."""
    _check(engine, ENGINES[1:])
    from onward.run.interpreted import array_function

    return array_function(engine, read(source), **options)


def _check(engine: str, engines: tuple[str, ...]) -> None:
    if engine not in engines:
        raise UnknownNameError(
            f"there is no engine `{engine}`", hint=near(engine, engines) or f"engines: {', '.join(engines)}"
        )
