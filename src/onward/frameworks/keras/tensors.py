"""Values of a Keras model while it is translated, in one layout or both."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from onward.build import Expr

Shape = tuple[int | None, ...]


class Tensor:
    """A value as Keras has it (`plain`), and with the last axis moved to the second place, where ONNX has channels.

    Either is made of the other when it is asked for, and only once: neighbours that agree need no Transpose.
    """

    def __init__(self, shape: Sequence[int | None], *, plain: Expr | None = None, moved: Expr | None = None):
        self.shape: Shape = tuple(shape)
        self.logits: Tensor | None = None
        """What this is the softmax or sigmoid of."""
        self.below: int | None = None
        """The number of rows of the table that this is an index into."""
        self._plain = plain
        self._moved = moved if len(self.shape) > 2 else None
        if len(self.shape) <= 2 and plain is None:
            self._plain = moved
        self._declare()

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def plain(self) -> Expr:
        if self._plain is None:
            assert self._moved is not None
            self._plain = self._moved.op.Transpose(self._moved, perm=[0, *range(2, self.rank), 1])
            self._declare()
        return self._plain

    @property
    def moved(self) -> Expr:
        if self.rank <= 2:
            return self.plain
        if self._moved is None:
            assert self._plain is not None
            self._moved = self._plain.op.Transpose(self._plain, perm=[0, self.rank - 1, *range(1, self.rank - 1)])
            self._declare()
        return self._moved

    @property
    def is_moved(self) -> bool:
        """Whether only the layout of ONNX is there so far."""
        return self._plain is None

    def map(self, function: Callable[[Expr], Expr]) -> Tensor:
        """What a function of single elements makes of it, in the layout that is there."""
        if self.is_moved:
            return Tensor(self.shape, moved=function(self.moved))
        return Tensor(self.shape, plain=function(self.plain))

    def _declare(self) -> None:
        """Shapes are known from Keras."""
        sizes = [size if size is not None else ("batch" if axis == 0 else None) for axis, size in enumerate(self.shape)]
        if self._plain is not None:
            self._plain.value.shape = ir.Shape(sizes)
        if self._moved is not None:
            self._moved.value.shape = ir.Shape([sizes[0], sizes[-1], *sizes[1:-1]])


def elementwise(function: Callable[..., Expr], *tensors: Tensor) -> Expr | Tensor:
    """What a function of the elements of several tensors makes of them; they may be broadcast."""
    first = tensors[0]
    if all(x.is_moved and x.shape == first.shape for x in tensors):
        return Tensor(first.shape, moved=function(*(x.moved for x in tensors)))
    return function(*(x.plain for x in tensors))
