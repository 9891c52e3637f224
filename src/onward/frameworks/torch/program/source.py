"""A run as a program: one Python file that needs nothing but PyTorch, and makes all its objects again."""

from __future__ import annotations

import dataclasses
import io
import linecache
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from onward.errors import UnsupportedError
from onward.frameworks.program.audit import audit_program
from onward.frameworks.program.source_bundle import SourceBundle
from onward.frameworks.program.source_text import arrange_imports, break_lines, docstring, identifier, indent, quote
from onward.frameworks.torch.forward import OnnxModule
from onward.frameworks.torch.probe import try_module
from onward.frameworks.torch.program.model import ModelSource, argument_names, model_source
from onward.frameworks.torch.program.operators import ForwardCalls, trace
from onward.frameworks.torch.program.passes import shorten
from onward.frameworks.torch.program.training import Definitions, schedules_of
from onward.frameworks.torch.schedule import updates_per_step
from onward.inspect import describe
from onward.model import Model
from onward.run_state.reading import LossTerm
from onward.run_state.training_models import from_training_model

_SIZES = 4, 7
"""What sizes that vary are while the forward pass is written down, at first and once more."""


@dataclasses.dataclass
class Source:
    """The file, and what its own state does not hold."""

    text: str
    constants: dict[str, torch.Tensor]
    """Tensors that the module needs beside its `state_dict`."""


def write_program(training: Model, live: Any, file: str = "run.pt") -> Source:
    """The program of the run that a training model holds, given what `to_torch` made of it; `file` is for its state."""
    module, optimizer, scheduler, loss = live
    program, model = _model(module)
    definitions = Definitions()
    functions = [
        definitions.clip(optimizer),
        [
            "def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:",
            *indent(definitions.optimizer(optimizer, module)),
        ],
    ]
    if scheduler is not None:
        made = [*schedules_of(scheduler), f"return {definitions.scheduler(scheduler)}"]
        functions.append(["def make_scheduler(optimizer: torch.optim.Optimizer) -> LRScheduler:", *indent(made)])
    functions.append(["def make_loss() -> nn.Module:", f"    return {definitions.loss(loss)}"])
    functions.append(_load(scheduler is not None, bool(model.constants)))
    functions.append(_save(scheduler is not None, bool(model.constants)))
    own = SourceBundle(replaced=definitions.replaced)
    own.add(*model.helpers, *definitions.borrowed)
    parts = [model.text, *("\n".join(lines) for lines in functions if lines)]
    body = "\n\n\n".join([*own.texts(), *map(break_lines, parts)])
    terms = describe(training).steps[0].loss.terms
    every = updates_per_step(from_training_model(training)) if scheduler is not None else 0
    loop = [f"    {line}" for line in _loop(program, terms, every, quote(file))]
    heading = docstring("\n".join(["A model and its training, written by Onward.", "", *loop, ""]))
    used = {*own.imports(), *(line for use, line in _KNOWN.items() if use in body)}
    used -= {"from torch import Tensor", "from torch import nn"}
    imports = arrange_imports([*used, "from __future__ import annotations", "from torch import Tensor, nn"])
    return Source(audit_program(f"{heading}\n\n{imports}\n\n\n{body}\n", ["torch"]), model.constants)


def _model(module: OnnxModule) -> tuple[ForwardCalls, ModelSource]:
    """The class of a module, if it is the same for all sizes."""
    programs = [shorten(trace(module, size)) for size in _SIZES]
    sources = [model_source(module, program) for program in programs]
    if sources[0].text != sources[1].text:
        raise UnsupportedError(
            "what the module does depends on sizes that vary",
            hint="fix them in the model's inputs, or take the live module: `onward.to_torch`",
        )
    return programs[0], sources[0]


def state_of(source: Source, live: Any) -> dict[str, Any]:
    """What the program loads."""
    module, optimizer, scheduler, _ = live
    state = {
        "module": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict() if scheduler is not None else None,
    }
    return {**state, **({"constants": source.constants} if source.constants else {})}


