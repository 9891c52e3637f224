"""Programs of runs: one Python file that needs only PyTorch and creates all objects of a run."""

from __future__ import annotations

import dataclasses
import io
import linecache
from collections.abc import Sequence
from typing import Any

import torch

from onward.errors import UnsupportedError
from onward.frameworks.program.audit import audit_program
from onward.frameworks.program.source_bundle import SourceBundle
from onward.frameworks.program.source_text import arrange_imports, break_lines, docstring, identifier, indent, quote
from onward.frameworks.torch.loss import GraphLoss, takes_all
from onward.frameworks.torch.module import LIVE, OnnxModule
from onward.frameworks.torch.probe import try_module
from onward.frameworks.torch.program.model import ClassWriter, ModelSource, argument_names
from onward.frameworks.torch.program.operators import ForwardCalls, trace
from onward.frameworks.torch.program.passes import shorten
from onward.frameworks.torch.program.training import Definitions, schedules_of
from onward.frameworks.torch.schedule import updates_per_step
from onward.inspect import describe
from onward.model import Model
from onward.run_state.reading import LossTerm
from onward.run_state.training_models import from_training_model

_SIZES = 4, 7
"""Values of the first dynamic size in two traces, which must give the same text."""
_IMPORTS = {
    "math.": "import math",
    "Any": "from typing import Any",
    "torch.": "import torch",
    "F.": "from torch.nn import functional as F",
    "lr_scheduler.": "from torch.optim import lr_scheduler",
    "LRScheduler": "from torch.optim.lr_scheduler import LRScheduler",
}
"""Text in a program -> import that it needs. `Tensor` and `nn` are imported always."""


@dataclasses.dataclass
class Source:
    """Text of a program, and state that belongs to it."""

    text: str
    constants: dict[str, torch.Tensor]
    """Tensors of the module outside of its `state_dict`."""


def write_program(training: Model, live: Any, file: str = "run.pt") -> Source:
    """Return the program of a run, or of a module alone. `file` is the name of its state file."""
    module, optimizer, scheduler, loss = live
    if own := [*module._graph.updates]:
        raise UnsupportedError(f"the model itself updates `{own[0]}`, which a written program does not", hint=LIVE)
    program, model = _model(module)
    if optimizer is None:
        functions = [_load_module(bool(model.constants)), _save_module(bool(model.constants))]
        loop = [f"module = load({quote(file)})", f"module({', '.join(argument_names(program))})"]
        return _assemble([model], Definitions(), functions, ["A model, written by Onward.", "", *indent(loop), ""])
    definitions = Definitions()
    sources = [model]
    if isinstance(loss, GraphLoss):
        sources.append(_model(loss.graph, "Loss", loss.outputs if len(program.outputs) > 1 else ())[1])
        if sources[1].constants:
            raise UnsupportedError("the loss has constants that are too large for a program", hint=LIVE)
    functions = [
        definitions.clip(optimizer),
        [
            "def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:",
            *indent(definitions.optimizer(optimizer, module)),
        ],
    ]
    if scheduler is not None:
        body = [*schedules_of(scheduler), f"return {definitions.scheduler(scheduler)}"]
        functions.append(["def make_scheduler(optimizer: torch.optim.Optimizer) -> LRScheduler:", *indent(body)])
    functions.append(["def make_loss() -> nn.Module:", f"    return {definitions.loss(loss)}"])
    functions.append(_load(scheduler is not None, bool(model.constants)))
    functions.append(_save(scheduler is not None, bool(model.constants)))
    terms = describe(training).steps[0].loss.terms
    every = updates_per_step(from_training_model(training)) if scheduler is not None else 0
    loop = indent(_loop(program, terms, every, quote(file)))
    return _assemble(sources, definitions, functions, ["A model and its training, written by Onward.", "", *loop, ""])


def _assemble(
    sources: Sequence[ModelSource], definitions: Definitions, functions: list[list[str]], heading: list[str]
) -> Source:
    """Return the program of classes, the first that of the model, and of functions, with what they need."""
    own = SourceBundle(replaced=definitions.replaced)
    own.add(*(helper for source in sources for helper in source.helpers), *definitions.borrowed)
    sections = [*(source.text for source in sources), *("\n".join(lines) for lines in functions if lines)]
    text = "\n\n\n".join([*own.texts(), *map(break_lines, sections)])
    used = {*own.imports(), *(line for use, line in _IMPORTS.items() if use in text)}
    used -= {"from torch import Tensor", "from torch import nn"}
    imports = arrange_imports([*used, "from __future__ import annotations", "from torch import Tensor, nn"])
    whole = f"{docstring(chr(10).join(heading))}\n\n{imports}\n\n\n{text}\n"
    return Source(audit_program(whole, ["torch"]), sources[0].constants)


def _model(module: OnnxModule, name: str = "Model", outputs: Sequence[str] = ()) -> tuple[ForwardCalls, ModelSource]:
    """Return the calls and the class of a module, which must be the same for all dynamic sizes."""
    programs = [shorten(trace(module, size)) for size in _SIZES]
    sources = [ClassWriter(module, program, name, outputs).source() for program in programs]
    if sources[0].text != sources[1].text:
        raise UnsupportedError(
            "the forward pass depends on dynamic sizes",
            hint="fix them in the model's inputs, or use the live module: `onward.to_torch(training)`",
        )
    return programs[0], sources[0]


