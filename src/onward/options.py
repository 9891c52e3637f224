"""The options of a recipe and of a run, each declared once: type, range, default, and what it says.

Arguments of `onward.prepare` and `onward.train`, their documentation, the options of the command line and the keys of
configuration files are made of these fields. A new option is a new field here, and what is done with it.
"""

# ruff: noqa: RUF009
from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, ParamSpec, Protocol, TypeAlias, TypeVar, get_type_hints

from onward.arguments import OPENED, Count, Range, Seed, Threads, bind, fitting, with_new_names

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")

_DATA, _FIRST, _HOW, _WHAT = "Data", "What happens to data", "How it is trained", "What is trained"
_FROM, _RUN, ENGINE = "Where it starts", "The run", "The engine"
_MACHINES, _PAGE, _WHOLE = "The machines", "The page", "The part `run`"
UNTOLD = "What a checkpoint does not tell"
_PANELS = (_MACHINES, _PAGE, _DATA, _FIRST, _HOW, _WHAT, _FROM, _RUN, ENGINE, _WHOLE, UNTOLD)


class Proto(Protocol):
    """A message of ONNX, such as a `ModelProto` or a `FunctionProto`."""

    def SerializeToString(self) -> bytes: ...


class InMemory(Protocol):
    """A model in memory, such as `onward.Model`."""

    def to_proto(self) -> Any: ...


class Parsed(Protocol):
    """An optimizer or a schedule that was read already."""

    @property
    def name(self) -> str: ...


