"""Recurrent layers: what the standard's node tests leave out, and what the reference evaluator gets wrong.

There, LSTM, GRU and RNN know no lengths of sequences, no activation functions but the default ones, no clipping and no
coupled gates. The operators here follow the standard's equations, one sequence after the other.
"""

import numpy as np
import onnx
from onnx import helper
from onnx.reference.op_run import OpRun

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
FUNCTIONS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}
OUTPUTS = {"LSTM": ("Y", "Y_h", "Y_c"), "GRU": ("Y", "Y_h"), "RNN": ("Y", "Y_h")}


# ---- the standard's equations ----------------------------------------------------------------------------------------

ACTIVATIONS = {
    "Affine": (lambda x, alpha, beta: alpha * x + beta, 1.0, 0.0),
    "Elu": (lambda x, alpha: np.where(x >= 0, x, alpha * np.expm1(x)), 1.0),
    "HardSigmoid": (lambda x, alpha, beta: np.minimum(np.maximum(alpha * x + beta, 0), 1), 0.2, 0.5),
    "LeakyRelu": (lambda x, alpha: np.where(x >= 0, x, alpha * x), 0.01),
    "Relu": (lambda x: np.maximum(x, 0),),
    "ScaledTanh": (lambda x, alpha, beta: alpha * np.tanh(beta * x), 1.0, 1.0),
    "Sigmoid": (lambda x: 1 / (1 + np.exp(-x)),),
    "Softplus": (lambda x: np.log1p(np.exp(x)),),
    "Softsign": (lambda x: x / (1 + np.abs(x)),),
    "Tanh": (np.tanh,),
    "ThresholdedRelu": (lambda x, alpha: np.where(x >= alpha, x, 0), 1.0),
}
"""The functions, then the defaults of alpha and beta."""


def chosen_activations(names, alphas, betas, clip):
    alphas, betas = list(alphas or ()), list(betas or ())
    functions = []
    for name in names:
        function, *defaults = ACTIVATIONS[name]
        numbers = [given.pop(0) if given else d for given, d in zip((alphas, betas), defaults, strict=False)]
        bound = np.inf if clip is None else clip
        functions.append(lambda x, f=function, numbers=numbers, c=bound: f(np.clip(x, -c, c), *numbers))
    return functions


def lstm_step(x, h, c, w, r, wb, rb, p, functions, input_forget):
    f, g, out = functions
    (wi, wo, wf, wc), (ri, ro, rf, rc) = np.split(w, 4), np.split(r, 4)
    bi, bo, bf, bc = np.split(wb + rb, 4)
    pi, po, pf = np.split(p, 3)
    i = f(wi @ x + ri @ h + pi * c + bi)
    forget = 1 - i if input_forget else f(wf @ x + rf @ h + pf * c + bf)
    c = forget * c + i * g(wc @ x + rc @ h + bc)
    o = f(wo @ x + ro @ h + po * c + bo)
    return o * out(c), c


def gru_step(x, h, w, r, wb, rb, functions, linear_before_reset):
    f, g = functions
    (wz, wr, wh), (rz, rr, rh) = np.split(w, 3), np.split(r, 3)
    (wbz, wbr, wbh), (rbz, rbr, rbh) = np.split(wb, 3), np.split(rb, 3)
    z = f(wz @ x + rz @ h + wbz + rbz)
    reset = f(wr @ x + rr @ h + wbr + rbr)
    inner = reset * (rh @ h + rbh) if linear_before_reset else rh @ (reset * h) + rbh
    return ((1 - z) * g(wh @ x + inner + wbh) + z * h,)


def rnn_step(x, h, w, r, wb, rb, functions):
    return (functions[0](w @ x + r @ h + wb + rb),)


