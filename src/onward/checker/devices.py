"""Rules about devices: configurations of the model, and how nodes divide tensors among them (OW140 to OW143)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from onnx import ShardingSpecProto

from onward.checker.codes import Finding, listing, make_finding, quote
from onward.checker.graphs import NodeView
from onward.checker.scope import CheckedModel, Scope
from onward.standard import DEVICES_IR

_NAMES = "each configuration has a name, at least one device, and as many names of devices, or none"


def configurations(subject: CheckedModel) -> Iterator[Finding]:
    given, version = subject.proto.configuration, subject.proto.ir_version
    used = bool(given) or any(call.node.device_configurations for call in subject.calls)
    if used and 0 < version < DEVICES_IR:
        message = f"device configurations came with IR version {DEVICES_IR}; this file says {version}"
        yield make_finding("OW143", "model", message)
    for name, times in Counter(each.name for each in given).items():
        if times > 1 or not name:
            what = f"{quote(name)} stands {times} times" if name else "a configuration has no name"
            yield make_finding("OW140", "configuration", what, _NAMES)
    for each in given:
        if each.num_devices < 1 or (each.device and len(each.device) != each.num_devices):
            message = f"{quote(each.name)} has {each.num_devices} devices and {len(each.device)} names for them"
            yield make_finding("OW140", "configuration", message, _NAMES)


def nodes_name_configurations(scope: Scope) -> Iterator[Finding]:
    known = {each.name: each.num_devices for each in scope.subject.proto.configuration}
    for node in scope.own.nodes:
        for each in node.proto.device_configurations:
            if each.configuration_id not in known:
                message = f"the model has no device configuration {quote(each.configuration_id)}"
                yield make_finding("OW141", node.place, message, f"it has {listing(known)}" if known else None)
                continue
            for spec in each.sharding_spec:
                for fault in _faults(scope, node, spec, known[each.configuration_id]):
                    yield make_finding("OW142", node.place, f"{quote(spec.tensor_name)} {fault}")


def _faults(scope: Scope, node: NodeView, spec: ShardingSpecProto, devices: int) -> Iterator[str]:
    """What is wrong with how a node divides a tensor, as the rest of a sentence about that."""
    if spec.tensor_name not in (*node.args, *node.outputs):
        yield "is divided, and the node neither reads nor writes it"
        return
    groups = {entry.key: list(entry.value) for entry in spec.index_to_device_group_map}
    named = [device for key in spec.device for device in groups.get(key, [key])]
    if strange := [device for device in named if not 0 <= device < devices]:
        yield f"is given to the device {strange[0]}, and there are {devices}"
    rank = _rank(scope, spec.tensor_name)
    axes = [dim.axis if rank is None else dim.axis % max(rank, 1) for dim in spec.sharded_dim]
    if rank is not None and (beyond := [dim.axis for dim in spec.sharded_dim if not -rank <= dim.axis < rank]):
        yield f"has {rank} axes, and is divided along axis {beyond[0]}"
    elif len(set(axes)) < len(axes):
        yield "is divided twice along one axis"
    parts = [simple.num_shards for dim in spec.sharded_dim for simple in dim.simple_sharding]
    if any(part < 1 for part in parts):
        yield f"is divided into {min(parts)} parts"
    elif spec.device and math.prod(parts) != len(spec.device):
        yield f"is divided into {math.prod(parts)} parts, and given to {len(spec.device)} devices or groups of them"


def _rank(scope: Scope, name: str) -> int | None:
    tensor = scope.initializer(name)
    if tensor is not None:
        return len(tensor.dims)
    known = scope.types.get(name)
    return len(known.dims) if known is not None and known.dims is not None else None


MODEL_RULES = (configurations,)
SCOPE_RULES = (nodes_name_configurations,)
