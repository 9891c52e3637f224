"""Training information of older forms, brought into the present one: drafts of 2019 and 2020, and onnx 1.7's GraphCall.

docs/older-forms.md says where each form is written down, and which field became which.
"""

from __future__ import annotations

from onnx import ModelProto

from onward.model.legacy import calls, drafts


def is_older(proto: ModelProto) -> bool:
    return drafts.has_training(proto) or calls.has_calls(proto)


def convert(proto: ModelProto) -> list[str]:
    """Bring training information into the present form, in place; what was converted, nothing for almost every file."""
    return [*drafts.convert(proto), *calls.convert(proto)]