class Indexed(Protocol):
    """Samples by number, such as a `Dataset` of PyTorch."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


Graph: TypeAlias = os.PathLike[str] | bytes | Proto | InMemory
Named: TypeAlias = str | Mapping[str, Any] | None
Loss: TypeAlias = Named | Sequence[Any] | Graph
Optimizer: TypeAlias = str | Mapping[str, Any] | Parsed | Graph
Schedule: TypeAlias = Named | Sequence[Any] | Parsed
Distill: TypeAlias = Schedule
Teacher: TypeAlias = str | Graph | None
Preprocess: TypeAlias = str | Mapping[str, Any] | Sequence[Any] | Graph | None
Data: TypeAlias = (
    str | os.PathLike[str] | Mapping[str, Any] | Iterable[Any] | Indexed | Callable[[], Iterable[Any]] | None
)
Validation: TypeAlias = float | Data
OPENED.update((Named, Loss, Optimizer, Schedule, Teacher, Preprocess, Data, Validation))
"""These are checked where they are opened, with messages of their own."""

Last = Literal["keep", "drop", "pad"]
Variance = Literal["population", "sample"]
BatchSize = Annotated[int, Range(least=1, most=2**31 - 1)]
Strategy = Literal["ddp", "zero1", "zero2", "zero3", "fsdp", "hybrid", "tensor", "tensor+fsdp"]
Parallel = Literal["ddp", "fsdp", "hybrid", "tensor", "pipeline", "deepspeed"]


@dataclasses.dataclass(frozen=True)
class Option:
    """A field as people see it."""

    name: str
    hint: Any
    default: Any
    panel: str
    """Under which heading it stands."""
    metavar: str | None
    """What stands for its value where it is typed."""
    text: str
    """What it says: a sentence without its capital and full stop."""
    flags: tuple[str, ...]
    repeated: bool
    also: str
    """What can be given in Python only."""
    formerly: tuple[str, ...]
    """Other names that it has until the next release: an argument, a flag."""

    @property
    def said(self) -> str:
        """What it says, and what is so unless it is given."""
        usual = "so it is" if self.default is True else f"`{_word(self.default)}`" if self.default else None
        return self.text + (f"; {usual} unless given" if usual else "")

    @property
    def sentence(self) -> str:
        return f"{self.said[:1].upper()}{self.said[1:]}.{' May be repeated.' if self.repeated else ''}"

    @property
    def line(self) -> str:
        """Its line in the documentation of a function."""
        told = f"{self.text}; {self.also}" if self.also else self.text
        return f"- `{self.name}`: {told}" + (
            "" if self.default in (None, False, (), {}) else f" (default: {self.default})"
        )


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _option(
    default: Any,
    metavar: str | None,
    text: str,
    *,
    flags: str = "",
    repeated: bool = False,
    also: str = "",
    formerly: str = "",
    panel: str,
) -> Any:
    facts = {"panel": panel, "metavar": metavar, "text": text, "flags": flags, "repeated": repeated, "also": also}
    facts["formerly"] = formerly
    if isinstance(default, Mapping):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=facts)
    return dataclasses.field(default=default, metadata=facts)


_data = functools.partial(_option, panel=_DATA)
_first = functools.partial(_option, panel=_FIRST)
_how = functools.partial(_option, panel=_HOW)
_what = functools.partial(_option, panel=_WHAT)
_from = functools.partial(_option, panel=_FROM)
_run = functools.partial(_option, panel=_RUN)
_engine = functools.partial(_option, panel=ENGINE)
_machines = functools.partial(_option, panel=_MACHINES)
_page = functools.partial(_option, panel=_PAGE)
_whole = functools.partial(_option, panel=_WHOLE)


def as_in(kind: type, name: str, *, default: Any = dataclasses.MISSING, **said: str) -> Any:
    """Declare an option as another class does, but for its default and what is `said` of it."""
    (declared,) = (field for field in dataclasses.fields(kind) if field.name == name)
    default = declared.default if default is dataclasses.MISSING else default
    return dataclasses.field(default=default, metadata={**declared.metadata, **said})


def options_of(kind: type) -> Iterator[Option]:
    """All options among the fields of a dataclass, panel by panel."""
    hints = get_type_hints(kind, include_extras=True)
    declared = [field for field in dataclasses.fields(kind) if field.metadata]
    for field in sorted(declared, key=lambda field: _PANELS.index(field.metadata["panel"])):
        flags = field.metadata["flags"] or f"--{field.name.replace('_', '-')}"
        default = {} if field.default is dataclasses.MISSING else field.default
        words = {"flags": tuple(flags.split()), "formerly": tuple(field.metadata["formerly"].split())}
        yield Option(field.name, hints[field.name], default, **{**field.metadata, **words})


class Fields:
    """A dataclass of options that are checked when it is made, and shown where they differ from their defaults."""

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for name, hint in field_types(kind).items():
            object.__setattr__(self, name, fitting(f"`{name}`", getattr(self, name), hint))

    def changed(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        declared = dataclasses.fields(self)  # type: ignore[arg-type]
        return {field.name: value for field in declared if _differs(value := getattr(self, field.name), field)}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.changed().items())})"


def documented(kind: type[_T]) -> type[_T]:
    """Add the lines of its options to the documentation of a dataclass."""
    kind.__doc__ = "\n\n".join([inspect.cleandoc(kind.__doc__ or ""), *_sections(options_of(kind))])
    return kind


@functools.cache
def field_types(kind: Any) -> dict[str, Any]:
    """Return the types of the fields of a dataclass."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _differs(value: Any, field: dataclasses.Field[Any]) -> bool:
    """Arrays are not compared: they are no defaults."""
    default = {} if field.default is dataclasses.MISSING else field.default
    return value is not default and not (type(value) in (str, bool, int, float, tuple, dict) and value == default)


def former_names(kind: type) -> dict[str, str]:
    """Return the names and flags that options of a dataclass had, and those that they have now."""
    return {
        old: option.flags[0] if old.startswith("--") else option.name
        for option in options_of(kind)
        for old in option.formerly
    }


