"""Gradients for shapes and settings that nobody thought of, against PyTorch."""

import math

import numpy as np
import onnx
import onnxruntime as ort
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import broadcastable_shapes, mutually_broadcastable_shapes
from marks import needs
from onnx import TensorProto, helper

from onward.differentiate import vjp

pytestmark = needs("torch")

SIZES = st.integers(0, 3)
few = settings(max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def gradients(operator, xs, y_shape, others=(), symbolic=False, opset=21, **attributes):
    """The gradients of `xs` by ONNX Runtime, for a fixed gradient of y; `others` are inputs without one."""
    arrays = {f"x{i}": x for i, x in enumerate(xs)}
    fixed = {f"c{i}": c for i, c in enumerate(others) if c is not None}
    names = [*arrays, *(f"c{i}" if c is not None else "" for i, c in enumerate(others))]
    values = [
        helper.make_tensor_value_info(
            name,
            helper.np_dtype_to_tensor_dtype(array.dtype),
            [f"{name}_{i}" for i in range(array.ndim)] if symbolic else array.shape,
        )
        for name, array in {**arrays, **fixed}.items()
    ]
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [f"y_{i}" for i in range(len(y_shape))])
    graph = helper.make_graph([helper.make_node(operator, names, ["y"], **attributes)], "g", values, [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    model = vjp(model, "y", list(arrays)).to_proto()
    onnx.checker.check_model(model, full_check=True)
    session = ort.InferenceSession(model.SerializeToString())
    feeds = {**arrays, **fixed, "dy": weights(y_shape)}
    return session.run(None, {value.name: feeds[value.name] for value in session.get_inputs()})


def weights(shape):
    """A gradient of y: different everywhere."""
    return np.asarray((np.arange(math.prod(shape)).reshape(shape) * 0.37) % 1.3 - 0.6, np.float32)


def numbers(shape, seed=0):
    return np.asarray(np.random.default_rng(seed).uniform(0.5, 2, shape), np.float32)


def check(operator, function, *xs, others=(), symbolic=False, **attributes):
    """Compare with what PyTorch says of the function."""
    import torch

    leaves = [torch.tensor(x, requires_grad=True) for x in xs]
    y = function(*leaves)
    y.backward(torch.tensor(weights(tuple(y.shape))))
    found = gradients(operator, xs, tuple(y.shape), others, symbolic, **attributes)
    for leaf, grad in zip(leaves, found, strict=True):
        np.testing.assert_allclose(grad, leaf.grad, rtol=1e-4, atol=1e-5)


BINARY = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Div": lambda a, b: a / b,
    "Pow": lambda a, b: a**b,
}


@few
@given(
    st.sampled_from(sorted(BINARY)),
    mutually_broadcastable_shapes(num_shapes=2, min_dims=0, max_dims=5, min_side=0, max_side=3),
    st.booleans(),
)
def test_broadcasting(operator, shapes, symbolic):
    a, b = (numbers(shape, seed) for seed, shape in enumerate(shapes.input_shapes))
    check(operator, BINARY[operator], a, b, symbolic=symbolic)


@few
@given(mutually_broadcastable_shapes(signature="(m?,n),(n,p?)->(m?,p?)", max_side=3), st.booleans())
def test_products_of_matrices(shapes, symbolic):
    """Of no empty ones: ONNX Runtime itself broadcasts no matrix to a batch of 0."""
    import torch

    a, b = (numbers(shape, seed) for seed, shape in enumerate(shapes.input_shapes))
    check("MatMul", torch.matmul, a, b, symbolic=symbolic)


REDUCTIONS = {
    "ReduceSum": lambda x, axes, keep: x.sum(axes, keep),
    "ReduceMean": lambda x, axes, keep: x.mean(axes, keep),
    "ReduceMax": lambda x, axes, keep: x.amax(axes, keep),
    "ReduceL2": lambda x, axes, keep: x.square().sum(axes, keep).sqrt(),
    "ReduceLogSumExp": lambda x, axes, keep: x.logsumexp(axes, keep),
}


@few
@given(st.sampled_from(sorted(REDUCTIONS)), st.lists(st.integers(1, 3), min_size=1, max_size=5), st.data())
def test_reductions(operator, shape, data):
    chosen = data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    axes = [axis - len(shape) * data.draw(st.booleans()) for axis in sorted(chosen)]
    keep, symbolic = data.draw(st.booleans()), data.draw(st.booleans())
    function = REDUCTIONS[operator]
    check(
        operator,
        lambda x: function(x, axes, keep),
        numbers(shape),
        others=[np.array(axes)],
        symbolic=symbolic,
        keepdims=int(keep),
    )


@few
@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.data())
def test_slices(shape, data):
    axis = data.draw(st.integers(0, len(shape) - 1))
    bound = st.integers(-6, 6)
    start, end, step = data.draw(bound), data.draw(bound), data.draw(st.sampled_from([-2, -1, 1, 2, 3]))
    places = _sliced(shape[axis], start, end, step)
    given_axis = axis - len(shape) * data.draw(st.booleans())
    check(
        "Slice",
        lambda x: x.index_select(axis, places),
        numbers(shape),
        others=[np.array([n]) for n in (start, end, given_axis, step)],
        symbolic=data.draw(st.booleans()),
    )


