"""Text of a summary, on at most one screen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from onward.inspect.formatting import (
    amount,
    clean,
    gather_names,
    list_names,
    percent,
    quantity,
    setting,
    settings,
    shape,
    shorten,
    size,
)
from onward.inspect.summary import (
    Amount,
    GroupSummary,
    LossTerms,
    Port,
    ProgressSummary,
    Quantization,
    Role,
    Summary,
    Training,
    Weight,
)
from onward.recipe.optimizers import OPTIMIZERS
from onward.run_state.reading import LossTerm

_INDENT, _LABEL_WIDTH = 2, 12
_LABEL, _FAINT = "cyan", "bright_black"

_GAP = "  "
_NARROWEST = {"name": 14, "shape": 9, "reason": 14}
"""Columns whose cells may take several lines, and how narrow they get for that."""


def render(summary: Summary, console: Console) -> None:
    """Print the summary of a model."""
    label = "training model" if summary.is_training_model else "inference model"
    _print(console, Text.assemble((_encode(shorten(summary.name), console), "bold"), "  ", (label, _FAINT)))
    _print_rows(console, model_rows(summary))
    for index, step in enumerate(summary.steps):
        title = "training" if len(summary.steps) == 1 else f"step {index}: {shorten(step.name)}"
        _print(console, Text("\n" + _encode(title, console), "bold"))
        _print_rows(console, step_rows(summary, step))
    if summary.parameters["trainable"].tensors:
        name = shorten(summary.name) if summary.file.path else "model.onnx"
        hint = f"make it a training model: onward prepare {name} --loss ..."
        _print(console, Text("\n" + _encode(hint, console), _FAINT))


def render_parameters(summary: Summary, console: Console) -> None:
    """Print a table of all constant tensors of the model with their roles."""
    groups = [_group_of(weight, summary) for weight in summary.weights]
    columns: dict[str, list[str]] = {
        "name": [clean(weight.name) for weight in summary.weights],
        "shape": [shape(weight.shape).replace(" ", "") for weight in summary.weights],
        "type": [weight.type for weight in summary.weights],
        "size": [size(weight.bytes) for weight in summary.weights],
        "role": [str(weight.role) for weight in summary.weights],
        "group": [clean(group) for group in groups],
        "reason": [clean(weight.reason) for weight in summary.weights],
    }
    if len({*groups} - {""}) < 2:
        del columns["group"]
    if summary.weights:
        _print_table(console, columns)
    counts = [f"{of.numbers:,} {role}" for role, of in summary.parameters.items() if of.tensors]
    total = f"total  {amount(Amount.of(summary.weights))}"
    text = Text(": ".join([total, ", ".join(counts)] if counts else [total]), "bold")
    console.print(text, soft_wrap=not console.is_terminal)


def _group_of(weight: Weight, summary: Summary) -> str:
    """Return the group of a weight, or its steps if there are several."""
    if len(summary.steps) < 2 or not weight.steps:
        return weight.group or ""
    return f"step {list_names([str(index) for index in weight.steps], 3)}"


# ---- printing --------------------------------------------------------------------------------------------------------
# Everything is printed as `Text`, which has no markup: a parameter may be called `[red]`.


def _print(console: Console, text: Text) -> None:
    console.print(text, soft_wrap=True)


def _print_rows(console: Console, rows: Iterable[Row]) -> None:
    width = max(console.width - _INDENT - _LABEL_WIDTH, 20)
    for label, content in rows:
        text = content if isinstance(content, str) else _flowing(content, width)
        for i, line in enumerate(Text(_encode(text, console)).wrap(console, width, overflow="fold")):
            line.rstrip()
            head = (label if i == 0 else "").ljust(_LABEL_WIDTH)
            _print(console, Text.assemble(" " * _INDENT, (head, _LABEL), line))


def _flowing(items: Iterable[str], width: int) -> str:
    """Return items with commas between them, in lines that end with a comma."""
    lines = [""]
    for item in items:
        if lines[-1] and cell_len(lines[-1]) + cell_len(item) + 2 > width:
            lines.append("")
        lines[-1] += f"{' ' if lines[-1] else ''}{item},"
    return "\n".join(lines).removesuffix(",")


def _print_table(console: Console, columns: dict[str, list[str]]) -> None:
    widths = {heading: max(map(cell_len, (heading, *cells))) for heading, cells in columns.items()}
    while console.is_terminal and sum(widths.values()) + len(_GAP) * (len(widths) - 1) > console.width:
        heading = max(_NARROWEST, key=lambda heading: widths[heading] - _NARROWEST[heading])
        if widths[heading] <= _NARROWEST[heading]:
            break  # a line that is too long loses less than a column that is too narrow
        widths[heading] -= 1
    _print_table_row(console, {heading: heading for heading in columns}, widths, "bold")
    for row in zip(*columns.values(), strict=True):
        _print_table_row(console, dict(zip(columns, row, strict=True)), widths)


def _print_table_row(console: Console, row: dict[str, str], widths: dict[str, int], style: str = "") -> None:
    cells = [
        Text(_encode(cell, console), justify="right" if heading == "size" else "left").wrap(
            console, widths[heading], overflow="fold"
        )
        for heading, cell in row.items()
    ]
    for texts in zip_longest(*cells, fillvalue=None):
        line_cells = [text or Text() for text in texts]
        for text, (heading, width) in zip(line_cells, widths.items(), strict=True):
            text.align("right" if heading == "size" else "left", width)
        line = Text(_GAP, style).join(line_cells)
        line.rstrip()
        _print(console, line)


def _encode(text: str, console: Console) -> str:
    """Escape characters that the terminal's encoding lacks."""
    return text.encode(console.encoding, "backslashreplace").decode(console.encoding)


