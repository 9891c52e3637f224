"""Sequences through If, Loop and Scan, and as inputs and results of gradients: against differences and PyTorch."""

import itertools

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from control_flow import on_onnxruntime, parsed
from gradcheck import check, check_on_onnxruntime, differentiable, flat, mapped, with_symbolic_dims
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import parser
from onnx.reference import ReferenceEvaluator
from representatives import examples
from rule_cases.sequence import f32

from onward.differentiate import gradient, jvp, vjp
from onward.errors import UnsupportedError
from onward.model import load
from onward.recipe.trainable import judge

TENSOR, SEQUENCE = "float[2]", "seq(float[2])"
DEEPEST = 2


@st.composite
def programs(draw):
    """A model, and inputs for it."""
    scope = _Scope(draw, itertools.count(), tensors=["x", "w"], sequences={"s": 2}, number="i")
    scope.steps(1, 4)
    y = scope.everything()
    inputs = f"{TENSOR} x, {TENSOR} w, {SEQUENCE} s, int64 i, int64 n, bool c"
    text = f"g ({inputs}) => ({TENSOR} {y}) {{\n{scope.text()}\n}}"
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}')
    x, w, *s = np.random.default_rng(0).standard_normal((4, 2)).astype(np.float32)
    chosen = {"i": draw(st.integers(0, 3)), "n": draw(st.integers(0, 3)), "c": draw(st.booleans())}
    return model, {"x": x, "w": w, "s": s, **{name: np.array(value) for name, value in chosen.items()}}


