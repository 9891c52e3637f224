"""Training run as a JAX program, `run.py`: graphs as functions, with the source of what they call.

Programs contain copies of the engine's operators and of everything that these mention. So a program
computes what the engine does, and can be read and changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from onward.frameworks.jax.forward import TrainingParts
from onward.frameworks.jax.program.operators import INSTEAD, pairs, type_name, variables
from onward.frameworks.jax.program.optimizer_source import OptimizerSource
from onward.frameworks.jax.program.recording import GraphPrinter
from onward.frameworks.jax.updates import types_of
from onward.frameworks.program.audit import audit_program
from onward.frameworks.program.source_bundle import SourceBundle
from onward.frameworks.program.source_text import arrange_imports, break_lines, docstring, quote
from onward.model import Model
from onward.model.state import STEP

STATE = "state.safetensors"
CONSTANTS = "constants.safetensors"


def write_program(parts: TrainingParts, params: Mapping[str, Any], name: str) -> tuple[str, Mapping[str, np.ndarray]]:
    """Return the program that resumes a run, and the constants that it reads from a file."""
    printer = _printer("read", "write", "leaves_by_name", "fill_tree", "exact")
    loss, apply, batch = _loss(parts, printer), _apply(parts, printer), parts.forward()[1].batch
    optimizer_source = OptimizerSource(printer, params)
    optimizer = optimizer_source.optimizer(parts.run)
    sections = {
        "the run": break_lines(_run(parts, optimizer)),
        "the model": break_lines(f"{loss}\n\n\n{apply}"),
        "updates that optax does not have": break_lines("\n\n\n".join(optimizer_source.functions)),
    }
    heading = _DOCSTRING.format(name=name, batch=", ".join(f"{quote(key)}: ..." for key in batch))
    return _assemble(printer, heading, sections, [*_IMPORTS, "import optax"])


def write_model(model: Model, params: Iterable[str], name: str) -> tuple[str, Mapping[str, np.ndarray]]:
    """Return the program of an inference model whose `params` are inputs, and its constants."""
    printer = _printer("read", "write", "exact")
    taken, expressions = _take_inputs(dict.fromkeys(params, "params"), model, "inputs")
    lines, results = printer.body(model, expressions)
    body = [*taken, *lines, f"return {{{pairs(results)}}}"]
    apply = _function("apply(params, inputs)", "Return the outputs of the model, in inference mode.", body)
    names = [value.name or "" for value in model.inputs if value.name not in set(params)]
    heading = _MODEL_DOCSTRING.format(name=name, inputs=", ".join(f"{quote(key)}: ..." for key in names))
    return _assemble(printer, heading, {"the model": break_lines(f"{apply}\n\n\n{_LOAD}")}, _IMPORTS)


def _printer(*helpers: str) -> GraphPrinter:
    printer = GraphPrinter(SourceBundle(instead=INSTEAD, taken=_NAMES, annotated=False))
    for helper in helpers:
        printer.helper(helper)
    return printer


def _assemble(
    printer: GraphPrinter, heading: str, sections: dict[str, str], imports: Iterable[str]
) -> tuple[str, Mapping[str, np.ndarray]]:
    """Return the program of these sections, with what they call, and the constants that it reads."""
    sections["what these call"] = "\n\n\n".join(printer.own.texts())
    heads = {title: f"# ---- {title} ".ljust(120, "-") for title in sections}
    written = [f"{heads[title]}\n\n\n{text}" for title, text in sections.items() if text]
    written += [f"constants = read(HERE / {quote(CONSTANTS)})"] if printer.constants else []
    head = f"{docstring(heading)}\n\n{arrange_imports([*printer.own.imports(), *imports])}"
    source = "\n\n".join([f"{head}\n\nHERE = Path(__file__).parent", *(f"{text}\n" for text in written)])
    return audit_program(source, ["jax", "optax"]), printer.constants


_NAMES = ("loss", "apply", "step", "load", "save", "optimizer", "constants", "rate", "clip")  # not of copied functions
_IMPORTS = ("import jax", "import jax.numpy as jnp", "import numpy as np", "from pathlib import Path")

_DOCSTRING = """Training run of {name}, resumed in JAX. Written by Onward; needs only JAX and optax.

    import jax, run

    step, state = jax.jit(run.step), run.load()
    state, metrics = step(state, {{{batch}}})
    run.save(state)
"""

_MODEL_DOCSTRING = """{name} in JAX. Written by Onward; needs only JAX.

    import jax, model

    params = model.load()
    outputs = jax.jit(model.apply)(params, {{{inputs}}})
    model.save(params)