# ---- rows ------------------------------------------------------------------------------------------------------------


Row = tuple[str, str | Sequence[str]]
"""A label with a text, or with items that are not broken between lines."""

_MOST_PORTS, _MOST_GROUPS, _MOST_REASONS, _MOST_TERMS = 6, 4, 3, 4
_NAME_WIDTH = 28

_LABELS: dict[Role, str] = {"frozen": "  frozen", "constant": "constants"}
_STATE_WORDS = {
    "parameter": "parameters",
    "optimizer_state": "optimizer slots",
    "counter": "counters",
    "rng": "random state",
    "master": "master weights",
    "ema": "averages",
    "accum": "gradient sums",
    "scaler": "loss scaler",
}
_RANGES = {"moving": "observed, moving averages", "lsq": "learned", "fixed": "fixed"}
_CLIPPED = {"norm": "norm of all gradients", "tensor_norm": "norm of each gradient", "value": "each element"}


# ---- the model -------------------------------------------------------------------------------------------------------


def model_rows(summary: Summary) -> Iterator[Row]:
    yield "file", _file(summary)
    if summary.file.producer:
        yield "made by", shorten(summary.file.producer)
    yield from _ports("in", summary.inputs)
    yield from _ports("out", summary.outputs)
    for key, text in summary.file.says.items():
        yield key, shorten(text)
    if summary.is_training_model:
        yield from _parameters(summary)
    for role in ("frozen", "trainable", "statistics", "constant"):
        if summary.parameters[role].tensors:
            yield _LABELS.get(role, role), "\n".join([amount(summary.parameters[role]), *_reasons(summary, role)])
    if summary.quantization is not None:
        yield "quantized", "\n".join(_quantization(summary.quantization))
    for text in summary.remarks:
        yield "note", text


