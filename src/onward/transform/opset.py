"""Convert a model to another version of the standard operator set, training included."""

from __future__ import annotations

from onnx import ModelProto, ValueInfoProto

from onward.arguments import Count, checked
from onward.build import Names
from onward.model import Model, Source, load
from onward.model.core import all_names
from onward.model.functions import check_expansion
from onward.model.protos import captured_names
from onward.model.serde import from_proto, stamp, to_proto, with_data, without_data
from onward.standard import COMMON_OPSET, STANDARD
from onward.transform.function_opset import convert_functions, is_of_one_opset
from onward.transform.graph_opset import convert_graph
from onward.transform.types import value_types

_INITIALIZERS_APART = 4
"""From this IR version on an initializer need not be an input as well, which the converter relies on."""


@checked()
def convert_opset(model: Source, version: Count) -> Model:
    """The same model in operator set `version`: inference graph, algorithms, initializations and functions.

        newer = onward.transform.convert_opset("training.onnx", 22)

    The conversion itself is `onnx.version_converter`'s, which knows nothing of training and functions, so each graph is
    handed to it on its own, without the weights.

    - `model`: any model
    - `version`: the operator set
    """
    model = load(model)
    if model.opset == version and _is_of_one_opset(model):
        return model
    check_expansion(model)
    with without_data(model) as tensors:
        proto = to_proto(model)
    names = Names(name for step in model.steps for name in all_names(step.algorithm))
    names.take(all_names(model.graph))
    _convert(proto, version, names)
    converted = with_data(from_proto(proto), tensors)
    converted.path = model.path
    return stamp(converted)


def of_one_opset(model: Model, oldest: int = 1) -> Model:
    """The model in one version of each operator set, functions included; in a common one if it is older than `oldest`.

    Functions may import other versions than the model that they are in. Nothing is converted to an older one.
    """
    versions = [
        f.opset_imports[domain] for f in model.functions.values() for domain in STANDARD if domain in f.opset_imports
    ]
    newest = max(model.opset, *versions, 1)
    return convert_opset(model, max(newest, COMMON_OPSET) if newest < oldest else newest)


def _is_of_one_opset(model: Model) -> bool:
    return is_of_one_opset(model.ir.opset_imports, (f.opset_imports for f in model.functions.values()))


def _convert(proto: ModelProto, version: int, names: Names) -> None:
    opsets = list(proto.opset_import)
    types = value_types(proto) if proto.training_info else {}
    convert_functions(proto, version)
    if any(opset.domain in STANDARD and opset.version != version for opset in opsets):
        convert_graph(proto.graph, opsets, version, names)
        for info in proto.training_info:
            read = [types.get(name) or ValueInfoProto(name=name) for name in captured_names(info.algorithm)]
            convert_graph(info.algorithm, opsets, version, names, read)
            if info.HasField("initialization"):
                convert_graph(info.initialization, opsets, version, names)
    for opset in proto.opset_import:
        if opset.domain in STANDARD:
            opset.version = version
    if not any(opset.domain in STANDARD for opset in opsets):
        proto.opset_import.add(domain="", version=version)
    proto.ir_version = max(proto.ir_version, _INITIALIZERS_APART)