class _Scope:
    """A graph while it is written: its lines, and what they can read."""

    def __init__(self, draw, names, tensors, sequences, number, depth=0):
        self._draw, self._names, self._depth = draw, names, depth
        self._tensors, self._sequences, self._number = tensors, sequences, number
        self._lines = []

    def text(self):
        return "\n".join(self._lines)

    def steps(self, least, most):
        plain = [self._compute, self._construct, self._insert, self._erase, self._replace]
        plain += [self._at, self._length, self._concat, self._split]
        nested = [self._map, self._scan, self._branch, self._loop]
        for _ in range(self._draw(st.integers(least, most))):
            self._one_of(plain + nested * (self._depth < DEEPEST))()

    def everything(self):
        """A tensor that depends on much of what there is."""
        total = self._tensors[-1]
        for sequence in list(self._sequences)[-2:]:
            last = self._made("Constant <value_int = -1> ()")
            total = self._made(f"Add({total}, {self._made(f'SequenceAt({sequence}, {last})')})")
        return self._made(f"Sin({total})")

    # ---- tensors and sequences ---------------------------------------------------------------------------------------

    def _compute(self):
        a, b = self._tensor(), self._tensor()
        self._tensors.append(self._made(self._one_of([f"Sin({a})", f"Mul({a}, {b})", f"Add({a}, {b})"])))

    def _construct(self):
        parts = [self._tensor() for _ in range(self._draw(st.integers(1, 3)))]
        return self._known(self._made(f"SequenceConstruct({', '.join(parts)})"), len(parts))

    def _insert(self):
        sequence, tensor = self._sequence(), self._tensor()
        length = self._sequences[sequence]
        place = self._place(sequence, -length, length)
        self._known(self._made(f"SequenceInsert({sequence}, {tensor}{place})"), length + 1)

    def _erase(self):
        long = [name for name, length in self._sequences.items() if length > 1]
        if long:
            sequence = self._one_of(long)
            length = self._sequences[sequence]
            place = self._place(sequence, -length, length - 1)
            self._known(self._made(f"SequenceErase({sequence}{place})"), length - 1)

    def _replace(self):
        """Erase and insert: the length remains, which a Loop may carry on."""
        sequence, tensor = self._sequence(), self._tensor()
        length = self._sequences[sequence]
        shorter = self._made(f"SequenceErase({sequence}{self._place(sequence, -length, length - 1)})")
        place = self._place(shorter, 1 - length, length - 1)
        self._known(self._made(f"SequenceInsert({shorter}, {tensor}{place})"), length)

    def _at(self):
        sequence = self._sequence()
        length = self._sequences[sequence]
        place = self._place(sequence, -length, length - 1, optional=False)
        self._tensors.append(self._made(f"SequenceAt({sequence}{place})"))

    def _length(self):
        length = self._made(f"CastLike({self._made(f'SequenceLength({self._sequence()})')}, x)")
        self._tensors.append(self._made(f"Mul({length}, {self._tensor()})"))

    def _concat(self):
        stack = self._made(f"Sin({self._stack(self._sequence())})")
        axis = self._made("Constant <value_ints = [0]> ()")
        self._tensors.append(self._made(f"ReduceMean <keepdims = 0> ({stack}, {axis})"))

    def _split(self):
        """One behind the other, and apart again."""
        sequence = self._sequence()
        flat = self._made(f"Sin({self._made(f'ConcatFromSequence <axis = 0> ({sequence})')})")
        size = self._made("Constant <value_int = 2> ()")
        self._known(self._made(f"SplitToSequence({flat}, {size})"), self._sequences[sequence])

    # ---- nested graphs -----------------------------------------------------------------------------------------------

    def _map(self):
        sequence = self._sequence()
        other = self._one_of([sequence, self._tensor()])
        a, b = self._fresh(), self._fresh()
        body = self._inner([a, b], self._sequences)
        body.steps(0, 2)
        text = body._closed([(TENSOR, body.everything())], f"{TENSOR} {a}, {TENSOR} {b}")
        self._known(self._made(f"SequenceMap <body = {text}> ({sequence}, {other})"), self._sequences[sequence])

    def _scan(self):
        sequence = self._sequence()
        start, stack = self._tensor(), self._stack(sequence)
        state, item, last, items = (self._fresh() for _ in range(4))
        body = self._inner([state, item], {})
        body.steps(0, 2)
        text = body._closed(
            [(TENSOR, body.everything()), (TENSOR, body._tensor())], f"{TENSOR} {state}, {TENSOR} {item}"
        )
        self._lines.append(f"{last}, {items} = Scan <num_scan_inputs = 1, body = {text}> ({start}, {stack})")
        self._tensors.append(last)
        self._known(self._made(f"SplitToSequence <keepdims = 0> ({items})"), self._sequences[sequence])

    def _branch(self):
        kinds = self._one_of([(TENSOR,), (SEQUENCE,), (SEQUENCE, TENSOR)])
        branches, lengths = [], []
        for name in ("then_branch", "else_branch"):
            inner = self._inner([], self._sequences)
            inner.steps(0, 3)
            chosen = inner._sequence()
            lengths.append(inner._sequences[chosen])
            text = inner._closed([(kind, chosen if kind is SEQUENCE else inner.everything()) for kind in kinds])
            branches.append(f"{name} = {text}")
        self._take(kinds, min(lengths), f"If (c) <{', '.join(branches)}>")

    def _loop(self):
        """One that carries a tensor, and a sequence that does not become shorter than it was."""
        tensor, sequence = self._tensor(), self._sequence()
        length = self._sequences[sequence]
        number, go_on, state, carried = (self._fresh() for _ in range(4))
        body = self._inner([state], {**self._sequences, carried: length}, number)
        body.steps(0, 3)
        longer = body._one_of([name for name, least in body._sequences.items() if least >= length])
        text = body._closed(
            [("bool", go_on), (TENSOR, body.everything()), (SEQUENCE, longer)],
            f"int64 {number}, bool {go_on}, {TENSOR} {state}, {SEQUENCE} {carried}",
        )
        self._take((TENSOR, SEQUENCE), length, f"Loop <body = {text}> (n, , {tensor}, {sequence})")

    def _inner(self, tensors, sequences, number=None):
        """A nested graph, which captures all tensors of this one, and the sequences that it is given."""
        number = number or self._number
        return _Scope(self._draw, self._names, [*self._tensors, *tensors], dict(sequences), number, self._depth + 1)

    def _closed(self, outputs, inputs=""):
        """The graph in the form of an attribute."""
        declared = ", ".join(f"{kind} {self._made(f'Identity({value})')}" for kind, value in outputs)
        return f"{self._fresh()} ({inputs}) => ({declared}) {{\n{self.text()}\n}}"

    def _take(self, kinds, length, text):
        """Write a node with such outputs."""
        outputs = [self._fresh() for _ in kinds]
        self._lines.append(f"{', '.join(outputs)} = {text}")
        for kind, name in zip(kinds, outputs, strict=True):
            if kind is TENSOR:
                self._tensors.append(name)
            else:
                self._known(name, length)

    # ---- choices -----------------------------------------------------------------------------------------------------

    def _one_of(self, things):
        return self._draw(st.sampled_from(things))

    def _tensor(self):
        return self._one_of(self._tensors)

    def _sequence(self):
        return self._one_of(list(self._sequences)) if self._sequences else self._construct()

    def _place(self, sequence, low, high, optional=True):
        """An operand: a constant, the number of an iteration modulo the length, or none, which means the end."""
        place = self._one_of([*range(low, high + 1), "number", *["end"] * optional])
        if place == "end":
            return ""
        if place != "number":
            return f", {self._made(f'Constant <value_int = {place}> ()')}"
        # the length may be 0 where something was erased
        length = self._made(
            f"Max({self._made(f'SequenceLength({sequence})')}, {self._made('Constant <value_int = 1> ()')})"
        )
        return f", {self._made(f'Mod({self._number}, {length})')}"

    def _stack(self, sequence):
        return self._made(f"ConcatFromSequence <axis = 0, new_axis = 1> ({sequence})")

    def _known(self, sequence, length):
        self._sequences[sequence] = length
        return sequence

    def _fresh(self):
        return f"v{next(self._names)}"

    def _made(self, text):
        name = self._fresh()
        self._lines.append(f"{name} = {text}")
        return name