def _file(summary: Summary) -> list[str]:
    file = summary.file
    facts = [size(file.bytes)] if file.bytes is not None else []
    if file.external_files:
        facts.append(f"{size(file.external_bytes)} in {list_names(file.external_files, 2)}")
    nodes = quantity(file.nodes, "node")
    if training := sum(step.nodes for step in summary.steps):
        nodes += f" + {training:,} for training"
    facts += [f"opset {file.opset}", f"IR {file.ir_version}", nodes]
    return [*facts, quantity(len(file.functions), "function")] if file.functions else facts


def _quantization(quantization: Quantization) -> Iterator[str]:
    for weights in quantization.weights:
        count = quantity(weights.tensors, "weight")
        yield f"{count} to {weights.type}, a scale for each {weights.per}: {weights.numbers:,} numbers"
    for name, activations in quantization.activations.items():
        yield f"{quantity(activations, 'activation')} to {name}"
    if quantization.ranges:
        yield f"ranges: {', '.join(_RANGES.get(word, word) for word in quantization.ranges)}"


def _ports(label: str, ports: Sequence[Port]) -> Iterator[Row]:
    if not ports:
        return
    names = [shorten(port.name, _NAME_WIDTH) for port in ports[:_MOST_PORTS]]
    width = max(cell_len(name) for name in names)
    lines = [
        f"{name}{' ' * (width - cell_len(name))}  {clean(port.type)} {shape(port.shape)}"
        for name, port in zip(names, ports, strict=False)
    ]
    if len(ports) > _MOST_PORTS:
        lines.append(f"and {len(ports) - _MOST_PORTS:,} more")
    yield label, "\n".join(lines)


def _parameters(summary: Summary) -> Iterator[Row]:
    trained, whole = summary.parameters["trained"], Amount.of(summary.with_role("trained", "frozen"))
    if not trained.tensors:
        yield "parameters", "unknown: no step updates a weight of the model"
    elif trained == whole:
        yield "parameters", f"{amount(whole)}, all trained"
    else:
        yield "parameters", amount(whole)
        yield "  trained", f"{amount(trained)} ({percent(trained.numbers, whole.numbers)})"


def _reasons(summary: Summary, role: Role) -> Iterator[str]:
    """Yield the tensors with a role, in a line for each of its most frequent reasons."""
    by_reason: dict[str, list[str]] = {}
    for weight in summary.with_role(role):
        by_reason.setdefault(weight.reason, []).append(weight.name)
    ordered = sorted(by_reason.items(), key=lambda item: -len(item[1]))
    everything = [weight.name for weight in summary.weights]
    for reason, names in ordered[:_MOST_REASONS]:
        yield f"{gather_names(names, everything)}: {shorten(reason, 100)}"
    if others := ordered[_MOST_REASONS:]:
        count = sum(len(names) for _, names in others)
        yield f"{quantity(count, 'tensor')} for {quantity(len(others), 'other reason')}"


# ---- a step ----------------------------------------------------------------------------------------------------------


def step_rows(summary: Summary, step: Training) -> Iterator[Row]:
    yield from _ports("in", step.inputs)
    if step.metrics:
        yield "metrics", list_names([port.name for port in step.metrics], 8)
    if len(summary.steps) > 1:
        yield "trained", _trained_parameters(summary, step)
    yield "loss", _loss(step.loss)
    yield from _optimizer(step)
    for i, section in enumerate(step.schedule):
        yield "schedule" if i == 0 else "", _name_settings(section.name, {**section.numbers, **section.choices})
    yield from _around_optimizer(step)
    yield "progress", [_progress(step.progress), *settings({k: v for k, v in step.progress.recorded.items() if v})]
    yield (
        "state",
        [f"{_STATE_WORDS.get(s.role, shorten(s.role))} {s.tensors:,} ({size(s.bytes)})" for s in step.state],
    )
    if not step.initialization:
        yield "initial", "some state has no initial value"


def _trained_parameters(summary: Summary, step: Training) -> str:
    names = [name for group in step.groups for name in group.parameters]
    if not names:
        return "unknown: it updates no weight of the model"
    return f"{amount(step.trained)}\n{gather_names(names, [weight.name for weight in summary.weights])}"


