"""What a lowered model says about itself: the metadata `train.lowered`, as JSON, for loops in any language.

Types and shapes are in the graph, as the inputs and outputs that the names stand for.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import field
from typing import Any

from onward.errors import UnsupportedError
from onward.model import Model

_KEY = "train.lowered"
_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Contract:
    """How to drive a lowered model. A field is empty where a part has nothing of the kind."""

    part: str = ""
    batch: list[str] = field(default_factory=list)
    """Inputs that each call brings."""
    gradients: dict[str, str] = field(default_factory=dict)
    """Gradient -> its parameter: outputs of `gradients`, inputs of `apply`."""
    state: list[str] = field(default_factory=list)
    """Inputs that go on from call to call."""
    update: dict[str, str] = field(default_factory=dict)
    """State -> the output that replaces it."""
    metrics: list[str] = field(default_factory=list)
    """Outputs to look at."""
    loss: str | None = None
    """Which of them is minimised."""
    outputs: list[str] = field(default_factory=list)
    """Outputs of the inference model."""
    validation: dict[str, str] = field(default_factory=dict)
    """Input of validation data -> the input of a batch that it is for."""
    noise: list[str] = field(default_factory=list)
    """Which inputs are no rows of the data, but numbers for each batch."""
    settings: dict[str, str] = field(default_factory=dict)
    """What is told each time -> its input: `epochs`, `steps`, `seed`."""
    position: dict[str, str] = field(default_factory=dict)
    """Where the run stands -> its input, which is among the state."""
    best: dict[str, str] = field(default_factory=dict)
    """Input that holds the best value so far, which is among the state -> the state that it is of."""
    epochs: dict[str, str] = field(default_factory=dict)
    """What is known of each epoch -> its output."""
    stopped: str | None = None
    """The output that says why it stopped."""

    def to_json(self) -> dict[str, Any]:
        """The contract as the file has it, every key included."""
        return {"version": _VERSION, **dataclasses.asdict(self)}

    def write_to(self, model: Model) -> None:
        """Write the contract into the metadata of a lowered model."""
        model.metadata[_KEY] = json.dumps(self.to_json())


def contract_of(model: Model) -> Contract:
    """What the metadata of a lowered model says; keys of later versions are left out."""
    if _KEY not in model.metadata:
        raise UnsupportedError("this is not a lowered model", hint="make one with `onward lower`")
    found = json.loads(model.metadata[_KEY])
    known = {each.name for each in dataclasses.fields(Contract)}
    return Contract(**{key: value for key, value in found.items() if key in known})