LIST_RNN = parsed("""
g (int64 n, float[2,3] x, float[3,4] w, float[4,4] r, float[2,4] h0) => (float[t,2,4] y, float[2,4] h) {
  none = SequenceEmpty <dtype = 1> ()
  h, all = Loop <body = b (int64 i, bool c, float[2,4] before, seq(float[2,4]) list)
      => (bool go, float[2,4] after, seq(float[2,4]) longer) {
    p = MatMul(x, w)
    q = MatMul(before, r)
    z = Add(p, q)
    after = Tanh(z)
    longer = SequenceInsert(list, after)
    go = Identity(c)
  }> (n, , h0, none)
  y = ConcatFromSequence <axis = 0, new_axis = 1> (all)
}""")
"""A recurrent network as a loop that appends to a list."""

ITEMS = parsed("""
g (seq(float[2,3]) xs, float[3,4] w, float[4,4] r, float[2,4] h0) => (float[2,4] h) {
  n = SequenceLength(xs)
  h = Loop <body = b (int64 i, bool c, float[2,4] before) => (bool go, float[2,4] after) {
    x = SequenceAt(xs, i)
    p = MatMul(x, w)
    q = MatMul(before, r)
    z = Add(p, q)
    after = Tanh(z)
    go = Identity(c)
  }> (n, , h0)
}""")
"""A recurrent network over the elements of a sequence."""

FIBONACCI = parsed("""
g (int64 n, float[3] a, float[3] b, float[3] w) => (float[t,3] y, float[3] z) {
  start = SequenceConstruct(a, b)
  all = Loop <body = b (int64 i, bool c, seq(float[3]) list) => (bool go, seq(float[3]) longer) {
    latest = Constant <value_int = -1> ()
    before = Constant <value_int = -2> ()
    p = SequenceAt(list, latest)
    q = SequenceAt(list, before)
    s = Mul(p, w)
    t = Sin(s)
    next = Add(t, q)
    longer = SequenceInsert(list, next)
    go = Identity(c)
  }> (n, , start)
  y = ConcatFromSequence <axis = 0, new_axis = 1> (all)
  last = Constant <value_int = -1> ()
  z = SequenceAt(all, last)
}""")
"""A loop that reads the list that it appends to."""

QUEUE = parsed("""
g (int64 n, seq(float[3]) s, float[3] w) => (float[3] y, seq(float[3]) rest) {
  zero = Constant <value = float[3] {0.0, 0.0, 0.0}> ()
  y, rest = Loop <body = b (int64 i, bool c, float[3] sum, seq(float[3]) list)
      => (bool go, float[3] more, seq(float[3]) shorter) {
    first = Constant <value_int = 0> ()
    a = SequenceAt(list, first)
    shorter = SequenceErase(list, first)
    m = Mul(a, w)
    e = Mul(m, m)
    more = Add(sum, e)
    go = Identity(c)
  }> (n, , zero, s)
}""")
"""A loop that takes elements from the front of a list."""

