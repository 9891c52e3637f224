"""Whole models out of PyTorch's exporters: the gradient of the loss by everything it depends on, against autograd.

Autograd computes in float64. The error of a gradient is the largest absolute difference over the largest absolute
element of that gradient, for each parameter and each input by itself. Only where a gradient is zero by mathematics, as
that of the bias of attention's keys, and autograd finds mere rounding errors, it is over the largest of all gradients.
"""

import copy
import itertools
from typing import NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from gradcheck import assert_close
from marks import needs
from onnx.reference import ReferenceEvaluator
from reference_ops import OPERATORS

import onward

pytestmark = needs("torch")


class Case(NamedTuple):
    model: str
    """A function of torch_models.py."""
    arguments: tuple = ()
    torchscript: bool = False
    """By the exporter that traces; files in the wild are from it. Else by that of torch.export."""
    scripted: bool = False
    """Exported as a program, in which loops are loops, not as what it does once."""
    train: bool = False
    dynamic: bool = False
    double: bool = False
    opset: int | None = None

    def __str__(self):
        words = [
            self.model, *self.arguments, "torchscript" if self.torchscript else "dynamo", "train" if self.train else "",
            "dynamic" if self.dynamic else "static", "float64" if self.double else "float32", str(self.opset or ""),
        ]  # fmt: skip
        return "-".join(filter(None, words))


# ---- exporting -------------------------------------------------------------------------------------------------------


class Exported(NamedTuple):
    proto: onnx.ModelProto
    module: object
    inputs: dict
    """Tensors to run both with; where sizes are dynamic, of others than those that were exported."""

    @property
    def leaves(self):
        """What the loss is differentiated by: the parameters and float inputs that are left in the exported graph."""
        known = {value.name for value in (*self.proto.graph.initializer, *self.proto.graph.input)}
        named = {**dict(self.module.named_parameters(remove_duplicate=False)), **self.inputs}
        return {name: x for name, x in named.items() if name in known and x.is_floating_point()}

    def feeds(self):
        return {name: x.detach().numpy() for name, x in self.inputs.items()}


def exported(case):
    import torch
    import torch_models
    from torch_export import by_dynamo, by_torchscript, quiet

    torch.manual_seed(0)
    torch.compiler.reset()  # what was exported before must not count as a recompilation
    dtype = torch.float64 if case.double else torch.float32
    with quiet():
        model = getattr(torch_models, case.model)(*case.arguments)
        module = model.module.to(dtype).train(case.train)
        with torch.no_grad():
            for parameter in module.parameters():  # fresh biases are 0, which hides errors; exporters merge equal ones
                parameter += torch.randn_like(parameter) / 20
        traced, given = model.inputs(2, 6), model.inputs(*((3, 5) if case.dynamic else (2, 6)))
        state = {name: value.clone() for name, value in module.state_dict().items()}
        export = by_torchscript if case.torchscript else by_dynamo
        proto = export(
            torch.jit.script(module) if case.scripted else module,
            _to(dtype, traced),
            model.axes if case.dynamic else {},
            opset=case.opset,
        )
        module.load_state_dict(state)  # exporting may have moved the running statistics
    return Exported(proto, module, _to(dtype, given))


def _to(dtype, inputs):
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}


# ---- running and comparing -------------------------------------------------------------------------------------------


def run(proto, feeds):
    """On ONNX Runtime; in float64 on the reference implementation where ONNX Runtime has no kernel, as for Conv.

    Its optimizations are off in float64: there too it moves scalars beside a MatMul into a factor that is a float32.
    """
    onnx.checker.check_model(proto, full_check=True)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if any(x.dtype == np.float64 for x in feeds.values()) or _has_doubles(proto):
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    names = [value.name for value in proto.graph.output]
    try:
        session = ort.InferenceSession(proto.SerializeToString(), options)
    except ort.capi.onnxruntime_pybind11_state.NotImplemented:
        results = ReferenceEvaluator(proto, new_ops=OPERATORS).run(None, feeds)
    else:
        results = session.run(None, {value.name: feeds[value.name] for value in session.get_inputs()})
    return dict(zip(names, map(np.asarray, results), strict=True))


