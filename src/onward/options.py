"""Options of a recipe and of a run, each declared once: type, range, default and help text.

From these fields come the arguments of `onward.prepare` and `onward.train` and their documentation,
the options of the command line and the keys of configuration files.
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

from onward.arguments import OPENED, Count, Range, Seed, Threads, bind, coerce, with_new_names

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")

_PANELS = (
    "Cluster", "Page", "Data", "Preprocessing", "Loss and optimizer", "Trainable parameters", "Initial values", "Run",
    "Engine", "The part `run`", "Missing from the checkpoint",
)  # fmt: skip
"""Headings in their order."""
ENGINE, _WHOLE, MISSING = _PANELS[-3:]


class Proto(Protocol):
    """An ONNX message, such as a `ModelProto` or a `FunctionProto`."""

    def SerializeToString(self) -> bytes: ...


class InMemory(Protocol):
    """A model in memory, such as `onward.Model`."""

    def to_proto(self) -> Any: ...


class Parsed(Protocol):
    """A parsed optimizer or schedule."""

    @property
    def name(self) -> str: ...


class Indexed(Protocol):
    """Samples by index, such as a `Dataset` of PyTorch."""

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
OPENED.update((Loss, Optimizer, Schedule, Teacher, Preprocess, Data, Validation))
"""Types that are not checked here, but where their values are opened."""

Last = Literal["keep", "drop", "pad"]
Variance = Literal["population", "sample"]
BatchNorm = Literal["batch", "frozen"]
BatchSize = Annotated[int, Range(least=1, most=2**31 - 1)]
Strategy = Literal["ddp", "zero1", "zero2", "zero3", "fsdp", "hybrid", "tensor", "tensor+fsdp"]
Parallel = Literal["ddp", "fsdp", "hybrid", "tensor", "pipeline", "deepspeed"]


@dataclasses.dataclass(frozen=True)
class Option:
    """A field with its help text."""

    name: str
    hint: Any
    default: Any
    panel: str
    """Heading in help and docstrings."""
    metavar: str | None
    """Placeholder of the value in help."""
    text: str
    """Help text: a sentence without its capital and full stop."""
    flags: tuple[str, ...]
    repeated: bool
    also: str
    """Further values, in Python only."""
    formerly: tuple[str, ...]
    """Deprecated names, until the next release: an argument, a flag."""

    @property
    def help(self) -> str:
        """Help text with the default."""
        word = f"{self.default:g}" if isinstance(self.default, float) else str(self.default)
        default = "on" if self.default is True else f"`{word}`"
        return f"{self.text} (default: {default})" if self.default else self.text

    @property
    def sentence(self) -> str:
        return f"{self.help[:1].upper()}{self.help[1:]}.{' May be repeated.' if self.repeated else ''}"

    @property
    def line(self) -> str:
        """Line in the docstring of a function."""
        text = f"{self.text}; {self.also}" if self.also else self.text
        default = "" if self.default in (None, False, (), {}) else f" (default: {self.default})"
        return f"- `{self.name}`: {text}{default}"


def _option(default: Any, metavar: str | None, text: str, **facts: Any) -> Any:
    """Declare a field with the facts of its `Option`; `flags` and `formerly` have spaces between names."""
    facts = {"metavar": metavar, "text": text, "flags": "", "repeated": False, "also": "", "formerly": "", **facts}
    if isinstance(default, Mapping):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=facts)
    return dataclasses.field(default=default, metadata=facts)


_cluster, _page, _data, _preprocess, _loss, _parameters, _initial, _run, _engine, _whole, _ = (
    functools.partial(_option, panel=panel) for panel in _PANELS
)


def redeclare(cls: type, name: str, *, default: Any = dataclasses.MISSING, **metadata: str) -> Any:
    """Declare an option of another class again, with another default or other metadata."""
    (declared,) = (field for field in dataclasses.fields(cls) if field.name == name)
    metadata = {**declared.metadata, **metadata}
    if default is declared.default is dataclasses.MISSING:  # a mapping
        return dataclasses.field(default_factory=declared.default_factory, metadata=metadata)
    default = declared.default if default is dataclasses.MISSING else default
    return dataclasses.field(default=default, metadata=metadata)


def options_of(cls: type) -> Iterator[Option]:
    """Yield the options among the fields of a dataclass, panel by panel."""
    hints = field_types(cls)
    declared = [field for field in dataclasses.fields(cls) if field.metadata]
    for field in sorted(declared, key=lambda field: _PANELS.index(field.metadata["panel"])):
        flags = field.metadata["flags"] or f"--{field.name.replace('_', '-')}"
        default = {} if field.default is dataclasses.MISSING else field.default
        words = {"flags": tuple(flags.split()), "formerly": tuple(field.metadata["formerly"].split())}
        yield Option(field.name, hints[field.name], default, **{**field.metadata, **words})


class Fields:
    """A dataclass of options: checks them when it is created, shows those that differ from their defaults."""

    def __post_init__(self) -> None:
        cls: Any = type(self)
        for name, hint in field_types(cls).items():
            object.__setattr__(self, name, coerce(f"`{name}`", getattr(self, name), hint))

    def changed(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        declared = dataclasses.fields(self)  # type: ignore[arg-type]
        return {field.name: value for field in declared if _differs(value := getattr(self, field.name), field)}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.changed().items())})"


def documented(cls: type[_T]) -> type[_T]:
    """Add the help of its options to the docstring of a dataclass."""
    cls.__doc__ = "\n\n".join([inspect.cleandoc(cls.__doc__ or ""), *_sections(options_of(cls))])
    return cls


@functools.cache
def field_types(cls: Any) -> dict[str, Any]:
    """Return the types of the fields of a dataclass."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _differs(value: Any, field: dataclasses.Field[Any]) -> bool:
    """True if a value is not the default of a field. Arrays are never defaults and are not compared."""
    default = {} if field.default is dataclasses.MISSING else field.default
    return value is not default and not (type(value) in (str, bool, int, float, tuple, dict) and value == default)


