"""Entire training as one ONNX model, driven by what its file says, and the same training by `onward train`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
from models import digits_mlp, small_cnn, small_transformer
from paths import ROOT
from runs import QUIET, digits, gan_example

import onward
from onward.lowering.rounds import as_one_step
from onward.training.data import Noise
from onward.training.run import Run

Arrays = dict[str, np.ndarray]
FINISHED, MORE, EARLY, NOT_FINITE = range(4)
CE = {"loss": "cross_entropy"}


class Results(NamedTuple):
    """What came out: all outputs by name, and what goes in again."""

    outputs: Arrays
    carried: Arrays


class WholeRun:
    """The part `run` of a training model. `compute` executes it; on ONNX Runtime unless given."""

    def __init__(self, training: Any, compute: Any = None, **settled: Any):
        self.training = onward.load(training)
        self.model = onward.lower(training, part="run", **settled)
        proto = self.model.to_proto()
        onnx.checker.check_model(proto, full_check=True)
        assert [opset.domain for opset in proto.opset_import] == [""] and not proto.functions
        self.contract = json.loads(self.model.metadata["train.lowered"])
        self._compute = (compute or on_onnxruntime)(self.model)
        inputs, outputs = ([value.name for value in values] for values in (proto.graph.input, proto.graph.output))
        said, position = self.contract, self.contract["position"].values()
        assert inputs == [*said["batch"], *said["settings"].values(), *said["state"]]
        assert outputs == [*said["metrics"], *said["epochs"].values(), *said["update"].values(), said["stopped"]]
        assert {*position, *said["best"]} <= set(said["state"])

    def start(self) -> Arrays:
        """State as it is in the file, where nothing is done yet."""
        said = self.contract
        kinds = {value.name: value.dtype.numpy() for value in self.model.inputs if value.dtype is not None}
        state = run_once(onward.lower(self.training, part="state"), {})
        place = {name: np.zeros((), kinds[name]) for name in said["position"].values()}
        return state | place | {name: state[of] for name, of in said["best"].items()}

    def __call__(
        self, data: Arrays, epochs: int, *, carried: Arrays | None = None, steps: int = -1, seed: int = 0, **more: Any
    ) -> Results:
        said = self.contract
        validation = {f"validation/{name}": array for name, array in more.get("validation", {}).items()}
        told = {"epochs": np.array(epochs), "steps": np.array(steps), "seed": np.array(seed)}
        inputs = {said["settings"][name]: number for name, number in told.items()}
        outputs = self._compute(data | validation | inputs | (self.start() if carried is None else carried))
        return Results(outputs, self._carried(outputs))

    def in_pieces(self, data: Arrays, epochs: int, steps: int, **more: Any) -> Results:
        """The same, so many steps at a time; metrics are those of all pieces."""
        pieces = [self(data, epochs, steps=steps, **more)]
        while pieces[-1].outputs[self.contract["stopped"]] == MORE:
            pieces.append(self(data, epochs, steps=steps, carried=pieces[-1].carried, **more))
        return self.joined([piece.outputs for piece in pieces])

    def joined(self, calls: list[Arrays]) -> Results:
        """The outputs of several calls as those of one."""
        parts = [*self.contract["metrics"], *self.contract["epochs"].values()]
        outputs = calls[-1] | {name: np.concatenate([call[name] for call in calls]) for name in parts}
        return Results(outputs, self._carried(outputs))

    def _carried(self, outputs: Arrays) -> Arrays:
        return {name: outputs[new] for name, new in self.contract["update"].items()}

    def position(self, results: Results) -> dict[str, float]:
        return {name: results.carried[given].item() for name, given in self.contract["position"].items()}


def on_onnxruntime(model: onward.Model) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(model.to_proto().SerializeToString(), options)
    names = [value.name for value in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(None, inputs), strict=True))


def run_once(model: onward.Model, inputs: Arrays) -> Arrays:
    return on_onnxruntime(model)(inputs)


def trained(training: Any, data: Arrays, folder: Path, **options: Any) -> Run:
    """The same by `onward train`."""
    return onward.train(training, data, run=folder / "run", kernels=False, statistics=False, **QUIET, **options)


@dataclass(frozen=True)
class Case:
    """What is trained: a training model, data, and what is settled. Of noise, each epoch takes so many batches."""

    training: onward.Model
    data: Arrays
    held_out: Arrays
    options: dict[str, Any]
    noise: dict[str, str] = field(default_factory=dict)
    batches: int = 0

    def whole(self, compute: Any = None) -> WholeRun:
        return WholeRun(self.training, compute, validation=True, noise=[*self.noise], **self.options)

    def trained(self, folder: Path, epochs: int, seed: int) -> Run:
        told: dict[str, Any] = {"validation": self.held_out, "noise": self.noise, "epochs": epochs, "seed": seed}
        return trained(self.training, self.data, folder, **told, **self.options)

    def drawn(self, epochs: Iterable[int], seed: int) -> Arrays:
        """The noise that `onward train` draws in these epochs."""
        return self._drawn(((epoch, batch) for epoch in epochs for batch in range(self.batches)), seed)

    def measured_with(self, seed: int) -> Arrays:
        """The validation data, with the noise that `onward train` draws for them."""
        count = len(next(iter(self.held_out.values())))
        return self.held_out | self._drawn(((0, i) for i in range(-(-count // self.options["batch_size"]))), seed)

    def _drawn(self, batches: Iterable[tuple[int, int]], seed: int) -> Arrays:
        draw = Noise(self.noise, {value.name or "": value for value in self.training.inputs}, seed)
        drawn = [draw(epoch, batch, self.options["batch_size"]) for epoch, batch in batches]
        return {name: np.stack([of[name] for of in drawn]) for name in self.noise}


def tokens(count: int) -> Arrays:
    drawn = np.random.default_rng(count).integers(0, 32, (count, 9))
    return {"tokens": drawn[:, :-1].copy(), "labels": drawn[:, 1:].copy()}


def _mlp() -> Case:
    optimizer = {"optimizer": "adam:lr=1e-2", "schedule": "cosine:steps=12,warmup=2"}
    training = onward.prepare(digits_mlp(8), **CE, **optimizer, accumulate=2, ema=0.9)
    return Case(training, digits(90), digits(40, seed=1), {"batch_size": 16})


def _cnn() -> Case:
    training = onward.prepare(small_cnn(4), **CE, optimizer="momentum:lr=0.05", augment="flip crop:padding=1")
    options = {"batch_size": 20, "metrics": ["accuracy", "top_k:k=3"]}
    return Case(training, digits(70, flat=False), digits(33, flat=False, seed=1), options)


def _gpt() -> Case:
    optimizer = {"optimizer": "adamw:lr=1e-3,weight_decay=0.1", "schedule": "linear:steps=20,warmup=4"}
    training = onward.prepare(small_transformer(1), loss="value:loss", **optimizer, clip="norm:1")
    return Case(training, tokens(30), tokens(9), {"batch_size": 8, "metrics": ["perplexity"], "monitor": "loss"})


def gan_case() -> Case:
    """Of five batches, four make the two rounds of an epoch."""
    gan = gan_example()
    rows = gan.digits()["digit"]
    data, held_out = {"digit": rows[:70]}, {"digit": rows[-40:]}
    return Case(gan.prepared(gan.exported()), data, held_out, {"batch_size": 16}, {"z": "normal"}, batches=4)


CASES: dict[str, Callable[[], Case]] = {
    "mlp": _mlp,
    "cnn with batch norm, dropout and augmentation": _cnn,
    "gpt": _gpt,
}


# ---- what is equal ---------------------------------------------------------------------------------------------------


def check_same(whole: WholeRun, results: Results, run: Run) -> None:
    """State, metrics of steps and epochs, and the best model are those of the run, to the last bit."""
    for name, found, wanted in _compared(whole, results, run):
        np.testing.assert_array_equal(found, wanted, err_msg=name)


def check_close(whole: WholeRun, results: Results, run: Run) -> None:
    """The same within the rounding of other arithmetic."""
    for name, found, wanted in _compared(whole, results, run):
        assert_close(name, found, wanted)


def assert_close(name: str, found: np.ndarray, wanted: np.ndarray) -> None:
    if "qkv.bias" in name:  # that of keys has the gradient zero: AdamW makes steps of rounding errors
        found, wanted = (np.delete(np.split(array, 3), 1, axis=0) for array in (found, wanted))
    tolerance = 1e-5 if np.asarray(wanted).dtype.kind == "f" else 0
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance, err_msg=name)


def _compared(whole: WholeRun, results: Results, run: Run) -> Iterator[tuple[str, Any, Any]]:
    """Each thing by its name: as the file has computed it, and as the run has."""
    said, outputs, model = whole.contract, results.outputs, run.model
    events: dict[str, list[dict[str, Any]]] = {}
    for event in run.read_log():
        events.setdefault(event["event"], []).append(event)
    for name in said["metrics"]:
        yield name, outputs[name], [event[name] for event in events["step"]]
    measured = [event["loss"] for event in events.get("epoch", [])]
    losses = outputs[said["epochs"]["loss"]]
    yield "epoch/loss", losses[len(losses) - len(measured) :], measured
    for name, output in said["epochs"].items():
        if name.startswith("validation/"):
            yield name, outputs[output], [event[name.removeprefix("validation/")] for event in events["validation"]]
    place = whole.position(results)
    for name in place.keys() & run.read_progress().keys():
        yield name, place[name], run.read_progress()[name]
    origins = as_one_step(model).origins
    for name in set(said["state"]) - {*said["position"].values(), *said["best"]}:
        step, own = origins.get(name, (0, name))
        yield name, results.carried[name], model.array(own, step)
    if said["best"]:
        best = [event["step"] for event in events["save"] if event.get("best")][-1]
        numbers = {event["step"]: event["epoch"] for event in events["validation"]}
        yield "best_epoch", place["best_epoch"], numbers[best]
        for name, of in said["best"].items():
            yield name, results.carried[name], run.load_best().array(of)


# ---- the program in JavaScript ---------------------------------------------------------------------------------------


def javascript() -> str:
    """The one of the documentation."""
    page = (ROOT / "docs" / "whole-training.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```javascript\n(.*?)```", page, re.DOTALL)
    return program


def write_for_javascript(folder: Path, whole: WholeRun, data: Arrays, noise: Iterable[Arrays] = ()) -> None:
    """All files that the program reads. `noise` is for one call after the other."""
    whole.model.save(folder / "train.onnx")
    onward.lower(whole.training, part="state").save(folder / "state.onnx")
    (folder / "train.json").write_text(json.dumps(whole.contract))
    drawn: dict[str, list[str]] = {}
    for call in noise:
        for name, array in call.items():
            drawn.setdefault(name, []).append(_tensor(array))
    lines = [f'  "{name}": {_tensor(array)},' for name, array in data.items()]
    lines += [f'  get "{name}"() {{ return noise["{name}"].shift(); }},' for name in drawn]
    calls = [f'  "{name}": [{", ".join(tensors)}],' for name, tensors in drawn.items()]
    text = ['import * as ort from "onnxruntime-web";', "const noise = {", *calls, "};", "export const data = {", *lines]
    (folder / "data.mjs").write_text("\n".join([*text, "};", ""]))


def _tensor(array: np.ndarray) -> str:
    numbers = [f"{number}n" if array.dtype == np.int64 else str(number) for number in array.ravel().tolist()]
    return f'new ort.Tensor("{array.dtype}", [{", ".join(numbers)}], {list(array.shape)})'
