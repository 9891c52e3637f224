"""`onward lower`, and loops in other languages over the files that it writes."""

import json
import re

import numpy as np
import onnx
import pytest
from commands import failed, run
from lowered import SQUARE, Part, penalised
from models import digits_mlp, small_cnn
from paths import ROOT
from web_runtime import node_modules, run_node

import onward
from onward.lowering.contract import contract_of
from onward.lowering.step import PARTS

# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onward.prepare(digits_mlp(8), loss="cross_entropy", optimizer="adam:lr=0.01").save("training.onnx")
    return tmp_path


def test_the_command_writes_a_part_and_what_it_says(folder):
    run("lower", "training.onnx", "-o", "step.onnx")
    lowered = onward.lower("training.onnx")
    assert onnx.load("step.onnx") == lowered.to_proto()
    assert json.loads((folder / "step.json").read_text()) == contract_of(lowered).to_json()
    told = json.loads(run("lower", "training.onnx", "--part", "evaluation", "--json").stdout)
    evaluation = onward.lower("training.onnx", part="evaluation")
    assert told == {"output": "training-evaluation.onnx", "contract": contract_of(evaluation).to_json()}
    assert onnx.load("training-evaluation.onnx") == evaluation.to_proto()
    again = onward.lower("training.onnx", part="gradients", recompute=["relu"])
    run("lower", "training.onnx", "--part", "gradients", "--recompute", "relu", "-o", "gradients.onnx")
    assert onnx.load("gradients.onnx") == again.to_proto()


def test_the_command_writes_all_parts(folder):
    told = json.loads(run("lower", "training.onnx", "--all", "lowered", "--json").stdout)
    assert [one["contract"]["part"] for one in told] == list(PARTS)
    assert {file.name for file in (folder / "lowered").iterdir()} == {
        f"{p}.{e}" for p in PARTS for e in ("onnx", "json")
    }
    onward.load(penalised(18)).save("other.onnx")  # which has no initialization
    run("lower", "other.onnx", "--all", "others")
    assert not (folder / "others" / "initialization.onnx").exists() and (folder / "others" / "apply.onnx").exists()


def test_the_command_takes_a_model_without_training(folder):
    run("strip", "training.onnx", "-o", "plain.onnx")
    told = json.loads(run("lower", "plain.onnx", "--json").stdout)
    assert told["output"] == "plain-inference.onnx" and told["contract"]["part"] == "inference"
    run("lower", "plain.onnx", "--all", "only")
    assert {file.name for file in (folder / "only").iterdir()} == {"inference.onnx", "inference.json"}
    assert list(onnx.load("plain-inference.onnx").graph.node) == list(onnx.load("plain.onnx").graph.node)


def test_the_command_overwrites_nothing(folder):
    (folder / "step.json").write_text("mine")
    assert failed("lower", "training.onnx", "-o", "step.onnx")[0] == "`step.json` already exists"
    assert not (folder / "step.onnx").exists()
    run("lower", "training.onnx", "-o", "step.onnx", "--force")
    assert failed("lower", "training.onnx", "-o", "step.onnx")[0] == "`step.onnx` already exists"
    assert failed("lower", "training.onnx", "-o", "training.onnx")[0] == "`training.onnx` is the input model"
    assert "path of the .json file" in failed("lower", "training.onnx", "-o", "new.json", code=2)[0]
    message, _ = failed("lower", "training.onnx", "--all", "lowered", "-o", "step.onnx", code=2)
    assert message == "`--all` and `--output` exclude each other"
    assert "the model has no step `1`" in failed("lower", "training.onnx", "--steps", "1")[0]


# ---- other languages -------------------------------------------------------------------------------------------------

PAGE = ROOT / "docs" / "lowered-steps.md"
BATCHES = """
import { readFileSync } from "node:fs";
import * as ort from "onnxruntime-web";
const bytes = (name) => new Uint8Array(readFileSync(name)).buffer;
const image = new ort.Tensor("float32", new Float32Array(bytes("image.bin")), [6, 1, 8, 8]);
const labels = new ort.Tensor("int64", new BigInt64Array(bytes("labels.bin")), [6]);
export const batches = Array(10).fill({ image, labels });
"""


def test_the_loop_in_javascript_trains_as_the_loop_in_python(folder):
    """The one on the page, with the runtime of browsers, for a CNN with BatchNormalization: Dropout drops the same."""
    onward.prepare(small_cnn(), loss="cross_entropy", optimizer="adam:lr=0.01").save("training.onnx")
    run("lower", "training.onnx", "--all", "lowered")
    code = re.search(r"```javascript\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1]
    (folder / "batches.mjs").write_text(BATCHES)
    (folder / "node_modules").symlink_to(node_modules())
    for name, array in SQUARE.items():
        (folder / f"{name}.bin").write_bytes(array.tobytes())
    printed = run_node(folder, code)
    step, state = Part(onward.load("lowered/step.onnx")), Part(onward.load("lowered/state.onnx"))({})
    losses = []
    for _ in range(10):
        results = step({**SQUARE, **state})
        state = step.new_state(results)
        losses.append(float(results["loss"]))
    np.testing.assert_allclose([float(line) for line in printed.split()], losses, rtol=1e-4)
    assert losses[-1] < losses[0]