def former_names(cls: type) -> dict[str, str]:
    """Return the deprecated names and flags of options, with their current ones."""
    pairs = ((option, old) for option in options_of(cls) for old in option.formerly)
    return {old: option.flags[0] if old.startswith("--") else option.name for option, old in pairs}


def with_options(cls: Callable[_P, Any], **formerly: str) -> Callable[[Callable[..., _R]], Callable[_P, _R]]:
    """Give a function the fields of a dataclass as arguments, also for type checkers and editors.

    Names, types and ranges are checked; the function gets only the arguments that were passed. Its
    docstring gets a line for each option. `formerly` maps former names of arguments that are not
    options to current ones, until the next release.
    """

    def decorate(function: Callable[..., _R]) -> Callable[_P, _R]:
        assert isinstance(cls, type)
        signature, hints = inspect.signature(cls), field_types(cls)
        renamed = former_names(cls) | formerly

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            arguments = bind(function.__name__, signature, args, with_new_names(kwargs, renamed)).arguments
            return function(**{name: coerce(f"`{name}`", value, hints[name]) for name, value in arguments.items()})

        call.__dict__["is_checked"] = True
        call.__dict__["__signature__"] = signature.replace(return_annotation=function.__annotations__["return"])
        text, _, examples = inspect.cleandoc(function.__doc__ or "").partition("\nExamples:\n")
        sections = [text.rstrip(), *_sections(options_of(cls)), *([f"Examples:\n{examples}"] if examples else [])]
        call.__doc__ = "\n\n".join(sections)
        return call

    return decorate


def _sections(options: Iterable[Option]) -> Iterator[str]:
    """Yield the help of options, heading by heading."""
    for panel, group in itertools.groupby(options, lambda option: option.panel):
        lines = (textwrap.fill(o.line, 96, subsequent_indent="  ", break_on_hyphens=False) for o in group)
        yield "\n".join([f"{panel}:\n", *lines])