class Recurrent(OpRun):
    op_domain = ""

    def _layer(self, step, x, w, r, b, lengths, *initial, layout, direction, **activations):
        if layout:
            x, *initial = (None if a is None else np.swapaxes(a, 0, 1) for a in (x, *initial))
        steps, batch, _ = x.shape
        directions, rows, hidden = r.shape
        names = FUNCTIONS[self.op_type] * directions
        functions = chosen_activations(activations.pop("activations") or names, **activations)
        b = np.zeros((directions, 2 * rows), x.dtype) if b is None else b
        lengths = np.full(batch, steps) if lengths is None else lengths
        last = [np.zeros((directions, batch, hidden), x.dtype) if a is None else a.copy() for a in initial]
        every = np.zeros((steps, directions, batch, hidden), x.dtype)
        for d in range(directions):
            mine = functions[len(functions) // directions * d :][: len(functions) // directions]
            for n in range(batch):
                times = range(lengths[n])
                states = [state[d, n] for state in last]
                for t in reversed(times) if direction == "reverse" or d == 1 else times:
                    states = step(x[t, n], *states, w[d], r[d], *np.split(b[d], 2), d, mine)
                    every[t, d, n] = states[0]
                for state, value in zip(last, states, strict=True):
                    state[d, n] = value
        results = [every.transpose(2, 0, 1, 3), *(np.swapaxes(a, 0, 1) for a in last)] if layout else [every, *last]
        return tuple(results[: len(self.onnx_node.output)])


class LSTM(Recurrent):
    def _run(self, x, w, r, b=None, lengths=None, h=None, c=None, p=None, activations=None, activation_alpha=None,
             activation_beta=None, clip=None, direction=None, hidden_size=None, input_forget=0, layout=0):  # fmt: skip
        p = np.zeros((r.shape[0], 3 * r.shape[2]), x.dtype) if p is None else p

        def step(x, h, c, w, r, wb, rb, d, functions):
            return lstm_step(x, h, c, w, r, wb, rb, p[d], functions, input_forget)

        return self._layer(step, x, w, r, b, lengths, h, c, layout=layout, direction=direction, activations=activations,
                           alphas=activation_alpha, betas=activation_beta, clip=clip)  # fmt: skip


class GRU(Recurrent):
    def _run(self, x, w, r, b=None, lengths=None, h=None, activations=None, activation_alpha=None,
             activation_beta=None, clip=None, direction=None, hidden_size=None, layout=0,
             linear_before_reset=0):  # fmt: skip
        def step(x, h, w, r, wb, rb, d, functions):
            return gru_step(x, h, w, r, wb, rb, functions, linear_before_reset)

        return self._layer(step, x, w, r, b, lengths, h, layout=layout, direction=direction, activations=activations,
                           alphas=activation_alpha, betas=activation_beta, clip=clip)  # fmt: skip


class RNN(Recurrent):
    def _run(self, x, w, r, b=None, lengths=None, h=None, activations=None, activation_alpha=None,
             activation_beta=None, clip=None, direction=None, hidden_size=None, layout=0):  # fmt: skip
        def step(x, h, w, r, wb, rb, d, functions):
            return rnn_step(x, h, w, r, wb, rb, functions)

        return self._layer(step, x, w, r, b, lengths, h, layout=layout, direction=direction, activations=activations,
                           alphas=activation_alpha, betas=activation_beta, clip=clip)  # fmt: skip


EVALUATORS = [LSTM, GRU, RNN]


# ---- cases -----------------------------------------------------------------------------------------------------------


def layer(
    operator, given="", *, lengths=None, outputs=("Y",), dtype=np.float32, sizes=(3, 2, 2, 2), opset=22, **attributes
):
    """A model with one layer, and inputs for it; `given` names the optional ones: b, h, c and p."""
    steps, batch, width, hidden = sizes
    rows = GATES[operator] * hidden
    count = 2 if attributes.get("direction") == "bidirectional" else 1
    batchwise = attributes.get("layout") == 1
    state = (batch, count, hidden) if batchwise else (count, batch, hidden)
    shapes = {
        "X": (batch, steps, width) if batchwise else (steps, batch, width),
        "W": (count, rows, width),
        "R": (count, rows, hidden),
        "B": (count, 2 * rows) if "b" in given else None,
        "lengths": None,
        "H0": state if "h" in given else None,
        "C0": state if "c" in given else None,
        "P": (count, 3 * hidden) if "p" in given else None,
    }
    rng = np.random.default_rng(1)
    inputs = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items() if shape is not None}
    if lengths is not None:
        inputs["lengths"] = np.array(lengths, np.int32)
    every = (batch, steps, count, hidden) if batchwise else (steps, count, batch, hidden)
    names = OUTPUTS[operator]
    node = helper.make_node(
        operator,
        [name if name in inputs else "" for name in shapes],
        [name if name in outputs else "" for name in names],
        hidden_size=hidden,
        **attributes,
    )
    while not node.input[-1]:
        node.input.pop()
    while not node.output[-1]:
        node.output.pop()
    graph = helper.make_graph(
        [node],
        operator,
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
            for n, x in inputs.items()
        ],
        [
            helper.make_tensor_value_info(
                n, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), every if n == "Y" else state
            )
            for n in names
            if n in outputs
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10), inputs


CASES: dict[str, tuple[onnx.ModelProto, dict[str, np.ndarray]]] = {
    "lstm_given_all": layer("LSTM", "bhcp", lengths=[2, 3], clip=1.5, opset=18),
    "lstm_reverse_lengths": layer("LSTM", "bh", direction="reverse", lengths=[2, 0], outputs=["Y_h"], layout=1),
    "lstm_last_memory": layer("LSTM", "c", outputs=["Y_c"], input_forget=1),
    "lstm_coupled_with_peepholes": layer("LSTM", "p", outputs=["Y_h"], input_forget=1, direction="reverse"),
    "lstm_activations": layer(
        "LSTM", activations=["HardSigmoid", "Softsign", "ScaledTanh"],
        activation_alpha=[0.3, 1.1], activation_beta=[0.4, 0.9],
    ),
    "lstm_more_activations": layer(
        "LSTM", activations=["Affine", "Softplus", "Elu"], activation_alpha=[0.6, 1.4], activation_beta=[0.2],
    ),
    "gru_lengths": layer("GRU", "bh", lengths=[3, 1], clip=1.5, layout=1),
    "gru_reverse": layer("GRU", "h", direction="reverse", outputs=["Y_h"], lengths=[0, 2]),
    "gru_linear_before_reset": layer("GRU", "bh", linear_before_reset=1, outputs=["Y_h"]),
    "gru_linear_before_reset_without_bias": layer("GRU", linear_before_reset=1, outputs=["Y_h"]),
    "gru_activations": layer("GRU", "b", activations=["ThresholdedRelu", "LeakyRelu"], activation_alpha=[0.2]),
    "rnn_lengths": layer("RNN", "bh", lengths=[1, 3], layout=1, clip=1.5),
    "rnn_activation": layer("RNN", "b", outputs=["Y", "Y_h"], activations=["Relu"], direction="reverse"),
}  # fmt: skip

SATURATED = "its example saturates, where float32 has no digits for the slope of Tanh"

EXCLUDED_ON_ONNXRUNTIME = {
    "test_rnn_seq_length": SATURATED,
    "test_simple_rnn_bidirectional": SATURATED,
}
