"""The page of a run: what is on it, what it makes of damaged runs, that no file breaks it, how large it gets."""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from browser import find_chromium, needs_chromium
from models import digits_mlp, small_transformer
from typer.testing import CliRunner

import onward
from onward.cli.commands import app
from onward.training.log import Log
from onward.training.report.charts import curve
from onward.training.report.history import History, Series

STEPS_PER_EPOCH, BATCH = 45, 32
STARTED = 1_790_000_000.0

Events = Iterator[dict[str, Any]]


def fake_run(
    folder: Path, *, epochs: int = 5, resumed: bool = False, reason: str | None = "finished", large: bool = False
) -> Path:
    """A run of a small classifier, or of a transformer with many layers; `reason` None is one that was killed."""
    folder.mkdir(parents=True, exist_ok=True)
    proto = small_transformer() if large else digits_mlp()
    name = "small-gpt.onnx" if large else "digits.onnx"
    recipe = {
        "loss": "value:loss" if large else "cross_entropy",
        "optimizer": "adamw:lr=3e-3,weight_decay=0.01",
        "schedule": f"cosine:steps={epochs * STEPS_PER_EPOCH},warmup=20",
    }
    onnx.save(proto, folder / name)
    onward.prepare(str(folder / name), clip="norm:1", **recipe).save(folder / "training.onnx")
    config = {"data": "digits.npz", "validation": 0.2, "batch_size": BATCH, "seed": 7, "epochs": epochs, **recipe}
    (folder / "config.yaml").write_text(json.dumps(config))
    layers = [tensor.name for tensor in proto.graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT]
    with Log(folder / "log.jsonl") as log:
        for event in _events(name, recipe, config, layers, epochs, resumed, reason):
            log.write(event.pop("event"), **event)
    return folder


def _events(
    name: str, recipe: dict, config: dict, layers: list[str], epochs: int, resumed: bool, reason: str | None
) -> Events:
    rng = np.random.default_rng(0)
    total = epochs * STEPS_PER_EPOCH
    yield {
        "event": "start", "time": STARTED, "model": name, "parameters": 2410, "recipe": recipe, "config": config,
        "device": "cpu", "engine": "onnxruntime", "steps_per_epoch": STEPS_PER_EPOCH, "epochs": epochs,
    }  # fmt: skip
    yield from _validation(rng, 0, total)
    stop = total if reason in ("finished", "early_stopping") else int(total * 0.7)
    for step in range(1, stop + 1):
        yield from _step(rng, step, total, layers)
        if resumed and step == stop // 2:
            saved = step // STEPS_PER_EPOCH * STEPS_PER_EPOCH
            yield {"event": "resume", "step": saved, "time": STARTED + 3600}
            for again in range(saved + 1, step + 1):
                yield from _step(rng, again, total, layers)
    failure = {"loss": math.nan} if reason == "not_finite" else {}
    if reason is not None:
        yield {"event": "end", "step": stop, "reason": reason, "seconds": stop * 0.0031, **failure}


def _step(rng: np.random.Generator, step: int, total: int, layers: list[str]) -> Events:
    progress = step / total
    loss = 2.3 * math.exp(-5 * progress) * (1 + 0.25 * rng.normal()) + 0.05 * rng.random() + 0.02
    rate = 3e-3 * min(step / 20, 0.5 + 0.5 * math.cos(math.pi * progress))
    yield {
        "event": "step", "step": step, "epoch": (step - 1) // STEPS_PER_EPOCH, "loss": abs(loss),
        "lr": rate, "samples": step * BATCH, "seconds": 0.0021 * (1 + 0.1 * rng.random() + (rng.random() < 0.02)),
    }  # fmt: skip
    if step % 5 == 0:
        depth = {name: math.exp(-0.06 * i - 2 * progress + 0.3 * rng.normal()) for i, name in enumerate(layers)}
        yield {"event": "gradients", "step": step, "norms": depth}
    if step % STEPS_PER_EPOCH == 0:
        yield from _weights(rng, step, total, layers)
        yield from _validation(rng, step, total)
        if progress < 0.85:
            yield {"event": "save", "step": step, "best": True}
        yield {"event": "save", "step": step, "best": False}