def _name_settings(name: str, values: Mapping[str, Any]) -> list[str]:
    """Return `cosine: steps 1,000`, `warmup 50`, ..."""
    first, *others = settings(values) or [""]
    return [f"{shorten(name)}: {first}" if first else shorten(name), *others]


def _loss(loss: LossTerms) -> str:
    differentiated = f"differentiated: {list_names(loss.differentiated, 4)}" if loss.differentiated else "no Gradient"
    terms = [_term(term) for term in loss.terms[:_MOST_TERMS]]
    if len(loss.terms) > _MOST_TERMS:
        terms.append(f"and {quantity(len(loss.terms) - _MOST_TERMS, 'more term')}")
    if not terms:
        operators = list_names([operator or "unknown" for operator in loss.operators], 4) or "unknown"
        terms = [f"{operators} on {list_names(loss.outputs, 4)}" if loss.outputs else operators]
    return "\n".join(terms) + f"; {differentiated}"


def _term(term: LossTerm) -> str:
    options = f" ({', '.join(settings(term.options))})" if term.options else ""
    against = f" against {list_names(term.inputs, 4)}" if term.inputs else ""
    scale = f" times {setting(term.scale)}" if term.scale != 1 else ""
    return f"{shorten(term.name)}{options} on {shorten(term.output)}{against}{scale}"


def _optimizer(step: Training) -> Iterator[Row]:
    if not step.groups:
        yield "optimizer", "unknown"
    for i, group in enumerate(step.groups[:_MOST_GROUPS]):
        yield "optimizer" if i == 0 else "", _group(group)
        if len(step.groups) > 1:
            yield "", f"  {shorten(group.name)}: {gather_names(group.parameters, ())}"
    if len(step.groups) > _MOST_GROUPS:
        yield "", f"and {quantity(len(step.groups) - _MOST_GROUPS, 'more group')}"


def _group(group: GroupSummary) -> list[str]:
    if group.optimizer is None:
        return [
            f"unknown: plain operators, the last one {shorten(group.operators[0])}" if group.operators else "unknown"
        ]
    values = {**group.hyper, **_unusual_options(group)}
    if group.lr_now is not None and group.lr_now != group.hyper["lr"]:
        values["lr"] = f"{setting(group.hyper['lr'])} (now {setting(group.lr_now)})"
    return _name_settings(group.optimizer, values)


def _unusual_options(group: GroupSummary) -> dict[str, Any]:
    """Return the options that differ from their defaults."""
    optimizer = OPTIMIZERS.get(group.optimizer or "")
    choices = optimizer.choices if optimizer is not None else {}
    usual = {name: allowed if isinstance(allowed, int) else allowed[0] for name, allowed in choices.items()}
    return {name: value for name, value in group.options.items() if name not in usual or usual[name] != value}


def _around_optimizer(step: Training) -> Iterator[Row]:
    if step.clip is not None:
        yield "clipping", f"{_CLIPPED[step.clip.kind]}: at most {setting(step.clip.limit)}"
    if step.accumulation is not None:
        every, seen = setting(step.accumulation.batches), setting(step.accumulation.seen)
        yield "accumulate", f"one update every {every} batches, {seen} since the last one"
    if step.average is not None:
        yield "average", f"decay {setting(step.average.decay)}, over {setting(step.average.updates)} updates"
    if step.loss_scale is not None:
        mode = "dynamic" if step.loss_scale.dynamic else "fixed"
        yield "loss scale", [setting(step.loss_scale.scale), *_name_settings(mode, step.loss_scale.settings)]


def _progress(progress: ProgressSummary) -> str:
    if progress.step is None:
        return "step unknown"
    if not progress.steps:
        return f"step {progress.step:,}"
    share = percent(min(progress.step, progress.steps), progress.steps)
    return f"step {progress.step:,} of {progress.steps:,} ({share})"