def taking(kind: Callable[_P, Any], **formerly: str) -> Callable[[Callable[..., _R]], Callable[_P, _R]]:
    """Give a function the arguments of a dataclass: to people, type checkers and editors. It gets those that are given.

    They are checked first, names, types and ranges, and its docstring gets a line for each that is an option. What is
    no option may have other names, too, until the next release: those are given here.
    """

    def decorate(function: Callable[..., _R]) -> Callable[_P, _R]:
        assert isinstance(kind, type)
        signature = inspect.signature(kind)
        hints = get_type_hints(kind, include_extras=True)
        renamed = former_names(kind) | formerly

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            given = bind(function.__name__, signature, args, with_new_names(kwargs, renamed)).arguments
            return function(**{name: fitting(f"`{name}`", value, hints[name]) for name, value in given.items()})

        call.__dict__["is_checked"] = True
        call.__dict__["__signature__"] = signature.replace(return_annotation=function.__annotations__["return"])
        text, _, examples = inspect.cleandoc(function.__doc__ or "").partition("\nExamples:\n")
        sections = [text.rstrip(), *_sections(options_of(kind)), *([f"Examples:\n{examples}"] if examples else [])]
        call.__doc__ = "\n\n".join(sections)
        return call

    return decorate


def _sections(options: Iterable[Option]) -> Iterator[str]:
    """Yield the documentation of options, heading by heading."""
    for panel, group in itertools.groupby(options, lambda option: option.panel):
        lines = (textwrap.fill(o.line, 116, subsequent_indent="  ", break_on_hyphens=False) for o in group)
        yield "\n".join([f"{panel}:\n", *lines])


