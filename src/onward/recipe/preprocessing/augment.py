"""Augmentation of images in a training step; masks and further images move along with them.

Augmentation replaces a value of the inference graph in the step, which has its own copy of all
nodes behind it, as for Dropout. `flip` and `crop` move pixels. They move every input and target
with the height and width of the images by the same random numbers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.build import Expr, Names
from onward.errors import RecipeError, UnknownNameError, list_names, suggest_or_list
from onward.model import Step
from onward.recipe.preprocessing.augmentations import AUGMENTATIONS, MOVES, Chance, Draws
from onward.recipe.preprocessing.join import ModelInput
from onward.recipe.preprocessing.operations import SampleShape, dims_of
from onward.recipe.preprocessing.pipeline import form_of, specs_of
from onward.recipe.spec import Spec, arguments, lookup
from onward.recipe.step_builder import StepBuilder

_NONE = "none"
_FACT = "train.augmentation"
_COMPUTED = {
    **dict.fromkeys((ir.DataType.INT8, ir.DataType.INT16, ir.DataType.UINT16), ir.DataType.INT32),
    ir.DataType.BOOL: ir.DataType.UINT8,
    **dict.fromkeys((ir.DataType.UINT32, ir.DataType.UINT64), ir.DataType.INT64),
    ir.DataType.BFLOAT16: ir.DataType.FLOAT,
}
"""Types without Where or Pad in ONNX Runtime -> a type that holds the same values."""

_Sizes = Sequence[set[int | str]]
"""For each axis the number and the symbols that its length is known by."""


@dataclasses.dataclass(frozen=True)
class _Operation:
    """An augmentation with the random numbers that it draws in each step."""

    function: Callable[..., Expr]
    options: Mapping[str, Any]
    draws: Draws

    def __call__(self, x: Expr, form: SampleShape, **settings: Any) -> Expr:
        return self.function(Chance(x, form, draws=self.draws, **settings), **self.options)


class Augmentation:
    """The augmentation of a step.

    Args:
        entries: inputs with preprocessing.
        inputs: names of all inputs of the model.
        augment: augmentations by input.
        along: inputs and targets that move with the images (default: all of their size).
    """

    def __init__(
        self,
        builder: StepBuilder,
        entries: Mapping[str, ModelInput],
        inputs: Sequence[str],
        augment: Mapping[str, Any],
        along: Sequence[str] | str | None,
    ):
        self._builder, self._op, self._sites = builder, builder.op.scoped("augment"), Names()
        self._along = ([] if along == _NONE else [along]) if isinstance(along, str) else along
        self._specs = {name: specs_of(operations, AUGMENTATIONS) for name, operations in augment.items()}
        moving = [name for name in self._specs if self._moves_of(name)]
        if self._along and not moving:
            raise RecipeError("`move_with_image` needs `flip` or `crop` in `augment`", hint="leave it out")
        values = {value.name: value for value in builder.model.inputs}
        self._entries = {name: entries.get(name) or self._unprocessed(values[name]) for name in inputs}
        self._image = self._entries[moving[0]] if moving else None
        self._moves: list[_Operation] = []
        """The flips and crops of the image, in order."""
        self._size: list[Expr] = []
        self._moved, self._fixed = [*moving], list[str]()
        for other in moving[1:] if self._along != [] else ():
            first = moving[0]
            way_out = 'let each move by itself: `move_with_image="none"` (`--move-with-image none`)'
            if self._moves_of(first) != self._moves_of(other):
                raise RecipeError(
                    f"`augment` moves `{first}` and `{other}` in different ways",
                    hint=f"give both the same `flip` and `crop`, or {way_out}",
                )
            if not _is_same(_height_and_width(self._entries[first]), _height_and_width(self._entries[other])):
                raise RecipeError(f"`augment` moves `{first}` and `{other}`, which differ in size", hint=way_out)
        self.changed: dict[ir.Value, ir.Value] = {}
        """Augmented values -> their values in training."""
        for name in [*moving, *(name for name in inputs if name not in moving)]:
            if (new := self._augment_input(name, self._entries[name])) is not None:
                self.changed[self._entries[name].point] = new

    def move_targets(self) -> dict[ir.Value, ir.Value]:
        """Move the targets of the loss; return input of the step -> the moved value."""
        graph = self._builder.step.algorithm
        names = [*self._entries, *(value.name or "" for value in graph.inputs)]
        if unknown := [name for name in self._along or () if name not in names]:
            hint = suggest_or_list(unknown[0], names)
            raise UnknownNameError(f"no input or target `{unknown[0]}` for `move_with_image`", hint=hint)
        if self._image is None:
            return {}
        moved: dict[ir.Value, ir.Value] = {}
        for value in graph.inputs:
            readers = list(value.uses())
            form = self._form(value.name or "", value)
            if form is None:
                continue
            new = self._move(self._op(value), form, self._ignored(value)).like(value).named(f"{value.name}/moved").value
            for node, index in readers:
                node.replace_input_with(index, new)
            moved[value] = new
        graph.sort()
        self._builder.fact("augmentation", {"moved": self._moved, "kept": self._fixed})
        return moved

    # ---- inputs ------------------------------------------------------------------------------------------------------

    def _unprocessed(self, value: ir.Value) -> ModelInput:
        is_augmented = value.name in self._specs
        return ModelInput(
            value, value, form_of(value) if is_augmented else SampleShape.of(dims_of(value.shape or ())[1:])
        )

    def _moves_of(self, name: str) -> list[Spec]:
        return [spec for spec in self._specs[name] if spec.name in MOVES]

    def _augment_input(self, name: str, entry: ModelInput) -> ir.Value | None:
        """Append the augmentation of an input; return None if nothing changes it."""
        x, specs = self._op(entry.point), self._specs.get(name, [])
        if specs and (entry.point.dtype is None or not entry.point.dtype.is_floating_point()):
            raise RecipeError(
                f"`augment` needs floating-point numbers, and `{name}` has none", hint="write `preprocess=scale`"
            )
        if name not in self._moved and self._image is not None:
            form = self._form(name, entry.point, entry)
            x = self._move(x, form).like(entry.point) if form is not None else x
        draws_itself = not self._moves or self._along == []
        shared = iter(() if draws_itself else self._moves)
        for spec in specs:
            function = lookup("augmentation", spec.name, AUGMENTATIONS)
            options = arguments(function, spec.options)
            operation = next(shared, None) if spec.name in MOVES else None
            if operation is None:
                key = self._builder.random_key(self._sites.fresh(f"augment/{name}/{spec.name}"))
                operation = _Operation(function, options, Draws(x, len(entry.form.dims), key))
                if spec.name in MOVES:
                    self._moves.append(operation)
            x = operation(x, entry.form, limit=entry.limit).like(entry.point)
        return None if x.value is entry.point else x.named(f"{name}/augmented").value

    # ---- what moves along --------------------------------------------------------------------------------------------

    def _move(self, x: Expr, form: SampleShape, fill: float = 0.0) -> Expr:
        """Flip and crop a batch like the image, with nearest neighbors: classes stay classes."""
        assert self._image is not None
        op, dtype, has_channels = self._op, x.dtype, len(form.dims) == len(x.value.shape or ()) - 1
        if not self._size:
            shape = op.Shape(op(self._image.point))
            self._size = [op.Gather(shape, np.int64(axis)) for axis in self._image.form.axes]
        x = op.Cast(x, to=_COMPUTED[dtype]) if dtype in _COMPUTED else x
        x = x if has_channels else op.Unsqueeze(x, [1])
        for move in self._moves:
            x = move(x, form, fill=fill, size=self._size)
        x = x if has_channels else op.Squeeze(x, [1])
        return op.Cast(x, to=dtype) if dtype in _COMPUTED else x

    def _form(self, name: str, value: ir.Value, entry: ModelInput | None = None) -> SampleShape | None:
        """Return the axes of height and width of an input or target, and record if it moves."""
        assert self._image is not None
        if self._along is not None and name not in self._along:
            form = None
        else:
            sizes, image = _sizes(value, entry), self._image
            whole = _height_and_width(image)
            forms = _forms(sizes, image) if _may_be_same_batch(value, image.point) else []
            form = next((candidate for candidate in forms if _is_same(_at(sizes or (), candidate), whole)), None)
            if form is None and self._along is not None:
                form = self._named_form(name, sizes)
            if form is None and not self._has_none(sizes):
                raise self._undecided(name, value)
        if form is not None:
            self._moved.append(name)
        elif value.dtype is not None and value.dtype.is_floating_point() and len(value.shape or ()) > 1:
            self._fixed.append(name)  # it may hold coordinates
        return form

    def _has_none(self, sizes: _Sizes | None) -> bool:
        """True if a sample is a flat row of numbers that are not pixels: a class, or amounts."""
        if sizes is None or len(sizes) != 2:
            return sizes is not None and len(sizes) < 2
        assert self._image is not None
        height, width = _height_and_width(self._image)
        pixels = {h * w for h in height for w in width if isinstance(h, int) and isinstance(w, int)}
        channels = {1, *(dim for dim in (self._image.form.dims[self._image.form.channels],) if dim is not None)}
        return not sizes[1] & {count * channel_count for count in pixels for channel_count in channels}

    def _named_form(self, name: str, sizes: _Sizes | None) -> SampleShape:
        """Return the form of an input that the recipe moves despite another or unknown size."""
        assert self._image is not None
        form = next(iter(_forms(sizes, self._image)), None)
        if form is None:
            raise RecipeError(
                f"`{name}` of `move_with_image` has no height and width",
                hint="leave it out: only masks and images move, [N, height, width] with or without channels",
            )
        own, whole = _at(sizes or (), form), _height_and_width(self._image)
        numbers = [[next((n for n in names if isinstance(n, int)), None) for names in side] for side in (own, whole)]
        texts = [" x ".join("?" if n is None else str(n) for n in side) for side in numbers]
        if self._image.resized_by is not None:
            raise RecipeError(
                f"`{self._image.resized_by}` changes the size of images after they are moved",
                hint="put it before `normalize`",
            )
        if numbers[0] == [None, None]:
            return form  # the step checks the size
        ratios = {math.nan if not a or not b else b / a for a, b in zip(*numbers, strict=True)}
        if len(ratios) > 1 or not ratios.pop() > 0:
            raise RecipeError(f"`{name}` is {texts[0]}, but the image is {texts[1]}", hint="resize it in the data")
        if any(move.function is AUGMENTATIONS["crop"] for move in self._moves):
            raise RecipeError(
                f"`crop` moves by pixels, and `{name}` is {texts[0]}, not {texts[1]}",
                hint="leave `crop` out, or resize it in the data",
            )
        return form

    def _undecided(self, name: str, value: ir.Value) -> RecipeError:
        assert self._image is not None
        image = self._moved[0]
        moves = " and ".join(dict.fromkeys(f"`{spec.name}`" for spec in self._moves_of(image)))
        others = [other for other in self._moved if other not in self._specs]

        def say(names: Sequence[str]) -> str:
            flags = " ".join(f"--move-with-image {input_name}" for input_name in names or [_NONE])
            return f"`move_with_image={[*names] or _NONE!r}` (`{flags}`)".replace("'", '"')

        hints = [f"if it holds coordinates, leave {moves} out", f"if it must not move: {say(others)}"]
        if self._image.resized_by is not None:
            hints.insert(0, f"put `{self._image.resized_by}` before `normalize`, if this makes its size differ")
        else:
            try:
                self._named_form(name, _sizes(value))
                remedy = say([*others, name])
            except RecipeError:
                remedy = "give it the height and width of the image"
            hints.insert(1, f"if it is a mask or image: {remedy}")
        message = f"`{name}` {_show(value.shape)} may have to move with `{image}` under {moves}"
        return RecipeError(message, hint="; ".join(hints))

    def _ignored(self, value: ir.Value) -> float:
        """Return the value that a crop fills in: the class that the loss ignores, else 0."""
        facts = self._builder.step.fact("train.loss") or []
        options = [fact.get("options", {}) for fact in facts if value.name in fact["inputs"]]
        return float(next((o["ignore_index"] for o in options if o.get("ignore_index") is not None), 0))


def notes_on_moves(step: Step) -> list[str]:
    """Return sentences about the inputs and targets that `flip` and `crop` move, and the others."""
    fact = step.fact(_FACT)
    if not isinstance(fact, dict):
        return []
    moved, fixed = (list_names(fact.get(key) or [], 6) for key in ("moved", "kept"))
    return [f"augmentation moves {moved} together" + (f"; {fixed} does not move" if fixed else "")]


# ---- shapes ----------------------------------------------------------------------------------------------------------


def _names(dim: int | ir.SymbolicDim | None) -> set[int | str]:
    name = dim if isinstance(dim, int) else getattr(dim, "value", None)
    return set() if name is None else {name}


def _sizes(value: ir.Value, entry: ModelInput | None = None) -> _Sizes | None:
    if entry is None or entry.point is entry.value:
        return None if value.shape is None else [_names(dim) for dim in value.shape]
    sizes = [set[int | str](), *(_names(dim) for dim in entry.form.dims)]
    if entry.form.is_picture and entry.value.shape is not None and entry.resized_by is None:
        declared = form_of(entry.value)
        for axis, of_model in zip(entry.form.axes, declared.axes, strict=True):
            sizes[axis] |= _names(entry.value.shape[of_model])
    return sizes


def _forms(sizes: _Sizes | None, image: ModelInput) -> list[SampleShape]:
    """Return possible forms of a mask: channels as in the image, at the other end, or none."""
    rank = len(sizes or ())
    channels = {3: [0], 4: [image.form.channels, 2 - image.form.channels]}.get(rank, [])
    return [SampleShape((None, None, None), at) for at in channels]


def _at(sizes: _Sizes, form: SampleShape) -> _Sizes:
    """Return height and width. A mask without channels has one axis less before them."""
    return [sizes[axis - (len(sizes) == 3)] for axis in form.axes]


def _height_and_width(image: ModelInput) -> _Sizes:
    sizes = _sizes(image.point, image)
    return [set(), set()] if sizes is None else _at(sizes, image.form)


def _is_same(a: _Sizes, b: _Sizes) -> bool:
    return all(first & other for first, other in zip(a, b, strict=True))


def shared_axes(value: ir.Value, image: ir.Value) -> tuple[int, ...] | None:
    """Return the axes of a mask that are height and width of the images; None if it has none."""
    entry, sizes = ModelInput(image, image, form_of(image)), _sizes(value)
    if sizes is None or not entry.form.is_picture:
        return None
    forms = (form for form in _forms(sizes, entry) if _is_same(_at(sizes, form), _height_and_width(entry)))
    return next((tuple(axis - (len(sizes) == 3) for axis in form.axes) for form in forms), None)


def _may_be_same_batch(a: ir.Value, b: ir.Value) -> bool:
    sizes = {value.shape[0] for value in (a, b) if value.shape and isinstance(value.shape[0], int)}
    return len(sizes) < 2


def _show(shape: ir.Shape | None) -> str:
    if shape is None:
        return "of unknown shape"
    return "[" + ", ".join(str(next(iter(_names(dim)), "?")) for dim in shape) + "]"
