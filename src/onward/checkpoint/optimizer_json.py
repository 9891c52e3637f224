"""What a checkpoint says of its optimizers in words of a recipe, as JSON, for formats that have a place for more."""

from __future__ import annotations

import dataclasses
from typing import Any

from onward.checkpoint.format import Checkpoint
from onward.model.storage.files import SENSELESS, blame_file
from onward.recipe.spec import parse


def words_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the optimizers, schedules, clipping and accumulation of a checkpoint; nothing where it does not tell."""
    groups = [group for each in checkpoint.optimizers for group in each.groups]
    if not groups or any(group.optimizer is None for group in groups):
        return {}
    return {
        "groups": [{"optimizer": str(group.optimizer), "parameters": [*group.parameters]} for group in groups],
        "schedules": [None if each.words is None else [*map(str, each.words)] for each in checkpoint.schedules],
        "every": [each.every for each in checkpoint.schedules],
        "clip": checkpoint.clip and dict(checkpoint.clip),
        "accumulate": checkpoint.accumulate,
    }


def with_words(checkpoint: Checkpoint, words: Any) -> Checkpoint:
    """A checkpoint that says what was written beside it. Groups are those of the words, if they name the same."""
    if not words or len(checkpoint.optimizers) != 1:
        return checkpoint
    (optimizer,) = checkpoint.optimizers
    with blame_file(f"what `{checkpoint.path}` says of its optimizer cannot be read", *SENSELESS):
        said = [(parse(str(group["optimizer"])), tuple(map(str, group["parameters"]))) for group in words["groups"]]
        schedules = [None if each is None else tuple(parse(str(spec)) for spec in each) for each in words["schedules"]]
        units = [None if each is None else int(each) for each in words.get("every") or [None] * len(schedules)]
        clip = words["clip"] and dict(words["clip"])
        accumulate = None if words.get("accumulate") is None else int(words["accumulate"])
    stored = {name: group for group in optimizer.groups for name in group.parameters}
    if {*stored} != {name for _, names in said for name in names}:
        return checkpoint
    # What optax stores does not tell apart groups that keep nothing, such as several of SGD.
    groups = tuple(
        dataclasses.replace(stored[names[0]], parameters=names, optimizer=spec) for spec, names in said if names
    )
    families = dict.fromkeys(group.optimizer.name for group in groups if group.optimizer)
    found = []
    for each, told, every in zip(checkpoint.schedules, schedules or [()], units or [None], strict=False):
        position = each.position
        if position is not None and every is not None and every > 1:
            position //= every  # optax counts updates
        found.append(dataclasses.replace(each, words=told, every=every or each.every, position=position))
    return dataclasses.replace(
        checkpoint,
        optimizers=(dataclasses.replace(optimizer, groups=groups, families=tuple(families)),),
        schedules=tuple(found) or checkpoint.schedules,
        clip=clip,
        accumulate=accumulate if checkpoint.accumulate is None else accumulate or checkpoint.accumulate,
    )
