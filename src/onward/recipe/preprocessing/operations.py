"""Preprocessing operations by name, and the data between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr
from onward.errors import RecipeError
from onward.recipe.preprocessing.text import tokenize
from onward.recipe.spec import lookup

Dims = tuple[int | None, ...]

_CHANNELS = (1, 3, 4)


def dims_of(shape: Iterable[Any]) -> Dims:
    """Return the dimensions of an onnx_ir shape, None for those that are not numbers."""
    return tuple(dim if isinstance(dim, int) else None for dim in shape)


@dataclasses.dataclass(frozen=True)
class SampleShape:
    """The shape of a sample, with None for unknown dimensions."""

    dims: Dims
    channels: int
    """The axis of channels, or of features."""

    @classmethod
    def of(cls, dims: Sequence[int | None]) -> SampleShape:
        """Return a shape: three dimensions are an image, channels first or last."""
        is_first = len(dims) == 3 and (dims[0] in _CHANNELS or dims[2] not in _CHANNELS)
        return cls(tuple(dims), 0 if is_first else max(len(dims) - 1, 0))

    @property
    def is_picture(self) -> bool:
        return len(self.dims) == 3

    @property
    def axes(self) -> tuple[int, int]:
        """Height and width, as axes of a batch."""
        return (2, 3) if self.channels == 0 else (1, 2)

    def sized(self, height: int | None, width: int | None) -> SampleShape:
        rest = (self.dims[self.channels],)
        return dataclasses.replace(self, dims=(*rest, height, width) if self.channels == 0 else (height, width, *rest))

    def with_channels(self, count: int | None) -> SampleShape:
        dims = (*self.dims[: self.channels], count, *self.dims[self.channels + 1 :])
        return dataclasses.replace(self, dims=dims)

    def turned(self) -> SampleShape:
        """Return the shape with the channels at the other end."""
        first, second, third = self.dims
        return SampleShape((second, third, first), 2) if self.channels == 0 else SampleShape((third, first, second), 0)

    def fits(self, dims: Sequence[int | None]) -> bool:
        return len(dims) == len(self.dims) and all(
            a is None or b is None or a == b for a, b in zip(dims, self.dims, strict=True)
        )

    def __str__(self) -> str:
        return "[" + ", ".join("?" if dim is None else str(dim) for dim in self.dims) + "]"


@dataclasses.dataclass(frozen=True)
class ImageBatch:
    """A batch of samples between two operations."""

    x: Expr
    form: SampleShape
    limit: float | None = None
    """The maximum of values that start at 0; None if unknown."""

    @property
    def op(self) -> Builder:
        return self.x.op

    def check(self, name: str) -> None:
        check_picture(name, self.form)

    def changed(self, x: Expr, **others: Any) -> ImageBatch:
        return dataclasses.replace(self, x=x, **others)


def check_picture(name: str, form: SampleShape) -> None:
    """Raise if a sample is not an image."""
    if not form.is_picture:
        raise RecipeError(
            f"`{name}` is for images, but a sample has the shape {form}",
            hint="leave it out: an image has three axes, channels, height and width",
        )


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


PRESETS = {"imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}
"""Means and standard deviations of red, green and blue, from 0 to 1, for many pretrained models."""


@dataclasses.dataclass(frozen=True)
class Operation:
    build: Callable[..., Any]
    before: Callable[[SampleShape], SampleShape] = lambda form: form


# ---- values ----------------------------------------------------------------------------------------------------------


def scale(picture: ImageBatch, max: float = 255.0) -> ImageBatch:
    """Scale values from 0..`max` to 0..1."""
    if not is_number(max) or max <= 0:
        raise RecipeError(f"`max` of `scale` is `{max}`, but must be positive", hint="write `scale:max=255`")
    limit = picture.limit / max if picture.limit is not None else None
    return picture.changed(picture.x / float(max), limit=limit)


def normalize(picture: ImageBatch, mean: Any = 0.0, std: Any = 1.0, preset: str | None = None) -> ImageBatch:
    """Subtract a mean and divide by a deviation: numbers, lists per channel, or `imagenet`."""
    if isinstance(mean, str):
        preset = mean
    if preset is not None:
        mean, std = lookup("preset", preset, PRESETS)
        if picture.limit is not None and picture.limit > 1:
            message = f"`normalize:preset={preset}` is for values from 0 to 1, and these go to {picture.limit:g}"
            raise RecipeError(message, hint="put `scale` before it")
    means, stds = (_per_channel(picture.form, name, value) for name, value in (("mean", mean), ("std", std)))
    if not (stds > 0).all():
        raise RecipeError(f"`std` of `normalize` is `{std}`, but must be positive")
    return picture.changed((picture.x - means) / stds, limit=None)


def _per_channel(form: SampleShape, name: str, value: Any) -> np.ndarray:
    numbers = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if not numbers or not all(is_number(number) for number in numbers):
        raise RecipeError(f"`{name}` of `normalize` is `{value}`, not a number or a list of numbers")
    count = form.dims[form.channels] if form.dims else None
    if len(numbers) > 1 and count not in (None, len(numbers)):
        raise RecipeError(f"`{name}` of `normalize` has {len(numbers)} numbers for {count} channels")
    axis = form.channels if len(numbers) > 1 else max(len(form.dims) - 1, 0)
    return np.asarray(numbers, np.float32).reshape(-1, *[1] * (len(form.dims) - 1 - axis))


# ---- files -----------------------------------------------------------------------------------------------------------


def decode(picture: ImageBatch, format: str = "RGB") -> ImageBatch:
    """Decode an image file to `RGB`, `BGR` or `Grayscale`. For a separate pipeline."""
    count = lookup("image format", format, {"RGB": 3, "BGR": 3, "Grayscale": 1})
    op = picture.op
    image = op.Unsqueeze(op.ImageDecoder(picture.x, pixel_format=format), [0])
    image = op.Cast(image, to=ir.DataType.FLOAT)
    image.value.shape = ir.Shape([1, None, None, count])
    return ImageBatch(image, SampleShape((None, None, count), 2), 255.0)


def _of_file(form: SampleShape) -> SampleShape:
    raise RecipeError(
        "`decode` is for a separate pipeline: data files are decoded when they are read",
        hint="leave it out, or make a pipeline: `onward pipeline 'decode resize:32 scale'`",
    )


# ---- images ----------------------------------------------------------------------------------------------------------


def resize(picture: ImageBatch, size: Any, keep: bool = False) -> ImageBatch:
    """Resize to `size=32` or `size=32x48`: bilinear, with antialiasing where it shrinks.

    With `keep` the shorter side becomes `size`, in proportion.
    """
    picture.check("resize")
    height, width = size_of("resize", size)
    op, sizes = picture.op, np.asarray([height, width], np.int64)
    if keep:
        if height != width:
            message = f"`resize:size={size}` has two sizes, but `keep` needs one: that of the shorter side"
            raise RecipeError(message, hint="write `resize:size=32,keep=true`")
        old_size = op.Gather(op.Shape(picture.x), np.asarray(picture.form.axes, np.int64))
        sizes = op.Div(old_size * height, op.ReduceMin(old_size, keepdims=0))  # rounded down, as torchvision does
    resized = op.Resize(
        picture.x,
        None,
        None,
        sizes,
        mode="linear",
        antialias=1,
        exclude_outside=1,  # pixels beyond the border have no weight, as in PIL and torchvision
        axes=list(picture.form.axes),
    )
    return _with_form(picture, resized, picture.form.sized(None, None) if keep else picture.form.sized(height, width))


def center_crop(picture: ImageBatch, size: Any) -> ImageBatch:
    """Crop the middle of an image, such as `size=28` or `size=28x32`."""
    picture.check("center_crop")
    op, target, axes = picture.op, size_of("center_crop", size), picture.form.axes
    for axis, length in zip(axes, target, strict=True):
        if (actual := picture.form.dims[axis - 1]) is not None and actual < length:
            raise RecipeError(f"`center_crop:size={target[0]}x{target[1]}` is larger than images of {picture.form}")
    lengths = np.asarray(target, np.int64)
    old_size = op.Gather(op.Shape(picture.x), np.asarray(axes, np.int64))
    start = op.Div(old_size - lengths, np.int64(2))
    cropped = op.Slice(picture.x, start, start + lengths, np.asarray(axes, np.int64))
    return _with_form(picture, cropped, picture.form.sized(*target))


def to_rgb(picture: ImageBatch) -> ImageBatch:
    """Repeat the channel of a gray image three times."""
    picture.check("to_rgb")
    repeated = picture.op.Concat(picture.x, picture.x, picture.x, axis=picture.form.channels + 1)
    return _with_form(picture, repeated, picture.form.with_channels(3))


def channels_first(picture: ImageBatch) -> ImageBatch:
    """Transpose height, width, channels to channels, height, width."""
    return _with_form(picture, picture.op.Transpose(picture.x, perm=[0, 3, 1, 2]), picture.form.turned())


def channels_last(picture: ImageBatch) -> ImageBatch:
    """Transpose channels, height, width to height, width, channels."""
    return _with_form(picture, picture.op.Transpose(picture.x, perm=[0, 2, 3, 1]), picture.form.turned())


def _of_any_size(name: str) -> Callable[[SampleShape], SampleShape]:
    def before(form: SampleShape) -> SampleShape:
        check_picture(name, form)
        return form.sized(None, None)

    return before


def _of_gray(form: SampleShape) -> SampleShape:
    check_picture("to_rgb", form)
    if form.dims[form.channels] not in (None, 3):
        raise RecipeError(f"`to_rgb` gives three channels, but the next operation takes {form}", hint="leave it out")
    return form.with_channels(1)


def _swap_axes(name: str, axis: int) -> Callable[[SampleShape], SampleShape]:
    def before(form: SampleShape) -> SampleShape:
        check_picture(name, form)
        if form.channels != axis:
            raise RecipeError(f"`{name}` cannot give {form}, which the next operation takes", hint="leave it out")
        return form.turned()

    return before


OPERATIONS: Mapping[str, Operation] = {
    "scale": Operation(scale),
    "normalize": Operation(normalize),
    "resize": Operation(resize, _of_any_size("resize")),
    "center_crop": Operation(center_crop, _of_any_size("center_crop")),
    "to_rgb": Operation(to_rgb, _of_gray),
    "channels_first": Operation(channels_first, _swap_axes("channels_first", 0)),
    "channels_last": Operation(channels_last, _swap_axes("channels_last", 2)),
    "decode": Operation(decode, _of_file),
    "tokenize": Operation(tokenize),
}


SIZES = ("resize", "center_crop")
"""Operations that give images of different sizes one size."""


def size_of(name: str, size: Any) -> tuple[int, int]:
    """Parse height and width: `32`, `32x48` or `[32, 48]`."""
    parts = size.split("x") if isinstance(size, str) else list(size) if isinstance(size, Sequence) else [size] * 2
    try:
        height, width = (int(item) if isinstance(item, str) else item for item in parts)
    except ValueError:
        height = width = None
    if not all(is_number(length) and isinstance(length, int) and 0 < length < 2**31 for length in (height, width)):
        hint = f"write `{name}:size=32` or `{name}:size=32x48`"
        raise RecipeError(f"`size` of `{name}` is `{size}`, but must be one or two integers", hint=hint)
    assert height is not None and width is not None
    return height, width


def _with_form(picture: ImageBatch, x: Any, form: SampleShape) -> ImageBatch:
    batch = next(iter(picture.x.value.shape or ()), None)
    x.value.shape = ir.Shape([batch, *form.dims])
    return picture.changed(x, form=form)
