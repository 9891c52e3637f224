"""The loops of examples/devices, in C++ on the library of the wheel and in JavaScript, beside the one in Python."""

import importlib.util
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from lowered import Part
from paths import ROOT
from web_runtime import node_modules

import onward

pytestmark = pytest.mark.slow

DEVICES = ROOT / "examples" / "devices"
STEPS = 120


@pytest.fixture(scope="module")
def digits():
    spec = importlib.util.spec_from_file_location("digits_for_devices", DEVICES / "digits.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path, digits):
    digits.write(tmp_path / "lowered")
    return tmp_path


def losses_in_python(folder, digits):
    step, state = Part(onward.load(folder / "step.onnx")), Part(onward.load(folder / "state.onnx"))({})
    images, labels = (array[digits.TEST :] for array in digits.samples())
    losses = []
    for number in range(STEPS):
        first = number % (len(labels) // 32) * 32
        rows = slice(first, first + 32)
        results = step({"image": images[rows], "labels": labels[rows], **state})
        state = step.new_state(results)
        losses.append(float(results["loss"]))
    return losses


def compile_program(folder):
    library = next((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*"), None)
    if shutil.which("g++") is None or library is None:
        pytest.skip("needs g++, and a wheel with libonnxruntime.so")
    (folder / "libonnxruntime.so.1").symlink_to(library)
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror"]
    program = [str(DEVICES / "train.cpp"), "-o", "train", "libonnxruntime.so.1", "-Wl,-rpath,$ORIGIN"]
    subprocess.run(["g++", *flags, *program], cwd=folder, check=True, timeout=300)
    return ["./train"]


def node_program(folder):
    (folder / "node_modules").symlink_to(node_modules())
    shutil.copy(DEVICES / "train.mjs", folder)
    return ["node", "train.mjs"]


@pytest.mark.parametrize("make", [compile_program, node_program], ids=["C++", "JavaScript"])
def test_a_loop_on_a_device_trains_as_the_one_in_python(make, folder, digits):
    command = [*make(folder), "lowered", str(STEPS)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    losses = losses_in_python(folder / "lowered", digits)
    np.testing.assert_allclose([float(line) for line in done.stdout.split()], losses, rtol=0, atol=1e-5)
    assert digits.read(folder / "lowered") > 0.9