def _validation(rng: np.random.Generator, step: int, total: int) -> Events:
    progress = step / total
    yield {
        "event": "validation", "step": step, "epoch": step // STEPS_PER_EPOCH,
        "loss": 2.1 * math.exp(-4.5 * progress) + 0.12 + 0.1 * max(progress - 0.8, 0) + 0.01 * rng.random(),
        "accuracy": 1 - 0.9 * math.exp(-4 * progress) - 0.005 * rng.random() - 0.02,
    }  # fmt: skip


def _weights(rng: np.random.Generator, step: int, total: int, layers: list[str]) -> Events:
    histograms = {}
    for i, name in enumerate(layers):
        spread = (0.1 + 0.02 * (i % 5)) * (1 + step / total)
        values = np.concatenate([rng.normal(0, spread, 600), rng.normal(spread * 2 * step / total, spread / 2, 200)])
        counts, edges = np.histogram(values, 40)
        histograms[name] = {"edges": edges, "counts": counts}
    yield {"event": "weights", "step": step, "histograms": histograms}


VOID = {"meta", "input"}


class Page(HTMLParser):
    """A page as a browser reads it: its text, its elements, its scripts; the elements must be nested well."""

    def __init__(self, path: Path):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif self.open and self.open[-1] != "style":
            self.text += data + " "

    @property
    def run(self) -> dict[str, Any]:
        return json.loads(self.scripts[0])

    def has(self, *words: str) -> None:
        text = " ".join(self.text.split())
        for word in words:
            assert word in text, f"{word!r} is not in: {text}"


def page(folder: Path) -> Page:
    return Page(onward.report(folder))


def write_log(folder: Path, *events: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    with Log(folder / "log.jsonl") as log:
        for event in events:
            log.write(event["event"], **{key: value for key, value in event.items() if key != "event"})
    return folder


def step(number: int, loss: float, **others: Any) -> dict[str, Any]:
    return {"event": "step", "step": number, "epoch": 0, "loss": loss, **others}


# ---- what is on it ---------------------------------------------------------------------------------------------------


def test_page_says_what_was_trained_and_how_it_went(tmp_path: Path) -> None:
    found = page(fake_run(tmp_path))
    found.has("digits.onnx finished", "2,410 in 4 tensors", "cross_entropy on logits", "adamw: lr 0.003", "cosine:")
    found.has("digits.npz", "onnxruntime, cpu", "5 epochs of 45 steps", "225", "accuracy")
    found.has("best model, after step 180", "fc1.weight", "[32, 64]", "2026-09-21 14:13:20", "batch_size 32")
    titles = [chart["title"] for chart in found.run["curves"]]
    assert titles == ["loss", "accuracy", "learning rate", "samples per second"]
    loss, accuracy = found.run["curves"][:2]
    assert [series["name"] for series in loss["series"]] == ["training", "validation"]
    assert loss["best"]["x"] == accuracy["best"]["x"] == 180
    assert "training: 2." in loss["summary"] and "at step 225" in loss["summary"]
    assert found.run["map"] is None and len(found.run["norms"]["series"]) == 4
    assert [layer["name"] for layer in found.run["histograms"]] == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]


def test_many_layers_are_a_map(tmp_path: Path) -> None:
    run = page(fake_run(tmp_path, large=True, epochs=3)).run
    assert run["norms"] is None
    assert len(run["map"]["names"]) == len(run["map"]["rows"]) == 26
    assert run["map"]["x"] == list(range(5, 136, 5))
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    norms = next(event["norms"] for event in log if event["event"] == "gradients" and event["step"] == 50)
    column = [row[run["map"]["x"].index(50)] for row in run["map"]["rows"]]
    np.testing.assert_allclose(column, [norms[name] for name in run["map"]["names"]], rtol=1e-3)


