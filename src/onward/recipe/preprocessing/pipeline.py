"""Sequences of operations: `resize:size=32 scale normalize:mean=0.5,std=0.25 channels_first`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr
from onward.errors import RecipeError, UnknownNameError, list_names, suggest
from onward.model import Model
from onward.recipe.preprocessing.operations import (
    OPERATIONS,
    SIZES,
    Dims,
    ImageBatch,
    SampleShape,
    dims_of,
    is_number,
    size_of,
)
from onward.recipe.preprocessing.text import Tokens, checked_length, tokenize
from onward.recipe.preprocessing.word_pieces import ML_OPSET
from onward.recipe.spec import Spec, arguments, by_name, check_options, lookup, parse, words
from onward.runtime.sessions import open_session
from onward.standard import COMMON_OPSET, IR_VERSION, ML_DOMAIN, OLDEST_OPSET

INPUT = "input"
"""Name of an optional first item: the type and shape of the data."""
_TYPES = {
    name: ir.DataType.from_numpy(np.dtype(name))
    for name in ("uint8", "float32", "float16", "float64", "uint16", "int16", "int32", "int64", "int8", "bool")
}
_FUNCTIONS = {name: operation.build for name, operation in OPERATIONS.items()}
TEXT, FILE = "tokenize", "decode"
"""Operations on other data than images."""
ROLES = {
    **dict.fromkeys(("attention_mask", "input_mask", "mask"), "mask"),
    **dict.fromkeys(("token_type_ids", "segment_ids"), "zeros"),
}
"""Names of further inputs of text models, besides that of the token indices."""
_NAMED = re.compile(r"\s*[^\s:=]+=")


@dataclasses.dataclass(frozen=True)
class Raw:
    """The type of the data and the shape of a sample (default: those of the first operation)."""

    dtype: ir.DataType = ir.DataType.UINT8
    dims: Dims | None = None
    limit: float | None = None
    """Maximum of values that start at 0, if known; it is for bytes."""

    @classmethod
    def by(cls, spec: Spec) -> Raw:
        check_options(f"`{INPUT}`", spec.options, {"dtype": "", "shape": "", "max": ""})
        name, shape, limit = str(spec.options.get("dtype", "uint8")), spec.options.get("shape"), spec.options.get("max")
        if limit is not None and not (is_number(limit) and limit > 0):
            message = f"`max` of `{INPUT}` is `{limit}`, but must be positive"
            raise RecipeError(message, hint="write `input:dtype=float32,max=255`")
        dims = [None if dim == "?" else dim for dim in shape] if isinstance(shape, Sequence) else shape
        if dims is not None and not (isinstance(dims, list) and all(d is None or isinstance(d, int) for d in dims)):
            hint = "write `input:shape=[28,28]`, or `[?,?,3]` for any size"
            raise RecipeError(f"`shape` of `{INPUT}` is `{shape}`, not a list of sizes", hint=hint)
        return cls(lookup("type", name, _TYPES), None if dims is None else tuple(dims), limit)

    def spec(self) -> Spec:
        shape = {} if self.dims is None else {"shape": ["?" if dim is None else dim for dim in self.dims]}
        limit = {} if self.limit is None else {"max": self.limit}
        return Spec(INPUT, {"dtype": self.dtype.numpy().name, **shape, **limit})


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Operations for one input of a model. `raw` is the declared form of the data, if any."""

    specs: tuple[Spec, ...]
    raw: Raw | None = None

    @classmethod
    def of(cls, value: Any) -> Pipeline:
        specs = specs_of(value)
        raw = Raw.by(specs.pop(0)) if specs and specs[0].name == INPUT else None
        for spec in specs:
            arguments(lookup("preprocessing", spec.name, OPERATIONS).build, spec.options)
        if any(spec.name == TEXT for spec in specs) and (len(specs) > 1 or raw is not None):
            raise RecipeError(f"`{TEXT}` cannot be combined with other operations", hint="leave the others out")
        if any(spec.name == FILE for spec in specs[1:]) or (raw is not None and bool(specs) and specs[0].name == FILE):
            raise RecipeError(f"`{FILE}` must come first: it takes the bytes of a file", hint="put it first")
        return cls(tuple(specs), raw)

    @property
    def is_text(self) -> bool:
        return any(spec.name == TEXT for spec in self.specs)

    @property
    def size(self) -> tuple[int, int] | None:
        """Height and width of the result, if an operation fixes them."""
        spec = next((spec for spec in reversed(self.specs) if spec.name in SIZES), None)
        return None if spec is None else size_of(spec.name, spec.options["size"])

    @property
    def resized_late_by(self) -> str | None:
        """The operation that resizes images behind the point of augmentation, or None."""
        names = [spec.name for spec in self.specs]
        after = names[names.index("normalize") :] if "normalize" in names else []
        return next((name for name in after if name in SIZES), None)

    @property
    def all_specs(self) -> list[Spec]:
        """The declaration of the data, if any, and the operations."""
        return [*([self.raw.spec()] if self.raw is not None else []), *self.specs]

    def form(self, model: SampleShape) -> SampleShape:
        """Return the form of the data that the operations convert to the model's input."""
        for spec in reversed(self.specs):
            if spec.options.get("keep"):
                raise RecipeError(
                    f"`{spec}` leaves images of different sizes, which make no batch",
                    hint="leave `keep` out: it is for separate pipelines (`onward pipeline`)",
                )
            model = OPERATIONS[spec.name].before(model)
        return model

    def dims(self, model: SampleShape) -> Dims:
        """Return the shape of a sample, as declared or inferred."""
        implied = self.form(model)
        if self.raw is None or self.raw.dims is None:
            return implied.dims
        declared = self.raw.dims
        if implied.fits(declared) or (
            _lacks_channel(declared, implied) and implied.dims[implied.channels] in (None, 1)
        ):
            return declared
        raise RecipeError(
            f"samples are {SampleShape(declared, 0)}, but `{self}` takes {implied}", hint=_way_out(declared, implied)
        )

    def build(self, op: Builder, raw: ir.Value, model: ir.Value) -> tuple[ImageBatch, Expr]:
        """Append the operations; return the image for augmentation and the model's input."""
        target = form_of(model)
        implied, dims = self.form(target), self.dims(target)
        picture, point = self.through(self.start(op, raw, dims, implied))
        return point, fitted(picture, model, str(self))

    def start(self, op: Builder, raw: ir.Value, dims: Dims, implied: SampleShape) -> ImageBatch:
        """Return the data as an image: numbers, with an axis for channels."""
        x = op(raw)
        if _lacks_channel(dims, implied):
            x = op.Unsqueeze(x, [implied.channels + 1])
            dims = (*dims[: implied.channels], 1, *dims[implied.channels :])
            x.value.shape = ir.Shape([(raw.shape or [None])[0], *dims])
        limit = self.raw.limit if self.raw is not None else None
        if limit is None and raw.dtype is ir.DataType.UINT8:
            limit = 255.0
        if raw.dtype is not ir.DataType.FLOAT:
            x = op.Cast(x, to=ir.DataType.FLOAT)
        return ImageBatch(x, SampleShape(dims, implied.channels), limit)

    def through(self, picture: ImageBatch) -> tuple[ImageBatch, ImageBatch]:
        """Append the operations; return their result and the image for augmentation."""
        point: ImageBatch | None = None
        for spec in self.specs:
            if spec.name == "normalize" and point is None:
                point = picture
            picture = OPERATIONS[spec.name].build(picture, **spec.options)
        return picture, point or picture

    def __str__(self) -> str:
        return " ".join(str(spec) for spec in self.specs)


