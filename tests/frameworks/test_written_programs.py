"""Programs that are written of a model: whatever its texts say, they are no code, and compute what the model does."""

from __future__ import annotations

import ast
import keyword
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import needs
from onnx import TensorProto, helper, numpy_helper

import onward
from onward.engines import start
from onward.errors import Error, MismatchError, UnsupportedError
from onward.frameworks.program.audit import audit_program
from onward.frameworks.program.source_text import Identifiers, docstring, is_identifier, program_beside, quote
from onward.frameworks.program.trial import StepTrial, step_trial
from onward.frameworks.run_files import Framework, write
from onward.transform.types import WORDS

MARK = "open('marker', 'w')"
STATEMENTS = [
    f'"; {MARK}; "',
    f"'); {MARK}; ('",
    f'"""\n{MARK}\n"""',
    f"'''\n{MARK}\n'''",
    f"\n{MARK}\n",
    f"\r{MARK}\r",
    f"\\\n{MARK}",
    f'\\"; {MARK} #',
    f"a\u0085{MARK}",
    f"a\u2028{MARK}",
    f"{{{MARK}}}",
    f"# {MARK}",
]
PYTHON_WORDS = [
    "class", "lambda", "in", "None", "True", "import", "print", "input", "len", "self", "ops", "as_single",
    "keras", "np", "torch", "F", "nn", "jax", "jnp", "params", "state", "batch", "inputs", "metrics", "changed",
    "loss", "forward", "training", "built", "watched", "keys", "axis", "__class__", "__init__", "__metadata__",
    "{}", "{0}", "%s", "é", "\ufb01", "fi", "0", "a b", "a-b", "x.weight", "x/weight", "\N{GRINNING FACE}", "_",
    "__", "y", "optimizer", "load", "call", "constant_1", "dropout", "Update", "exact", "step_1", "new_w",
    "eval", "save", "hub",
]  # fmt: skip
ROLES = ("weights", "inputs", "hidden", "outputs", "sizes")
WIDTH, SAMPLES = 4, 6


def strings(turn: int) -> dict[str, list[str]]:
    """A share of all for each role; `turn` is which."""
    found: dict[str, list[str]] = {role: [] for role in ROLES}
    for i, string in enumerate([*STATEMENTS, *PYTHON_WORDS]):
        found[ROLES[(i + turn) % len(ROLES)]].append(string)
    return found


def model(turn: int = 0) -> onnx.ModelProto:
    """A model of one training input for each of some strings, and a weight, an inner value or an output for others."""
    rng, roles = np.random.default_rng(turn), strings(turn)
    sentence = _Sentences()
    nodes, inputs, weights = [], [], []
    sizes = iter([*roles["sizes"], *(f"n{i}" for i in range(len(roles["inputs"])))])
    names = iter([*roles["hidden"], *(f"h{i}" for i in range(200))])
    for name in ("first", *roles["inputs"]):
        inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", next(sizes)], next(sentence)))
    now = next(names)
    nodes.append(helper.make_node("ReduceMean", ["first", "axes"], [now], next(sentence), next(sentence), keepdims=1))

    def then(op: str, *given: str, domain: str = "", **attributes: object) -> None:
        nonlocal now
        made = next(names)
        nodes.append(helper.make_node(op, [now, *given], [made], next(sentence), next(sentence), domain, **attributes))
        now = made

    for name in roles["inputs"]:  # a sum over a size that the program has to know
        total, count, number = f"total {name}", f"count {name}", f"number {name}"
        nodes.append(helper.make_node("ReduceSum", [name, "axes"], [total], next(sentence), keepdims=1))
        nodes.append(helper.make_node("Size", [name], [count], next(sentence)))
        nodes.append(helper.make_node("Cast", [count], [number], next(sentence), to=TensorProto.FLOAT))
        nodes.append(helper.make_node("Div", [total, number], [f"share {name}"], next(sentence)))
        then("Add", f"share {name}")
    for name in roles["weights"]:
        weights.append(numpy_helper.from_array(rng.normal(1, 0.1, (1, WIDTH)).astype("f"), name))
        weights[-1].doc_string = next(sentence)
        then("Mul", name)
        then("Tanh")
    then("Gelu", approximate="tanh")
    then(FUNCTION, domain=DOMAIN, **{"class": "tanh"})
    then("Einsum", "square", equation="ij,jk->ik")
    outputs = ["result", *roles["outputs"]]
    for name in outputs:
        nodes.append(helper.make_node("Mul", [now, "two"], [name], next(sentence), next(sentence)))
    return _finished(nodes, inputs, weights, outputs, rng, sentence)


