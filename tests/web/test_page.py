"""`onward page`: what is in the folder, and the loop in JavaScript, beside `onward train`."""

import json
import shutil

import numpy as np
import onnx
import pytest
from commands import failed, run
from models import digits_mlp, small_cnn
from pages import CASES, digits, losses_of, placeholder_runtime, trained, validations_of
from safetensors.numpy import load_file
from web_runtime import node_modules, run_node

import onward
from onward.errors import DataError, RecipeError, UnsupportedError, WriteError
from onward.training.data.views import Order
from onward.training.run import in_form_of
from onward.web.content import pack, picture_of
from onward.web.offsets import trained_file, training_file

# ---- what is in the folder -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runtime(tmp_path_factory):
    return placeholder_runtime(tmp_path_factory.mktemp("package") / "dist")


def test_the_command_writes_a_page_that_names_all_its_files(tmp_path, monkeypatch, runtime):
    monkeypatch.chdir(tmp_path)
    onnx.save(digits_mlp(8), "digits.onnx")
    np.savez("digits.npz", **digits())
    options = ["--data", "digits.npz", "--loss", "cross_entropy", "--validation", "0.1", "--runtime", str(runtime)]
    told = json.loads(run("page", "digits.onnx", *options, "-o", "site", "--title", "Digits", "--json").stdout)
    page = json.loads((tmp_path / "site" / "page.json").read_text())
    assert page["title"] == "Digits" and page["labels"]["names"] == list("0123456789")
    assert page["data"]["training"]["rows"] + page["data"]["validation"]["rows"] == 1797
    assert page["picture"]["height"] == page["picture"]["width"] == 8 and page["picture"]["background"] == "low"
    assert told["sizes"]["data"] < 1797 * 67, "bytes, and not floats"
    names = {file.name for file in (tmp_path / "site").iterdir()}
    html = (tmp_path / "site" / "index.html").read_text()
    assert {
        "main.js",
        "style.css",
        "icon.svg",
        "worker.js",
        "page.json",
        "data.bin",
        "model.onnx",
        "step.onnx",
    } <= names
    assert "http://" not in html.replace("http://localhost:8000", "") and "https://" not in html
    run("page", "digits.onnx", *options, "-o", "site")  # a page may be written again
    assert failed("page", "digits.onnx", *options, "-o", ".")[0] == "`.` holds other files"
    assert "npm install" in failed("page", "digits.onnx", *options[:-1], str(tmp_path), "-o", "other")[1]
    assert not (tmp_path / "other").exists()