def _has_doubles(proto):
    return any(tensor.data_type == onnx.TensorProto.DOUBLE for tensor in proto.graph.initializer)


def autograd(model):
    """The gradients in float64, by the names of the leaves; all others, which the exporter left out, are zero."""
    import torch

    model = model._replace(module=copy.deepcopy(model.module).double(), inputs=_to(torch.float64, model.inputs))
    inputs = {name: x.requires_grad_(x.is_floating_point()) for name, x in model.inputs.items()}
    model.module(*inputs.values()).backward()
    leaves = {**dict(model.module.named_parameters(remove_duplicate=False)), **inputs}
    assert all(x.grad is None or any(x is leaf for leaf in model.leaves.values()) for x in leaves.values())
    return {name: np.zeros(x.shape) if x.grad is None else x.grad.numpy() for name, x in model.leaves.items()}


def gradients(proto, feeds, xs):
    outputs = run(onward.gradient(proto, y="loss", xs=list(xs)).to_proto(), feeds)
    return {name: outputs[f"{name}/grad"] for name in xs}


# ---- every model -----------------------------------------------------------------------------------------------------

BY_BOTH = ("cnn", "unet", "lstm", "gru", "tied", "assignments", "odd")
BY_DYNAMO = ("scan", "settling", "graph")  # tracing unrolls loops, and does not know all of scatter_reduce
TRANSFORMERS = ("vit", "bert", "gpt2", "llama")

IN_FLOAT32 = {("llama", "sdpa"), ("gpt2", "sdpa"), *((name, "eager") for name in TRANSFORMERS)}
"""What computes norms, positions, the softmax of attention or the loss in float32, whatever the type of the model."""


def cases():
    for double, dynamic in itertools.product((False, True), repeat=2):
        common = {"double": double, "dynamic": dynamic}
        for name in (*BY_BOTH, *BY_DYNAMO):
            if not (dynamic and name in ("lstm", "gru")):  # whose length becomes a constant, also where it is to vary
                yield Case(name, **common)
        for name in BY_BOTH:
            yield Case(name, torchscript=True, **common)
        yield Case("loop", torchscript=True, scripted=True, **common)
        yield Case("cnn", torchscript=True, train=True, **common)  # the other exporter forgets about the mode
        for name, attention in itertools.product(TRANSFORMERS, ("eager", "sdpa")):
            yield Case(name, (attention,), **common)
            if name in ("vit", "bert"):  # the masks of the others are made by what tracing does not know
                yield Case(name, (attention,), torchscript=True, **common)
            if attention == "sdpa":
                yield Case(name, (attention,), opset=23, **common)  # with Attention as one operator


def _is_slow(case):
    """Most models are in `make test` once with each exporter: traced in float64, and else in float32 with any batch."""
    if case.arguments == ("eager",) or (case.opset and (case.double or case.model != "gpt2")):
        return True
    if not case.double:
        return not case.dynamic or case.torchscript
    return case.dynamic or not (case.torchscript or case.model in ("graph", "gpt2"))


def _parameter(case):
    marks = [pytest.mark.slow] if _is_slow(case) else []
    return pytest.param(case, id=str(case), marks=[*marks, needs("transformers")] if case.arguments else marks)


