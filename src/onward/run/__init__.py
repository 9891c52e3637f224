"""Engines: what executes training models.

engine = onward.run.load(model)               # on stock ONNX Runtime
metrics = engine.step({"image": images, "labels": labels})
results = engine.evaluate({"image": images, "labels": labels})
model = engine.updated()                      # the training model with the state as it is now
"""

from __future__ import annotations

from typing import Any

from onward.errors import UnknownNameError, near
from onward.model import Source, read
from onward.run.engine import Engine

ENGINES = ("onnxruntime",)

__all__ = ["ENGINES", "Engine", "load"]


def load(source: Source, step: int = 0, *, engine: str = "onnxruntime", **options: Any) -> Engine:
    """Make a step of a training model ready to run. Options are the engine's: `device`, `threads`, `recompute`."""
    if engine not in ENGINES:
        raise UnknownNameError(
            f"there is no engine `{engine}`", hint=near(engine, ENGINES) or f"engines: {', '.join(ENGINES)}"
        )
    from onward.run.onnxruntime import OnnxRuntime

    return OnnxRuntime(read(source), step, **options)
