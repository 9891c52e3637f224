"""A picture of a model and its training: which blocks there are, where they go, how they look."""

from __future__ import annotations

from onward.inspect.description import describe
from onward.inspect.picture.blocks import Picture
from onward.inspect.picture.svg import write_svg
from onward.model import Source, load
from onward.run_state.reading import blame_model


def draw(source: Source, step: int = 0) -> str:
    """An SVG picture of a step: forward pass, loss, gradients, update and state; of the graph alone if there is none.

    The file needs nothing else. Long graphs are drawn by parts, as the names of nodes tell them.
    """
    model = load(source)
    if model.steps or step:
        model.step(step)
    summary = describe(model)
    index = step % len(model.steps) if model.steps else None
    with blame_model():
        picture = Picture(model, summary, index)
    several = index is not None and len(model.steps) > 1
    return write_svg(picture, f"{summary.name}, step {index}" if several else summary.name)
