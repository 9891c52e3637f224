"""Programs that are written of a model: whatever its texts say, they are no code, and compute what the model does."""

from __future__ import annotations

import ast
import keyword
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import planted
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import needs
from onnx import TensorProto, helper, numpy_helper

import onward
from onward.engines import start
from onward.errors import Error, MismatchError, UnsupportedError
from onward.frameworks.files import Framework, write
from onward.frameworks.program.audit import audit_program
from onward.frameworks.program.source_text import Identifiers, docstring, is_identifier, program_beside, quote
from onward.frameworks.program.trial import StepTrial, step_trial
from onward.transform.types import WORDS

TEXTS = st.text(st.characters(codec="utf-8"), max_size=30) | st.sampled_from([*planted.STATEMENTS, *planted.WORDS])


# ---- what programs are made of ---------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(TEXTS)
def test_texts_are_literals_of_one_line(text: str) -> None:
    assert ast.literal_eval(quote(text)) == text
    assert len(quote(text).splitlines()) == 1 and quote(text).isprintable()


@settings(max_examples=300)
@given(TEXTS)
def test_docstrings_are_nothing_else(text: str) -> None:
    (only,) = ast.parse(docstring(text)).body
    assert isinstance(only, ast.Expr) and ast.literal_eval(only.value) == text


@settings(max_examples=300)
@given(st.lists(TEXTS, max_size=8))
def test_names_are_fresh_and_what_python_reads(texts: list[str]) -> None:
    names = Identifiers(["taken"])
    made = [names.like(text) for text in [*texts, "taken"]]
    assert len({*made, "taken"}) == len(made) + 1
    for name in made:
        assert is_identifier(name) and not keyword.iskeyword(name)
        assert isinstance(ast.parse(name).body[0].value, ast.Name)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("path", "program"),
    [("run.pt", "run.py"), ("my-model.keras", "my_model.py"), ("class.pt", "class_.py"), ("torch.pt", "torch_run.py"),
     ("json.keras", "json_run.py"), ("1.pt", "_1.py"), ("é.pt", "run.py")],
)  # fmt: skip
def test_a_program_can_be_imported_and_hides_no_module(path: str, program: str) -> None:
    assert program_beside(Path("folder", path)) == Path("folder", program)


@pytest.mark.parametrize(
    ("source", "objection"),
    [
        ("x = '", "not Python"),
        ("import os", "imports `os`"),
        ("from subprocess import run", "imports `subprocess`"),
        ("def f():\n    import socket", "imports `socket`"),
        ("print(1)", "runs code on import"),
        ("def f(x):\n    return eval(x)", "`eval` is not defined"),
        ("x = __import__('os')", "`__import__` is not defined"),
        ("def f(x):\n    return x.__globals__", "`__globals__`"),
        ("import torch\nx = torch.hub", "`hub`"),
        ("import torch\ndef f():\n    return torch.load('x')", "`load`"),
        ("def f():\n    return g()", "`g` is not defined"),
        ("import torch\ndef f(torch):\n    return torch", "`torch` hides an import"),
        ("def f(): pass\ndef f(): pass", "`f` is defined twice"),
    ],
)
def test_audit_refuses_a_program(source: str, objection: str) -> None:
    with pytest.raises(UnsupportedError, match=objection):
        audit_program(source, ["torch"])


# ---- models that are full of statements ------------------------------------------------------------------------------

SCRIPTS: dict[Framework, str] = {
    "torch": """
import importlib, torch
module, _, _, loss = importlib.import_module(program).load("run.pt")
outputs = module(*map(torch.from_numpy, inputs))
found = loss(outputs["result"], torch.from_numpy(target))
""",
    "keras": """
import importlib, keras
importlib.import_module(program)
model = keras.models.load_model("run.keras")
model(inputs, training=True)
found = model.train_on_batch(inputs, target, return_dict=True)["loss"]
""",
    "jax": """
sys.path.insert(0, "run")
import run
batch = dict(zip(names, [*inputs, target]))
found = run.step(run.load(), batch)[1]["loss"]
assert set(run.apply(run.load(), batch)) >= {"result"}
""",
    "tensorflow": """
import tensorflow as tf
module = tf.saved_model.load("run")
found = module.train_step(*inputs, target)["loss"]
""",
}


