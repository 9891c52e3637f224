"""Runs as programs for JAX that need nothing of Onward: `onward convert training.onnx --to jax`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import numpy as np
import onnx
import pytest
from jax_training import Arrays, digits, sentences
from marks import needs
from node_tests import onnx_node_tests

import onward
from onward.engines import start
from onward.engines.framework_engine import array_function
from onward.errors import UnsupportedError
from onward.frameworks.run_files import restore, write

pytestmark = [needs("jax", "optax"), pytest.mark.usefixtures("untried")]

_CONTINUE = """
import importlib.util, json, sys
from pathlib import Path
sys.modules["onward"] = None  # importing it fails
import jax, numpy as np
losses = {}
for folder in map(Path, sys.argv[1:]):
    spec = importlib.util.spec_from_file_location("run", folder / "run.py")
    run = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run)
    batches = np.load(folder / "batches.npz")
    count = batches[batches.files[0]].shape[0]
    state, step, found = run.load(), jax.jit(run.step), []
    for i in range(count):
        state, metrics = step(state, {name: batches[name][i] for name in batches.files})
        found.append(float(metrics["loss"]))
    run.save(state)
    losses[folder.name] = found
print(json.dumps(losses))
"""


def lstm() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    weights = {"w": (1, 32, 8), "r": (1, 32, 8), "b": (1, 64), "head": (8, 10)}
    initializers = [
        onnx.numpy_helper.from_array((rng.normal(size=shape) * 0.3).astype(np.float32), name)
        for name, shape in weights.items()
    ]
    nodes = [
        onnx.helper.make_node("LSTM", ["x", "w", "r", "b"], ["", "last"], hidden_size=8),
        onnx.helper.make_node("Squeeze", ["last", "first"], ["hidden"]),
        onnx.helper.make_node("MatMul", ["hidden", "head"], ["logits"]),
    ]
    initializers.append(onnx.numpy_helper.from_array(np.array([0], np.int64), "first"))
    graph = onnx.helper.make_graph(
        nodes,
        "lstm",
        [onnx.helper.make_tensor_value_info("x", 1, ["time", "batch", 8])],
        [onnx.helper.make_tensor_value_info("logits", 1, ["batch", 10])],
        initializers,
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)


def signals(count: int) -> list[Arrays]:
    rng = np.random.default_rng(0)
    return [
        {"x": rng.normal(size=(5, 6, 8)).astype(np.float32), "labels": rng.integers(0, 10, 6)} for _ in range(count)
    ]


class Written:
    """A folder, and the losses of the run that it was made of."""

    def __init__(self, folder: Path, proto: onnx.ModelProto, batches: list[Arrays], **recipe: Any):
        self.folder = folder
        self.training = onward.prepare(onward.load(proto), **recipe)
        with start(self.training, threads=1) as engine:
            for batch in batches[:5]:
                engine.step(batch)
            for name, array in engine.state().items():
                self.training.set(name, array)
            write(self.training, "jax", folder)
            self.losses = [float(engine.step(batch)[engine.loss]) for batch in batches[5:]]
            self.after = engine.state()
        np.savez(folder / "batches.npz", **{name: np.stack([b[name] for b in batches[5:]]) for name in batches[0]})


def check(*runs: Written) -> None:
    """Continue them all where there is no Onward, and read what they have become."""
    command = [sys.executable, "-c", _CONTINUE, *(str(run.folder) for run in runs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = json.loads(done.stdout)
    for run in runs:
        assert losses[run.folder.name] == pytest.approx(run.losses, rel=1e-6)
        again = restore("jax", run.folder, run.training)
        for name, array in run.after.items():
            found = again.initializer(name).const_value.numpy()
            assert found.dtype == array.dtype and found.shape == array.shape
            if not name.startswith("conv.bias"):  # whose gradient is rounding alone
                assert np.abs(found.astype(float) - array).max() <= 2e-4 * max(np.abs(array).max(), 1e-3), name


def test_programs_go_on_without_onward(tmp_path: Path) -> None:
    mlp, cnn = models.digits_mlp(), models.small_cnn()
    check(
        Written(
            tmp_path / "schedule",
            mlp,
            digits(15, 64),
            loss="cross_entropy:label_smoothing=0.1",
            optimizer="adamw:lr=1e-2,eps=1e-3",
            schedule="cosine:steps=40,warmup=8",
            clip="norm:1",
        ),
        Written(
            tmp_path / "statistics",
            cnn,
            digits(15, 1, 8, 8),
            loss="cross_entropy",
            optimizer="momentum:lr=0.05",
            schedule="exponential:gamma=0.9",
        ),
        Written(
            tmp_path / "groups",
            mlp,
            digits(15, 64),
            loss="cross_entropy",
            optimizer="amsgrad:lr=1e-2",  # of PyTorch, which optax does not have
            groups=["*.bias:optimizer=sgd,lr=1e-3"],
            freeze="fc1.weight",
            schedule="cosine_restarts:period=4",
            accumulate=2,
            ema=0.9,
        ),
    )
    text = (tmp_path / "schedule" / "run.py").read_text()
    assert "optax.join_schedules" in text and 'image @ params["fc1.weight"].T + params["fc1.bias"]' in text
    assert "import onward" not in text and "onward." not in text


@pytest.mark.slow
def test_larger_programs_go_on_without_onward(tmp_path: Path) -> None:
    check(
        Written(
            tmp_path / "transformer",
            models.small_transformer(2),
            sentences(15),
            loss="value:loss",
            optimizer="adafactor:lr=1e-3",
        ),
        Written(tmp_path / "lstm", lstm(), signals(15), loss="cross_entropy", optimizer="nadam:lr=1e-2"),
        Written(
            tmp_path / "muon",
            models.digits_mlp(),
            digits(15, 64),
            loss="cross_entropy",
            optimizer="muon",
            groups=["*.bias:optimizer=adamw"],
        ),
    )


def test_state_of_another_model_is_refused(tmp_path: Path) -> None:
    recipe = {"loss": "cross_entropy", "optimizer": "adam"}
    write(onward.prepare(onward.load(models.digits_mlp()), **recipe), "jax", tmp_path / "run")
    other = onward.prepare(onward.load(models.digits_mlp(16)), **recipe)
    with pytest.raises(UnsupportedError, match=r"`params/fc1.weight` is float32\[32, 64\], not float32\[16, 64\]"):
        restore("jax", tmp_path / "run", other)
    with pytest.raises(UnsupportedError, match="holds the state of a run"):
        restore("jax", tmp_path / "run")


def _operators() -> Iterator[str]:
    from onward.frameworks.jax.program.operators import rows

    return iter(sorted(rows()))


def test_all_operators_can_be_written() -> None:
    """Each with all that it mentions; but those that ask other parts of Onward."""
    import builtins
    import symtable

    from onward.frameworks.jax.program.operators import INSTEAD, define, short
    from onward.frameworks.program.source_bundle import SourceBundle

    own, refused = SourceBundle(instead=INSTEAD, annotated=False), []
    for name in _operators():
        try:
            define(own, name, short(name))
        except UnsupportedError:
            refused.append(name)
    text = "\n".join([*own.imports(), *own.texts()])
    assert refused == ["NonMaxSuppression"] and "onward" not in text
    module: dict[str, Any] = {}
    exec(compile(text, "operators.py", "exec"), module)
    tables = [symtable.symtable(text, "operators.py", "exec")]
    for table in tables:
        tables += table.get_children()
        read = [symbol.get_name() for symbol in table.get_symbols() if symbol.is_global() and symbol.is_referenced()]
        assert not [name for name in read if name not in module and not hasattr(builtins, name)]


WINDOWS = ("test_hannwindow", "test_hammingwindow", "test_blackmanwindow", "test_melweightmatrix")
"""Of sizes that are not known before it runs, which programs of JAX do not have."""


@pytest.mark.slow
def test_programs_of_the_standards_own_tests() -> None:
    """Some of all operators, and all control flow, as a program without an interpreter, and as the engine has them."""
    names = list(onnx_node_tests())
    flow = [name for name in names if name.startswith(("test_loop", "test_if", "test_scan", "test_lstm"))]
    for name in dict.fromkeys([*names[::40], *flow]):
        case = onnx_node_tests()[name]
        values = [value for inputs, outputs in case.data for value in (*inputs, *outputs)]
        if name.startswith(("test_nonmaxsuppression", "test_image_decoder", *WINDOWS)):  # which are refused
            continue
        if not all(isinstance(value, np.ndarray) and value.dtype.kind not in "OSU" for value in values):
            continue
        given = [value.name for value in case.proto().graph.input]
        engine = array_function("jax", onward.load(case.proto()))
        for inputs, _ in case.data:
            fed = dict(zip(given, inputs, strict=False))
            for found, expected in zip(executed(case.proto(), fed), engine(fed).values(), strict=True):
                assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
                same = [array.astype(np.complex128) for array in (found, expected)]
                np.testing.assert_allclose(*same, rtol=1e-5, atol=1e-6, err_msg=name)


def executed(proto: onnx.ModelProto, inputs: Arrays) -> list[np.ndarray]:
    """What a program of a model computes."""
    import jax.numpy as jnp

    from onward.frameworks.jax.program.operators import INSTEAD
    from onward.frameworks.jax.program.recording import GraphPrinter
    from onward.frameworks.program.source_bundle import SourceBundle

    model, printer = onward.load(proto), GraphPrinter(SourceBundle(instead=INSTEAD, annotated=False))
    given = {value.name: f"inputs[{value.name!r}]" for value in model.graph.inputs if not value.is_initializer()}
    lines, results = printer.body(model, given)
    exact = printer.helper("exact")
    body = [*lines, f"return [{', '.join(results.values())}]"]
    run = "\n".join(["def run(inputs):", *(f"    {line}" for line in body)])
    imports = ["import jax", "import jax.numpy as jnp", "import numpy as np", *printer.own.imports()]
    module: dict[str, Any] = {"constants": printer.constants}
    exec("\n".join([*imports, *printer.own.texts(), run]), module)
    with module[exact]():
        return [np.asarray(x) for x in module["run"]({name: jnp.asarray(x) for name, x in inputs.items()})]


def test_names_that_a_program_has_itself(tmp_path: Path) -> None:
    proto = models.digits_mlp()
    renamed = {"image": "state", "hidden": "np", "active": "at.once", "logits": "loss"}
    for node in proto.graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
    for value in (*proto.graph.input, *proto.graph.output):
        value.name = renamed[value.name]
    training = onward.prepare(onward.load(proto), loss="cross_entropy", optimizer="sgd")
    write(training, "jax", tmp_path)
    module: dict[str, Any] = {"__file__": str(tmp_path / "run.py")}
    exec((tmp_path / "run.py").read_text(), module)
    (batch,) = digits(1, 64)
    batch["state"] = batch.pop("image")
    with start(training, threads=1) as engine:
        expected = float(engine.step(batch)[engine.loss])
    found, _ = module["loss"]((state := module["load"]())["params"], state, batch)
    assert float(found) == pytest.approx(expected, rel=1e-6)