def _sliced(size, start, end, step):
    """The places that ONNX takes: bounds that are negative count from the end, once."""
    import torch

    start, end = (n + size if n < 0 else n for n in (start, end))
    low, high = (0, size) if step > 0 else (-1, size - 1)
    start = min(max(start, 0), size if step > 0 else size - 1)
    return torch.tensor(list(range(start, min(max(end, low), high), step)), dtype=torch.int64)


@few
@given(st.lists(st.tuples(SIZES, st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=5), st.booleans())
def test_padding(axes, symbolic):
    import torch

    shape, before, after = zip(*axes, strict=True)
    around = [n for pair in reversed(list(zip(before, after, strict=True))) for n in pair]
    check(
        "Pad",
        lambda x: torch.nn.functional.pad(x, around),
        numbers(shape),
        others=[np.array([*before, *after])],
        symbolic=symbolic,
    )


@few
@given(st.lists(SIZES, min_size=1, max_size=6), st.data())
def test_transposes(shape, data):
    order = data.draw(st.permutations(range(len(shape))))
    check("Transpose", lambda x: x.permute(order), numbers(shape), symbolic=data.draw(st.booleans()), perm=order)


@few
@given(st.lists(st.integers(1, 3), min_size=1, max_size=5), broadcastable_shapes((2, 2), min_side=0), st.data())
def test_gathers(shape, index_shape, data):
    axis = data.draw(st.integers(0, len(shape) - 1))
    size = shape[axis]
    count = math.prod(index_shape)
    places = data.draw(st.lists(st.integers(-size, size - 1), min_size=count, max_size=count))
    indices = np.array(places, np.int64).reshape(index_shape)

    def gathered(x):
        return x[(slice(None),) * axis + (indices % size,)]

    given_axis = axis - len(shape) * data.draw(st.booleans())
    check("Gather", gathered, numbers(shape), others=[indices], symbolic=data.draw(st.booleans()), axis=given_axis)


@few
@given(
    st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from(["all", "causal", "boolean", "numbers"]),
    st.booleans(),
)
def test_attention(heads, queries, keys, masking, symbolic):
    """Heads that share keys, and masks, each of which shows a query at least its first key."""
    import torch

    q = numbers((2, heads[0], queries, 3))
    k, v = (numbers((2, heads[1], keys, width), seed) for seed, width in ((1, 3), (2, 5)))
    masks = {"boolean": numbers((queries, keys), 3) < 1.2, "numbers": numbers((1, heads[0], queries, keys), 3)}
    masks["boolean"][:, 0] = True
    mask, causal = masks.get(masking), masking == "causal"
    seen = None if mask is None else torch.tensor(mask)

    def attended(q, k, v):
        function = torch.nn.functional.scaled_dot_product_attention
        return function(q, k, v, attn_mask=seen, is_causal=causal, enable_gqa=heads[0] != heads[1])

    check("Attention", attended, q, k, v, others=[mask], symbolic=symbolic, opset=24, is_causal=int(causal))
