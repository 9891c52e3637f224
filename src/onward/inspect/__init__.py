"""What is in a model: `describe` reads it from the file, `render` prints it on a screen, `draw` makes a picture of it."""

from onward.inspect.summary import Summary, describe

__all__ = ["Summary", "describe"]