def state_of(source: Source, live: Any) -> dict[str, Any]:
    """Return the content of the state file."""
    module, optimizer, scheduler, _ = live
    state = {"module": module.state_dict()}
    if optimizer is not None:
        state["optimizer"] = optimizer.state_dict()
        state["scheduler"] = scheduler.state_dict() if scheduler is not None else None
    return {**state, **({"constants": source.constants} if source.constants else {})}


def run_program(source: Source, live: Any) -> Any:
    """Execute a program with the state of live objects, and return its own. Tracebacks show its lines."""
    name = f"<written by Onward, {id(source):x}>"
    linecache.cache[name] = len(source.text), None, source.text.splitlines(True), name
    namespace: dict[str, Any] = {"__name__": "written_by_onward"}
    exec(compile(source.text, name, "exec"), namespace)
    with io.BytesIO() as file:
        torch.save(state_of(source, live), file)
        file.seek(0)
        objects = namespace["load"](file)
    try_module(objects if live[1] is None else objects[0], live[0])
    return objects


# ---- sections of the file --------------------------------------------------------------------------------------------


def _loop(program: ForwardCalls, terms: Sequence[LossTerm], every: int, file: str) -> list[str]:
    """Return a training loop. `every` is the updates per step of the scheduler (0 without one)."""
    often = f"  # once in {every} updates" if every > 1 else ""
    arguments = argument_names(program)
    call = f"module({', '.join(arguments)})"
    targets = list(dict.fromkeys(identifier(name) for term in terms for name in term.inputs))
    several = len(program.outputs) > 1
    outputs = [f"outputs[{quote(term.output)}]" if several else call for term in terms]
    pairs = [", ".join([output, *map(identifier, term.inputs)]) for output, term in zip(outputs, terms, strict=True)]
    if takes_all(terms):
        losses = ", ".join(["outputs" if several else call, *targets])
    elif len(terms) > 1:
        losses = ", ".join(f"({p})" if term.inputs else f"({p},)" for p, term in zip(pairs, terms, strict=True))
    else:
        losses = pairs[0]
    return [
        f"module, optimizer, scheduler, loss = load({file})",
        f"for {', '.join([*arguments, *targets])} in batches:",
        "    optimizer.zero_grad()",
        *([f"    outputs = {call}"] if several else []),
        f"    loss({losses}).backward()",
        "    optimizer.step()",
        *([f"    scheduler.step(){often}"] if every else []),
        f"save({file}, module, optimizer, scheduler)",
    ]


def _load(scheduled: bool, constants: bool) -> list[str]:
    result = "tuple[Model, torch.optim.Optimizer, LRScheduler | None, nn.Module]"
    lines = [
        '"""Return module, optimizer, scheduler and loss, with the state of a file."""',
        "state = torch.load(path, weights_only=True)",
        "module = Model()",
        'module.load_state_dict(state["module"])',
        *(_LOAD_CONSTANTS if constants else ()),
        "optimizer = make_optimizer(module)",
        "scheduler = make_scheduler(optimizer)" if scheduled else "",
        'optimizer.load_state_dict(state["optimizer"])',
        'scheduler.load_state_dict(state["scheduler"])' if scheduled else "",
        f"return module, optimizer, {'scheduler' if scheduled else 'None'}, make_loss()",
    ]
    return [f"def load(path: str) -> {result}:", *indent([line for line in lines if line])]


def _load_module(constants: bool) -> list[str]:
    lines = [
        '"""Return the module in eval mode, with the state of a file."""',
        "state = torch.load(path, weights_only=True)",
        "module = Model()",
        'module.load_state_dict(state["module"])',
        *(_LOAD_CONSTANTS if constants else ()),
        "return module.train(False)",
    ]
    return ["def load(path: str) -> Model:", *indent(lines)]


def _save_module(constants: bool) -> list[str]:
    lines = [
        '"""Write the current state to a file."""',
        'state = {"module": module.state_dict()}',
        *(_SAVE_CONSTANTS if constants else ()),
        "torch.save(state, path)",
    ]
    return ["def save(path: str, module: Model) -> None:", *indent(lines)]


_LOAD_CONSTANTS = (
    'for name, constant in state["constants"].items():',
    "    module.get_buffer(name).copy_(constant)",
)
_SAVE_CONSTANTS = (
    "persistent = module.state_dict()",
    'state["constants"] = {n: x for n, x in module.named_buffers() if n not in persistent}',
)


def _save(scheduled: bool, constants: bool) -> list[str]:
    lines = [
        '"""Write the current state to a file."""',
        'state = {"module": module.state_dict(), "optimizer": optimizer.state_dict()}',
        'state["scheduler"] = scheduler.state_dict()' if scheduled else 'state["scheduler"] = None',
        *(_SAVE_CONSTANTS if constants else ()),
        "torch.save(state, path)",
    ]
    head = (
        "def save(path: str, module: Model, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None) -> None:"
    )
    return [head, *indent([line for line in lines if line])]
