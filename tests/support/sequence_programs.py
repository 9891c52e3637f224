"""Random programs over sequences, for hypothesis: built, changed and read, in and outside of nested graphs.

All tensors have two elements, so that what varies is what goes where. Of each sequence a program knows the least length
that it can have, and so which positions there are in any case.
"""

import itertools

import numpy as np
from hypothesis import strategies as st
from onnx import parser

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
