"""Entire training as one ONNX model, driven by what its file says, and the same training by `onward train`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime as ort

import onward
from onward.lowering.rounds import as_one_step
from onward.training.run import Run
from runs import QUIET

Arrays = dict[str, np.ndarray]
FINISHED, MORE, EARLY, NOT_FINITE = range(4)


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
        return Results(outputs, {name: outputs[new] for name, new in said["update"].items()})

    def in_pieces(self, data: Arrays, epochs: int, steps: int, **more: Any) -> Results:
        """The same, so many steps at a time; metrics are those of all pieces."""
        pieces = [self(data, epochs, steps=steps, **more)]
        while pieces[-1].outputs[self.contract["stopped"]] == MORE:
            pieces.append(self(data, epochs, steps=steps, carried=pieces[-1].carried, **more))
        parts = [*self.contract["metrics"], *self.contract["epochs"].values()]
        joined = {name: np.concatenate([piece.outputs[name] for piece in pieces]) for name in parts}
        return Results(pieces[-1].outputs | joined, pieces[-1].carried)

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


def check_same(whole: WholeRun, results: Results, run: Run) -> None:
    """State, metrics of steps and epochs, and the best model are those of the run, to the last bit."""
    said, outputs, model = whole.contract, results.outputs, run.model
    events: dict[str, list[dict[str, Any]]] = {}
    for event in run.log:
        events.setdefault(event["event"], []).append(event)
    for name in said["metrics"]:
        assert outputs[name].tolist() == [event[name] for event in events["step"]], name
    measured = [event["loss"] for event in events.get("epoch", [])]
    losses = outputs[said["epochs"]["loss"]]
    assert losses[len(losses) - len(measured) :].tolist() == measured
    for name, output in said["epochs"].items():
        if name.startswith("validation/"):
            wanted = [event[name.removeprefix("validation/")] for event in events["validation"]]
            assert outputs[output].tolist() == wanted, name
    place = whole.position(results)
    found = {name: value for name, value in run.progress.items() if name in place}
    assert {name: place[name] for name in found} == found
    origins = as_one_step(model).origins
    for name in set(said["state"]) - {*said["position"].values(), *said["best"]}:
        step, own = origins.get(name, (0, name))
        np.testing.assert_array_equal(results.carried[name], model.array(own, step), err_msg=name)
    if said["best"]:
        best = [event["step"] for event in events["save"] if event.get("best")][-1]
        numbers = {event["step"]: event["epoch"] for event in events["validation"]}
        assert place["best_epoch"] == numbers[best]
        for name, of in said["best"].items():
            np.testing.assert_array_equal(results.carried[name], run.best.array(of), err_msg=of)