# ---- recipes ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """What turns an inference model into a training model."""

    loss: Loss = _how(
        None,
        "SPEC",
        "what to minimise: a loss by name, such as `cross_entropy:label_smoothing=0.1`; `OUTPUT=SPEC` where the model "
        "has several outputs, and with `constant=1` an output is compared with that number and not with data; a loss "
        "as an .onnx file; or `value:NAME` for one that the model computes. Several are added up",
        repeated=True,
        also="an ONNX model or function, or a mapping or list of several",
    )
    sample_weight: str | Mapping[str, Any] | None = _how(
        None,
        "COLUMN",
        "a column by which the loss of each sample is multiplied: an input of the step. The mean is over samples, or "
        "with `COLUMN:by=weights` the sum is divided by that of the weights",
    )
    optimizer: Optimizer = _how(
        "adamw",
        "SPEC",
        "by name, such as `adamw:lr=1e-3,weight_decay=0.01`",
        also='an ONNX model or function, which can be given a rate: `{"function": update, "lr": 1e-3}`',
    )
    lr: float | None = _how(None, "X", "the learning rate, where the optimizer does not say it")
    schedule: Schedule = _how(
        None,
        "SPEC",
        "how the learning rate changes, such as `cosine:steps=1000,warmup=50`. Several follow one another, each but "
        "the last with `until=STEP`",
        repeated=True,
    )
    clip: str | Annotated[float, Range(finite=False)] | Mapping[str, Any] | None = _how(
        None,
        "SPEC",
        "limit gradients: `norm:1` that of all together, which a number alone means, too; `tensor_norm:1` that of "
        "each; `value:0.5` each element",
    )
    accumulate: Count = _how(1, "N", "make one update from N batches")
    ema: Annotated[float, Range(least=0, below=1)] | None = _how(None, "DECAY", "keep a moving average of parameters")
    loss_scale: Annotated[float, Range(above=0)] | str | None = _how(
        None, "X", "scale the loss, for float16: a number, or `dynamic`, such as `dynamic:growth_interval=1000`"
    )
    master_weights: bool | None = _how(
        None, None, "whether float32 copies of parameters in float16 and bfloat16 are kept; they are unless given"
    )
    variance: Variance = _how(
        "population", "KIND", "running variance of BatchNormalization, as in ONNX, or `sample` as in PyTorch"
    )
    teacher: Teacher = _how(None, "MODEL", "a model to learn from, beside the loss or alone", also="then `loss=None`")
    distill: Distill = _how(
        None, "SPEC", "how to learn from the teacher, such as `kl:temperature=4,weight=0.5`", repeated=True
    )
    new_head: str | Mapping[str, Any] | int | None = _what(
        None,
        "OPTIONS",
        "first give the model a new last layer: `5` classes, or `5,layer=fc`",
        also="or what `replace_head` takes as a mapping",
    )
    lora: str | Mapping[str, Any] | int | None = _what(
        None,
        "OPTIONS",
        "first add low-rank adapters, such as `8,targets=*attn*`, and train them alone",
        also="or what `lora.add` takes as a mapping",
    )
    quantize: str | Mapping[str, Any] | None = _what(
        None,
        "SPEC",
        "train a model that computes with integers afterwards: `int8`, `int4`, or "
        "`int8:weights=int4,block=32,keep=first+last,ranges=lsq`",
    )
    prune: str | Mapping[str, Any] | None = _what(
        None, "SPEC", "leave out the smallest weights: `magnitude:sparsity=0.5`, or `2of4`"
    )
    trainable: Sequence[str] | str | None = _what(
        None, "PATTERN", "train these parameters alone; also `biases`, `norms` or the `head`", repeated=True
    )
    freeze: Sequence[str] | str | None = _what((), "PATTERN", "do not train these", repeated=True)
    groups: Sequence[str | Mapping[str, Any]] = _what(
        (),
        "PATTERN:...",
        "settings of the optimizer for some parameters, such as `*.bias:weight_decay=0`",
        flags="--group",
        repeated=True,
    )
    lr_decay: Annotated[float, Range(above=0, most=1)] | None = _what(
        None, "X", "give each block of the network X times the learning rate of the block after it, such as 0.8"
    )
    preprocess: Preprocess = _first(
        None,
        "SPECS",
        "what happens to data before the model, such as `resize:size=32 scale channels_first`, or an .onnx file that "
        "does it; `INPUT=...` where several inputs take pictures",
        repeated=True,
    )
    augment: Preprocess = _first(
        None, "SPECS", "what happens to them in training alone, such as `flip crop:padding=4`", repeated=True
    )
    move_with_image: Sequence[str] | str | None = _first(
        None,
        "NAME",
        "the inputs and targets that `flip` and `crop` of `augment` move with the image (default: those with its "
        "height and width); `none` for none",
        repeated=True,
    )
    init: str | Sequence[str] | Mapping[str, Any] = _from(
        "file",
        "SPEC",
        "what `train` and `reset` make of parameters first: an initializer by name, such as `kaiming_normal`, or "
        "`PATTERN=SPEC` for some",
        repeated=True,
        also="a mapping by pattern",
    )
    seed: Seed = _from(0, "N", "for initial values, and for random numbers in training")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions(RecipeOptions):
    """A recipe, and which step of a model it becomes."""

    append: bool = _what(False, None, "add a step to those that the model has")
    name: str | None = _what(None, "NAME", "what the step is called")
    times: Count = _what(1, "N", "how often the step runs while others run once, such as a discriminator")