BRANCHES = parsed("""
g (bool c, seq(float[2]) s, float[2] x) => (seq(float[2]) y, float[2] z) {
  y = If (c) <
    then_branch = t () => (seq(float[2]) yt) { e = Mul(x, x)  yt = SequenceInsert(s, e) },
    else_branch = e () => (seq(float[2]) ye) {
      i = Constant <value_int = 1> ()
      a = SequenceAt(s, i)
      m = Mul(a, a)
      ye = SequenceConstruct(m, x)
    }
  >
  j = Constant <value_int = 0> ()
  b = SequenceAt(y, j)
  d = SequenceAt(s, j)
  z = Mul(b, d)
}""")
"""A sequence that is the result of an If, captured by its branches, and read besides."""

MAYBE = parsed("""
g (optional(float[2]) o, float[2] x) => (float[2] y) {
  has = OptionalHasElement(o)
  a = If (has) <
    then_branch = t () => (float[2] at) { e = OptionalGetElement(o)  at = Mul(e, x) },
    else_branch = f () => (float[2] af) { af = Mul(x, x) }
  >
  b = If (has) <
    then_branch = u () => (float[2] bt) { g = OptionalGetElement(o)  bt = Mul(g, g) },
    else_branch = v () => (float[2] bf) { bf = Identity(x) }
  >
  y = Add(a, b)
}""")

MAPPED_IN_LOOP = parsed("""
g (int64 n, seq(float[2]) s, float[2] w) => (seq(float[2]) y) {
  y = Loop <body = b (int64 i, bool c, seq(float[2]) list) => (bool go, seq(float[2]) next) {
    next = SequenceMap <body = m (float[2] a, float[2] b) => (float[2] d) { e = Mul(a, w)  d = Add(e, b) }> (list, s)
    go = Identity(c)
  }> (n, , s)
}""")

WHOLE = parsed("""
g (seq(float[2]) s, seq(float[2]) t) => (seq(float[2]) y) {
  zero = Constant <value_int = 0> ()
  y = SequenceMap <body = b (float[2] a) => (float[2] d) { e = SequenceAt(t, zero)  d = Mul(a, e) }> (s)
}""")
"""A body that captures a sequence."""

MAPS_IN_IF = parsed("""
g (bool c, seq(float[2]) s, float[2] x) => (float[2] y) {
  y = If (c) <
    then_branch = t () => (float[2] yt) {
      last = Constant <value_int = -1> ()
      m = SequenceMap <body = b1 (float[2] a) => (float[2] d) { d = Mul(a, x) }> (s)
      k = SequenceMap <body = b2 (float[2] p, float[2] q) => (float[2] r) {
        e = SequenceAt(m, last)
        f = Mul(p, e)
        r = Add(f, q)
      }> (m, m)
      yt = SequenceAt(k, last)
    },
    else_branch = e () => (float[2] ye) { ye = Identity(x) }
  >
}""")
"""A body that captures a sequence that is mapped, too, and whose type is said nowhere, since it is inside of an If."""

WEIGHTS = {"w": f32(3, 4), "r": f32(4, 4, seed=1), "h0": f32(2, 4, seed=2)}
PAIRS = [f32(2), f32(2, seed=1), f32(2, seed=2)]
TRIPLES = [f32(3), f32(3, seed=1), f32(3, seed=2)]
CASES = {
    "list": (LIST_RNN, {"n": np.array(4), "x": f32(2, 3, seed=3), **WEIGHTS}),
    "items": (ITEMS, {"xs": [f32(2, 3, seed=i) for i in range(4)], **WEIGHTS}),
    **{
        f"list that is read, {n} trips": (FIBONACCI, {"n": np.array(n), **dict(zip("abw", TRIPLES, strict=True))})
        for n in (0, 3)
    },
    "queue": (QUEUE, {"n": np.array(2), "s": TRIPLES, "w": f32(3, seed=3)}),
    **{f"branches {c}": (BRANCHES, {"c": np.array(c), "s": PAIRS, "x": f32(2, seed=3)}) for c in (True, False)},
    "maybe": (MAYBE, {"o": f32(2), "x": f32(2, seed=1)}),
    "captured by a map": (WHOLE, {"s": PAIRS, "t": PAIRS[:2]}),
    "maps in If": (MAPS_IN_IF, {"c": np.array(True), "s": PAIRS, "x": f32(2, seed=3)}),
    "map in loop": (MAPPED_IN_LOOP, {"n": np.array(2), "s": PAIRS, "w": f32(2, seed=3)}),
}