RECIPES = {
    "adam": {"optimizer": "adam"},
    "average": {"optimizer": "sgd:lr=0.1", "ema": 0.5},
    "head": {"new_head": 3},
    "frozen": {"freeze": "conv.*"},
    "adapters": {"lora": "2,targets=fc*"},
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_state_written_over_bytes_is_what_training_exports(recipe):
    """Files with trained numbers at the places that a page writes to, beside the models that `onward train` writes."""
    original = onward.load(small_cnn(4))
    training = onward.prepare(original, loss="cross_entropy", **recipe)
    if "new_head" in recipe:
        original = onward.replace_head(original, 3, seed=0)
    model, whole = trained_file(original, training), training_file(training)
    batch = {name: array[:16] for name, array in digits((1, 8, 8)).items()}
    with onward.engines.start(training) as engine:
        engine.step({**batch, "labels": batch["labels"] % 3})
        state = engine.state()
        later = _with_state(training, state)
    files = []
    for data, spans in (model, whole):
        content = bytearray(data)
        for name, (begin, end) in spans:
            content[begin:end] = state[name].tobytes()
        assert len(content) == len(data)
        files.append(onward.load(onnx.ModelProto.FromString(bytes(content))))
    expected = later if "lora" in recipe else in_form_of(original, later)
    _assert_same_tensors(files[0], onward.transform.strip(expected) if "lora" in recipe else expected)
    _assert_same_tensors(files[1], later)
    assert onward.check(files[1]) == onward.check(training)


def _with_state(training, state):
    result = training.copy()
    for name, array in state.items():
        result.set(name, array)
    return result


def _assert_same_tensors(one, other):
    found = {name: value.const_value.numpy() for name, value in one.graph.initializers.items()}
    for name, value in other.graph.initializers.items():
        np.testing.assert_array_equal(found[name], value.const_value.numpy(), err_msg=name)


def test_narrow_numbers_come_back_to_the_last_bit():
    random = np.random.default_rng(0)
    columns = {
        "sixteenths": (random.integers(0, 17, 100) / 16).astype(np.float32),
        "colours": (random.integers(0, 256, (50, 3)) / 255).astype(np.float32),
        "anything": random.normal(size=20).astype(np.float32),
        "zeros with a sign": np.array([-0.0, 0.5], np.float32),
        "labels": random.integers(0, 10, 30),
        "wide": np.array([-(2**40), 3]),
        "tokens": np.array([0, 50_000]),
    }
    packed = bytearray()
    for name, values in columns.items():
        told = pack(packed, name, values)
        stored = np.frombuffer(bytes(packed), told["stored"], values.size, told["offset"]).reshape(values.shape)
        back = (stored.astype(np.float64) / told["divisor"]).astype(values.dtype) if told["divisor"] != 1 else stored
        np.testing.assert_array_equal(back.astype(values.dtype), values)
        assert (back.astype(values.dtype).tobytes()) == values.tobytes()
    assert len(packed) < 700


def test_pictures_are_known_by_their_shape_and_by_what_is_said():
    grey = digits()["image"]
    assert picture_of([3, 32, 32], None, None)["layout"] == "channels_first"
    assert picture_of([32, 32, 3], None, None)["channels"] == 3
    assert picture_of([64], grey, None)["extent"] > 0.9
    assert picture_of([64], 1 - grey, None)["background"] == "high"
    assert picture_of([64], grey * 150 + 50, None)["high"] == [255.0] and picture_of([64], grey * 16, None)["high"] == [
        16
    ]
    assert picture_of([64], grey - 1, None) is None, "64 measurements"
    assert picture_of([64], grey, "none") is None
    assert picture_of([12], None, "2x2")["channels"] == 3
    with pytest.raises(RecipeError, match="9 x 9 pixels"):
        picture_of([64], grey, "9x9")


def test_what_a_page_cannot_train_is_refused(tmp_path, runtime):
    twice = onward.prepare(digits_mlp(4), loss="cross_entropy")
    twice = onward.prepare(twice, loss="cross_entropy", append=True, name="again")
    with pytest.raises(UnsupportedError, match="one step"):
        onward.page(twice, digits(), output=tmp_path / "site", runtime=runtime)
    with pytest.raises(DataError, match="stream of batches"):
        onward.page(
            digits_mlp(4), lambda: iter([digits()]), loss="cross_entropy", output=tmp_path / "site", runtime=runtime
        )
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    with pytest.raises(WriteError, match="holds other files"):
        onward.page(digits_mlp(4), digits(), loss="cross_entropy", output=tmp_path / "full", runtime=runtime)


def test_a_page_needs_no_data(tmp_path, runtime):
    names = ["cat", "dog", "bird"]
    onward.page(small_cnn(), loss="cross_entropy", new_head=3, classes=names, output=tmp_path / "site", runtime=runtime)
    page = json.loads((tmp_path / "site" / "page.json").read_text())
    assert page["data"] == {} and page["labels"]["names"] == names
    assert (page["picture"]["low"], page["picture"]["high"]) == ([0.0], [1.0])


# ---- JavaScript ------------------------------------------------------------------------------------------------------

MODULES = """
import { readFileSync, writeFileSync } from "node:fs";
import { Order } from "./order.js";
import { samplesOf } from "./csv.js";
import { read, write } from "./safetensors.js";
import { fromInk, fromPixels, toPixels } from "./pictures.js";
const said = JSON.parse(readFileSync("said.json", "utf8"));
const orders = said.orders.map(([count, seed, epoch]) => {
  const order = new Order(count, seed, epoch);
  return Array.from({ length: count }, (_, at) => order.row(at));
});
const refusals = [];
const tables = said.tables.map(([text, inputs, labels]) => {
  try { return samplesOf(text, inputs, labels); } catch (error) { refusals.push(error.message); return null; }
});
const back = read(new Uint8Array(readFileSync("python.safetensors")));
writeFileSync("javascript.safetensors", write(back.tensors, { ...back.about, by: "JavaScript" }));
const size = { layout: "channels_first", width: 4, height: 4, channels: 1 };
const picture = { ...size, low: [-1], high: [3], background: "low", extent: 1 };
const ink = new Float32Array(100).map((_, at) => (at % 10 === 7 ? 1 : 0)); // a line, to the right of the middle
const line = Array.from(fromInk(ink, 10, 10, picture));
const pixels = toPixels(line, picture, { data: new Uint8ClampedArray(64) }).data;
const again = Array.from(fromPixels(pixels, { ...picture, background: null }));
console.log(JSON.stringify({ orders, tables, refusals, line, again }));
"""


def test_modules_of_the_page_agree_with_python(tmp_path):
    """Order of samples, tables, files of tensors and pictures, in one process of node."""
    if shutil.which("node") is None:
        pytest.skip("needs node")
    from importlib.resources import files

    from safetensors.numpy import save_file

    for file in files("onward.web").joinpath("static").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "package.json").write_text('{"type": "module"}')
    orders = [(1, 0, 0), (2, 5, 1), (37, -3, 2), (1347, 7, 0), (500, 2**63 + 11, 4)]
    inputs = [{"name": "x", "shape": [2], "is_target": False}, {"name": "label", "shape": [], "is_target": True}]
    labels = {"input": "label", "names": ["cat", "dog"], "count": 2}
    tables = [
        ('x1,x2,label\n1,2,cat\n3,"4",dog\n', inputs, labels),
        ("label;a;b\n1;0.5;-2e3\n", inputs, labels),
        ("1,2,3.5\n", inputs, None),
        ("1,2,fish\n", inputs, labels),
        ("1,2\n", inputs, labels),
    ]
    said = {"orders": [[count, str(seed), epoch] for count, seed, epoch in orders], "tables": tables}
    (tmp_path / "said.json").write_text(json.dumps(said))
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "step": np.array(2**60 + 1), "flag": np.array([True])}
    save_file(tensors, tmp_path / "python.safetensors", {"samples": "3"})
    found = json.loads(run_node(tmp_path, MODULES))
    for (count, seed, epoch), rows in zip(orders, found["orders"], strict=True):
        assert rows == Order(count, seed, epoch)(np.arange(count)).tolist()
    assert found["tables"][:3] == [
        [{"label": [0], "x": [1, 2]}, {"label": [1], "x": [3, 4]}],
        [{"label": [1], "x": [0.5, -2000]}],
        [{"label": [3.5], "x": [1, 2]}],
    ]
    assert "fish" in found["refusals"][0] and "a row needs 3" in found["refusals"][1]
    for name, array in load_file(tmp_path / "javascript.safetensors").items():
        assert array.dtype == tensors[name].dtype
        np.testing.assert_array_equal(array, tensors[name])
    line = np.array(found["line"]).reshape(4, 4)
    assert (line[:, [0, 3]] == -1).all() and np.allclose(line[:, 1:3], 3), "the line is in the middle, and full"
    np.testing.assert_allclose(found["again"], found["line"], atol=4 / 255)


