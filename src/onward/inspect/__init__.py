"""What is in a model: `describe` reads it from the file, `render` prints it, `draw` makes a picture of it."""

from onward.inspect.description import describe
from onward.inspect.picture import draw
from onward.inspect.render import render, render_parameters
from onward.inspect.summary import Summary

__all__ = ["Summary", "describe", "draw", "render", "render_parameters"]