@pytest.mark.slow("list that is read, 0 trips")
@pytest.mark.parametrize("name", CASES)
def test_differences(name):
    check(*CASES[name], order=2)


@pytest.mark.parametrize("name", CASES)
def test_no_dimension_known(name):
    proto, inputs = CASES[name]
    check(with_symbolic_dims(proto), inputs, order=1)


@pytest.mark.parametrize("name", CASES)
def test_onnxruntime(name):
    check_on_onnxruntime(*CASES[name])


@examples(15, suppress_health_check=[HealthCheck.too_slow])
@given(programs())
def test_programs(program):
    check_program(*program)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs())
def test_many_programs(program):
    check_program(*program)


def check_program(proto, inputs):
    """Against differences; and on ONNX Runtime, where it loads the program itself."""
    onnx.checker.check_model(proto, full_check=True)
    check(proto, inputs, order=1)
    if is_loaded_by_onnxruntime(proto):
        check_on_onnxruntime(proto, inputs)


def is_loaded_by_onnxruntime(proto):
    """It does not load every SequenceMap that stands in a graph that is nested in another."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        ort.InferenceSession(proto.SerializeToString(), options)
    except (ort.capi.onnxruntime_pybind11_state.InvalidGraph, ort.capi.onnxruntime_pybind11_state.Fail):
        return False
    return True


TAKEN_APART = parsed("""
g (float[5,2,3] x, float[2,3] h, float[3,3] w) => (float[2,3] y) {
  sizes = Constant <value = int64[2] {1, 4}> ()
  zero = Constant <value = int64 {0}> ()
  one = Constant <value = int64 {1}> ()
  two = Constant <value = int64 {2}> ()
  parts = SplitToSequence <axis = 0> (x, sizes)
  first = SequenceAt(parts, zero)
  second = SequenceAt(parts, one)
  hw = MatMul(h, w)
  columns = SplitToSequence <axis = 1, keepdims = 0> (hw)
  a = SequenceAt(columns, zero)
  b = SequenceAt(columns, one)
  c = SequenceAt(columns, two)
  sin = Sin(first)
  axis = Constant <value = int64[1] {0}> ()
  sum = ReduceSum <keepdims = 0> (sin, axis)
  p = MatMul(sum, w)
  row = Gather(second, one)
  q = Mul(p, row)
  ab = Mul(a, b)
  list = SequenceConstruct(c, ab, a)
  stack = ConcatFromSequence <axis = 1, new_axis = 1> (list)
  y = Add(q, stack)
}""")
"""`take_apart` as the exporter writes it before it optimises."""


@pytest.mark.needs("torch")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["append_to_list", "go_through_parts", "read_list", "take_apart"])
def test_torch(name):
    import torch
    import torch_sequences

    function = getattr(torch_sequences, name)
    inputs = {"x": f32(5, 2, 3), "h": f32(2, 3, seed=1), "w": f32(3, 3, seed=2)}
    tensors = {key: torch.tensor(value, requires_grad=True) for key, value in inputs.items()}
    proto = TAKEN_APART
    if name != "take_apart":
        proto = onnx.load_from_string(torch_sequences.exported(function, tensors))
    check_against_torch(proto, function(**tensors), tensors, inputs, [on_onnxruntime], rtol=1e-4, atol=1e-5)


def check_against_torch(proto, y, tensors, inputs, runs, rtol=1e-5, atol=1e-6):
    """Compare the gradients of y by tensors, named as in the model, with those of PyTorch."""
    import torch

    dy = f32(*y.shape, seed=9)
    expected = torch.autograd.grad(y, list(tensors.values()), torch.tensor(dy))
    model = vjp(proto, "y", list(tensors)).to_proto()
    for run in runs:
        for grad, exact in zip(run(model, {**inputs, "dy": dy}), expected, strict=True):
            np.testing.assert_allclose(grad, exact.numpy(), rtol=rtol, atol=atol)


@pytest.mark.slow("mean", "sum")
@pytest.mark.needs("torch")
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bag(mode):
    """A Loop that appends a row for each bag, as PyTorch exports it; one is empty, and an index is there twice."""
    import torch
    import torch_sequences

    x, offsets = torch.tensor([1, 2, 4, 5, 4, 3, 2, 9]), torch.tensor([0, 3, 4, 4, 8])
    bag = torch_sequences.Bag(mode)
    proto = torch_sequences.exported_by_dynamo(bag, {"x": x, "offsets": offsets})
    choices = judge(whole := load(proto), whole.graph.outputs)
    assert [choice.name for choice in choices if choice.role == "parameter"] == ["bag.weight"]
    inputs = {"x": x.numpy(), "offsets": offsets.numpy()}
    tensors = {"bag.weight": bag.bag.weight}
    check_against_torch(proto, bag(x, offsets), tensors, inputs, [on_onnxruntime, on_stock_evaluator])


def on_stock_evaluator(proto, inputs):
    return ReferenceEvaluator(proto).run(None, inputs)


@pytest.mark.needs("torch")
def test_dstack():
    """SequenceConstruct, SequenceMap over an If on ranks, one branch of which is never taken, and SequenceAt."""
    import torch
    import torch_sequences

    inputs = {name: f32(3, seed=i) for i, name in enumerate("abc")}
    tensors = {name: torch.tensor(array, requires_grad=True) for name, array in inputs.items()}
    y = torch_sequences.Stack()(**tensors)
    proto = torch_sequences.exported_by_dynamo(torch_sequences.Stack(), tensors, optimize=False)
    check_against_torch(proto, y, tensors, inputs, [on_onnxruntime, on_stock_evaluator])


@pytest.mark.parametrize("position", [0, 1, 2, -1, -3])
@pytest.mark.parametrize("operator", ["SequenceAt", "SequenceErase"])
def test_positions_on_the_stock_evaluator(operator, position):
    """onnx's own evaluator inserts at the front where the position is the end: no gradient depends on that."""
    result = "e = Mul(t, t)" if operator == "SequenceAt" else "e = ConcatFromSequence <axis = 0> (t)"
    proto = parsed(f"""g (seq(float[2]) s, int64 p) => (float[k] y) {{
      t = {operator}(s, p)
      {result}
      y = Sin(e)
    }}""")
    known = parsed(f"""g (seq(float[2]) s) => (float[k] y) {{
      p = Constant <value_int = {position}> ()
      t = {operator}(s, p)
      {result}
      y = Sin(e)
    }}""")
    wanted = on_onnxruntime(gradient(known, "y", ["s"]).to_proto(), {"s": PAIRS})[1]
    for model, more in ((proto, {"p": np.array(position)}), (known, {})):
        found = on_stock_evaluator(gradient(model, "y", ["s"]).to_proto(), {"s": PAIRS, **more})[1]
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_known_parts_leave_no_sequence():
    model = vjp(TAKEN_APART, "y", ["x", "h", "w"])
    assert not [node.op_type for node in model.graph if "Sequence" in node.op_type]


