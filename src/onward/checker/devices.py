"""Rules about device configurations, and how nodes divide tensors (OW140 to OW143)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from onnx import ShardingSpecProto

from onward.checker.codes import Finding, listing, make_finding, quote
from onward.checker.graphs import NodeView
from onward.checker.scope import CheckedModel, Scope
from onward.standard import DEVICES_IR

_NAMES = "give each configuration a name, at least one device, and a name for each device or for none"


def configurations(subject: CheckedModel) -> Iterator[Finding]:
    declared, version = subject.proto.configuration, subject.proto.ir_version
    used = bool(declared) or any(call.node.device_configurations for call in subject.calls)
    if used and 0 < version < DEVICES_IR:
        message = f"device configurations came with IR version {DEVICES_IR}; the file has {version}"
        yield make_finding("OW143", "model", message)
    for name, times in Counter(entry.name for entry in declared).items():
        if times > 1 or not name:
            what = f"{quote(name)} is declared {times} times" if name else "a configuration has no name"
            yield make_finding("OW140", "configuration", what, _NAMES)
    for entry in declared:
        number = entry.num_devices
        if number < 1 or (entry.device and len(entry.device) != number):
            message = f"{quote(entry.name)} has {number} devices and {len(entry.device)} names for them"
            yield make_finding("OW140", "configuration", message, _NAMES)


def nodes_name_configurations(scope: Scope) -> Iterator[Finding]:
    counts = {assignment.name: assignment.num_devices for assignment in scope.subject.proto.configuration}
    for node in scope.own.nodes:
        for assignment in node.proto.device_configurations:
            if assignment.configuration_id not in counts:
                message = f"the model has no device configuration {quote(assignment.configuration_id)}"
                yield make_finding("OW141", node.place, message, f"it has {listing(counts)}" if counts else None)
                continue
            for spec in assignment.sharding_spec:
                for fault in _faults(scope, node, spec, counts[assignment.configuration_id]):
                    yield make_finding("OW142", node.place, f"{quote(spec.tensor_name)} {fault}")


def _faults(scope: Scope, node: NodeView, spec: ShardingSpecProto, devices: int) -> Iterator[str]:
    """Yield the faults of the division of a tensor, as ends of a sentence."""
    if spec.tensor_name not in (*node.args, *node.outputs):
        yield "is divided, but the node neither reads nor writes it"
        return
    groups = {entry.key: list(entry.value) for entry in spec.index_to_device_group_map}
    named = [device for key in spec.device for device in groups.get(key, [key])]
    if invalid := [device for device in named if not 0 <= device < devices]:
        yield f"is on device {invalid[0]} of {devices}"
    rank = _rank(scope, spec.tensor_name)
    axes = [dim.axis if rank is None else dim.axis % max(rank, 1) for dim in spec.sharded_dim]
    if rank is not None and (out_of_range := [dim.axis for dim in spec.sharded_dim if not -rank <= dim.axis < rank]):
        yield f"has {rank} axes, but is divided along axis {out_of_range[0]}"
    elif len(set(axes)) < len(axes):
        yield "is divided twice along one axis"
    counts = [simple.num_shards for dim in spec.sharded_dim for simple in dim.simple_sharding]
    if any(shards < 1 for shards in counts):
        yield f"is divided into {min(counts)} parts"
    elif spec.device and math.prod(counts) != len(spec.device):
        yield f"is divided into {math.prod(counts)} parts for {len(spec.device)} devices or groups of devices"


def _rank(scope: Scope, name: str) -> int | None:
    tensor = scope.initializer(name)
    if tensor is not None:
        return len(tensor.dims)
    tensor_type = scope.types.get(name)
    return len(tensor_type.dims) if tensor_type is not None and tensor_type.dims is not None else None


MODEL_RULES = (configurations,)
SCOPE_RULES = (nodes_name_configurations,)