def test_page_asks_nothing_of_the_network(tmp_path: Path) -> None:
    found = page(fake_run(tmp_path))
    assert set(re.findall(r"https?://[^\"' ]+", found.source)) == {"http://www.w3.org/2000/svg"}
    assert not any({"src", "href", "srcset"} & attributes.keys() for _, attributes in found.tags)
    policy = next(a["content"] for t, a in found.tags if t == "meta" and a.get("http-equiv"))
    assert policy is not None and policy.startswith("default-src 'none';") and "script-src 'sha256-" in policy


def test_speed_is_that_of_steps(tmp_path: Path) -> None:
    folder = write_log(
        tmp_path,
        step(1, 1.0, samples=32, seconds=0.5),
        step(2, 1.0, samples=64, seconds=0.25),
        step(6, 1.0, samples=192, seconds=0.5),  # not each step need have a line
    )
    assert page(folder).run["curves"][-1]["series"][0]["y"] == [64, 128, 64]


def test_histograms_keep_their_shape(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    events = []
    for number, centre in ((1, 0.0), (2, 3.0)):
        counts, edges = np.histogram(rng.normal(centre, 0.5, 50_000), 64)
        events.append({"event": "weights", "step": number, "histograms": {"w": {"edges": edges, "counts": counts}}})
    (layer,) = page(write_log(tmp_path, step(1, 1.0), *events)).run["histograms"]
    assert layer["steps"] == [1, 2]
    centres = layer["low"] + (np.arange(len(layer["heights"][0])) + 0.5) * (layer["high"] - layer["low"]) / 48
    for heights, mean in zip(layer["heights"], (0.0, 3.0), strict=True):
        assert max(heights) == 100
        assert np.average(centres, weights=heights) == pytest.approx(mean, abs=0.02)
        assert np.average((centres - mean) ** 2, weights=heights) ** 0.5 == pytest.approx(0.5, abs=0.03)


# ---- how runs end, and go on -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (
            "not_finite",
            ["loss not finite", "The run stopped.", "loss of step 158 was NaN", "after step 135", "learning rate"],
        ),
        ("interrupted", ["interrupted, and saved"]),
        ("early_stopping", ["stopped early"]),
        ("power_cut", ["power_cut"]),
        (None, ["unfinished", "The run has not ended."]),
    ],
)
def test_endings(tmp_path: Path, reason: str | None, words: list[str]) -> None:
    found = page(fake_run(tmp_path, reason=reason))
    found.has(*words)
    alerts = [a for t, a in found.tags if a.get("role") == "alert"]
    assert len(alerts) == (reason == "not_finite")


def test_steps_made_again_after_a_resume_count_once(tmp_path: Path) -> None:
    folder = write_log(
        tmp_path,
        *(step(i, float(i), samples=32 * i, seconds=0.1) for i in range(1, 8)),
        {"event": "validation", "step": 4, "loss": 0.4},
        {"event": "validation", "step": 6, "loss": 0.6},
        {"event": "save", "step": 6, "best": True},
        {"event": "resume", "step": 4, "time": 5.0},
        *(step(i, -float(i), samples=32 * i, seconds=0.1) for i in range(5, 7)),
    )
    run = page(folder).run
    training, validation = run["curves"][0]["series"]
    assert (training["x"], training["y"]) == ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, -5, -6])
    assert (validation["x"], validation["y"]) == ([4], [0.4])
    assert run["marks"] == [{"x": 4, "kind": "resume", "text": "resumed"}]
    assert run["last"] == 6 and run["curves"][0]["best"]["x"] == 4