def fitted(picture: ImageBatch, model: ir.Value, operations: str) -> Expr:
    """Return an image in the type and rank of the model's input."""
    if not (target := form_of(model)).fits(picture.form.dims):
        raise RecipeError(
            f"`{operations}` gives samples of the shape {picture.form}, but `{model.name}` takes {target}",
            hint="add a `resize` to that size at its end",
        )
    x = picture.x
    dtype = model.dtype or ir.DataType.FLOAT
    if dtype.is_integer():
        limits = np.iinfo(dtype.numpy())
        x = x.op.Clip(x.op.Round(x), np.float32(limits.min), np.float32(limits.max))
    if dtype is not ir.DataType.FLOAT:
        x = x.op.Cast(x, to=dtype)
    return x


def form_of(value: ir.Value) -> SampleShape:
    """Return the form of the samples in a batch."""
    if value.shape is None or not len(value.shape):
        hint = f"declare it: `onward set MODEL --shape {value.name}=N,3,224,224`"
        raise RecipeError(f"the shape of `{value.name}` is unknown", hint=hint)
    return SampleShape.of(dims_of(value.shape)[1:])


def specs_of(specs: Any, functions: Mapping[str, Callable[..., Any]] = _FUNCTIONS) -> list[Spec]:
    """Parse specs with spaces or `|` between them, or a list of specs."""
    if isinstance(specs, str):
        return [parse(word, functions) for word in words(specs.replace("|", " "))]
    if isinstance(specs, Mapping | Spec):
        return [parse(specs)]
    if isinstance(specs, bytes) or not isinstance(specs, Sequence):
        raise RecipeError(f"{specs!r} is not a string, mapping or list", hint="write 'resize:size=32 scale'")
    return [spec for item in specs for spec in specs_of(item, functions)]


