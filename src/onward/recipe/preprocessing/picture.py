"""What data are on their way to the model: a tensor, where its channels are, and the largest value it can have."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from onward.build import Builder, Expr
from onward.errors import RecipeError

Dims = tuple[int | None, ...]

_CHANNELS = (1, 3, 4)


def dims_of(shape: Iterable[Any]) -> Dims:
    """The dimensions of a shape of onnx_ir, as far as they are numbers."""
    return tuple(dim if isinstance(dim, int) else None for dim in shape)


@dataclasses.dataclass(frozen=True)
class Form:
    """The shape of a sample. A dimension that is not known is None."""

    dims: Dims
    channels: int
    """The axis of channels, or of features."""

    @classmethod
    def of(cls, dims: Sequence[int | None]) -> Form:
        """Three dimensions are a picture, with the channels first or last; of others, features are last."""
        is_first = len(dims) == 3 and (dims[0] in _CHANNELS or dims[2] not in _CHANNELS)
        return cls(tuple(dims), 0 if is_first else max(len(dims) - 1, 0))

    @property
    def is_picture(self) -> bool:
        return len(self.dims) == 3

    @property
    def axes(self) -> tuple[int, int]:
        """Height and width, as axes of a batch."""
        return (2, 3) if self.channels == 0 else (1, 2)

    def sized(self, height: int | None, width: int | None) -> Form:
        rest = (self.dims[self.channels],)
        return dataclasses.replace(self, dims=(*rest, height, width) if self.channels == 0 else (height, width, *rest))

    def with_channels(self, count: int | None) -> Form:
        dims = (*self.dims[: self.channels], count, *self.dims[self.channels + 1 :])
        return dataclasses.replace(self, dims=dims)

    def turned(self) -> Form:
        """With the channels at the other end."""
        first, second, third = self.dims
        return Form((second, third, first), 2) if self.channels == 0 else Form((third, first, second), 0)

    def fits(self, dims: Sequence[int | None]) -> bool:
        return len(dims) == len(self.dims) and all(
            a is None or b is None or a == b for a, b in zip(dims, self.dims, strict=True)
        )

    def __str__(self) -> str:
        return "[" + ", ".join("?" if dim is None else str(dim) for dim in self.dims) + "]"


@dataclasses.dataclass(frozen=True)
class Picture:
    """A batch of samples, in the middle of being prepared."""

    x: Expr
    form: Form
    limit: float | None = None
    """Values go from 0 to this, as far as that is known."""

    @property
    def op(self) -> Builder:
        return self.x.op

    def check(self, name: str) -> None:
        check_picture(name, self.form)

    def changed(self, x: Expr, **others: Any) -> Picture:
        return dataclasses.replace(self, x=x, **others)


def check_picture(name: str, form: Form) -> None:
    """Refuse what is for pictures elsewhere."""
    if not form.is_picture:
        raise RecipeError(
            f"`{name}` is for pictures, and a sample has the shape {form} there",
            hint="a picture has three dimensions: channels, height and width",
        )


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