def test_appending_computes_nothing_again():
    """The way back through a Loop that only appends holds no Loop of its own."""
    proto, _ = CASES["list"]
    model = vjp(proto, "y", ["x", "w"])
    assert [node.op_type for node in model.graph.all_nodes()].count("Loop") == 2


@pytest.mark.parametrize("call", [gradient, vjp])
def test_sequences_are_inputs_and_results(call):
    """A gradient has the type of what it belongs to; `gradient` weights all elements of all tensors with 1."""
    proto = parsed("""g (seq(float[n]) s, float[2] x) => (seq(float[n]) y) {
      y = SequenceMap <body = b (float[n] a) => (float[n] d) { d = Mul(a, a) }> (s)
    }""")
    model = call(proto, "y", ["s", "x"]).to_proto()
    onnx.checker.check_model(model, full_check=True)
    s, x = [f32(2), f32(3, seed=1)], f32(2)
    ones = [np.ones_like(a) for a in s]
    *_, ds, dx = on_onnxruntime(model, {"s": s, "x": x} | ({"dy": ones} if call is vjp else {}))
    for a, da in zip(s, ds, strict=True):
        np.testing.assert_allclose(da, 2 * a)
    np.testing.assert_array_equal(dx, np.zeros(2))


def test_a_sequence_in_between():
    """Elements that are known are not taken past a sequence that is differentiated by."""
    proto = parsed("""g (float[2] a, float[2] b) => (float[2] y) {
      one = Constant <value_int = 1> ()
      s = SequenceConstruct(a, b)
      e = SequenceAt(s, one)
      y = Mul(e, e)
    }""")
    inputs = {"a": f32(2), "b": f32(2, seed=1)}
    _, ds, db = on_onnxruntime(gradient(proto, "y", ["s", "b"]).to_proto(), inputs)
    np.testing.assert_allclose(ds, [np.zeros(2), 2 * inputs["b"]])
    np.testing.assert_allclose(db, 2 * inputs["b"])