"""
_LOAD = f'''def load(path=HERE / "{STATE}"):
    """Return the parameters by name."""
    with exact():
        return {{name: jnp.asarray(array) for name, array in read(path).items()}}


def save(params, path=HERE / "{STATE}"):
    write({{name: np.asarray(array) for name, array in params.items()}}, path)'''


def _take_inputs(kinds: Mapping[str, str], model: Model, fed: str) -> tuple[list[str], dict[str, str]]:
    """Return statements that read the inputs of a model, and the expressions of all inputs.

    `kinds` has the key of the state for each name in it.
    """
    types, lines, expressions = types_of(model), [], {}
    own = variables(name for name in types if name not in kinds)
    for name, dtype in types.items():
        if name in kinds:
            source = "params" if kinds[name] == "params" else f'state["{kinds[name]}"]'
            expressions[name] = f"{source}[{quote(name)}]"
        else:
            source = 'state["step"]' if name == STEP else f"{fed}[{quote(name)}]"
            expressions[name] = own[name]
            lines.append(f"{expressions[name]} = jnp.asarray({source}, {type_name(dtype)})")
    return lines, expressions


def _loss(parts: TrainingParts, printer: GraphPrinter) -> str:
    model, contract = parts.forward()
    assert contract.loss is not None
    taken, expressions = _take_inputs(parts.kinds, model, "batch")
    keys = parts.kinds
    stores = {output: f"{keys[name]}[{quote(name)}]" for name, output in contract.update.items()}
    lines, results = printer.body(model, expressions, stores)
    metrics = {"loss": results[contract.loss]}
    metrics |= {name: results[name] for name in contract.metrics if name != contract.loss}
    used = [key for key in ("statistics", "random") if any(keys[name] == key for name in contract.update)]
    changed = pairs({key: key if key in used else f'state["{key}"]' for key in ("statistics", "random")})
    begin = [f'{key} = dict(state["{key}"])' for key in used]
    body = [*taken, *begin, *lines, f"metrics = {{{pairs(metrics)}}}", f"changed = {{{changed}}}"]
    return _function(
        "loss(params, state, batch)",
        "Return the loss, with the metrics and the changed state of the forward pass.",
        [*body, f"return {metrics['loss']}, (metrics, changed)"],
    )


def _apply(parts: TrainingParts, printer: GraphPrinter) -> str:
    model = parts.inference()
    taken, expressions = _take_inputs(parts.kinds, model, "inputs")
    lines, results = printer.body(model, expressions)
    body = ['params = state["params"]', *taken, *lines, f"return {{{pairs(results)}}}"]
    return _function("apply(state, inputs)", "Return the outputs of the model, in inference mode.", body)


def _function(signature: str, summary: str, lines: Sequence[str]) -> str:
    body = "\n".join(f"        {line}" for line in lines)
    return f'def {signature}:\n    """{summary}"""\n    with exact():\n{body}'


def _run(parts: TrainingParts, optimizer: str) -> str:
    recipe = parts.run.recipe
    accumulates = int(recipe.get("accumulate", 1)) > 1
    count = "opt_state.gradient_step" if accumulates else 'state["step"] + 1'
    roles = ", ".join(map(quote, ["params", "statistics", "random", *(["ema"] if "ema" in recipe else [])]))
    averages = _AVERAGES.format(decay=float(recipe["ema"])) if "ema" in recipe else ""
    return _STEP.format(optimizer=optimizer, count=count, averages=averages, roles=f"({roles})", state=STATE)


_STEP = '''def optimizer():
    """Return the optimizer, a transformation of optax."""
    return {optimizer}


def step(state, batch):
    """Return the state after one update, and the metrics, with the loss."""
    with exact():
        (_, (metrics, changed)), gradients = jax.value_and_grad(loss, has_aux=True)(state["params"], state, batch)
        changes, opt_state = optimizer().update(gradients, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], changes)
        count = {count}
        new = {{**state, **changed, "params": params, "opt_state": opt_state, "step": count}}
{averages}        return new, metrics


def load(path=HERE / "{state}"):
    """Return the state of the run: parameters, statistics, random keys and optimizer state."""
    with exact():
        arrays = read(path)

        def arrays_of(role):
            names = [name for name in arrays if name.startswith(f"{{role}}/")]
            return {{name[len(role) + 1 :]: jnp.asarray(arrays[name]) for name in names}}

        state = {{role: arrays_of(role) for role in {roles}}} | {{"step": jnp.zeros([], jnp.int32)}}
        state["opt_state"] = optimizer().init(state["params"])
        return fill_tree(state, arrays)


def save(state, path=HERE / "{state}"):
    write(leaves_by_name(state), path)'''

_AVERAGES = """        updated = count > state["step"]
        new["ema"] = {{
            name: jnp.where(updated, past * {decay} + params[name] * (1 - {decay}), past)
            for name, past in state["ema"].items()
        }}
"""
