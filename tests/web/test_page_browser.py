"""The page in a real browser: it trains, goes on after a reload, and hands out what ONNX Runtime and `onward` open."""

import json
import shutil
import time

import numpy as np
import onnxruntime as ort
import pytest
from browser import ISOLATED, Browser, find_chromium, needs_chromium, serving
from pages import CASES, losses_of, trained
from PIL import Image, ImageDraw
from web_runtime import node_modules

import onward

pytestmark = [pytest.mark.slow, needs_chromium]

READY = "document.documentElement.dataset.ready === 'true'"
RESTS = "document.getElementById('go').textContent === 'Resume'"
KEPT = """new Promise((resolve, reject) => {
  const request = indexedDB.open("onward", 1);
  request.onerror = reject;
  request.onsuccess = () => {
    const all = request.result.transaction("runs").objectStore("runs").getAll();
    all.onsuccess = () => resolve(all.result.map(({ history, place }) => ({ history, place }))[0] ?? null);
  };
})"""
"""What the browser has stored of a run."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page") / "site"
    runtime = node_modules() / "onnxruntime-web"
    onward.page(**CASES["mlp"], title="Digits", output=folder, runtime=runtime)
    return folder


@pytest.fixture(scope="module")
def address(site):
    with serving(site) as url:
        yield url


@pytest.fixture
def browser(tmp_path):
    assert find_chromium() is not None
    made = Browser()
    (tmp_path / "downloads").mkdir()
    made.save_downloads_to(tmp_path / "downloads")
    yield made
    made.close()


def opened(browser, address):
    tab = browser.new_tab()
    tab.open(address)
    tab.wait(READY)
    return tab


def train(tab, epochs):
    tab.evaluate(f"document.getElementById('epochs').value = {epochs}")
    tab.click("go")


def downloaded(tmp_path, ending):
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if found := list((tmp_path / "downloads").glob(f"*{ending}")):
            return found
        time.sleep(0.1)
    raise AssertionError(f"there is no {ending} among {list((tmp_path / 'downloads').iterdir())}")


def test_it_trains_and_goes_on_after_a_reload_as_onward_train_does(browser, address, tmp_path):
    tab = opened(browser, address)
    train(tab, 400)
    tab.wait(f"{KEPT}.then((run) => run?.place.step > 60)")
    tab.evaluate("location.reload()")  # in the middle
    tab.wait(f"{READY} && {RESTS}")
    before = tab.evaluate(KEPT)
    assert before["place"]["step"] % 26, "in the middle of an epoch"
    assert f"{before['place']['step']:,} steps" in tab.text("progress")
    train(tab, 3)
    tab.wait(RESTS)
    after = tab.evaluate(KEPT)
    last = after["place"]["step"]
    assert after["history"]["steps"] == list(range(1, last + 1)), "none twice, and none left out"
    ours = losses_of(trained(CASES["mlp"], -(-last // 26), tmp_path / "run"))
    np.testing.assert_allclose(after["history"]["losses"][:50], ours[:50], rtol=0, atol=1e-5)
    np.testing.assert_allclose(after["history"]["losses"], ours[:last], rtol=0, atol=1e-3)
    assert not tab.complaints
    assert {url.split("/")[2] for url in tab.requests if url.startswith("http")} == {address.split("/")[2]}


def test_what_it_hands_out_opens_in_onnxruntime_and_in_onward(browser, address, tmp_path):
    tab = opened(browser, address)
    train(tab, 8)
    tab.wait(RESTS)
    claimed = tab.evaluate(KEPT)["history"]["validations"][-1]
    assert claimed["accuracy"] > 0.9
    tab.click("save-model")
    tab.click("save-training")
    model, training = downloaded(tmp_path, "-trained.onnx")[0], downloaded(tmp_path, "-training.onnx")[0]
    ours = trained(CASES["mlp"], 8, tmp_path / "run")
    data, labels = _held_out()
    logits = ort.InferenceSession(model).run(None, {"image": data})[0]
    assert float((logits.argmax(1) == labels).mean()) == pytest.approx(claimed["accuracy"], abs=1e-9)
    expected = {name: value.const_value.numpy() for name, value in ours.load_last().graph.initializers.items()}
    for name, value in onward.load(model).graph.initializers.items():
        np.testing.assert_allclose(value.const_value.numpy(), expected[name], atol=1e-3)
    found = onward.load(training)
    assert onward.check(found) == [] and onward.describe(found).steps[0].progress.step == 8 * 26
    more = onward.train(found, CASES["mlp"]["data"], epochs=1, run=tmp_path / "more", quiet=True)
    assert losses_of(more)[0] < 0.5, "it goes on, and does not begin again"
    assert not tab.complaints


def _held_out():
    """The rows that `onward train` validates with, as the page has them."""
    from onward.training.data import open_data, split

    data = open_data(CASES["mlp"]["data"])
    rows = split(data, 0.1, 0, CASES["mlp"]["data"]["labels"])[1]
    taken = rows.take(np.arange(len(rows)))
    return taken["image"], taken["labels"]


def test_people_draw_teach_and_bring_tables(browser, address, tmp_path):
    tab = opened(browser, address)
    train(tab, 15)
    tab.wait(RESTS)
    _draw(
        tab, [(0.3, 0.25), (0.45, 0.18), (0.62, 0.25), (0.6, 0.42), (0.45, 0.5), (0.62, 0.58), (0.64, 0.75), (0.3, 0.8)]
    )
    tab.wait("document.getElementById('verdict').textContent.startsWith('3,')")
    picture = Image.new("L", (100, 140), 255)
    ImageDraw.Draw(picture).line([(60, 15), (50, 125)], fill=10, width=14)
    picture.save(tmp_path / "one.png")
    tab.choose_files("#choose", tmp_path / "one.png")
    tab.wait("document.getElementById('verdict').textContent.startsWith('1,')")
    tab.click("mode-teach")
    tab.evaluate("document.querySelectorAll('.classes .add')[1].click()")
    tab.choose_files(".classes li:nth-child(2) input[type=file]", tmp_path / "one.png", tmp_path / "one.png")
    tab.wait("document.getElementById('own-text').textContent === '3 examples of yours'")
    (tmp_path / "table.csv").write_text(",".join(["0.5"] * 64) + ",7\n")
    tab.choose_files("#table", tmp_path / "table.csv")
    tab.wait("document.getElementById('rows').textContent.includes('1,621 examples')")
    (tmp_path / "wrong.csv").write_text("1,2,3\n")
    tab.choose_files("#table", tmp_path / "wrong.csv")
    tab.wait("document.getElementById('notice').textContent.includes('a row needs 65')")
    tab.evaluate("window.isOld = true; location.reload()")  # else the wait sees the page before the reload
    tab.wait(f"!window.isOld && {READY} && document.getElementById('own-text').textContent === '4 examples of yours'")
    tab.click("use-bundled")
    tab.wait("document.getElementById('rows').textContent.includes('4 examples')")
    train(tab, 5)
    tab.wait(RESTS)
    assert not tab.complaints


def _draw(tab, points):
    tab.evaluate("document.getElementById('pad').scrollIntoView()")
    box = tab.evaluate("document.getElementById('pad').getBoundingClientRect().toJSON()")
    left, top, side = box["left"], box["top"], box["width"]
    kinds = ["mousePressed", *["mouseMoved"] * (len(points) - 1)]
    for kind, (x, y) in zip(kinds, points, strict=True):
        where = {"x": left + x * side, "y": top + y * side}
        tab.command("Input.dispatchMouseEvent", type=kind, button="left", buttons=1, clickCount=1, **where)
    tab.command("Input.dispatchMouseEvent", type="mouseReleased", button="left", clickCount=1, **where)


def test_two_train_together_as_one_alone(browser, address, tmp_path, site):
    tab = opened(browser, address)
    tab.evaluate("document.getElementById('together').open = true")
    for number in (1, 2):
        tab.evaluate(
            f"document.getElementById('part-number').value = {number}; document.getElementById('part-count').value = 2"
        )
        tab.click("make-update")
        downloaded(tmp_path, f"-{number}-of-2.safetensors")
    begun = tab.text("state-name")
    tab.choose_files("#updates", *downloaded(tmp_path, ".safetensors"))
    tab.wait(f"document.getElementById('state-name').textContent !== '{begun}'")
    ours = losses_of(trained(CASES["mlp"], 1, tmp_path / "run"))
    assert f"of 64 samples; loss {ours[0]:.4f}" in tab.text("notice")
    tab.choose_files("#updates", *downloaded(tmp_path, ".safetensors"))
    tab.wait("document.getElementById('notice').textContent.includes('another round')")
    train(tab, 1)
    tab.wait(RESTS)
    np.testing.assert_allclose(tab.evaluate(KEPT)["history"]["losses"][:5], ours[:5], atol=1e-5)
    assert not tab.complaints


def test_two_tabs_do_not_write_over_one_another(browser, address):
    first, second = opened(browser, address), opened(browser, address)
    train(first, 4000)
    first.wait(f"{KEPT}.then((run) => run?.place.step > 0)")
    train(second, 1)
    second.wait("document.getElementById('notice').textContent.includes('another tab')")
    first.click("go")
    first.wait(RESTS)
    step = first.evaluate(KEPT)["place"]["step"]
    train(second, 1)  # from where the first has left it
    second.wait(RESTS)
    assert step < second.evaluate(KEPT)["place"]["step"] <= step + 26
    assert not first.complaints and not second.complaints


def test_everybody_can_use_it(browser, address, site, tmp_path):
    """All that can be pressed or typed has a name; nothing is wider than a phone; what is missing is said."""
    tab = opened(browser, address)
    tree = tab.command("Accessibility.getFullAXTree")["nodes"]
    typed = {"spinbutton", "textbox", "combobox", "application"}
    roles = {"button", "checkbox", "radio", "image", "DisclosureTriangle"} | typed
    found = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in tree if not node.get("ignored")]
    pressed = [(role, name) for role, name in found if role in roles]
    assert len(pressed) > 12 and all(name for _, name in pressed), pressed
    for width in (320, 390, 768, 1280):
        tab.screenshot(tmp_path / "shot.png", width, 800)
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
    other = browser.new_tab()
    other.open(f"file://{site}/index.html")
    other.wait("document.body.innerText.includes('python -m http.server')", 20)
    shutil.copytree(site, tmp_path / "part", ignore=shutil.ignore_patterns("step.onnx"))
    with serving(tmp_path / "part") as url:
        third = browser.new_tab()
        third.open(url)
        third.wait("!document.getElementById('trouble').hidden")
        assert "step.onnx is missing" in third.text("trouble-text")


@pytest.mark.parametrize("how", ["threads", "graphics"])
def test_it_also_trains_on(how, site):
    """Several threads, where the server isolates the page; and WebGPU, of which Chromium has one in software."""
    flags = ["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan"]
    made = Browser(*flags)
    try:
        with serving(site, ISOLATED) as url:
            tab = made.new_tab()
            tab.command("Emulation.setHardwareConcurrencyOverride", hardwareConcurrency=4)
            tab.open(url)
            tab.wait(READY)
            if how == "threads":
                assert "in 2 threads" in tab.text("device-text")
            if how == "graphics":
                tab.evaluate("document.getElementById('about').open = true")
                time.sleep(1)
                if tab.evaluate("document.getElementById('device').closest('label').hidden"):
                    pytest.skip("this Chromium has no WebGPU")
                choose = "device.value = 'graphics'; device.dispatchEvent(new Event('change'))"
                tab.evaluate(f"(() => {{ const device = document.getElementById('device'); {choose} }})()")
                tab.wait("document.getElementById('device-text').textContent.includes('GPU')")
            train(tab, 4)
            tab.wait(RESTS, 120)
            assert tab.evaluate(KEPT)["history"]["validations"][-1]["accuracy"] > 0.85
            assert not tab.complaints
    finally:
        made.close()


def test_what_it_keeps_is_small_and_described(site):
    page = json.loads((site / "page.json").read_text())
    assert sum(file.stat().st_size for file in site.iterdir() if file.is_file()) < 400_000
    assert page["runtime"]["processor"]["program"].endswith(".gz")
