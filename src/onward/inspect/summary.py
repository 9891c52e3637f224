"""A summary of a model, and its JSON form: the names of fields are its keys, and stable."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import onnx_ir as ir

from onward.run_state.reading import LossTerm, Setting, plain

Shape = tuple[int | str | None, ...]
"""Numbers, names, and None for an unknown axis."""

Role = Literal["trained", "frozen", "trainable", "statistics", "constant"]
"""`trainable`: parameters of an inference model that `prepare` would train."""

ROLES: tuple[Role, ...] = ("trained", "frozen", "trainable", "statistics", "constant")


@dataclass(frozen=True)
class Port:
    """Input or output."""

    name: str
    type: str
    shape: Shape | None


@dataclass(frozen=True)
class File:
    """File of a model."""

    path: str | None
    bytes: int | None
    """Its size, without external data; None for a model that is not on disk."""
    external_bytes: int
    external_files: tuple[str, ...]
    ir_version: int | None
    opset: int
    opsets: dict[str, int]
    producer: str
    nodes: int
    """Nodes of the inference graph, nested ones included."""
    functions: tuple[str, ...]
    says: dict[str, str]
    """Task, classes, columns, preprocessing ... as `train` writes them."""


@dataclass(frozen=True)
class Weight:
    """Constant tensor of the inference graph, with its role in training and the reason."""

    name: str
    type: str
    shape: Shape | None
    numbers: int
    bytes: int
    role: Role
    reason: str
    group: str | None = None
    """The optimizer group that updates it."""
    steps: tuple[int, ...] = ()
    """The steps that train it."""


@dataclass(frozen=True)
class Amount:
    tensors: int
    numbers: int
    bytes: int

    @staticmethod
    def of(weights: Iterable[Weight]) -> Amount:
        weights = list(weights)
        return Amount(len(weights), sum(w.numbers for w in weights), sum(w.bytes for w in weights))


@dataclass(frozen=True)
class QuantizedWeights:
    """Weights of the same type and granularity."""

    type: str
    per: str
    """Unit that has one scale: a tensor, a channel, or a block."""
    tensors: int
    numbers: int


@dataclass(frozen=True)
class Quantization:
    """Weights and activations that are rounded to integers."""

    weights: tuple[QuantizedWeights, ...]
    activations: dict[str, int]
    """Number by type."""
    ranges: tuple[str, ...]
    """Origins of scales in training: `moving`, `lsq` or `fixed`."""


@dataclass(frozen=True)
class LossTerms:
    differentiated: tuple[str, ...]
    """The values that Gradient operators differentiate: their `y`."""
    operators: tuple[str, ...]
    """The operator that computes each of them."""
    outputs: tuple[str, ...]
    """The outputs of the model that the loss reads."""
    terms: tuple[LossTerm, ...]
    """Empty if the file does not record them."""


@dataclass(frozen=True)
class GroupSummary:
    """Parameters that one optimizer updates with the same settings."""

    name: str
    optimizer: str | None
    """Name in recipes or of the operator; None for an update in plain operators."""
    operators: tuple[str, ...]
    hyper: dict[str, Setting]
    """Every hyper-parameter at its current value, `lr` first."""
    lr_now: float | None
    """The learning rate of the next update, by the schedule."""
    options: dict[str, Any]
    slots: tuple[str, ...]
    parameters: tuple[str, ...]
    is_function: bool = False
    """True if the optimizer has no name in recipes and is a function that updates all parameters."""


@dataclass(frozen=True)
class ScheduleSection:
    """One schedule of a sequence, with its numbers at their current values."""

    name: str
    numbers: dict[str, Setting]
    choices: dict[str, Any]


@dataclass(frozen=True)
class Clip:
    kind: Literal["norm", "tensor_norm", "value"]
    limit: Setting
    operator: str


@dataclass(frozen=True)
class Accumulation:
    batches: Setting
    seen: Setting
    """Batches since the last update."""


@dataclass(frozen=True)
class Average:
    """The exponential moving average of the parameters."""

    decay: Setting
    updates: Setting


@dataclass(frozen=True)
class LossScale:
    scale: Setting
    dynamic: bool
    settings: dict[str, Setting]


@dataclass(frozen=True)
class ProgressSummary:
    step: int | None
    """Updates made so far; None without a counter."""
    steps: int | None
    """Last update of the schedule; None if it is unknown or there is none."""
    recorded: dict[str, Any]
    """Other counters in the file: epochs, samples, ..."""


@dataclass(frozen=True)
class StateAmount:
    role: str
    tensors: int
    bytes: int


@dataclass(frozen=True)
class Training:
    """Training step of a model."""

    name: str
    inputs: tuple[Port, ...]
    """Inputs of training that the model does not have."""
    metrics: tuple[Port, ...]
    loss: LossTerms
    groups: tuple[GroupSummary, ...]
    trained: Amount
    schedule: tuple[ScheduleSection, ...]
    clip: Clip | None
    accumulation: Accumulation | None
    average: Average | None
    loss_scale: LossScale | None
    progress: ProgressSummary
    state: tuple[StateAmount, ...]
    hyperparameters: dict[str, Setting]
    """Every number that can be edited in the file, by the name of its initializer."""
    nodes: int
    initialization: bool
    """True if every state variable can be reset."""


FORMAT = 1
"""Version of the JSON form. New keys do not change it; removed keys and changed meanings do."""


@dataclass(frozen=True)
class Summary:
    """Contents of a model. `to_json` has the names of the fields as keys, at every level:

    - `format`: 1
    - `name`; `file`: path, bytes, external_bytes, external_files, ir_version, opset, opsets, producer, nodes,
      functions, says (task, classes, columns, preprocessing ... as `train` writes them)
    - `inputs`, `outputs` of the inference graph: lists of name, type, shape (numbers, names and null; null if unknown)
    - `parameters`: trained, frozen, trainable, statistics, constant; each with tensors, numbers, bytes
    - `remarks`: sentences about weights that an exporter folded, merged or added, and about augmentation
    - `quantization`: null, or weights (list of type, per, tensors, numbers), activations (numbers by type), ranges
    - `weights`: list of name, type, shape, numbers, bytes, role (one of these five), reason, group, steps
    - `steps`: none for an inference model, else a list of
        - `name`, `nodes`, `initialization`; `inputs` and `metrics` that inference does not have
        - `loss`: differentiated, operators, outputs, and terms: list of name, output, inputs, options, scale
        - `groups`: list of name, optimizer, operators, hyper, lr_now, options, slots, parameters, is_function
        - `trained`: tensors, numbers, bytes
        - `schedule`: list of name, numbers, choices
        - `clip`: null, or kind, limit, operator; `accumulation`: null, or batches, seen; `average`: null, or decay,
          updates; `loss_scale`: null, or scale, dynamic, settings
        - `progress`: step, steps, recorded
        - `state`: list of role, tensors, bytes
        - `hyperparameters`: every number that can be edited in the file, by the name of its initializer
    """

    name: str
    file: File
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    parameters: dict[Role, Amount]
    remarks: tuple[str, ...]
    quantization: Quantization | None
    weights: tuple[Weight, ...]
    steps: tuple[Training, ...]

    @property
    def is_training_model(self) -> bool:
        return bool(self.steps)

    def with_role(self, *roles: Role) -> list[Weight]:
        return [weight for weight in self.weights if weight.role in roles]

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data: dictionaries, lists, strings, numbers and None."""
        return {"format": FORMAT, **plain(asdict(self))}