# ---- recipes ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """Options that turn an inference model into a training model."""

    loss: Loss = _loss(
        None,
        "SPEC",
        "loss to minimize: a name with options, such as `cross_entropy:label_smoothing=0.1`; `OUTPUT=SPEC` if "
        "the model has several outputs; an .onnx file; or `value:NAME` for a loss that the model computes. "
        "`constant=1` compares an output with that number instead of a label. Several losses are summed",
        repeated=True,
        also="an ONNX model or function, or a mapping or list of several",
    )
    sample_weight: str | Mapping[str, Any] | None = _loss(
        None,
        "COLUMN",
        "column of per-sample loss weights. The loss is averaged over samples; with `COLUMN:by=weights` it is "
        "divided by the sum of weights",
    )
    optimizer: Optimizer = _loss(
        "adamw",
        "SPEC",
        "optimizer: a name with options, such as `adamw:lr=1e-3,weight_decay=0.01`",
        also='an ONNX model or function, alone or with a learning rate: `{"function": update, "lr": 1e-3}`',
    )
    lr: float | None = _loss(None, "X", "learning rate, if the optimizer does not set it")
    schedule: Schedule = _loss(
        None,
        "SPEC",
        "learning rate schedule, such as `cosine:steps=1000,warmup=50`. Several run one after another; all "
        "but the last need `until=STEP`",
        repeated=True,
    )
    clip: str | Annotated[float, Range(finite=False)] | Mapping[str, Any] | None = _loss(
        None,
        "SPEC",
        "clip gradients: `norm:1` by global norm (a bare number means the same), `tensor_norm:1` by the norm "
        "of each tensor, `value:0.5` by value",
    )
    accumulate: Count = _loss(1, "N", "accumulate gradients over N batches per update")
    ema: Annotated[float, Range(least=0, below=1)] | None = _loss(
        None, "DECAY", "keep an exponential moving average of the parameters"
    )
    loss_scale: Annotated[float, Range(above=0)] | str | None = _loss(
        None, "X", "loss scale for float16: a number, or `dynamic`, such as `dynamic:growth_interval=1000`"
    )
    master_weights: bool | None = _loss(
        None, None, "keep float32 master weights of float16 and bfloat16 parameters (default: yes)"
    )
    variance: Variance = _loss(
        "population",
        "KIND",
        "running variance of BatchNormalization: `population` as in ONNX, or `sample` as in PyTorch",
    )
    batch_norm: BatchNorm | None = _loss(
        None,
        "KIND",
        "statistics of BatchNormalization in training: those of the `batch`, or `frozen` (default: `batch`; for runs "
        "with the weights of an inference model and batches under 16, `frozen`)",
    )
    teacher: Teacher = _loss(
        None,
        "MODEL",
        "teacher model for distillation, with or without a loss",
        also="`loss=None` to learn from the teacher only",
    )
    distill: Distill = _loss(None, "SPEC", "distillation loss, such as `kl:temperature=4,weight=0.5`", repeated=True)
    new_head: str | Mapping[str, Any] | int | None = _parameters(
        None,
        "OPTIONS",
        "replace the last layer: `5` classes, or `5,layer=fc`",
        also="a mapping of the arguments of `replace_head`",
    )
    lora: str | Mapping[str, Any] | int | None = _parameters(
        None,
        "OPTIONS",
        "add low-rank adapters and train only them, such as `8,targets=*attn*`",
        also="a mapping of the arguments of `lora.add`",
    )
    quantize: str | Mapping[str, Any] | None = _parameters(
        None,
        "SPEC",
        "quantization-aware training: `int8`, `int4`, or `int8:weights=int4,block=32,keep=first+last,ranges=lsq`",
    )
    dequantize: bool = _parameters(False, None, "train a quantized model as a float model, which the result is too")
    prune: str | Mapping[str, Any] | None = _parameters(
        None, "SPEC", "prune the smallest weights: `magnitude:sparsity=0.5`, or `2of4`"
    )
    trainable: Sequence[str] | str | None = _parameters(
        None, "PATTERN", "train only these parameters: a pattern, `biases`, `norms` or `head`", repeated=True
    )
    freeze: Sequence[str] | str | None = _parameters((), "PATTERN", "freeze these parameters", repeated=True)
    groups: Sequence[str | Mapping[str, Any]] = _parameters(
        (),
        "PATTERN:...",
        "optimizer settings for some parameters, such as `*.bias:weight_decay=0`",
        flags="--group",
        repeated=True,
    )
    lr_decay: Annotated[float, Range(above=0, most=1)] | None = _parameters(
        None,
        "X",
        "layer-wise learning rate decay: each block gets X times the learning rate of the next block, such as 0.8",
    )
    preprocess: Preprocess = _preprocess(
        None,
        "SPECS",
        "preprocessing: operations such as `resize:size=32 scale channels_first`, or an .onnx file; "
        "`INPUT=...` if several inputs take images",
        repeated=True,
    )
    augment: Preprocess = _preprocess(
        None, "SPECS", "augmentation, in training only, such as `flip crop:padding=4`", repeated=True
    )
    move_with_image: Sequence[str] | str | None = _preprocess(
        None,
        "NAME",
        "the inputs and targets that `flip` and `crop` of `augment` move with the image (default: those with its "
        "height and width); `none` for none",
        repeated=True,
    )
    init: str | Sequence[str] | Mapping[str, Any] = _initial(
        "file",
        "SPEC",
        "initial values of parameters, for `train` and `reset`: a name such as `kaiming_normal`, or `PATTERN=SPEC`",
        repeated=True,
        also="a mapping by pattern",
    )
    seed: Seed = _initial(0, "N", "for initial values, and for random numbers in training")
    batch_axis: Mapping[str, int | str] = _data(
        {},
        "NAME=AXIS",
        "axis of samples in an input or output of the file, such as `state=1`, or `none` if it has none: then each "
        "sample is a whole tensor (default: 0, or read off symbols). Data have samples on axis 0",
        repeated=True,
    )
    constants: Mapping[str, Any] = _data(
        {},
        "INPUT=VALUE",
        "input that is the same for all samples and not in the data: `sr=16000`, `state=zeros`, `ones`, or numbers "
        "such as `[0.5, 2]`",
        flags="--constant",
        repeated=True,
        also="an array",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions(RecipeOptions):
    """Options of a recipe that becomes one step of a model."""

    append: bool = _parameters(False, None, "append a step to the steps of the model")
    name: str | None = _parameters(None, "NAME", "name of the step")
    times: Count = _parameters(1, "N", "number of times the step runs in each round, such as 5 for a discriminator")


# ---- runs ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ModelAndData:
    """Positional arguments."""

    model: Any = None
    data: Data = _data(
        None,
        "DATA",
        "training data: one or several .npz, .csv, .parquet, .arrow or .safetensors files "
        "(`'tokens/*.parquet'`), a folder of images, a Hugging Face dataset folder, or `NAME=FILE.npy` for "
        "each column",
        repeated=True,
        also="a mapping of arrays, or an iterable of batches",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Options of the data and their order."""

    columns: Mapping[str, str | Sequence[str]] = _data(
        {},
        "INPUT=COLUMN",
        "data column for an input, such as `image=pixels` (default: matched by name and shape)",
        flags="--column",
        repeated=True,
        formerly="--map",
    )
    batch_size: BatchSize | None = _data(
        None,
        "N",
        "batch size (default: 32). A fixed batch size in the model is made dynamic if possible",
        flags="--batch-size -b",
    )
    last: Last = _data("keep", "HOW", "last batch, if incomplete: `keep`, `drop` or `pad`")
    shuffle: bool = _data(True, None, "shuffle the data every epoch")
    classes: Sequence[str] | None = _data(
        None, "NAME", "class names in label order (default: taken from the data)", flags="--class", repeated=True
    )
    seed: Seed | None = _initial(
        None,
        "N",
        "random seed of initial values, shuffling and training (default: 0; for a reset, the seed in the model)",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeedOptions(DataOptions):
    """Options of the data and the engine."""

    noise: Mapping[str, str] = _data(
        {}, "INPUT=KIND", "random input that is not in the data: `z=normal`, `z=uniform:low=-1`", repeated=True
    )
    window: Annotated[int, Range(least=0)] | None = _data(
        None,
        "N",
        "shuffle buffer: shuffle the chunks of the files, then samples within N chunks; 0 shuffles all "
        "samples at once (default: chosen by file type)",
    )
    engine: str = _engine(
        "onnxruntime",
        "NAME",
        "engine that executes the training: `onnxruntime`, `torch`, `jax`, `tensorflow`, `keras` or `numpy`",
    )
    device: str = _engine("cpu", "NAME", "device: `cpu`, `cuda`, `directml` ...; `onward engines` lists them")
    threads: Threads | None = _engine(None, "N", "number of CPU threads (default: chosen by the engine)")
    precision: str | None = _engine(
        None, "TYPE", "mixed precision: `bfloat16`, `float16` or `tf32`, if the engine supports it"
    )
    compile: bool = _engine(True, None, "compile the step on torch, jax and tensorflow")
    kernels: bool = _engine(True, None, "use native kernels for ONNX Runtime on the CPU, if they are installed")
    deterministic: bool = _engine(False, None, "make runs reproducible bit for bit, if the engine supports it")
    recompute: int | str | Sequence[str] | None = _engine(
        None,
        "N|PATTERN",
        "recompute activations in the backward pass to save memory: of nodes that match a pattern, or of all "
        "but every N-th layer",
        repeated=True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidationOptions:
    """Options of validation."""

    validation: Validation = _data(
        None, "DATA", "validation data, or the fraction of the data to hold out, such as 0.1"
    )
    stratify: bool | None = _data(
        None, None, "stratify the validation split by class (default: on if labels are classes)"
    )


@documented
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class TrainConfig(Fields, ValidationOptions, FeedOptions):
    """Options of a run: data, epochs, metrics, folder, engine. A `Recipe` holds the loss, optimizer and so on.

        config = onward.TrainConfig(epochs=10, validation=0.1, engine="torch")
        run = onward.train("digits.onnx", "digits.npz", recipe=onward.Recipe(loss="cross_entropy"), config=config)

    `dataclasses.replace(config, seed=1)` returns a changed copy.
    """

    checkpoint: str | os.PathLike[str] | None = _run(
        None, "CHECKPOINT", "checkpoint of another framework to start from, of the same model", formerly="--from"
    )
    weights: str | os.PathLike[str] | None = _run(
        None, "CHECKPOINT", "checkpoint or file of weights that a new run starts with"
    )
    names: Mapping[str, str] | Sequence[str] | None = _run(
        None,
        "FILE",
        "names that could not be matched: a JSON object of checkpoint names to model names, or the parameters "
        "of the checkpoint's optimizer in order, one per line",
        also="a mapping or a list",
    )
    updates: Annotated[int, Range(least=0)] | None = _run(
        None, "N", "number of updates that a checkpoint has made, if it does not store it", formerly="step --step"
    )
    updates_per_epoch: Count | None = _run(
        None, "N", "updates per step of a checkpoint's scheduler: those of an epoch, or 1 if it steps with every update"
    )
    folds: Annotated[int, Range(least=2)] | None = _data(
        None,
        "K",
        "k-fold cross-validation: train K times, each time validating on another fold (in Python: "
        "`onward.cross_validate`; `onward.train` takes it with `fold`)",
    )
    fold: Annotated[int, Range(least=1)] | None = _data(
        None, "N", "with `folds`: train one run, which validates on fold N, counted from 1"
    )
    keep_preprocessing: bool = _preprocess(
        False, None, "keep preprocessing in the trained model, so that it takes raw data"
    )
    epochs: Annotated[int, Range(least=0)] = _run(1, "N", "number of epochs", flags="--epochs -e")
    steps: str | Mapping[str, Count] | None = _run(
        None,
        "STEPS",
        "training steps to run, with repeats per round, for a model with several: `discriminator:2,generator`",
    )
    metrics: Sequence[str] | str | None = _run(
        None,
        "SPEC",
        "validation metrics: `accuracy`, `top_k:k=5`, `f1` ... (default: chosen by the loss)",
        flags="--metric",
        repeated=True,
    )
    monitor: str | None = _run(None, "METRIC", "metric that selects the best model, or `loss`; it is measured too")
    patience: Count | None = _run(None, "N", "early stopping: stop after N epochs without improvement")
    reset: bool = _run(
        False, None, "start from the initialization of a training model instead of its state; `seed` draws new values"
    )
    save_every: Annotated[float, Range(least=0)] = _run(
        60.0, "SECONDS", "seconds between saves of the state, also within an epoch"
    )
    tensorboard: bool = _run(False, None, "write TensorBoard event files")
    statistics: bool = _run(True, None, "log gradient norms and weight histograms for the report")
    strategy: Parallel | None = _engine(
        None,
        "HOW",
        "parallel strategy of several processes: `ddp` (default) shards the batch; on torch also `fsdp`, "
        "`hybrid` and `deepspeed` (shard the state), `tensor` and `pipeline` (shard the model)",
    )
    deepspeed_config: str | os.PathLike[str] | Mapping[str, Any] | None = _engine(
        None,
        "JSON",
        "DeepSpeed configuration file, such as `ds.json`; missing and `auto` values are taken from the training model",
        also="a mapping",
    )
    sync_batch_norm: bool = _engine(True, None, "synchronize BatchNormalization statistics over all processes")
    mesh: str | None = _engine(
        None,
        "AXES",
        "device mesh of JAX or torch, such as `data=4,model=2`: `data` shards the batch, `fsdp` (JAX) also "
        "the parameters, `model` the matmuls; an axis without a size takes the remaining devices; `file` "
        "reads the mesh from the model",
    )
    shard: Mapping[str, str | Sequence[str | None]] = _engine(
        {},
        "PATTERN=AXES",
        "mesh axes that shard a tensor, such as `*.fc1.weight=-,model` (default: chosen from the graph)",
        repeated=True,
    )
    micro_batches: Count | None = _engine(
        None, "N", "micro-batches per batch in a pipeline (default: four per process)"
    )
    run: str | os.PathLike[str] | None = _run(None, "FOLDER", "run folder (default: a new folder in `runs/`)")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class TrainOptions(TrainConfig, RecipeOptions, ModelAndData):
    """All options of a training: the keys of a configuration file."""


def _missing_option(name: str, **metadata: str) -> Any:
    return redeclare(TrainOptions, name, panel=MISSING, default=None, **metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MissingOptions:
    """Options that a checkpoint of another framework may not hold."""

    loss: Loss = _missing_option("loss")
    optimizer: Named = _missing_option("optimizer", also="these numbers override stored ones")
    schedule: Named = _missing_option("schedule")
    updates: Annotated[int, Range(least=0)] | None = _missing_option("updates")
    updates_per_epoch: Count | None = _missing_option("updates_per_epoch")
    clip: str | Annotated[float, Range(finite=False)] | Mapping[str, Any] | None = _missing_option("clip")
    accumulate: Count | None = _missing_option("accumulate")
    ema: Annotated[float, Range(least=0, below=1)] | None = _missing_option("ema")
    loss_scale: Annotated[float, Range(above=0)] | str | None = _missing_option("loss_scale")
    trainable: Sequence[str] | str | None = _missing_option("trainable")
    freeze: Sequence[str] | str | None = _missing_option("freeze")
    names: Mapping[str, str] | Sequence[str] | None = _missing_option("names")


# ---- evaluation and prediction ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class InferenceOptions:
    """Options of a model that is run on data, without training."""

    model: Any = None
    data: Data = redeclare(
        ModelAndData,
        "data",
        text="data: what `train` takes; without labels also images and folders of images without classes",
        also="a mapping of arrays, or an iterable of batches",
    )
    _: dataclasses.KW_ONLY
    columns: Mapping[str, str | Sequence[str]] = redeclare(
        DataOptions, "columns", text="data column for an input, such as `image=pixels` (default: as in training)"
    )
    batch_size: BatchSize | None = redeclare(
        DataOptions, "batch_size", text="batch size (default: that of the model if fixed, else by the size of a row)"
    )
    classes: Sequence[str] | None = redeclare(
        DataOptions, "classes", text="class names in the order of the output (default: those in the file)"
    )
    batch_axis: Mapping[str, int | str] = redeclare(RecipeOptions, "batch_axis")
    constants: Mapping[str, Any] = redeclare(RecipeOptions, "constants")
    preprocess: Preprocess = redeclare(
        RecipeOptions,
        "preprocess",
        text="preprocessing, as in training (default: that in the file); `none` if the data are preprocessed",
    )
    loss: str | None = _loss(
        None, "SPEC", "loss that the model was trained with, such as `logits=cross_entropy` (default: that in the file)"
    )
    task: Literal["classification", "binary", "multi-label", "token-classification", "segmentation", "regression"] | (
        None
    ) = _loss(None, "NAME", "task, if the file does not say it: `classification`, `binary`, `multi-label`, "
        "`token-classification`, `segmentation` or `regression`")  # fmt: skip
    which: Literal["best", "last"] = _run("best", "WHICH", "model of a run: `best` or `last`")
    engine: str = redeclare(
        TrainConfig,
        "engine",
        text="engine: `onnxruntime`, `torch`, `jax`, `tensorflow`, `keras` or `numpy`",
    )
    device: str = redeclare(TrainConfig, "device")
    threads: Threads | None = redeclare(TrainConfig, "threads")


@dataclasses.dataclass(frozen=True)
class EvaluateOptions(InferenceOptions):
    """Options of an evaluation."""

    _: dataclasses.KW_ONLY
    metrics: Sequence[str] | str | None = redeclare(
        TrainConfig, "metrics", text="metrics: `accuracy`, `top_k:k=5`, `f1` ... (default: all that suit the task)"
    )
    against: Any = _run(
        None, "MODEL", "another model or run, to compare with: the change of each metric, with an interval"
    )
    worst: Annotated[int, Range(least=0, most=10_000)] = _run(10, "N", "number of worst samples to list")


@dataclasses.dataclass(frozen=True)
class PredictOptions(InferenceOptions):
    """Options of predictions."""

    _: dataclasses.KW_ONLY
    raw: bool = _run(False, None, "give the raw outputs of the model")
    keep: Sequence[str] | str = _run((), "COLUMN", "column of the data to copy to the output", repeated=True)


# ---- whole runs as ONNX ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeRunOptions:
    """Options of entire training as one ONNX model. Its other settings are inputs of that model."""

    batch_size: BatchSize | None = redeclare(
        TrainConfig, "batch_size", panel=_WHOLE, text="batch size (default: the model's fixed batch size, or 32)"
    )
    last: Last = redeclare(TrainConfig, "last", panel=_WHOLE)
    shuffle: bool = redeclare(TrainConfig, "shuffle", panel=_WHOLE)
    batch_inputs: Sequence[str] | str = _whole(
        (),
        "INPUT",
        "input that is not a data column but is passed for each batch, such as the noise of a GAN",
        flags="--batch-input",
        repeated=True,
        formerly="noise --noise",
    )
    validate: bool = _whole(
        False,
        None,
        "evaluate after every epoch on validation data, which are separate inputs, and keep the best state",
        formerly="validation --validation",
    )
    metrics: Sequence[str] | str | None = redeclare(TrainConfig, "metrics", panel=_WHOLE)
    monitor: str | None = redeclare(TrainConfig, "monitor", panel=_WHOLE)
    patience: Count | None = redeclare(TrainConfig, "patience", panel=_WHOLE)


# ---- pages -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageOptions(ValidationOptions, DataOptions, RecipeOptions, ModelAndData):
    """Options of a page that trains."""

    title: str | None = _page(None, "TEXT", "heading of the page (default: the name of the model)")
    picture: str | None = _page(
        None,
        "HxW",
        "image size of a flat input, such as `8x8`, so that users can draw, drop or film it; or `none` "
        "(default: chosen by the input shape)",
    )
    runtime: str | os.PathLike[str] | None = _page(
        None, "FOLDER", "folder of the installed package `onnxruntime-web` (default: installed with npm)"
    )


# ---- plans -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PlanOptions(RecipeOptions):
    """Options of a plan: devices, network, strategy."""

    model: Any = None
    _: dataclasses.KW_ONLY
    devices: Count = _cluster(1, "N", "number of devices")
    memory: str | Annotated[float, Range(above=0)] | None = _cluster(
        None, "BYTES", "memory per device, such as `80GB` or `64GiB`"
    )
    per_machine: Count = _cluster(8, "N", "devices per machine")
    bandwidth: str | Annotated[float, Range(above=0)] | None = _cluster(
        None, "BYTES", "bandwidth between devices of a machine, per second, such as `450GB`"
    )
    network: str | Annotated[float, Range(above=0)] | None = _cluster(
        None, "BYTES", "bandwidth between machines, per second, such as `50GB` (default: as within a machine)"
    )
    flops: str | Annotated[float, Range(above=0)] | None = _cluster(
        None, "NUMBER", "peak FLOP/s of a device, such as `989T`"
    )
    utilization: Annotated[float, Range(above=0, most=1)] = _cluster(
        0.4, "X", "fraction of the peak FLOP/s that is reached"
    )
    strategy: Strategy | None = _cluster(
        None,
        "NAME",
        "strategy: `ddp`, `zero1`, `zero2`, `fsdp` (or `zero3`), `hybrid`, `tensor` or `tensor+fsdp` "
        "(default: compare all)",
    )
    batch_size: Count | None = _data(
        None, "N", "global batch size, over all devices (default: one sample per device)", flags="--batch-size -b"
    )
    shape: Mapping[str, str | Sequence[int | str]] = _data(
        {}, "INPUT=SIZES", "shape of an input with dynamic axes, such as `tokens=N,2048`", repeated=True
    )
    engine: Literal["torch", "jax", "onnxruntime"] = _engine(
        "torch", "NAME", "engine: `torch` or `jax`, which do not store attention scores, or `onnxruntime`"
    )
    precision: Literal["bfloat16", "float16"] | None = _engine(
        None, "TYPE", "mixed precision for matmuls of a float32 model: `bfloat16` or `float16`"
    )
    recompute_blocks: bool = _engine(
        False, None, "recompute blocks in the backward pass to save memory", formerly="recompute --recompute"
    )
