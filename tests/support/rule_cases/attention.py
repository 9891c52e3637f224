"""Attention, where the node tests of `onnx` do not go."""

import numpy as np
from onnx import TensorProto, helper
from onnx.reference.op_run import OpRun


class LinearAttention(OpRun):
    """The reference computes in float32."""

    op_domain = ""

    def _run(self, query, key, value, past_state=None, decay=None, beta=None, kv_num_heads=None, q_num_heads=None,
             scale=None, **_):  # fmt: skip
        dtype = np.float64 if query.dtype == np.float64 else np.float32
        q, k, v = (
            self._heads(x, n, dtype) for x, n in ((query, q_num_heads), (key, kv_num_heads), (value, kv_num_heads))
        )
        shared = q_num_heads // kv_num_heads
        state = np.zeros((len(q), kv_num_heads, k.shape[-1], v.shape[-1])) if past_state is None else past_state
        state, steps = state.astype(dtype), []
        for t in range(query.shape[1]):
            written = v[:, t]
            if decay is not None:
                state = state * np.exp(self._heads(decay, kv_num_heads, dtype)[:, t, :, :, None])
            if beta is not None:
                written = written - np.einsum("bhk,bhkv->bhv", k[:, t], state)
                written = written * beta[:, t, :, None].astype(dtype)
            state = state + np.einsum("bhk,bhv->bhkv", k[:, t], written)
            steps.append(np.einsum("bhk,bhkv->bhv", q[:, t], state.repeat(shared, axis=1)))
        y = np.stack(steps, axis=1).reshape(*query.shape[:2], -1) * (scale or q.shape[-1] ** -0.5)
        return y.astype(query.dtype), state.astype((query if past_state is None else past_state).dtype)

    def _heads(self, x, count, dtype):
        return x.reshape(*x.shape[:2], count, -1).astype(dtype)


EVALUATORS = [LinearAttention]


def _random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


HEADS = {"q": _random(2, 4, 3, 5), "k": _random(2, 2, 6, 5, seed=1), "v": _random(2, 2, 6, 4, seed=2)}
"""Two heads share a key; a value has another size than a key."""
FLAT = {"q": _random(2, 3, 20), "k": _random(2, 6, 10, seed=1), "v": _random(2, 6, 8, seed=2)}
COUNTS = {"q_num_heads": 4, "kv_num_heads": 2}
PAST = {"past_key": _random(2, 2, 2, 5, seed=5), "past_value": _random(2, 2, 2, 4, seed=6)}
SEEN = np.random.default_rng(3).random((3, 6)) < 0.6
SEEN[1] = False
"""The second query sees nothing."""
_INPUTS = ("q", "k", "v", "mask", "past_key", "past_value", "lengths")


def attention(arrays, outputs=("y",), opset=24, rank=4, dims=None, **attributes):
    """A model of one Attention node; `arrays` by the names of its inputs, `dims` in the place of their shapes."""
    given = [name if name in arrays else "" for name in _INPUTS]
    while not given[-1]:
        given.pop()
    node = helper.make_node("Attention", given, list(outputs), **attributes)
    types = {name: helper.np_dtype_to_tensor_dtype(x.dtype) for name, x in arrays.items()}
    sizes = {name: (dims or {}).get(name, x.shape) for name, x in arrays.items()}
    inputs = [helper.make_tensor_value_info(name, types[name], sizes[name]) for name in arrays]
    results = [
        helper.make_tensor_value_info(name, types["q"], [f"{name}_{i}" for i in range(rank)])
        for name in outputs
        if name
    ]
    graph = helper.make_graph([node], "attention", inputs, results)
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", opset)]), arrays