# ---- ports -----------------------------------------------------------------------------------------------------------


_TYPE_NAMES = {"FLOAT": "float32", "DOUBLE": "float64"}


def port(value: ir.Value) -> Port:
    return Port(value.name or "", type_name(value.type), shape_of(value))


def type_name(value_type: ir.TypeProtocol | None) -> str:
    """Return `float32`, `sequence(int64)`, or `?`."""
    if value_type is None:
        return "?"
    if isinstance(value_type, ir.TensorType):
        return dtype_name(value_type.dtype)
    inner = getattr(value_type, "elem_type", None)
    words = {ir.SequenceType: "sequence", ir.OptionalType: "optional", ir.SparseTensorType: "sparse"}
    word = next((word for cls, word in words.items() if isinstance(value_type, cls)), type(value_type).__name__)
    return f"{word}({dtype_name(inner) if isinstance(inner, ir.DataType) else type_name(inner)})"


def dtype_name(dtype: ir.DataType | None) -> str:
    if dtype is None or dtype == ir.DataType.UNDEFINED:
        return "?"
    return _TYPE_NAMES.get(dtype.name, dtype.name.lower())


def shape_of(value: ir.Value) -> Shape | None:
    if value.shape is None:
        return None
    return tuple(axis if isinstance(axis, int) else axis.value for axis in value.shape)
