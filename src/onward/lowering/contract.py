"""Metadata `train.lowered` of a lowered model: how to drive it, as JSON, for loops in any language.

Types and shapes are those of the inputs and outputs that the names stand for.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import field
from typing import Any

from onward.errors import UnsupportedError
from onward.model import Model

_KEY = "train.lowered"
_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Contract:
    """Interface of a lowered model. A field is empty if the part has nothing of this type."""

    part: str = ""
    batch: list[str] = field(default_factory=list)
    """Inputs that take the data of a call."""
    gradients: dict[str, str] = field(default_factory=dict)
    """Gradient -> its parameter: outputs of `gradients`, inputs of `apply`."""
    state: list[str] = field(default_factory=list)
    """Inputs that take the state of the call before."""
    update: dict[str, str] = field(default_factory=dict)
    """State -> the output that replaces it."""
    metrics: list[str] = field(default_factory=list)
    """Outputs to log."""
    loss: str | None = None
    """The metric that is minimized."""
    outputs: list[str] = field(default_factory=list)
    """Outputs of the inference model."""
    validation: dict[str, str] = field(default_factory=dict)
    """Input with validation data -> the input of a batch that these are for."""
    noise: list[str] = field(default_factory=list)
    """Inputs that take new random numbers for each batch, not rows of the data."""
    settings: dict[str, str] = field(default_factory=dict)
    """Setting of a call -> its input: `epochs`, `steps`, `seed`."""
    position: dict[str, str] = field(default_factory=dict)
    """Progress of the run -> its input, which is part of the state."""
    best: dict[str, str] = field(default_factory=dict)
    """Input with the best value so far, part of the state -> the state that it copies."""
    epochs: dict[str, str] = field(default_factory=dict)
    """Result of each epoch -> its output."""
    stopped: str | None = None
    """Output with the reason why the run stopped."""

    @property
    def skips_overflows(self) -> bool:
        """True if the step itself keeps its weights after an overflow, and shrinks the scale of its loss."""
        return any(re.sub(r"_\d+$", "", name) == "scaler/scale" for name in self.update)

    def to_json(self) -> dict[str, Any]:
        """Return the contract as stored in the file, with all keys."""
        return {"version": _VERSION, **dataclasses.asdict(self)}

    def write_to(self, model: Model) -> None:
        """Write the contract into the metadata of a lowered model."""
        model.metadata[_KEY] = json.dumps(self.to_json())


def contract_of(model: Model) -> Contract:
    """Return the contract in the metadata of a lowered model; keys of later versions are ignored."""
    if _KEY not in model.metadata:
        raise UnsupportedError("this is not a lowered model", hint="make one with `onward lower`")
    stored = json.loads(model.metadata[_KEY])
    fields = {field_.name for field_ in dataclasses.fields(Contract)}
    return Contract(**{key: value for key, value in stored.items() if key in fields})
