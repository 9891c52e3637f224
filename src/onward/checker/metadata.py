"""Rules about metadata, and about outdated training information (OW701, OW703 to OW708)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from onnx import StringStringEntryProto

from onward.checker.codes import REFRESH, Finding, bare, listing, make_finding, quote
from onward.checker.scope import CheckedModel, Scope
from onward.model.serde import FINGERPRINT, fingerprint
from onward.model.state import FACTS, KEPT, PARAMETER_KEY, PREPROCESSING, ROLE_KEY
from onward.standard import METADATA_IR

_OTHER_FACTS = ("metrics", "model_config", "args", "data", "parallel", "sharding")
JSON_KEYS = {*FACTS, *(f"train.{name}" for name in _OTHER_FACTS)}
ROLES = {
    *("parameter", "optimizer_state", "statistics", "counter", "rng", "master", "ema", "accum", "scaler", "state"),
    *("hyper", PREPROCESSING, KEPT),
}


class MetadataHolder(NamedTuple):
    """An object with metadata, and the scope of the names in it."""

    location: str
    entries: Iterable[StringStringEntryProto]
    scope: Scope
    is_tensor: bool = False


def _holders(subject: CheckedModel) -> Iterator[MetadataHolder]:
    """Yield all holders of metadata but the model, which may have metadata in every IR version."""
    for scope in subject.scopes:
        graph = scope.own
        if graph.proto.metadata_props:
            yield MetadataHolder(graph.place, graph.proto.metadata_props, scope)
        for field in ("initializer", "input", "output", "value_info"):
            for value in getattr(graph.proto, field):
                if value.metadata_props:
                    location = f'{graph.place}.{field}["{bare(value.name)}"]'
                    yield MetadataHolder(location, value.metadata_props, scope, is_tensor=field == "initializer")
        for site in graph.sites:
            if site.node.metadata_props:
                yield MetadataHolder(site.place, site.node.metadata_props, scope)


def _all_holders(subject: CheckedModel) -> Iterator[MetadataHolder]:
    yield MetadataHolder("model", subject.proto.metadata_props, subject.inference)
    yield from _holders(subject)


def fresh(subject: CheckedModel) -> Iterator[Finding]:
    current = None
    for step in subject.steps:
        for entry in step.own.proto.metadata_props:
            if entry.key != FINGERPRINT:
                continue
            current = current or fingerprint(subject.proto.graph)
            if entry.value != current:
                message = "the inference graph has changed since the training was written"
                yield make_finding("OW701", step.own.place, message, REFRESH)


def json_parses(subject: CheckedModel) -> Iterator[Finding]:
    for holder in _all_holders(subject):
        for entry in holder.entries:
            if _should_be_json(entry) and (problem := _parse(entry.value)[1]):
                message = f"not JSON: {problem}"
                yield make_finding("OW703", f'{holder.location}.metadata_props["{bare(entry.key)}"]', message)


def _should_be_json(entry: StringStringEntryProto) -> bool:
    if entry.key == PARAMETER_KEY:  # a name, whatever it looks like
        return False
    return entry.key in JSON_KEYS or (entry.key.startswith("train.") and entry.value[:1] in ("{", "["))


def _parse(text: str) -> tuple[Any, str | None]:
    try:
        return json.loads(text), None
    except RecursionError:
        return None, "nested too deeply"
    except ValueError as error:
        return None, str(error)


def parameters_exist(subject: CheckedModel) -> Iterator[Finding]:
    for holder in _all_holders(subject):
        for entry in holder.entries:
            if entry.key == PARAMETER_KEY and holder.is_tensor:
                named = [entry.value]
            elif entry.key == "train.optimizer":
                named = list(_optimized_parameters(_parse(entry.value)[0]))
            else:
                continue
            if missing := [name for name in named if not _is_known(subject, holder.scope, name)]:
                hint = holder.scope.suggest(missing[0])
                location = f'{holder.location}.metadata_props["{entry.key}"]'
                yield make_finding("OW704", location, f"the model has no parameter {listing(missing)}", hint)


def _optimized_parameters(groups: Any) -> Iterator[str]:
    """Yield the parameters that `train.optimizer` names."""
    for group in groups if isinstance(groups, list) else []:
        names = group.get("params") if isinstance(group, dict) else None
        yield from (name for name in names if isinstance(name, str)) if isinstance(names, list) else ()


def _is_known(subject: CheckedModel, scope: Scope, name: str) -> bool:
    is_of_step = scope.step is None and any(name in step.own.initializers for step in subject.steps)
    return is_of_step or scope.initializer(name) is not None


def roles_are_known(subject: CheckedModel) -> Iterator[Finding]:
    for holder in _holders(subject):
        for entry in holder.entries:
            if entry.key == ROLE_KEY and entry.value not in ROLES:
                hint = subject.suggest(entry.value, iter(ROLES)) or f"roles: {', '.join(sorted(ROLES))}"
                yield make_finding("OW705", holder.location, f"unknown role {quote(entry.value)}", hint)


def keys_once(subject: CheckedModel) -> Iterator[Finding]:
    for holder in _all_holders(subject):
        if twice := [key for key, number in Counter(entry.key for entry in holder.entries).items() if number > 1]:
            code = "OW707" if holder.location == "model" else "OW706"
            yield make_finding(code, f"{holder.location}.metadata_props", f"duplicate key {listing(twice)}")


def new_enough(subject: CheckedModel) -> Iterator[Finding]:
    version = subject.proto.ir_version
    if not 1 <= version < METADATA_IR:
        return
    holders = [holder.location for holder in _holders(subject)]
    if holders:
        more = f" and {len(holders) - 1} more have" if len(holders) > 1 else " has"
        message = f"{holders[0]}{more} metadata, which came with IR version {METADATA_IR}; the file has {version}"
        yield make_finding("OW708", "model", message, f"write the model with IR version {METADATA_IR} or newer")


MODEL_RULES = (fresh, json_parses, parameters_exist, roles_are_known, keys_once, new_enough)