DOMAIN, FUNCTION = f'"; {MARK}; "', f"f\n{MARK}\n"


class _Sentences(Iterator[str]):
    """Statements, over and over, each but for a number at its end."""

    def __init__(self) -> None:
        self._count = 0

    def __next__(self) -> str:
        self._count += 1
        return f"{STATEMENTS[self._count % len(STATEMENTS)]} # {self._count}"


def _finished(nodes, inputs, weights, outputs, rng, sentence) -> onnx.ModelProto:  # type: ignore[no-untyped-def]
    weights += [
        numpy_helper.from_array(rng.normal(size=(WIDTH, WIDTH)).astype("f"), "square"),
        numpy_helper.from_array(np.float32(2.0), "two"),
        numpy_helper.from_array(np.array([1]), "axes"),
    ]
    shape = ["N", WIDTH]
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape, next(sentence)) for name in outputs]
    graph = helper.make_graph(nodes, next(sentence), inputs, made, weights, next(sentence))
    proto = helper.make_model(
        graph,
        functions=[_function(sentence)],
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)],
        producer_name=next(sentence),
        producer_version=next(sentence),
        domain=next(sentence),
        doc_string=next(sentence),
        ir_version=10,
    )
    helper.set_model_props(proto, {next(sentence): next(sentence)})
    for holder in (proto.graph, *proto.graph.node, *proto.graph.input, *proto.graph.initializer):
        entry = holder.metadata_props.add()
        entry.key, entry.value = next(sentence), next(sentence)
    return proto


def _function(sentence: Iterator[str]) -> onnx.FunctionProto:
    inner = helper.make_node("Gelu", ["x"], ["gelu"], next(sentence), next(sentence))
    inner.attribute.append(onnx.AttributeProto(name="approximate", ref_attr_name="class", type=3))
    last = helper.make_node("Sin", ["gelu"], [f"y\n{MARK}"], next(sentence))
    opsets = [helper.make_opsetid("", 21)]
    return helper.make_function(
        DOMAIN, FUNCTION, ["x"], [f"y\n{MARK}"], [inner, last], opsets, ["class"], doc_string=next(sentence)
    )


def batch_for(names: list[str], rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {name: rng.normal(size=(SAMPLES, WIDTH)).astype("f") for name in names}


TEXTS = st.text(st.characters(codec="utf-8"), max_size=30) | st.sampled_from([*STATEMENTS, *PYTHON_WORDS])


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
    training = onward.prepare(onward.load(model(turn)), loss={"result": "mse"}, optimizer="adamw")
    with start(training, threads=1) as engine:
        names = [
            *(value.name or "" for value in training.inputs),
            *(set(engine.inputs) - {value.name for value in training.inputs}),
        ]
        batch = batch_for(names, np.random.default_rng(turn))
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
@pytest.mark.parametrize("turn", range(len(ROLES)))
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


EQUATIONS = (f'abcd"); {MARK}; ("', "abcd\u0085", "abcd->ab\n")
BAD = [("Gelu", "approximate"), ("Conv", "auto_pad"), ("Pad", "mode"), ("Einsum", "equation")]


@pytest.mark.slow("jax", "keras")
@pytest.mark.parametrize("target", [pytest.param(name, marks=needs(name)) for name in SCRIPTS])
def test_words_that_are_none_of_the_standard_are_refused(target: Framework, tmp_path: Path) -> None:
    for operator, attribute in BAD:
        for word in (f'none"); {MARK}; ("', "none ", "a\u0085b") if attribute != "equation" else EQUATIONS:
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
