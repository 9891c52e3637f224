"""Pictures of different sizes: the first operations on one picture alone, up to that which gives all the same size.

The graph of a training model takes batches, so that what fixes the size must have happened before. It is still in the
graph, which gets pictures of that size already, and leaves them as they are: to resize to the same size changes no bit.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onward.build import Builder
from onward.model import Model
from onward.recipe.preprocessing.operations import OPERATIONS, SIZES, size_of
from onward.recipe.preprocessing.picture import Form, Picture
from onward.recipe.preprocessing.pipeline import Pipeline
from onward.recipe.spec import Spec
from onward.runtime.sessions import open_session
from onward.standard import IR_VERSION, OLDEST_OPSET

_MOVES = ("channels_first", "channels_last", "to_rgb")
"""What can be undone: after it, a picture is what it was, in another order."""


class Single:
    """Brings bytes of a picture to the size that a pipeline makes of it, as numbers that are not rounded."""

    def __init__(self, specs: tuple[Spec, ...], form: Form):
        self._specs, self._form = specs, form
        raw = ir.Value(name="x", type=ir.TensorType(ir.DataType.UINT8), shape=ir.Shape([1, *form.dims]))
        graph = ir.Graph([raw], [], nodes=[], name="picture", opset_imports={"": OLDEST_OPSET})
        op = Builder(graph, opset=OLDEST_OPSET)
        picture = Picture(op.Cast(op(raw), to=ir.DataType.FLOAT), form)
        for spec in specs:
            picture = OPERATIONS[spec.name].build(picture, **spec.options)
        made = picture.x.named("y").value
        made.type, self._made = ir.TensorType(ir.DataType.FLOAT), picture.form
        graph.outputs.append(made)
        # Other pictures wait for other cores.
        self._session = open_session(Model(ir.Model(graph, ir_version=IR_VERSION)), threads=1)

    @classmethod
    def of(cls, pipeline: Pipeline, form: Form) -> Single | None:
        """For pictures of such a form; None where the size is not fixed, or only after values were changed."""
        at = next((at for at, spec in enumerate(pipeline.specs) if spec.name in SIZES), None)
        if at is None or not form.is_picture or not all(spec.name in _MOVES for spec in pipeline.specs[:at]):
            return None
        return cls(pipeline.specs[: at + 1], form)

    @property
    def least(self) -> tuple[int, int]:
        """The height and width that a picture must have."""
        last = self._specs[-1]
        return size_of("center_crop", last.options["size"]) if last.name == "center_crop" else (1, 1)

    def __call__(self, picture: np.ndarray) -> np.ndarray:
        made = self._session.run(None, {"x": picture[None]})[0][0]
        if any(spec.name == "to_rgb" for spec in self._specs):  # all three are alike
            made = np.take(made, [0], axis=self._made.channels)
        return np.ascontiguousarray(np.moveaxis(made, self._made.channels, self._form.channels))

    def __str__(self) -> str:
        return str(self._specs[-1])