def pipelines(model: Model, specs: Any) -> dict[str, Pipeline]:
    """Return a pipeline per input, from {input: operations} or for the only suitable one."""
    return {name: Pipeline.of(operations) for name, operations in by_input(model, specs).items()}


def by_input(model: Model, specs: Any) -> dict[str, Any]:
    """Return specs by input, from {input: ...} or `INPUT=...`; else for the only image."""
    if not isinstance(specs, str | Spec | Mapping | Sequence):
        raise RecipeError(f"{specs!r} is not a string, mapping or list", hint="write 'resize:size=32 scale'")
    texts = [specs] if isinstance(specs, str | Spec) else specs
    if isinstance(specs, Mapping) and "name" not in specs:
        named = {str(name): value for name, value in specs.items()}
    elif texts and all(isinstance(text, str) and _NAMED.match(text) for text in texts):
        named = by_name([str(text).strip().split("=", 1) for text in texts])
    else:
        named = {(_text_of if mentions_text(specs) else _picture_of)(model): specs}
    names = [value.name or "" for value in model.inputs]
    for name in named:
        if name not in names:
            hint = suggest(name, names) or f"its inputs are {', '.join(names)}"
            raise UnknownNameError(f"the model has no input `{name}`", hint=hint)
    return named


def mentions_text(specs: Any) -> bool:
    """True if an operation is for text."""
    if isinstance(specs, str):
        return re.search(rf"\b{TEXT}\b", specs) is not None
    if isinstance(specs, Spec):
        return specs.name == TEXT
    items = specs.values() if isinstance(specs, Mapping) else specs if isinstance(specs, Sequence) else ()
    return any(mentions_text(item) for item in items)


def _text_of(model: Model) -> str:
    """Return the input for token indices: the only one, or the only one of integers."""
    inputs = [value for value in model.inputs if (value.name or "") not in ROLES]
    whole = [value for value in inputs if value.dtype is not None and value.dtype.is_integer()]
    candidates = [value.name or "" for value in (inputs if len(inputs) == 1 else whole)]
    return _only(model, candidates, "tokenize:...")


def _picture_of(model: Model) -> str:
    """Return the only input, or the only one that takes images."""
    inputs = {value.name or "": value for value in model.inputs}
    pictures = [name for name, value in inputs.items() if value.shape is not None and len(value.shape) == 4]
    return _only(model, list(inputs) if len(inputs) == 1 else pictures, "...")


def _only(model: Model, candidates: list[str], spec: str) -> str:
    if len(candidates) == 1:
        return candidates[0]
    names = [value.name or "" for value in model.inputs]
    message = f"preprocessing does not name one of the inputs {list_names(names, 6)}"
    raise RecipeError(message, hint=f"write `{next(iter(names), 'INPUT')}={spec}`")


def _lacks_channel(dims: Dims, form: SampleShape) -> bool:
    if not form.is_picture or len(dims) != 2:
        return False
    sizes = [dim for axis, dim in enumerate(form.dims) if axis != form.channels]
    return all(a is None or b is None or a == b for a, b in zip(dims, sizes, strict=True))


def _way_out(dims: Dims, implied: SampleShape) -> str:
    if len(dims) == 3 and implied.is_picture:
        if implied.turned().fits(dims):
            return f"`{'channels_first' if implied.channels == 0 else 'channels_last'}` moves the channels"
        if implied.with_channels(None).fits(dims) and dims[implied.channels] == 1:
            return "`to_rgb` gives gray images three channels"
    return "change sizes with `resize` or `center_crop`, channels with `to_rgb` or `channels_first`"


# ---- text as a model of its own --------------------------------------------------------------------------------------


TEXT_INPUT = "text"
"""The name of the input for text."""
_USUAL = {"input_ids": "ids", "attention_mask": "mask"}


