"""Recurrent layers in PyTorch: the gradients of those that the cases of `rule_cases.recurrent` have, in its order."""

import numpy as np
from onnx import helper
from rule_cases.recurrent import GATES

TORCH_ORDER = {"LSTM": [0, 3, 1, 2], "GRU": [1, 0, 2], "RNN": [0]}
"""Where PyTorch has the gates that the standard numbers: i o f c of i f c o, z r h of r z h."""


def loss_of_all(proto):
    """The model with a sum of its outputs, each times an input `d<output>`, as one more output `loss`."""
    graph = proto.graph
    for output in list(graph.output):
        graph.input.append(output)
        graph.input[-1].name = f"d{output.name}"
        graph.node.append(helper.make_node("Mul", [output.name, f"d{output.name}"], [f"{output.name}*d"]))
        graph.node.append(helper.make_node("ReduceSum", [f"{output.name}*d"], [f"{output.name}_sum"], keepdims=0))
    sums = [f"{output.name}_sum" for output in graph.output]
    graph.node.append(helper.make_node("Sum", sums, ["loss"]))
    graph.output.append(helper.make_tensor_value_info("loss", graph.output[0].type.tensor_type.elem_type, []))
    return proto


def torch_layer(operator, inputs, attributes):
    """PyTorch's layer with these weights."""
    import torch

    directions, rows, width = inputs["W"].shape
    hidden = rows // GATES[operator]
    kinds = {"LSTM": torch.nn.LSTM, "GRU": torch.nn.GRU, "RNN": torch.nn.RNN}
    batch_first = attributes.get("layout") == 1
    module = kinds[operator](width, hidden, bidirectional=directions == 2, batch_first=batch_first).double()
    for names, value in parameters(module, operator, inputs):
        for name, part in zip(names, value, strict=True):
            getattr(module, name).data = torch.tensor(part)
    return module


def in_order(operator, x, back=False):
    """The gates of a matrix or vector in PyTorch's order, or back in the standard's."""
    order = TORCH_ORDER[operator]
    gates = np.split(x, GATES[operator])
    return np.concatenate([gates[i] for i in (order if back else np.argsort(order))])


def parameters(module, operator, inputs):
    """PyTorch's names of the parameters of each direction, and their values."""
    for d, suffix in enumerate(["_l0", "_l0_reverse"][: len(inputs["W"])]):
        of_inputs, of_states = np.split(inputs["B"][d], 2)
        names = [f"weight_ih{suffix}", f"weight_hh{suffix}", f"bias_ih{suffix}", f"bias_hh{suffix}"]
        yield names, [in_order(operator, x) for x in (inputs["W"][d], inputs["R"][d], of_inputs, of_states)]


def torch_gradients(operator, inputs, seeds, attributes):
    import torch
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

    batch_first = attributes.get("layout") == 1
    module = torch_layer(operator, inputs, attributes)
    leaves = {name: torch.tensor(inputs[name], requires_grad=True) for name in ("X", "H0", "C0") if name in inputs}
    first = [x.transpose(0, 1).contiguous() if batch_first else x for name, x in leaves.items() if name != "X"]
    x = leaves["X"]
    steps = x.shape[1 if batch_first else 0]
    if "lengths" in inputs:
        lengths = torch.tensor(inputs["lengths"]).long()
        x = pack_padded_sequence(x, lengths, batch_first=batch_first, enforce_sorted=False)
    y, last = module(x, tuple(first) if operator == "LSTM" else first[0])
    if "lengths" in inputs:
        y, _ = pad_packed_sequence(y, batch_first=batch_first, total_length=steps)
    y = y.unflatten(-1, (len(inputs["W"]), -1))  # PyTorch has the directions side by side
    results = [y if batch_first else y.transpose(1, 2)]
    results += [state.transpose(0, 1) if batch_first else state for state in (last if operator == "LSTM" else [last])]
    sum((result * torch.tensor(seed)).sum() for result, seed in zip(results, seeds.values(), strict=True)).backward()
    grads = {name: x.grad.numpy() for name, x in leaves.items()}
    found = [
        [getattr(module, name).grad.numpy() for name in names] for names, _ in parameters(module, operator, inputs)
    ]
    w, r, of_inputs, of_states = (
        np.stack([in_order(operator, x, back=True) for x in parts]) for parts in zip(*found, strict=True)
    )
    return grads | {"W": w, "R": r, "B": np.concatenate([of_inputs, of_states], axis=1)}