TRAIN = """
import { readFileSync, writeFileSync } from "node:fs";
import * as ort from "onnxruntime-web";
import { applyUpdates, makeUpdate } from "./rounds.js";
import { Rows } from "./rows.js";
import { Training } from "./training.js";
ort.env.wasm.numThreads = 1;
const read = async (name) => new Uint8Array(readFileSync(name));
const page = JSON.parse(readFileSync("page.json", "utf8"));
const training = await new Training(ort, page, read).open();
const data = await read("data.bin");
training.setRows(Rows.read(page.data.training, data));
const heldOut = Rows.read(page.data.validation, data);
const losses = [];
const validations = [await training.evaluate(heldOut)];
for (let step = 0; step < 50; step++) {
  losses.push((await training.step())[page.parts.step.loss]);
  if (!training.place.batch) validations.push(await training.evaluate(heldOut));
}
writeFileSync("model-trained.onnx", await training.model());
writeFileSync("training-trained.onnx", await training.training());
if (page.order.fixed) {
  const refused = await makeUpdate(training, 1, 3).catch((error) => error.message);
  console.log(JSON.stringify({ losses, validations, refused }));
  process.exit();
}
training.reset();
const files = [];
for (const number of [1, 2, 3]) files.push({ name: `${number}`, bytes: await makeUpdate(training, number, 3) });
const together = await applyUpdates(training, files.reverse());
const after = await training.arrays();
training.reset();
const alone = await training.step();
const far = Object.entries(await training.arrays()).map(([name, values]) =>
  values.reduce((most, value, at) => Math.max(most, Math.abs(Number(value) - Number(after[name][at]))), 0));
const refused = await applyUpdates(training, files).catch((error) => error.message);
console.log(JSON.stringify({ losses, validations, together, alone, far: Math.max(...far), refused }));
"""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name != "mlp" else []) for name in CASES]
)
def test_the_loop_of_the_page_trains_as_onward_train(name, tmp_path, runtime):
    case = CASES[name]
    modules = node_modules()
    onward.page(**case, output=tmp_path / "site", runtime=runtime)
    (tmp_path / "site" / "node_modules").symlink_to(modules)
    (tmp_path / "site" / "package.json").write_text('{"type": "module"}')
    found = json.loads(run_node(tmp_path / "site", TRAIN))
    ours = trained(case, 2 if name == "mlp" else 11, tmp_path / "run")
    np.testing.assert_allclose(found["losses"], losses_of(ours)[:50], rtol=0, atol=1e-5)
    told = [(one["loss"], one["accuracy"] or 0) for one in found["validations"]]
    assert len(told) >= 2
    np.testing.assert_allclose(told, validations_of(ours)[: len(told)], rtol=0, atol=1e-5)
    for file in ("model-trained.onnx", "training-trained.onnx"):
        assert onward.check(tmp_path / "site" / file) == []
    assert ("one size" if name == "fixed" else "another round") in found["refused"]
    if name == "mlp":  # statistics and Dropout are of a batch, which three parts of one are not
        assert found["far"] < 1e-6 and abs(found["together"]["loss"] - found["alone"]["loss"]) < 1e-6