def of_unknown_rank(arrays, **attributes):
    """The same for Q, K and V that are reshaped to shapes which are known only at run time."""
    model, arrays = attention(arrays, **attributes)
    for value in model.graph.input[:3]:
        flat, shape = f"{value.name}_flat", f"{value.name}_shape"
        arrays = {**arrays, flat: arrays[value.name].reshape(-1), shape: np.array(arrays[value.name].shape)}
        model.graph.node.insert(0, helper.make_node("Reshape", [flat, shape], [value.name]))
        model.graph.input.append(helper.make_tensor_value_info(flat, TensorProto.FLOAT, ["L"]))
        model.graph.input.append(helper.make_tensor_value_info(shape, TensorProto.INT64, ["R"]))
        arrays.pop(value.name)
    del model.graph.input[:3]
    return model, arrays


_BATCHES = {"q": ["N", 4, "T", 5], "k": ["N", 2, "S", 5], "v": ["N", 2, "S", 4]}
_ALL_OUTPUTS = ("y", "present_key", "present_value", "products")

CASES = {
    "of_symbolic_batches_and_lengths": attention(HEADS, dims=_BATCHES, is_causal=1),
    "of_symbolic_width": attention(FLAT, dims={name: ["N", 3, "W"] for name in "q"}, rank=3, **COUNTS),
    "of_unknown_rank": of_unknown_rank(HEADS, is_causal=1),
    "of_flat_heads_of_unknown_rank": of_unknown_rank(FLAT, rank=3, **COUNTS),
    "of_one_head_for_all": attention(HEADS | {"k": _random(2, 1, 6, 5, seed=1), "v": _random(2, 1, 6, 4, seed=2)}),
    "past": attention(HEADS | PAST, outputs=_ALL_OUTPUTS, is_causal=1),
    "mask_for_keys": attention(HEADS | {"mask": _random(6, seed=4)}),
    "mask_for_heads": attention(HEADS | {"mask": _random(4, 1, 6, seed=4)}),
    "mask_for_samples": attention(HEADS | {"mask": _random(2, 1, 1, 6, seed=4)}),
    "mask_shorter_than_keys": attention(HEADS | {"mask": SEEN[:, :4]}, softcap=2.0),
    "mask_of_numbers_shorter_than_keys": attention(HEADS | {"mask": _random(3, 4, seed=4)}, dims=_BATCHES),
    "mask_and_past": attention(HEADS | PAST | {"mask": _random(3, 8, seed=4)}, is_causal=1),
    "mask_that_hides_all": attention(HEADS | {"mask": SEEN}, outputs=("y", "", "", "weights"), qk_matmul_output_mode=3),
    "mask_of_numbers_that_hides_all": attention(
        HEADS | {"mask": np.where(SEEN, _random(3, 6, seed=4), -np.inf).astype(np.float32)}
    ),
    "padding_in_one_sample": attention(HEADS | {"lengths": np.array([6, 2])}),
    "padding_alone_in_one_sample": attention(HEADS | {"lengths": np.array([0, 5])}, is_causal=1),
    "products_after_the_cap": attention(
        HEADS | {"mask": SEEN}, outputs=("y", "", "", "products"), softcap=0.5, qk_matmul_output_mode=1
    ),
    "scores_behind_a_mask": attention(
        HEADS | {"mask": SEEN}, outputs=("y", "", "", "scores"), qk_matmul_output_mode=2
    ),
    "window": attention(HEADS, opset=25, left_window_size=0, right_window_size=1),
    "window_and_past": attention(HEADS | PAST, opset=25, left_window_size=1, is_causal=1),
    "window_before_padding": attention(HEADS | {"lengths": np.array([6, 3])}, opset=25, left_window_size=1),
    "window_beyond_the_keys": attention(
        HEADS | {"k": HEADS["k"][:, :, :1], "v": HEADS["v"][:, :, :1]}, opset=25, left_window_size=0
    ),
    "softmax_in_double": attention(HEADS, softmax_precision=TensorProto.DOUBLE, scale=0.7),
    "softmax_in_float16": attention(HEADS | {"mask": SEEN}, softmax_precision=TensorProto.FLOAT16),
}  # fmt: skip