def run_program(source: Source, live: Any) -> tuple[nn.Module, Optimizer, LRScheduler | None, nn.Module]:
    """What the program makes, with the state of what it was made of; tracebacks show its lines."""
    name = f"<written by Onward, {id(source):x}>"
    linecache.cache[name] = len(source.text), None, source.text.splitlines(True), name
    space: dict[str, Any] = {"__name__": "written_by_onward"}
    exec(compile(source.text, name, "exec"), space)
    with io.BytesIO() as file:
        torch.save(state_of(source, live), file)
        file.seek(0)
        made = space["load"](file)
    try_module(made[0], live[0])
    return made


# ---- parts of the file -----------------------------------------------------------------------------------------------


def _loop(program: ForwardCalls, terms: Sequence[LossTerm], every: int, file: str) -> list[str]:
    """How to train; `every` is how many updates there are for a step of the scheduler, if there is one."""
    often = f"  # once in {every} updates" if every > 1 else ""
    arguments = argument_names(program)
    called = f"module({', '.join(arguments)})"
    targets = list(dict.fromkeys(identifier(name) for term in terms for name in term.inputs))
    several = len(program.outputs) > 1
    outputs = [f"outputs[{quote(term.output)}]" if several else called for term in terms]
    pairs = [", ".join([output, *map(identifier, term.inputs)]) for output, term in zip(outputs, terms, strict=True)]
    own = terms[0].name == "value" and len(terms) == 1
    if own:
        given = "outputs" if several else called
    elif len(terms) == 1:
        given = pairs[0]
    else:
        given = ", ".join(f"({p})" if term.inputs else f"({p},)" for p, term in zip(pairs, terms, strict=True))
    return [
        f"module, optimizer, scheduler, loss = load({file})",
        f"for {', '.join([*arguments, *targets])} in batches:",
        "    optimizer.zero_grad()",
        *([f"    outputs = {called}"] if several else []),
        f"    loss({given}).backward()",
        "    optimizer.step()",
        *([f"    scheduler.step(){often}"] if every else []),
        f"save({file}, module, optimizer, scheduler)",
    ]


_KNOWN = {
    "math.": "import math",
    "Any": "from typing import Any",
    "torch.": "import torch",
    "nn.": "from torch import nn",
    "Tensor": "from torch import Tensor",
    "F.": "from torch.nn import functional as F",
    "lr_scheduler.": "from torch.optim import lr_scheduler",
    "LRScheduler": "from torch.optim.lr_scheduler import LRScheduler",
}


def _load(scheduled: bool, constants: bool) -> list[str]:
    result = "tuple[Model, torch.optim.Optimizer, LRScheduler | None, nn.Module]"
    lines = [
        '"""The run that a file holds: module, optimizer, scheduler and loss, which go on where it was."""',
        "state = torch.load(path, weights_only=True)",
        "module = Model()",
        'module.load_state_dict(state["module"])',
        'for name, constant in state["constants"].items():' if constants else "",
        "    module.get_buffer(name).copy_(constant)" if constants else "",
        "optimizer = make_optimizer(module)",
        "scheduler = make_scheduler(optimizer)" if scheduled else "",
        'optimizer.load_state_dict(state["optimizer"])',
        'scheduler.load_state_dict(state["scheduler"])' if scheduled else "",
        f"return module, optimizer, {'scheduler' if scheduled else 'None'}, make_loss()",
    ]
    return [f"def load(path: str) -> {result}:", *indent([line for line in lines if line])]


def _save(scheduled: bool, constants: bool) -> list[str]:
    lines = [
        '"""Write the run as it is now."""',
        'state = {"module": module.state_dict(), "optimizer": optimizer.state_dict()}',
        'state["scheduler"] = scheduler.state_dict()' if scheduled else 'state["scheduler"] = None',
        "kept = module.state_dict()" if constants else "",
        'state["constants"] = {name: x for name, x in module.named_buffers() if name not in kept}' if constants else "",
        "torch.save(state, path)",
    ]
    head = (
        "def save(path: str, module: Model, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None) -> None:"
    )
    return [head, *indent([line for line in lines if line])]
