"""Entire training as one ONNX model in a real browser: what `onward train` does, within 1e-5."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Browser, needs_chromium, serving
from web_runtime import node_modules
from whole_runs import CASES, FINISHED, Results, WholeRun, check_close, gan_case, javascript, write_for_javascript

pytestmark = [pytest.mark.slow, needs_chromium]

EPOCHS = 3
IN_A_PAGE = {
    'import { readFileSync } from "node:fs";\n': "",
    'JSON.parse(readFileSync("train.json", "utf8"))': 'await (await fetch("train.json")).json()',
    'create(readFileSync("train.onnx"))': 'create("train.onnx")',
    'create(readFileSync("state.onnx"))': 'create("state.onnx")',
    "epoch <= 10;": f"epoch <= {EPOCHS};",
    "console.log(epoch, ...results[contract.loss].data);": "calls.push(results);",
}
"""What is another for the program of the documentation in a page; what it computes is handed over, not printed."""
PACKED = """
const packed = ({ type, dims, data }) => {
  const bytes = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
  return { type, dims, bytes: btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join("")) };
};
const all = (results) => Object.fromEntries(Object.entries(results).map(([name, tensor]) => [name, packed(tensor)]));
export const pieces = calls.map(all);
"""
PAGE = """<!doctype html>
<link rel="icon" href="data:,">
<script type="importmap">
{ "imports": { "onnxruntime-web": "./node_modules/onnxruntime-web/dist/ort.wasm.bundle.min.mjs" } }
</script>
"""


@pytest.fixture(scope="module")
def browser() -> Any:
    made = Browser()
    yield made
    made.close()


@pytest.mark.parametrize("name", [*CASES, "gan"])
def test_it_trains_in_a_page_as_onward_train_does(name: str, browser: Browser, tmp_path: Path) -> None:
    case = CASES.get(name, gan_case)()
    whole, site = case.whole(), tmp_path / "site"
    site.mkdir()
    rows = case.data | {f"validation/{of}": array for of, array in case.measured_with(seed=0).items()}
    write_for_javascript(site, whole, rows, [case.drawn([epoch], seed=0) for epoch in range(EPOCHS)])
    results = in_a_page(browser, site, whole)
    check_close(whole, results, case.trained(tmp_path, EPOCHS, seed=0))
    assert results.outputs[whole.contract["stopped"]] == FINISHED
    assert whole.position(results)["epoch"] == EPOCHS


def in_a_page(browser: Browser, site: Path, whole: WholeRun) -> Results:
    """What the program computes that a page of this folder loads."""
    program = javascript()
    for here, there in IN_A_PAGE.items():
        assert program.count(here) == 1, here
        program = program.replace(here, there)
    (site / "train.mjs").write_text("const calls = [];\n" + program + PACKED)
    (site / "index.html").write_text(PAGE)
    (site / "node_modules").symlink_to(node_modules())
    with serving(site) as address:
        tab = browser.new_tab()
        tab.open(address)
        tab.wait(f"document.readyState === 'complete' && location.href === '{address}'")
        pieces = tab.evaluate("import('./train.mjs').then((program) => program.pieces)")
    assert len(pieces) == EPOCHS and not tab.complaints
    return whole.joined([{name: _array(**packed) for name, packed in call.items()} for call in pieces])


def _array(type: str, dims: list[int], bytes: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(bytes), type).reshape(dims)
