"""Transformations of models that keep their training, which standard tools drop or break."""

from onward.transform.declare import declare
from onward.transform.extract import extract
from onward.transform.inline import inline
from onward.transform.merge import add_prefix, merge, rename
from onward.transform.opset import convert_opset
from onward.transform.training import refresh, strip

__all__ = ["add_prefix", "convert_opset", "declare", "extract", "inline", "merge", "refresh", "rename", "strip"]


def __dir__() -> list[str]:
    return __all__
