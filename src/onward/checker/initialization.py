"""Rules about initialization graphs (OW301, OW302, OW307, OW308)."""

from __future__ import annotations

from collections.abc import Iterator

from onward.checker.findings import Finding, bare, listing, make_finding
from onward.checker.view.graphs import attribute
from onward.checker.view.scope import Scope
from onward.standard import domain_of

_RANDOM = {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli"}


def no_inputs(step: Scope) -> Iterator[Finding]:
    graph = step.initialization.own
    if graph.inputs:
        yield make_finding(
            "OW301",
            f"{graph.place}.input",
            f"the graph has inputs: {listing(graph.inputs)}; nobody feeds an initialization",
            "turn them into initializers of the initialization graph",
        )


def not_omitted(step: Scope) -> Iterator[Finding]:
    graph = step.initialization.own
    if graph.is_empty and step.resets:
        yield make_finding(
            "OW302",
            f"training_info[{step.step}].initialization_binding",
            f"{listing(step.resets)} should be initialised, but there is no initialization graph",
        )


def all_is_bound(step: Scope) -> Iterator[Finding]:
    graph = step.initialization.own
    bound = set(step.resets.values())
    for name in dict.fromkeys(graph.outputs):
        if name not in bound:
            place = f'{graph.place}.output["{bare(name)}"]'
            yield make_finding("OW307", place, "no initialization binding assigns this output", "bind it, or remove it")
    if graph.nodes and not graph.outputs:
        yield make_finding("OW307", graph.place, "the graph computes values, but returns none")


def check_seeds(step: Scope) -> Iterator[Finding]:
    for site in step.initialization.own.sites:
        node = site.node
        if domain_of(node) == "" and node.op_type in _RANDOM and attribute(node, "seed") is None:
            yield make_finding(
                "OW308", site.place, "each reset draws other numbers", "set the attribute `seed` to reproduce them"
            )


STEP_RULES = (no_inputs, not_omitted, all_is_bound, check_seeds)