def text_pipeline(pipeline: Pipeline, model: Model | None = None, name: str = "input_ids") -> Model:
    """Build the graph from `text`, strings [N], to `name` and inputs for a mask or zeros."""
    inputs = {value.name or "": value for value in model.inputs} if model is not None else {}
    options = dict(pipeline.specs[0].options)
    roles = dict(_USUAL)
    if model is not None:
        roles = {name: "ids", **{other: ROLES[other] for other in inputs if other in ROLES and other != name}}
        options.setdefault("length", _length(inputs[name]))
    raw = _raw(options)
    graph = ir.Graph([raw], [], nodes=[], name="pipeline", opset_imports={"": COMMON_OPSET, ML_DOMAIN: ML_OPSET})
    op = Builder(graph, opset=COMMON_OPSET)
    op.names.fresh(TEXT_INPUT)
    tokens = tokenize(op(raw), **options)
    for output, role in roles.items():
        result = _as_input(_part(tokens, role), inputs.get(output)).named(output).value
        result.shape = ir.Shape(["N", options["length"]])
        graph.outputs.append(result)
    return Model(ir.Model(graph, ir_version=IR_VERSION))


def _raw(options: Mapping[str, Any]) -> ir.Value:
    """Return strings; refuse bytes, which operators cannot make of strings."""
    if options.get("by") != "bytes":
        return ir.Value(name=TEXT_INPUT, type=ir.TensorType(ir.DataType.STRING), shape=ir.Shape(["N"]))
    shape = ir.Shape(["N", checked_length(options.get("length"))])
    return ir.Value(name=TEXT_INPUT, type=ir.TensorType(ir.DataType.UINT8), shape=shape)


def _part(tokens: Tokens, role: str) -> Expr:
    if role == "zeros":
        return tokens.ids.op.filled_like(tokens.ids.value, 0)
    return tokens.ids.op.Identity(tokens.ids if role == "ids" else tokens.mask)


def _as_input(x: Expr, target: ir.Value | None) -> Expr:
    if target is None or target.dtype in (None, ir.DataType.INT64):
        return x
    return x.op.Cast(x, to=target.dtype)


def _length(value: ir.Value) -> int | None:
    if value.shape is None or len(value.shape) != 2:
        raise RecipeError(f"`{value.name}` has the shape {value.shape}, but `{TEXT}` gives [N, length]")
    length = value.shape[1]
    return length if isinstance(length, int) else None


# ---- images of different sizes ---------------------------------------------------------------------------------------

# A training model takes batches, so images must be resized before. The graph still has the resize,
# which changes no bit of an image of its size.


_MOVES = ("channels_first", "channels_last", "to_rgb")
"""Operations that only reorder pixels."""


class Single:
    """A converter of one image from bytes to the size of a pipeline, without rounding."""

    def __init__(self, specs: tuple[Spec, ...], form: SampleShape):
        self._specs, self._form = specs, form
        raw = ir.Value(name="x", type=ir.TensorType(ir.DataType.UINT8), shape=ir.Shape([1, *form.dims]))
        graph = ir.Graph([raw], [], nodes=[], name="picture", opset_imports={"": OLDEST_OPSET})
        op = Builder(graph, opset=OLDEST_OPSET)
        picture = ImageBatch(op.Cast(op(raw), to=ir.DataType.FLOAT), form)
        for spec in specs:
            picture = OPERATIONS[spec.name].build(picture, **spec.options)
        result = picture.x.named("y").value
        result.type, self._made = ir.TensorType(ir.DataType.FLOAT), picture.form
        graph.outputs.append(result)
        # One thread: images are converted in parallel.
        self._session = open_session(Model(ir.Model(graph, ir_version=IR_VERSION)), threads=1)

    @classmethod
    def of(cls, pipeline: Pipeline, form: SampleShape) -> Single | None:
        """Return the converter for a form; None if the size varies or values change first."""
        at = next((at for at, spec in enumerate(pipeline.specs) if spec.name in SIZES), None)
        if at is None or not form.is_picture or not all(spec.name in _MOVES for spec in pipeline.specs[:at]):
            return None
        return cls(pipeline.specs[: at + 1], form)

    @property
    def least(self) -> tuple[int, int]:
        """Minimum height and width of an image."""
        last = self._specs[-1]
        return size_of("center_crop", last.options["size"]) if last.name == "center_crop" else (1, 1)

    def __call__(self, picture: np.ndarray) -> np.ndarray:
        pixels = self._session.run(None, {"x": picture[None]})[0][0]
        if any(spec.name == "to_rgb" for spec in self._specs):  # all three are alike
            pixels = np.take(pixels, [0], axis=self._made.channels)
        return np.ascontiguousarray(np.moveaxis(pixels, self._made.channels, self._form.channels))

    def __str__(self) -> str:
        return str(self._specs[-1])