def test_a_resumed_run_is_told_as_one(tmp_path: Path) -> None:
    found = page(fake_run(tmp_path, resumed=True))
    found.has("in 2 sittings", "resumed after 90 steps")
    assert found.run["curves"][0]["series"][0]["x"] == list(range(1, 226))


# ---- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("log", [b"", b"\n", b"\xff\xfe\x00", b'{"event": "start"', b"[" * 100_000, b"null\n1\n[]\n"])
def test_a_log_without_events(tmp_path: Path, log: bytes) -> None:
    (tmp_path / "log.jsonl").write_bytes(log)
    page(tmp_path).has("No step was logged.", "training.onnx is missing")


def test_every_torn_log_gives_a_page(tmp_path: Path) -> None:
    whole = (fake_run(tmp_path / "whole", epochs=1) / "log.jsonl").read_bytes()
    folder = tmp_path / "torn"
    folder.mkdir()
    for end in np.random.default_rng(0).integers(0, len(whole), 25):
        (folder / "log.jsonl").write_bytes(whole[:end])
        logged = len(re.findall(rb'"event": "step", .*\n', whole[:end]))
        assert page(folder).run["last"] == logged


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    folder = fake_run(tmp_path, epochs=1)
    (folder / "config.yaml").unlink()
    (folder / "training.onnx").write_bytes(b"not a model")
    found = page(folder)
    found.has("training.onnx cannot be read", "adamw:lr=3e-3", "cross_entropy")  # as the log has it
    (folder / "config.yaml").write_text("{")
    page(folder).has("is not valid YAML")
    with pytest.raises(onward.Error, match="holds no run"):
        onward.report(folder / "nowhere")


NONSENSE = [None, True, "x", -1, 10**400, 1e308, math.nan, math.inf, [], [1], {}, {"a": 1}, {"a": {"edges": [1, 0]}}]


@pytest.mark.parametrize("key", ["step", "epoch", "loss", "lr", "samples", "seconds", "norms", "histograms", "time"])
def test_nonsense_in_an_event_is_passed_over(tmp_path: Path, key: str) -> None:
    kinds = ["start", "step", "gradients", "weights", "validation", "save", "resume", "end"]
    (tmp_path / "log.jsonl").write_text(
        "".join(
            json.dumps({"event": kind, "step": 3, "loss": 0.5, key: value}) + "\n"
            for value in NONSENSE
            for kind in kinds
        )
    )
    write_log(tmp_path, step(4, 0.5))
    assert page(tmp_path).run["last"] == 4


@pytest.mark.parametrize(
    "key", ["model", "parameters", "recipe", "config", "device", "steps_per_epoch", "epochs", "reason"]
)
def test_nonsense_about_the_run_is_passed_over(tmp_path: Path, key: str) -> None:
    for value in NONSENSE:
        (tmp_path / "config.yaml").write_text(json.dumps({"data": value, "seed": value}))
        (tmp_path / "log.jsonl").write_text(
            "".join(
                json.dumps(event) + "\n"
                for event in ({"event": "start", key: value}, step(1, 0.5), {"event": "end", key: value})
            )
        )
        page(tmp_path)


EVIL = "</script><script>alert(1)</script><!--<b onload='x'>&amp;\u202e\u2028\x1b[31m"


