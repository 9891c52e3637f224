"""Passes over a lowered graph. State is an input, so they never fold it.

Bodies of functions cast numbers at run time, since they serve several types, and each call repeats
what all calls compute alike. Inlined with known types, casts are fixed and equal nodes are shared.
Half the nodes of an optimizer with a hundred calls disappear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onward.build import declare, identity, identity_of, replace_operator
from onward.constants import tensor_in
from onward.differentiate.simplify import swaps_last
from onward.standard import is_standard
from onward.transform.context import Context
from onward.transform.training import drop_unused_definitions, remove_unused


def optimize(context: Context) -> None:
    """Simplify the graph of a lowered model, in place."""
    context.fill_in_types()
    model = context.model
    for graph in (model.graph, *model.graph.subgraphs()):
        for node in graph if graph is not model.graph else ():
            declare(node, model.opset)
        settle_casts(graph)
        swap_vector_matmuls(graph)
        share_equal_nodes(graph)
        remove_unused(graph)


def settle_casts(graph: ir.Graph) -> None:
    """Remove casts to the same type, cast constants at once, and fix the type of each CastLike."""
    for node in list(graph):
        if node.op_type not in ("Cast", "CastLike") or not is_standard(node):
            continue
        source, target = node.inputs[0], _target(node)
        if source is None or target is None:
            continue
        constant = tensor_in(source.producer())
        if source.dtype == target and not node.outputs[0].is_graph_output():
            node.outputs[0].replace_all_uses_with(source)
        elif constant is not None and constant.size == 1:
            array = constant.numpy().astype(target.numpy())
            replace_operator(node, "Constant", [], ir.AttrTensor("value", ir.Tensor(array, dtype=target)))
        elif node.op_type == "CastLike":
            replace_operator(node, "Cast", [source], ir.AttrInt64("to", target.value))
        node.outputs[0].type = ir.TensorType(target)


def _target(node: ir.Node) -> ir.DataType | None:
    if node.op_type == "Cast":
        return ir.DataType(node.attributes["to"].as_int())
    like = node.inputs[1]
    return like.dtype if like is not None else None


def swap_vector_matmuls(graph: ir.Graph) -> None:
    """Replace Aᵀ v by v A, without a Transpose; ONNX Runtime 1.31 computes Aᵀ v wrongly."""
    for node in list(graph):
        if node.op_type != "MatMul" or not is_standard(node):
            continue
        matrix, vector = node.inputs
        transpose = matrix.producer() if matrix is not None else None
        is_vector = vector is not None and vector.shape is not None and vector.shape.rank() == 1
        if is_vector and transpose is not None and swaps_last(transpose):
            replace_operator(node, "MatMul", [vector, transpose.inputs[0]])


def share_equal_nodes(graph: ir.Graph) -> None:
    """Merge nodes that compute the same."""
    first_nodes: dict[tuple[object, ...], ir.Node] = {}
    for node in list(graph):
        key = identity(node)
        if key is None:
            continue
        first = first_nodes.setdefault(key, node)
        if first is not node and not any(output.is_graph_output() for output in node.outputs):
            for old, new in zip(node.outputs, first.outputs, strict=True):
                old.replace_all_uses_with(new)


# ---- calls of functions ----------------------------------------------------------------------------------------------


Results = Sequence[ir.Value | None]


def inline_typed_calls(context: Context) -> None:
    """Inline calls in the outermost graph, in place, but for functions with nested graphs."""
    model = context.model
    inliner = _Inliner(context)
    calls = [node for node in model.graph if inliner.can_inline(node)]
    for call in calls:
        inliner.replace(call)
    if calls:
        model.graph.remove(calls, safe=True)  # all at once: each removal goes through all outputs of the graph
    drop_unused_definitions(model)


class _Inliner:
    def __init__(self, context: Context):
        model = context.model
        self._graph = model.graph
        self._functions = model.functions
        self._opset = model.opset
        self._names = context.names
        self._written: dict[tuple[object, ...], Results] = {}
        self._simple: dict[ir.OperatorIdentifier, bool] = {}
        self._ends = {value: i for i, value in enumerate(model.graph.outputs)}

    def can_inline(self, node: ir.Node) -> bool:
        """True if a node calls a function without nested graphs, with operator sets of the model."""
        identifier = node.op_identifier()
        function = self._functions.get(identifier)
        if function is None or len(node.inputs) > len(function.inputs):
            return False
        if identifier not in self._simple:
            self._simple[identifier] = self._is_simple(function)
        return self._simple[identifier]

    def _is_simple(self, function: ir.Function) -> bool:
        imports = self._graph.opset_imports
        if any(imports.setdefault(domain, version) != version for domain, version in function.opset_imports.items()):
            return False
        graphs = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
        return all(
            (node.op_identifier() not in self._functions or self.can_inline(node))
            and not any(attribute.type in graphs for attribute in node.attributes.values())
            for node in function
        )

    def replace(self, call: ir.Node) -> None:
        nodes: list[ir.Node] = []
        results = self._body(call, call.inputs, call.attributes, call.metadata_props, nodes)
        for old, new in zip(call.outputs, results, strict=False):
            self._replace_output(old, new, nodes)
        call.prepend(nodes)

    def _replace_output(self, old: ir.Value, new: ir.Value | None, nodes: list[ir.Node]) -> None:
        """Replace the output of a call by a result of its body, which takes its name if it can."""
        assert new is not None, old.name
        named = new.producer() in nodes and not new.is_graph_output()
        if old.is_graph_output() and not named:
            nodes.append(ir.Node("", "Identity", [new], name=self._names.fresh("Identity")))
            new, named = nodes[-1].outputs[0], True
        new.type = new.type if old.type is None else old.type
        new.shape = new.shape if old.shape is None else old.shape
        if old in self._ends:
            self._graph.outputs[self._ends[old]] = new
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        if named:
            new.name, old.name = old.name, None

    def _body(
        self,
        call: ir.Node,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, ir.Attr],
        metadata: Mapping[str, str],
        nodes: list[ir.Node],
    ) -> list[ir.Value | None]:
        """Return the results of a call; add its nodes to `nodes`."""
        function = self._functions[call.op_identifier()]
        call_attributes = {**{a.name: a for a in function.attributes.values() if a.value is not None}, **attributes}
        new: dict[ir.Value | None, ir.Value | None] = dict.fromkeys((None, *function.inputs))
        new.update(zip(function.inputs, inputs, strict=False))
        for node in function:
            node_inputs = [new[value] for value in node.inputs]
            node_attributes = _resolve_attributes(node.attributes.data, call_attributes)
            if node.op_identifier() in self._functions:
                results: Results = self._body(
                    node, node_inputs, node_attributes, {**metadata, **node.metadata_props}, nodes
                )
            else:
                results = self._node(node, node_inputs, node_attributes, metadata, nodes)
            new.update(zip(node.outputs, results, strict=False))
        return [new[value] for value in function.outputs]

    def _node(
        self,
        node: ir.Node,
        inputs: list[ir.Value | None],
        attributes: dict[str, ir.Attr],
        metadata: Mapping[str, str],
        nodes: list[ir.Node],
    ) -> Results:
        op_type, standard = node.op_type, is_standard(node)
        if standard and op_type == "CastLike" and (like := inputs[1]) is not None and like.dtype is not None:
            op_type, inputs = "Cast", inputs[:1]
            attributes["to"] = ir.AttrInt64("to", like.dtype.value)
        key = None
        if standard:
            settings = {name: attribute.value for name, attribute in attributes.items()}
            key = identity_of(op_type, inputs, len(node.outputs), settings)
            if key in self._written:
                return self._written[key]
        copy = ir.Node(
            node.domain,
            op_type,
            inputs,
            list(attributes.values()),
            overload=node.overload,
            num_outputs=len(node.outputs),
            name=self._names.fresh(node.name or op_type),
            metadata_props={**metadata, **node.metadata_props},
        )
        for old, output in zip(node.outputs, copy.outputs, strict=True):
            output.name = self._names.fresh(old.name) if old.name else old.name
            output.type, output.shape = old.type, old.shape
        declare(copy, self._opset)
        nodes.append(copy)
        if key is not None:
            self._written[key] = copy.outputs
        return copy.outputs


def _resolve_attributes(
    attributes: Mapping[str, ir.Attr], call_attributes: Mapping[str, ir.Attr]
) -> dict[str, ir.Attr]:
    """Return the attributes of a node of a body, with references to the call resolved."""
    resolved = {}
    for name, attribute in attributes.items():
        if not attribute.is_ref():
            resolved[name] = attribute
        elif (value := call_attributes.get(attribute.ref_attr_name or "")) is not None:
            resolved[name] = ir.Attr(name, value.type, value.value)
    return resolved
