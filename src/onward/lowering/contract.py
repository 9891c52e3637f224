"""What a lowered model says about itself: the metadata `train.lowered`, as JSON, for loops in any language.

Types and shapes are in the graph, as the inputs and outputs that the names stand for.
"""

from __future__ import annotations

import json
from typing import Any

from onward.errors import UnsupportedError
from onward.model import Model

CONTRACT = "train.lowered"
VERSION = 1

_KEYS: dict[str, Any] = {
    "version": VERSION,
    "part": "",
    "batch": [],  # inputs that each call brings
    "gradients": {},  # gradient -> its parameter: outputs of `gradients`, inputs of `apply`
    "state": [],  # inputs that go on from call to call
    "update": {},  # state -> the output that replaces it
    "metrics": [],  # outputs to look at
    "loss": None,  # which of them is minimised
    "outputs": [],  # outputs of the inference model
}
"""All keys, which every contract has, with what they are where a part has nothing of the kind."""


def record(model: Model, facts: dict[str, Any]) -> None:
    """Write the contract into the metadata of a lowered model."""
    assert facts.keys() <= _KEYS.keys()
    model.metadata[CONTRACT] = json.dumps({**_KEYS, **facts})


def contract_of(model: Model) -> dict[str, Any]:
    """What the metadata of a lowered model says."""
    if CONTRACT not in model.metadata:
        raise UnsupportedError("this is not a lowered model", hint="make one with `onward lower`")
    found: dict[str, Any] = json.loads(model.metadata[CONTRACT])
    return found
