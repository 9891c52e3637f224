"""Engines, which run training models.

engine = onward.engines.start(model)          # on stock ONNX Runtime
metrics = engine.step({"image": images, "labels": labels})
results = engine.evaluate({"image": images, "labels": labels})
model = engine.updated()                      # the training model with the current state
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from onward.arguments import Threads, coerce
from onward.differentiate.gradients import check_gradients_of
from onward.engines.engine import Engine, check_options, fitting_inputs
from onward.engines.step_errors import refuse_endless_loops
from onward.errors import ArgumentError, UnknownNameError, needing_memory, suggest
from onward.lowering.rounds import Steps
from onward.lowering.step import has_training_operators, lower_for_engine
from onward.model import Source, load
from onward.model.checks import check_signatures
from onward.model.walk import graphs_of
from onward.transform.padding import write_padding

FRAMEWORKS = ("torch", "jax", "tensorflow")
"""Engines with their own derivative and compiler."""
ENGINES = ("onnxruntime", "numpy", *FRAMEWORKS, "keras")

__all__ = ["ENGINES", "FRAMEWORKS", "Engine", "function", "is_installed", "start"]


def __dir__() -> list[str]:
    return __all__


def is_installed(engine: str) -> bool:
    """True if the framework of an engine is installed: `onward.engines.is_installed("jax")`.

    - `engine`: name of the engine
    """
    return importlib.util.find_spec(engine) is not None


@needing_memory("start the engine")
def start(training: Source, steps: Steps = None, *, engine: str = "onnxruntime", **options: Any) -> Engine:
    """Start an engine with a training model.

        with onward.engines.start("training.onnx", engine="torch", device="cuda") as engine:
            metrics = engine.step({"image": images, "labels": labels})
            model = engine.updated()

    - `training`: a training model
    - `steps`: index or name of one step, or the runs per round: `"discriminator:2,generator"`
      (default: all steps, in their order and as often as the file says)
    - `engine`: `"onnxruntime"`, `"numpy"`, `"torch"`, `"jax"`, `"tensorflow"` or `"keras"`
    - `options`: options of the engine. All have `device`. ONNX Runtime has `threads`, `recompute`
      and `kernels` (use native kernels). Frameworks have `compile` (compile the whole step),
      `rules` (take gradients from Onward's rules), `precision` and `deterministic`. PyTorch has
      `strategy` (how several processes share the work) and `deepspeed_config`. JAX and PyTorch have
      `mesh` (devices or processes: `"data=2,model=2"`) and `shard` (how these divide tensors)
    """
    check_engine(engine)
    steps = options.pop("step", steps)  # deprecated name
    if options.get("deepspeed_config") is not None and options.get("strategy") != "deepspeed":
        raise ArgumentError(
            "`deepspeed_config` has no effect without DeepSpeed",
            hint='add `strategy="deepspeed"` (`--strategy deepspeed`)',
        )
    if "threads" in options:
        options["threads"] = coerce("`threads`", options["threads"], Threads | None)
    if engine == "onnxruntime":
        from onward.engines.onnxruntime import OnnxRuntime

        options.pop("compile", None)  # ONNX Runtime has no eager mode
        check_options(engine, options, OnnxRuntime)
        return OnnxRuntime(load(training), steps, **options)
    if engine == "torch" and any(options.get(name) is not None for name in ("strategy", "mesh")):
        from onward.engines.distributed.torch_parallel import start_together

        return start_together(load(training), steps, **options)
    if engine == "jax" and options.get("mesh") is not None:
        from onward.engines.distributed.jax_mesh import OnMesh

        return OnMesh.on(engine, load(training), steps, **options)
    from onward.engines.framework_engine import Interpreted

    options.pop("mesh", None)
    return Interpreted.on(engine, load(training), steps, **options)


@needing_memory("start the engine")
def function(model: Source, *, engine: str = "numpy", **options: Any) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return the graph of any model as a function of arrays by name.

        compute = onward.engines.function("digits.onnx", engine="torch")
        logits = compute({"image": images})["logits"]

    - `model`: any model
    - `engine`, `options`: as for `start`
    """
    check_engine(engine)
    model = check_signatures(load(model)).copy()
    write_padding(model)
    check_gradients_of(model)
    refuse_endless_loops(graphs_of(model))
    inputs = {value.name or "": value for value in model.inputs}
    # Frameworks treat an input with a default as a constant.
    defaults = {} if engine != "onnxruntime" else {value.name or "": value for value in model.graph.inputs}
    if engine not in FRAMEWORKS and has_training_operators(model):  # the engine has no derivative
        model = lower_for_engine(model, part="inference")
    if engine == "onnxruntime":
        from onward.engines import onnxruntime

        check_options(engine, options, onnxruntime.array_function)
        compute = onnxruntime.array_function(model, **options)
    else:
        from onward.engines.framework_engine import array_function

        compute = array_function(engine, model, **options)

    def checked(arrays: Mapping[str, Any]) -> dict[str, Any]:
        return compute(fitting_inputs(arrays, inputs, defaults, engine in FRAMEWORKS))

    return checked


def check_engine(engine: str) -> None:
    """Raise if the name is not an engine."""
    if engine not in ENGINES:
        raise UnknownNameError(
            f"unknown engine `{engine}`",
            hint="; ".join(filter(None, [suggest(engine, ENGINES), f"engines: {', '.join(ENGINES)}"])),
        )