def test_names_cannot_break_the_page(tmp_path: Path) -> None:
    proto = digits_mlp()
    for tensor in proto.graph.initializer:
        for node in proto.graph.node:
            node.input[:] = [tensor.name + EVIL if name == tensor.name else name for name in node.input]
        tensor.name += EVIL
    onnx.save(proto, tmp_path / "evil.onnx")
    onward.prepare(str(tmp_path / "evil.onnx"), loss="cross_entropy").save(tmp_path / "training.onnx")
    (tmp_path / "config.yaml").write_text(json.dumps({EVIL: EVIL, "data": EVIL}))
    histogram = {EVIL: {"edges": [0, 1], "counts": [1]}}
    folder = write_log(
        tmp_path,
        {"event": "start", "model": EVIL, "recipe": {EVIL: EVIL}, "device": EVIL, "engine": EVIL},
        step(1, 0.5, **{EVIL: 1.0}),
        {"event": "gradients", "step": 1, "norms": {f"{EVIL}{i}": 1.0 for i in range(9)}},
        {"event": "weights", "step": 1, "histograms": histogram},
        {"event": "validation", "step": 1, "loss": 1.0, EVIL: 1.0},
        {"event": "end", "step": 1, "reason": EVIL},
    )
    found = page(folder)
    assert len(found.scripts) == 2 and "alert" not in found.scripts[1]
    assert not any(tag == "b" or "onload" in attributes for tag, attributes in found.tags)
    assert not {"\u202e", "\u2028", "\x1b"} & set(found.source)
    assert found.run["histograms"][0]["name"].startswith("</script><script>alert(1)</script>")
    assert len(found.run["map"]["names"]) == 9


# ---- size ------------------------------------------------------------------------------------------------------------


def test_thinning_keeps_what_one_sees() -> None:
    rng = np.random.default_rng(0)
    series = Series()
    values = rng.normal(size=100_000)
    values[[777, 50_000]] = 40, -40
    values[60_000:60_500] = math.nan
    for i, value in enumerate(values):
        series.add(i, value)
    thin = curve(series)
    assert len(thin["x"]) <= 900 and {len(column) for column in thin.values()} == {len(thin["x"])}
    assert max(v for v in thin["high"] if v is not None) == 40 and min(v for v in thin["low"] if v is not None) == -40
    assert None in thin["y"]
    means = np.array([np.nan if v is None else v for v in thin["y"]])
    assert np.nanmean(means) == pytest.approx(np.nanmean(values), abs=1e-2)
    assert all(
        low <= mean <= high for low, mean, high in zip(thin["low"], thin["y"], thin["high"], strict=True) if mean
    )


