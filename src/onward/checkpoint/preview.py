"""What an import would do, in a few lines and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onward.checkpoint.importing import Plan
from onward.checkpoint.summary import plain, settings
from onward.errors import list_names

_MOST = 6


def lines(plan: Plan) -> list[tuple[str, str]]:
    """What there is to say, and under which words."""
    checkpoint, matched, run = plan.checkpoint, plan.match, plan.run
    rows = [
        ("checkpoint", f"{checkpoint.path}, {checkpoint.title}"),
        ("names", f"{len(matched.names)} of {len(checkpoint.tensors)} tensors have their place in the model"),
        *(("", rule) for rule in matched.rules),
        (
            "left out",
            list_names(matched.left, _MOST) and f"{list_names(matched.left, _MOST)}: the model has no place for them",
        ),
        *(("optimizer", f"{group.optimizer}") for group in run.groups[:1]),
        *(("", f"{group.optimizer}") for group in run.groups[1:]),
        ("", f"keeps {len(plan.slots)} tensors of {len(run.parameters)} parameters"),
        ("schedule", ", then ".join(map(str, run.schedule)) or "the rate stays"),
        ("step", f"{run.step}"),
        ("loss", _loss(run.loss)),
        ("clipping", settings(run.clip or {})),
        ("further", settings(run.recipe)),
        ("kept", "; ".join(_kept_lines(plan))),
        *(("note", note) for note in plan.notes[len(matched.rules) :]),
    ]
    return [(label, text) for label, text in rows if text]


def to_json(plan: Plan) -> dict[str, Any]:
    matched, run = plan.match, plan.run
    return {
        "checkpoint": str(plan.checkpoint.path),
        "format": plan.checkpoint.format,
        "names": dict(matched.names),
        "turned": sorted(matched.turned),
        "rules": list(matched.rules),
        "left": list(matched.left),
        "groups": [{"optimizer": str(each.optimizer), "parameters": list(each.parameters)} for each in run.groups],
        "slots": sorted(plan.slots),
        "schedule": [str(spec) for spec in run.schedule],
        "step": run.step,
        "loss": _loss(run.loss),
        "clip": plain(run.clip),
        "recipe": plain(run.recipe),
        "kept": _kept_lines(plan),
        "notes": list(plan.notes[len(matched.rules) :]),
    }


def _loss(loss: Any) -> str:
    if isinstance(loss, Mapping):
        return " + ".join(f"{output}={_loss(each)}" for output, each in loss.items())
    return " + ".join(map(_loss, loss)) if isinstance(loss, list | tuple) else str(loss)


def _kept_lines(plan: Plan) -> list[str]:
    """What a training model has no use for, and holds for the way back."""
    checkpoint = plan.checkpoint
    parts = {
        "states of random numbers": checkpoint.randomness,
        "where in its data it is": checkpoint.data,
        "the scale of the loss": checkpoint.scaler and "loss_scale" not in plan.run.recipe,
        "averages": checkpoint.averages,
        "the configuration": checkpoint.configuration,
        "arguments": checkpoint.arguments,
    }
    return [what for what, is_there in parts.items() if is_there]
