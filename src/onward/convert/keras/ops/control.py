"""Control flow. A branch that only the data decide about is computed on both sides, and then chosen."""

from __future__ import annotations

from onward.run.framework import NotOnHost, Operators
from onward.run.shared import control

operators = Operators(control.operators)


def branch(condition, *, then_branch, else_branch, framework):
    try:
        return control.branch(condition, then_branch=then_branch, else_branch=else_branch, framework=framework)
    except NotOnHost:
        choose = framework.operators["Where"]
        pairs = zip(then_branch(), else_branch(), strict=True)
        return tuple(choose(condition, framework.place(a), framework.place(b)) for a, b in pairs)


operators["If"] = branch
