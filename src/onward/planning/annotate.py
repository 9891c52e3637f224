"""A model file with a plan in it, whose weights need not be there."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from onward.errors import ExternalDataError, WriteError
from onward.model import load
from onward.model.serde import load_references, stamp
from onward.model.sharding import Sharding
from onward.model.storage import write_file


def annotate(source: str | os.PathLike[str], sharding: Sharding, path: str | os.PathLike[str]) -> None:
    """Write a copy of a model that says how it is divided; what a recipe would add to it is not in it."""
    try:
        model, is_whole = load(source), True
    except ExternalDataError:
        model, is_whole = load_references(source), False
    there = {value.name for value in model.initializers()}
    own = {name: axes for name, axes in sharding.tensors.items() if name in there}
    model = model.copy()
    dataclasses.replace(sharding, tensors=own).write_to(model)
    stamp(model)
    if is_whole:
        model.save(path)
    elif Path(path).resolve().parent == Path(source).resolve().parent:
        write_file(path, model.to_proto().SerializeToString())
    else:
        raise WriteError(
            f"the data of `{source}` are not there, so that they cannot be copied to `{Path(path).parent}`",
            hint="write beside the model",
        )