@pytest.mark.parametrize("name", ["branches True", "map in loop", "queue"])
def test_forward_mode(name):
    """How y changes along directions, times dy, is what the gradients times the directions are."""
    proto, inputs = CASES[name]
    y, xs = proto.graph.output[0].name, differentiable(proto, inputs)
    along = {f"d{x}": mapped(lambda a: f32(*a.shape, seed=7), inputs[x]) for x in xs}
    (change,) = on_onnxruntime(jvp(proto, y, xs).to_proto(), {**inputs, **along})
    dy = mapped(lambda a: f32(*a.shape, seed=8), change)
    grads = on_onnxruntime(vjp(proto, y, xs).to_proto(), {**inputs, "dy": dy})
    assert dot(change, dy) == pytest.approx(sum(map(dot, grads, along.values())), rel=1e-4)


def dot(a, b):
    return sum(float(np.sum(p * q)) for p, q in zip(flat(a), flat(b), strict=True))


@pytest.mark.parametrize("o", [None, f32(2)], ids=["nothing", "something"])
def test_optional_input(o):
    """The gradient of an Optional is an Optional; that of nothing is nothing."""
    x, dy = f32(2, seed=1), f32(2, seed=2)
    do, dx = on_onnxruntime(vjp(MAYBE, "y", ["o", "x"]).to_proto(), {"o": o, "x": x, "dy": dy})
    if o is None:
        assert do is None
        np.testing.assert_allclose(dx, dy * (2 * x + 1), rtol=1e-6)
    else:
        np.testing.assert_allclose(do, dy * (x + 2 * o), rtol=1e-6)
        np.testing.assert_allclose(dx, dy * o, rtol=1e-6)


def test_empty_sequence():
    """Nothing depends on what is done with each element of an empty sequence."""
    proto = parsed("""g (seq(float[2]) s, float[2] w) => (seq(float[2]) y) {
      t = SequenceErase(s)
      y = SequenceMap <body = b (float[2] a) => (float[2] d) { d = Mul(a, w) }> (t)
    }""")
    y, (ds,), dw = on_onnxruntime(gradient(proto, "y", ["s", "w"]).to_proto(), {"s": [f32(2)], "w": f32(2)})
    assert y == []
    np.testing.assert_array_equal([ds, dw], np.zeros((2, 2)))


SCAN = parsed("""
g (seq(float[2]) s, float[3,2] xs, float[2] h0) => (float[2] y) {
  zero = Constant <value_int = 0> ()
  y = Scan <num_scan_inputs = 1, body = b (float[2] h, float[2] x) => (float[2] next) {
    a = SequenceAt(s, zero)
    m = Mul(a, x)
    next = Add(m, h)
  }> (h0, xs)
}""")


def test_refused():
    """Gradients of sequences that a body reads as a whole, where the operator could not carry them."""
    with pytest.raises(UnsupportedError, match="captures the sequence") as caught:
        vjp(SCAN, "y", ["s"])
    assert "Loop" in caught.value.hint
