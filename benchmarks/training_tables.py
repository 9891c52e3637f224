"""Tables of the benchmark of training."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from workloads import LARGE, SMALL, WORKLOADS
from workloads.contenders import CONTENDERS

BASE, OWN = "torch", "onward"

Rows = dict[str, Any]
"""Contender -> results."""


def tables(results: dict[str, Any]) -> str:
    """Return the tables of workloads, each with the machine that it was measured `on`, and its `contenders`."""
    rows = {name: result["contenders"] for name, result in results.items()}
    return "\n\n".join(
        [
            _machines(results),
            _table(
                rows, f"ms a step (ratio to {CONTENDERS[BASE].title})", _step, {"Onward to the best peer": _to_best}
            ),
            _table(rows, "s to the end of the first step", lambda row, _: f"{row['start']:.2f}"),
            _table(rows, "MB at most", lambda row, _: f"{row['memory'] / 1e6:.0f}"),
        ]
    )


def by_size(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the results of small and of large models, by the mark of their table on the page."""
    marks = {"training": SMALL, "training of large models": LARGE}
    return {mark: {name: results[name] for name in workloads if name in results} for mark, workloads in marks.items()}


def ratio(row: dict[str, Any], base: dict[str, Any]) -> float:
    """Return the median ratio of two contenders over turns, in which other load on the machine cancels."""
    return statistics.median(a / b for a, b in zip(row["rounds"], base["rounds"], strict=True))


def milliseconds(row: dict[str, Any]) -> float:
    """Return the median milliseconds of a step."""
    return 1e3 * statistics.median(row["rounds"])


def _machines(results: dict[str, Any]) -> str:
    models: dict[str, list[str]] = {}
    for name, result in results.items():
        models.setdefault(result["on"], []).append(WORKLOADS[name].title.partition(",")[0])
    if len(models) == 1:
        return f"On {next(iter(models))}."
    return "\n".join(f"- {', '.join(titles)}: on {machine}." for machine, titles in models.items())


def _table(
    results: dict[str, Rows],
    title: str,
    cell: Callable[[dict[str, Any], Rows], str],
    last: dict[str, Callable[[Rows], str]] | None = None,
) -> str:
    """Return a table with a column per contender, empty where it did not run, and columns of all at the end."""
    last = last or {}
    names = [name for name in CONTENDERS if any(name in rows for rows in results.values())]
    titles = [title, *(CONTENDERS[name].title for name in names), *last]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for workload, rows in results.items():
        cells = [cell(rows[name], rows) if name in rows else "" for name in names]
        cells += [of_all(rows) for of_all in last.values()]
        lines.append(f"| {' | '.join([WORKLOADS[workload].title, *cells])} |")
    return "\n".join(lines)


def _step(row: dict[str, Any], rows: Rows) -> str:
    comparison = f" ({ratio(row, rows[BASE]):.2f})" if BASE in rows else ""
    return f"{milliseconds(row):.2f}{comparison}"


def _to_best(rows: Rows) -> str:
    peers = [row for name, row in rows.items() if name != OWN]
    return f"{ratio(rows[OWN], min(peers, key=milliseconds)):.2f}" if peers and OWN in rows else ""