@pytest.mark.slow(
    "bert-sdpa-dynamo-dynamic-float32",
    "cnn-dynamo-dynamic-float32",
    "gpt2-sdpa-dynamo-dynamic-float32",
    "gpt2-sdpa-dynamo-dynamic-float32-23",
    "gpt2-sdpa-dynamo-static-float64",
    "graph-dynamo-dynamic-float32",
    "llama-sdpa-dynamo-dynamic-float32",
    "odd-dynamo-dynamic-float32",
    "scan-dynamo-dynamic-float32",
    "settling-dynamo-dynamic-float32",
    "tied-dynamo-dynamic-float32",
    "unet-dynamo-dynamic-float32",
    "vit-sdpa-dynamo-dynamic-float32",
)
@pytest.mark.parametrize("case", [_parameter(case) for case in cases()])
def test_gradients_equal_autograd(case):
    model = exported(case)
    tolerance = (1e-6 if (case.model, *case.arguments) in IN_FLOAT32 else 1e-9) if case.double else 1e-5
    assert_close(gradients(model.proto, model.feeds(), model.leaves), autograd(model), tolerance)


# ---- more than a gradient --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("torchscript", [False, True], ids=["dynamo", "torchscript"])
def test_mixed_precision(torchscript):
    """In float16 the two round at other places; half of its digits are what can be asked for."""
    model = exported(Case("half_precision", torchscript=torchscript, dynamic=True))
    assert_close(gradients(model.proto, model.feeds(), model.leaves), autograd(model), 5e-3)


def test_what_the_exporter_has_optimized():
    """Given weights as inputs, the exporter's optimizer cannot fold or merge them."""
    import torch
    from torch_export import quiet
    from torch_models import WeightsAsInputs

    model = exported(Case("cnn"))
    feeds = {name: x.detach().numpy() for name, x in model.leaves.items()} | model.feeds()
    with quiet():
        program = torch.onnx.export(
            WeightsAsInputs(model.module), tuple(map(torch.tensor, feeds.values())), dynamo=True, verbose=False,
            input_names=list(feeds), output_names=["loss"],
        )  # fmt: skip
    assert len(program.model_proto.graph.node) < len(model.proto.graph.node)
    assert_close(gradients(program.model_proto, feeds, model.leaves), autograd(model), 1e-5)


def test_a_gradient_penalty():
    """The squared norm of the gradient by the image, differentiated by the weights."""
    import torch

    model = exported(Case("cnn", double=True))
    weights = {name: x for name, x in model.leaves.items() if name != "x"}
    first = onward.gradient(model.proto, y="loss", xs=["x"]).to_proto()
    first.graph.node.append(onnx.helper.make_node("ReduceSumSquare", ["x/grad"], ["penalty"], keepdims=0))
    first.graph.output.append(onnx.helper.make_tensor_value_info("penalty", onnx.TensorProto.DOUBLE, []))
    outputs = run(onward.gradient(first, y="penalty", xs=list(weights)).to_proto(), model.feeds())

    image = model.inputs["x"].requires_grad_()
    (slope,) = torch.autograd.grad(model.module(*model.inputs.values()), image, create_graph=True)
    penalty = (slope**2).sum()
    expected = torch.autograd.grad(penalty, list(weights.values()), materialize_grads=True)
    np.testing.assert_allclose(outputs["penalty"], penalty.item(), rtol=1e-9)
    expected = {name: grad.numpy() for name, grad in zip(weights, expected, strict=True)}
    assert_close({name: outputs[f"{name}/grad"] for name in weights}, expected, 1e-9)


@pytest.mark.slow
def test_forward_mode():
    """How the loss changes as all weights move at once."""
    import torch

    model = exported(Case("lstm", torchscript=True, dynamic=True, double=True))
    steps = {name: torch.randn_like(x) for name, x in model.leaves.items()}
    feeds = model.feeds() | {f"d{name}": step.numpy() for name, step in steps.items()}
    outputs = run(onward.jvp(model.proto, "loss", list(steps)).to_proto(), feeds)

    loss = lambda weights: torch.func.functional_call(model.module, weights, tuple(model.inputs.values()))
    _, expected = torch.func.jvp(loss, (model.leaves,), (steps,))
    np.testing.assert_allclose(outputs["dloss"], expected.item(), rtol=1e-9)