@pytest.mark.slow
def test_a_long_run_gives_a_small_page(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    layers = [f"encoder.layers.{i // 4}.attention.{i % 4}.weight" for i in range(200)]
    with (tmp_path / "log.jsonl").open("w") as log:
        log.write(json.dumps({"event": "start", "model": "long.onnx", "steps_per_epoch": 1000}) + "\n")
        for i in range(1, 100_001):
            line = step(i, float(rng.random()), lr=0.1 / i, samples=32 * i, seconds=0.01, accuracy=float(rng.random()))
            log.write(json.dumps(line) + "\n")
            if i % 1000 == 0:
                edges = np.sort(rng.normal(size=31)).tolist()
                shape = {"edges": edges, "counts": [1] * 30}
                for event in (
                    {"event": "gradients", "step": i, "norms": dict.fromkeys(layers, rng.random())},
                    {"event": "weights", "step": i, "histograms": dict.fromkeys(layers[:80], shape)},
                    {"event": "validation", "step": i, "loss": rng.random(), "accuracy": rng.random()},
                    {"event": "save", "step": i, "best": False},
                ):
                    log.write(json.dumps(event) + "\n")
    path = onward.report(tmp_path)
    assert path.stat().st_size < 1_000_000
    Page(path).has("long.onnx", "100,000", "40 more layers")


# ---- the command, and where it writes --------------------------------------------------------------------------------


def test_command(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", epochs=1)
    done = CliRunner().invoke(app, ["report", str(folder)])
    assert done.exit_code == 0 and re.fullmatch(r"wrote \S+/run/report\.html \(\d\d\.\d KiB\)\n", done.stderr)
    assert onward.report(folder, tmp_path / "other.html") == tmp_path / "other.html"
    assert onward.report(folder, tmp_path) == tmp_path / "report.html"
    assert {path.name for path in tmp_path.iterdir()} == {"run", "other.html", "report.html"}
    done = CliRunner().invoke(app, ["report", str(folder), "-o", str(tmp_path / "no" / "page.html")])
    assert done.exit_code == 1 and "does not exist" in done.stderr
    done = CliRunner().invoke(app, ["report", str(tmp_path / "no")])
    assert done.exit_code == 1 and "holds no run" in done.stderr


def test_history_reads_what_a_log_wrote(tmp_path: Path) -> None:
    from onward.training.log import read_log

    history = History().read(read_log(fake_run(tmp_path) / "log.jsonl"))
    assert history.steps_per_epoch == STEPS_PER_EPOCH and history.step == 225 and history.best == 180
    assert history.seconds == pytest.approx(225 * 0.0031)


# ---- in a browser ----------------------------------------------------------------------------------------------------

PLAY = """
const charts = document.querySelectorAll("figure.curve");
const first = charts[0].querySelector("svg");
first.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));
for (const figure of document.querySelectorAll("figure.curve, figure.norms, figure.map")) {
  const svg = figure.querySelector("svg"), box = svg.getBoundingClientRect();
  svg.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width / 2, clientY: box.top + 40}));
}
const read = [...charts].map((chart) => chart.querySelector(".at").textContent);
for (const button of document.querySelectorAll("button")) button.click();
const slider = document.getElementById("smoothing");
slider.value = 100;
slider.dispatchEvent(new Event("input"));
for (const folded of document.querySelectorAll("details")) folded.open = true;
const sizes = [...document.querySelectorAll(".plot svg")].map((svg) => svg.childElementCount);
const fits = document.documentElement.scrollWidth <= innerWidth;
document.title = JSON.stringify({ read, sizes, fits, bad: document.querySelector("main").innerHTML.includes("NaN") });
"""


@needs_chromium
@pytest.mark.parametrize("width", [1200, 500])
def test_in_a_browser(tmp_path: Path, width: int) -> None:
    """The page as it is logs no error; with a script that plays with it, what one points at is read out everywhere."""
    path = onward.report(fake_run(tmp_path, large=True, epochs=2, resumed=True))
    plain = browse(path, width)
    assert plain.count("<svg") == 4 + 1 + 26
    source = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", path.read_text())
    path.write_text(source.replace("</body>", f"<script>{PLAY}</script></body>"))
    title = re.search(r"<title>(.*?)</title>", browse(path, width))
    assert title is not None
    result = json.loads(title[1])
    assert len(set(result["read"])) == 1 and re.fullmatch(r"step \d+, epoch [12]", result["read"][0])
    assert min(result["sizes"]) > 5
    assert result["fits"] and not result["bad"]


@needs_chromium
def test_odd_runs_in_a_browser(tmp_path: Path) -> None:
    page(write_log(tmp_path / "empty"))
    one = {"event": "weights", "step": 1, "histograms": {"w": {"edges": [2, 2], "counts": [7]}}}
    page(write_log(tmp_path / "one", step(1, 0.0, lr=-1.0), one, {"event": "validation", "step": 1, "auc": 0.0}))
    page(write_log(tmp_path / "nan", step(1, math.nan, lr=0.0), step(2, math.inf, lr=1e-300), step(3, 1e300, lr=1e300)))
    zeros = {f"layer{i}": 0.0 for i in range(8)}
    page(write_log(tmp_path / "zero", step(1, 1.0), {"event": "gradients", "step": 1, "norms": zeros}))
    for name in ("empty", "one", "nan", "zero"):
        assert "NaN" not in re.sub("<(script|style).*?</\\1>", "", browse(tmp_path / name / "report.html"), flags=re.S)


def browse(path: Path, width: int = 1200) -> str:
    """The document after its scripts have run; none may have written to the console."""
    program = find_chromium()
    assert program is not None
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={path.parent / 'profile'}"]
    command += ["--enable-logging=stderr", "--virtual-time-budget=2000", f"--window-size={width},900", "--dump-dom"]
    done = subprocess.run([*command, path.as_uri()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout
