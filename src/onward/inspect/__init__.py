"""Contents of a model: `describe` reads them from the file, `render` prints them, `draw` makes a picture."""

from onward.inspect.description import describe
from onward.inspect.picture import draw
from onward.inspect.render import render, render_parameters
from onward.inspect.summary import Summary

__all__ = ["Summary", "describe", "draw", "render", "render_parameters"]