def checked(target: Framework, turn: int, folder: Path) -> None:
    """A planted model becomes a program that has the same loss, in a process that has nothing of Onward."""
    training = onward.prepare(onward.load(planted.model(turn)), loss={"result": "mse"}, optimizer="adamw")
    with start(training, threads=1) as engine:
        names = [
            *(value.name or "" for value in training.inputs),
            *(set(engine.inputs) - {value.name for value in training.inputs}),
        ]
        batch = planted.batch(names, np.random.default_rng(turn))
        expected = float(engine.step({name: batch[name] for name in engine.inputs})[engine.loss])
    ending = {"torch": ".pt", "keras": ".keras"}.get(target, "")
    written = write(training, target, folder / f"run{ending}")
    np.savez(folder / "batch.npz", **{str(i): batch[name] for i, name in enumerate(names)})
    head = f"""
import sys
sys.modules["onward"] = None
import numpy as np
program, names, data = {written[-1].stem!r}, {names!r}, np.load("batch.npz")
*inputs, target = [data[str(i)] for i in range(len(names))]
"""
    script = f"{head}{SCRIPTS[target]}\nprint(float(found))"
    done = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", script], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    np.testing.assert_allclose(float(done.stdout.split()[-1]), expected, rtol=1e-5)
    assert not list(folder.rglob("marker")) and not Path("marker").exists()


@pytest.mark.slow("torch-0")
@pytest.mark.parametrize(
    ("target", "turn"),
    [pytest.param("torch", 0, marks=needs("torch")), pytest.param("jax", 1, marks=needs("jax"))],
)
def test_statements_in_a_model_are_not_executed(target: Framework, turn: int, tmp_path: Path) -> None:
    checked(target, turn, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(len(planted.ROLES)))
@pytest.mark.parametrize("target", [pytest.param(name, marks=needs(name)) for name in SCRIPTS])
def test_statements_everywhere_in_a_model_are_not_executed(target: Framework, turn: int, tmp_path: Path) -> None:
    checked(target, turn, tmp_path)


