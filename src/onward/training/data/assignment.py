"""Giving each of some takers one of its choices, no two the same, and whether there is another way to do it.

These are matchings of a bipartite graph: found by augmenting paths, and unique unless a path or a circle of exchanges
leads to another one. All of it takes polynomial time, whatever the number of ways.
"""

from __future__ import annotations

import graphlib
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple


class Assignment(NamedTuple):
    chosen: dict[str, str]
    is_only: bool


def assign(choices: Mapping[str, Iterable[str]], needed: Collection[str] = ()) -> Assignment | None:
    """A choice for each taker, in which all that are `needed` are taken; None if there is no way."""
    takers: dict[str, list[str]] = {one: [] for one in needed}
    for taker, ones in choices.items():
        for one in ones:
            takers.setdefault(one, []).append(taker)
    chosen: dict[str, str] = {}
    taken_by: dict[str, str] = {}
    if not all(one in taken_by or _augment(one, takers, taken_by, chosen) for one in needed):
        return None
    if not all(taker in chosen or _augment(taker, choices, chosen, taken_by) for taker in choices):
        return None
    return Assignment(chosen, not _can_change(takers, chosen, taken_by, needed))


def _augment(start: str, edges: Mapping[str, Iterable[str]], mates: dict[str, str], back: dict[str, str]) -> bool:
    """Give `start` a partner on the other side. Whoever has one on either side still has one afterwards."""
    came_from: dict[str, str] = {}
    waiting = [start]
    for here in waiting:  # which grows
        for there in edges[here]:
            if there in came_from:
                continue
            came_from[there] = here
            if there not in back:
                _turn(there, came_from, mates, back)
                return True
            waiting.append(back[there])
    return False


def _turn(end: str, came_from: Mapping[str, str], mates: dict[str, str], back: dict[str, str]) -> None:
    """Exchange partners along the path that ends here."""
    there: str | None = end
    while there is not None:
        here = came_from[there]
        before = mates.get(here)
        mates[here], back[there] = there, here
        there = before


def _can_change(
    takers: Mapping[str, list[str]], chosen: Mapping[str, str], taken_by: Mapping[str, str], needed: Collection[str]
) -> bool:
    """Whether one that is left could be taken for one that is not needed, or some could be exchanged in a circle."""
    given_up = {
        one: {chosen[taker] for taker in those if chosen[taker] != one} for one, those in takers.items()
    }  # what is given up when somebody takes this one instead
    waiting = [one for one in takers if one not in taken_by]
    seen = set(waiting)
    while waiting:
        for one in given_up[waiting.pop()] - seen:
            if one not in needed:
                return True
            seen.add(one)
            waiting.append(one)
    try:
        graphlib.TopologicalSorter({one: given_up[one] for one in taken_by}).prepare()
    except graphlib.CycleError:
        return True
    return False