# ---- runs ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ModelAndData:
    """What functions take without a name."""

    model: Any = None
    data: Data = _data(
        None,
        "DATA",
        "a .npz, .csv, .parquet, .arrow or .safetensors file, or several (`'tokens/*.parquet'`), a folder of images or "
        "of a data set of Hugging Face, or `NAME=FILE.npy` for each column",
        repeated=True,
        also="arrays by name, or anything that gives batches",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Which data a model gets, and in which order."""

    columns: Mapping[str, str | Sequence[str]] = _data(
        {},
        "INPUT=COLUMN",
        "which column an input takes, such as `image=pixels`, where names and shapes do not say it",
        flags="--column",
        repeated=True,
        formerly="--map",
    )
    batch_size: BatchSize | None = _data(
        None,
        "N",
        "samples in a batch; 32 unless given. A model for one size is made to take any, where that is possible",
        flags="--batch-size -b",
    )
    last: Last = _data("keep", "HOW", "a last batch that is not full: `keep`, `drop` or `pad` it")
    shuffle: bool = _data(True, None, "whether samples are taken in another order in each epoch")
    classes: Sequence[str] | None = _data(
        None,
        "NAME",
        "what the numbers of labels stand for, in order, where data name classes; what the data say unless given",
        flags="--class",
        repeated=True,
    )
    seed: Seed | None = _from(
        None,
        "N",
        "for initial values, the order of samples and random numbers in training; 0 unless given, and for a reset what "
        "the model has",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeedOptions(DataOptions):
    """Which data a model gets, and what executes it."""

    noise: Mapping[str, str] = _data(
        {}, "INPUT=KIND", "an input that is no data but random: `z=normal`, `z=uniform:low=-1`", repeated=True
    )
    window: Annotated[int, Range(least=0)] | None = _data(
        None,
        "N",
        "shuffle the pieces in which files are read, then samples within N of them; 0 for all samples at once; what "
        "suits the files unless given",
    )
    engine: str = _engine("onnxruntime", "NAME", "`onnxruntime`, `torch`, `jax`, `tensorflow`, `keras` or `numpy`")
    device: str = _engine("cpu", "NAME", "`cpu`, `cuda`, `directml` ...: what `onward engines` lists")
    threads: Threads | None = _engine(None, "N", "threads of the CPU")
    precision: str | None = _engine(None, "TYPE", "`bfloat16`, `float16` or `tf32`, where the engine has it")
    compile: bool = _engine(True, None, "compile the step on torch, jax and tensorflow")
    kernels: bool = _engine(True, None, "native kernels for ONNX Runtime on the CPU, where they are compiled")
    deterministic: bool = _engine(False, None, "the same numbers in every run, where the engine has it")
    recompute: int | str | Sequence[str] | None = _engine(
        None,
        "N|PATTERN",
        "save memory: compute nodes a second time on the way back, those whose names match, or all, keeping the result "
        "of every N-th layer",
        repeated=True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldOutOptions:
    """What a model is validated with."""

    validation: Validation = _data(None, "DATA", "more data, or a share of it to keep apart, such as 0.1")
    stratify: bool | None = _data(
        None, None, "whether a share for validation has its part of every class; so it is where labels are classes"
    )


@documented
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class TrainConfig(Fields, HeldOutOptions, FeedOptions):
    """How a run goes: data, epochs, metrics, folder, engine. What it trains with is a `Recipe`.

        config = onward.TrainConfig(epochs=10, validation=0.1, engine="torch")
        run = onward.train("digits.onnx", "digits.npz", recipe=onward.Recipe(loss="cross_entropy"), config=config)

    `dataclasses.replace(config, seed=1)` makes another like it.
    """

    checkpoint: str | os.PathLike[str] | None = _run(
        None, "CHECKPOINT", "go on from a checkpoint of another framework, which is of the model", formerly="--from"
    )
    names: Mapping[str, str] | Sequence[str] | None = _run(
        None,
        "FILE",
        "names that rules do not find: a JSON object from those of the checkpoint to those of the model; or the "
        "parameters of its optimizer in their order, one in each line",
        also="a mapping or a list",
    )
    updates: Annotated[int, Range(least=0)] | None = _run(
        None,
        "N",
        "updates that the run of a checkpoint has made, where the checkpoint does not count them",
        formerly="step --step",
    )
    updates_per_epoch: Count | None = _run(
        None,
        "N",
        "updates for each step of a checkpoint's scheduler: those of an epoch, or 1 if it steps with every update",
    )
    folds: Annotated[int, Range(least=2)] | None = _data(
        None,
        "K",
        "cross-validate: divide the data into K equal parts and train K times, each time validating on another part "
        "(in Python: `onward.cross_validate`; `onward.train` takes it with `fold`)",
    )
    fold: Annotated[int, Range(least=1)] | None = _data(
        None, "N", "with `folds`: train only the run that validates on part N, counted from 1"
    )
    keep_preprocessing: bool = _first(
        False, None, "the model that comes out takes data as they are, not what the model took"
    )
    epochs: Annotated[int, Range(least=0)] = _run(1, "N", "times through the data", flags="--epochs -e")
    steps: str | Mapping[str, Count] | None = _run(
        None, "STEPS", "of a model with several: which run, and how often in a round: `discriminator:2,generator`"
    )
    metrics: Sequence[str] | str | None = _run(
        None,
        "SPEC",
        "measured on validation data: `accuracy`, `top_k:k=5`, `f1` ...; what suits the loss unless given",
        flags="--metric",
        repeated=True,
    )
    monitor: str | None = _run(
        None, "METRIC", "what decides which model is the best; it is measured, too, and `loss` can be it"
    )
    patience: Count | None = _run(None, "N", "stop after N epochs without a better model")
    reset: bool = _run(
        False, None, "start from the initialization of a training model, and not from its state; `seed` draws anew"
    )
    save_every: Annotated[float, Range(least=0)] = _run(
        60.0, "SECONDS", "after how many seconds the state is saved, also within an epoch"
    )
    tensorboard: bool = _run(False, None, "write event files of TensorBoard, too")
    statistics: bool = _run(
        True, None, "whether norms of gradients and histograms of weights are logged, which the report shows"
    )
    strategy: Parallel | None = _engine(
        None,
        "HOW",
        "how several processes share the work: `ddp`, each with its part of every batch, which is so unless given; on "
        "torch also `fsdp`, `hybrid` and `deepspeed`, dividing the state, `tensor` and `pipeline`, dividing the "
        "model",
    )
    deepspeed_config: str | os.PathLike[str] | Mapping[str, Any] | None = _engine(
        None,
        "JSON",
        "DeepSpeed's own configuration file, such as `ds.json`; what it leaves open or calls `auto` is as in the "
        "training model",
        also="a mapping",
    )
    sync_batch_norm: bool = _engine(
        True,
        None,
        "whether BatchNormalization has the statistics of the whole batch, or in each process those of its part",
    )
    mesh: str | None = _engine(
        None,
        "AXES",
        "devices of JAX, or processes of torch, such as `data=4,model=2`: `data` have other samples, `fsdp` (on JAX) "
        "also divide parameters, `model` divide products; an axis without a size takes the devices that are left; "
        "`file` for the mesh in the file",
    )
    shard: Mapping[str, str | Sequence[str | None]] = _engine(
        {},
        "PATTERN=AXES",
        "which axes of the mesh divide the axes of a tensor, such as `*.fc1.weight=-,model`, where it is not as usual",
        repeated=True,
    )
    micro_batches: Count | None = _engine(
        None,
        "N",
        "into how many parts a batch is divided that goes through a pipeline; four for each process unless given",
    )
    run: str | os.PathLike[str] | None = _run(
        None, "FOLDER", "the folder of the run; a new one below `runs/` unless given"
    )


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class TrainOptions(TrainConfig, RecipeOptions, ModelAndData):
    """Everything that a training can be told: the keys of a configuration file."""


def _untold(name: str, **said: str) -> Any:
    return as_in(TrainOptions, name, panel=UNTOLD, default=None, **said)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UntoldOptions:
    """What a checkpoint of another framework may not hold, and a user or a training model says."""

    loss: Loss = _untold("loss")
    optimizer: Named = _untold("optimizer", also="numbers given here win over stored ones")
    schedule: Named = _untold("schedule")
    updates: Annotated[int, Range(least=0)] | None = _untold("updates")
    updates_per_epoch: Count | None = _untold("updates_per_epoch")
    clip: str | Annotated[float, Range(finite=False)] | Mapping[str, Any] | None = _untold("clip")
    accumulate: Count | None = _untold("accumulate")
    ema: Annotated[float, Range(least=0, below=1)] | None = _untold("ema")
    loss_scale: Annotated[float, Range(above=0)] | str | None = _untold("loss_scale")
    trainable: Sequence[str] | str | None = _untold("trainable")
    freeze: Sequence[str] | str | None = _untold("freeze")
    names: Mapping[str, str] | Sequence[str] | None = _untold("names")


# ---- whole runs as ONNX ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeRunOptions:
    """What is settled when entire training becomes one ONNX model. All else is told to it when it runs."""

    batch_size: BatchSize | None = as_in(
        TrainConfig,
        "batch_size",
        panel=_WHOLE,
        text="samples in a batch; 32 unless given, or as many as the model is for",
    )
    last: Last = as_in(TrainConfig, "last", panel=_WHOLE)
    shuffle: bool = as_in(TrainConfig, "shuffle", panel=_WHOLE)
    batch_inputs: Sequence[str] | str = _whole(
        (),
        "INPUT",
        "an input that takes no rows of the data but numbers for each batch, such as the noise of a GAN",
        flags="--batch-input",
        repeated=True,
        formerly="noise --noise",
    )
    validate: bool = _whole(
        False,
        None,
        "evaluate on validation data, which are inputs of their own, after every epoch, and keep the best state",
        formerly="validation --validation",
    )
    metrics: Sequence[str] | str | None = as_in(TrainConfig, "metrics", panel=_WHOLE)
    monitor: str | None = as_in(TrainConfig, "monitor", panel=_WHOLE)
    patience: Count | None = as_in(TrainConfig, "patience", panel=_WHOLE)


# ---- pages -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageOptions(HeldOutOptions, DataOptions, RecipeOptions, ModelAndData):
    """What a page trains, and on what."""

    title: str | None = _page(None, "TEXT", "the heading of the page; the name of the model unless given")
    picture: str | None = _page(
        None,
        "HxW",
        "numbers in a row are the pixels of a picture, such as `8x8`, or `none`: what people may draw, drop and take "
        "with a camera; what the shape says unless given",
    )
    runtime: str | os.PathLike[str] | None = _page(
        None, "FOLDER", "the package `onnxruntime-web`, where it is installed; npm gets it unless given"
    )


# ---- plans -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PlanOptions(RecipeOptions):
    """What a training is to be spread over, and how."""

    model: Any = None
    _: dataclasses.KW_ONLY
    devices: Count = _machines(1, "N", "how many devices there are")
    memory: str | Annotated[float, Range(above=0)] | None = _machines(
        None, "BYTES", "what a device has, such as `80GB` or `64GiB`"
    )
    per_machine: Count = _machines(8, "N", "how many devices of a machine are neighbours")
    bandwidth: str | Annotated[float, Range(above=0)] | None = _machines(
        None, "BYTES", "what a device sends to its neighbours in a second, such as `450GB`"
    )
    network: str | Annotated[float, Range(above=0)] | None = _machines(
        None, "BYTES", "the same between machines, such as `50GB`; as between neighbours unless given"
    )
    flops: str | Annotated[float, Range(above=0)] | None = _machines(
        None, "NUMBER", "operations of a device in a second, at its best, such as `989T`"
    )
    utilization: Annotated[float, Range(above=0, most=1)] = _machines(0.4, "X", "the share of that which is reached")
    strategy: Strategy | None = _machines(
        None,
        "NAME",
        "`ddp`, `zero1`, `zero2`, `fsdp` (or `zero3`), `hybrid`, `tensor` or `tensor+fsdp`; all are compared unless "
        "given",
    )
    batch_size: Count | None = _data(
        None, "N", "samples in a batch, on all devices together; one on each unless given", flags="--batch-size -b"
    )
    shape: Mapping[str, str | Sequence[int | str]] = _data(
        {}, "INPUT=SIZES", "sizes of an input that the file leaves open, such as `tokens=N,2048`", repeated=True
    )
    engine: Literal["torch", "jax", "onnxruntime"] = _engine(
        "torch", "NAME", "`torch` and `jax`, which do not keep the scores of attention, or `onnxruntime`"
    )
    precision: Literal["bfloat16", "float16"] | None = _engine(
        None, "TYPE", "`bfloat16` or `float16` for products of a model in float32"
    )
    recompute_blocks: bool = _engine(
        False, None, "compute blocks a second time on the way back, to save memory", formerly="recompute --recompute"
    )