def with_word(operator: str, attribute: str, word: str) -> onnx.ModelProto:
    """A model of one operator, which would take the word for code."""
    inputs = {"Conv": ["x", "w"], "Gelu": ["x"], "Pad": ["x", "pads"], "Einsum": ["x"]}[operator]
    weights = {"w": np.ones((2, 1, 3, 3), "f"), "pads": np.zeros(8, np.int64), "s": np.ones((5, 3), "f")}
    nodes = [
        helper.make_node(operator, inputs, ["h"], "node", **{attribute: word}),
        helper.make_node("MatMul", ["h", "s"], ["m"]),
        helper.make_node("ReduceMean", ["m"], ["y"], keepdims=0),
    ]
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items() if name in (*inputs, "s")]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 1, 5, 5])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [])
    graph = helper.make_graph(nodes, "g", [x], [y], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


EQUATIONS = (f'abcd"); {planted.MARK}; ("', "abcd\u0085", "abcd->ab\n")
BAD = [("Gelu", "approximate"), ("Conv", "auto_pad"), ("Pad", "mode"), ("Einsum", "equation")]


@pytest.mark.slow("jax", "keras")
@pytest.mark.parametrize("target", [pytest.param(name, marks=needs(name)) for name in SCRIPTS])
def test_words_that_are_none_of_the_standard_are_refused(target: Framework, tmp_path: Path) -> None:
    for operator, attribute in BAD:
        for word in (f'none"); {planted.MARK}; ("', "none ", "a\u0085b") if attribute != "equation" else EQUATIONS:
            with pytest.raises(Error, match=f"`{attribute}` of|{operator}"):
                training = onward.prepare(with_word(operator, attribute, word), loss="value:y", optimizer="sgd:lr=0.1")
                write(training, target, tmp_path / {"torch": "run.pt", "keras": "run.keras"}.get(target, "run"))
    assert not list(tmp_path.iterdir()) and not Path("marker").exists()


def test_words_are_those_of_attributes_that_operators_have() -> None:
    for operator, attributes in WORDS.items():
        schema = onnx.defs.get_schema(operator)
        for name, allowed in attributes.items():
            kind = schema.attributes[name]
            assert not kind.default_value.s or kind.default_value.s.decode() in allowed


# ---- programs are tried ----------------------------------------------------------------------------------------------

SEQUENCES = """
<ir_version: 10, opset_import: ["" : 21]>
sequences (float[B, 4] x) => (float[B, 2] y)
<float[4, 6] w = {WEIGHTS}, float[2, 2] u = {1, 2, 3, 4}, float[2, 2] row = {0.5, -0.25, 1, 2},
 int64[2] uneven = {2, 4},
 int64 zero = {0}, int64 one = {1}, int64 two = {2}, int64 last = {-1}, bool certain = {1},
 int64[1] first_axis = {0}, int64[1] axis = {1}>
{
    h = MatMul(x, w)
    pairs = SplitToSequence <axis = 1> (h, two)
    p0 = SequenceAt(pairs, zero)  p1 = SequenceAt(pairs, one)  p2 = SequenceAt(pairs, last)
    parts = SplitToSequence <axis = 1> (h, uneven)
    part = SequenceAt(parts, zero)
    columns = SplitToSequence <axis = 1, keepdims = 0> (h)
    c1 = SequenceAt(columns, one)  c2 = SequenceAt(columns, two)
    d1 = Unsqueeze(c1, axis)  d2 = Unsqueeze(c2, axis)  c = Concat <axis = 1> (d1, d2)
    empty = SequenceEmpty()
    made = SequenceConstruct(p0, p1)
    longer = SequenceInsert(made, p2, one)  longest = SequenceInsert(longer, c)
    shorter = SequenceErase(longest, zero)
    alone = SequenceInsert(empty, p1)  only = SequenceAt(alone, zero)
    s0 = SequenceAt(shorter, zero)  s1 = SequenceAt(shorter, one)  s2 = SequenceAt(shorter, last)
    stacked = ConcatFromSequence <axis = 0, new_axis = 1> (shorter)
    top = ReduceMax <keepdims = 0> (stacked, first_axis)
    constants = SequenceConstruct(row, u)  joined = ConcatFromSequence <axis = 0> (constants)
    bias = ReduceMax(joined, first_axis)
    length = SequenceLength(shorter)  count = Cast <to = 1> (length)
    mapped = SequenceMap <body = each (float[B, 2] i) => (float[B, 2] o) { o = MatMul(i, u) }> (pairs)
    m = SequenceAt(mapped, one)
    total = ReduceSum <keepdims = 0> (h)  nothing = Sub(total, total)  yes = Equal(nothing, nothing)
    chosen = If(yes) <
        then_branch = those () => (seq(float[B, 2]) these) { these = SequenceConstruct(p2, p0) },
        else_branch = others () => (seq(float[B, 2]) rest) { rest = SequenceConstruct(p1, p1) }
    >
    i0 = SequenceAt(chosen, zero)  i1 = SequenceAt(chosen, one)
    grown = Loop <body = turn (int64 n, bool go, seq(float[B, 2]) q) => (bool on, seq(float[B, 2]) r) {
        on = Identity(go)  was = SequenceAt(q, n)  new = Mul(was, p1)  r = SequenceInsert(q, new)
    }> (two, , made)
    g = SequenceAt(grown, last)
    a = Mul(part, s0)  b = Mul(s1, count)  d = Sub(i0, i1)  e = Sub(m, bias)  f = Mul(top, only)
    y = Sum(a, b, d, e, f, s2, g)
}
"""


def of_sequences(target: Framework) -> onward.Model:
    """Of PyTorch a program cannot choose by the data."""
    weights = ", ".join(f"{x:.3f}" for x in np.random.default_rng(0).uniform(-0.5, 0.5, 24))
    text = SEQUENCES.replace("If(yes)", "If(certain)") if target == "torch" else SEQUENCES
    model = onward.load(onnx.parser.parse_model(text.replace("WEIGHTS", weights)))
    return onward.prepare(model, loss="mse", optimizer="adam:lr=0.01")


TRIED = [
    pytest.param("jax", marks=needs("jax")),
    pytest.param("keras", marks=needs("keras", "tensorflow")),
    *(pytest.param(name, marks=[needs(name), pytest.mark.slow]) for name in ("torch", "tensorflow")),
]
FILES: dict[Framework, str] = {"torch": "run.pt", "keras": "run.keras", "jax": "run", "tensorflow": "run"}


@pytest.mark.parametrize("target", TRIED)
def test_sequences_in_programs(target: Framework, tmp_path: Path) -> None:
    """The trial compares the losses of three steps with those of ONNX Runtime."""
    training = of_sequences(target)
    assert step_trial(training) is not None
    assert all(path.exists() for path in write(training, target, tmp_path / FILES[target]))


@pytest.mark.parametrize(
    "target", [TRIED[0], *(pytest.param(*one.values, marks=[*one.marks, pytest.mark.slow]) for one in TRIED[1:])]
)
def test_a_program_with_other_losses_is_not_written(
    target: Framework, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the third loss is another: that of an optimizer which forgets."""
    compare = StepTrial.compare

    def of_another(self: StepTrial, found: np.ndarray, **options: bool) -> None:
        compare(self, [*found[:-1], found[-1] * 1.01], **options)

    monkeypatch.setattr(StepTrial, "compare", of_another)
    with pytest.raises(MismatchError, match="in step 3 of the program the loss is off by"):
        write(of_sequences(target), target, tmp_path / FILES[target])
    assert not list(tmp_path.iterdir())


@needs("tensorflow")
def test_sequences_on_tensorflow() -> None:
    made = step_trial(training := of_sequences("tensorflow"))
    assert made is not None
    with start(training, engine="tensorflow") as engine:
        losses = [float(engine.step(made.batch)[engine.loss]) for _ in made.losses]
    np.testing.assert_allclose(losses, made.losses, rtol=1e-4)
