"""Giving each of some takers one of its choices, no two the same, and whether there is another way to do it.

These are matchings of a bipartite graph, found by augmenting paths in polynomial time, whatever the number of ways.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple


class Assignment(NamedTuple):
    chosen: dict[str, str]
    is_only: bool


def assign(choices: Mapping[str, Iterable[str]], needed: Collection[str] = ()) -> Assignment | None:
    """A choice for each taker, in which all that are `needed` are taken; None if there is no way.

    It is the only one if no taker can do without what it has: any other way gives something else to somebody.
    """
    chosen = _match(choices, needed)
    if chosen is None:
        return None
    others = ({**choices, taker: [o for o in choices[taker] if o != one]} for taker, one in chosen.items())
    return Assignment(chosen, all(_match(other, needed) is None for other in others))


def _match(choices: Mapping[str, Iterable[str]], needed: Collection[str]) -> dict[str, str] | None:
    takers: dict[str, list[str]] = {one: [] for one in needed}
    for taker, ones in choices.items():
        for one in ones:
            takers.setdefault(one, []).append(taker)
    chosen: dict[str, str] = {}
    taken_by: dict[str, str] = {}
    if not all(one in taken_by or _augment(one, takers, taken_by, chosen) for one in needed):
        return None
    return chosen if all(taker in chosen or _augment(taker, choices, chosen, taken_by) for taker in choices) else None


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
