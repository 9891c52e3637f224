"""A real browser for tests: Chromium without a window, driven over a pipe by its own protocol; and a static server."""

from __future__ import annotations

import base64
import contextlib
import functools
import http.server
import json
import os
import select
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_chromium() -> str | None:
    given = os.environ.get("ONWARD_CHROMIUM")
    return given or next((path for name in _NAMES if (path := shutil.which(name))), None)


needs_chromium = pytest.mark.skipif(find_chromium() is None, reason="needs Chromium (ONWARD_CHROMIUM names one)")


class Tab:
    """One page in a browser. What it complains about is in `complaints`."""

    def __init__(self, browser: Browser, session: str):
        self._browser, self._session = browser, session
        self.complaints: list[str] = []
        self.requests: list[str] = []
        browser.tabs[session] = self
        for domain in ("Page", "Runtime", "Log", "Network", "DOM"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.command(method, self._session, **parameters)

    def open(self, url: str) -> None:
        self.command("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        found = self.command("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise AssertionError(found["exceptionDetails"].get("exception", {}).get("description", str(found)))
        return found["result"].get("value")

    def wait(self, condition: str, seconds: float = 60) -> Any:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(AssertionError, KeyError):  # the page may be on its way
                if value := self.evaluate(condition):
                    return value
            time.sleep(0.05)
        seen = self.evaluate("document.body.innerText")
        raise AssertionError(f"waited {seconds} s for {condition}; {self.complaints}\n{seen}")

    def text(self, name: str) -> str:
        return self.evaluate(f"document.getElementById('{name}').textContent")

    def click(self, name: str) -> None:
        self.evaluate(f"document.getElementById('{name}').click()")

    def choose_files(self, selector: str, *files: Path) -> None:
        root = self.command("DOM.getDocument")["root"]["nodeId"]
        node = self.command("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.command("DOM.setFileInputFiles", nodeId=node, files=[str(file) for file in files])

    def screenshot(self, path: Path, width: int, height: int, dark: bool = False, whole: bool = True) -> None:
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.command("Emulation.setEmulatedMedia", features=scheme)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.command("Emulation.setDeviceMetricsOverride", **size)
        time.sleep(0.4)
        taken = self.command("Page.captureScreenshot", captureBeyondViewport=whole, format="png")
        path.write_bytes(base64.b64decode(taken["data"]))

    def heard(self, method: str, content: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(content["exceptionDetails"].get("exception", {}).get("description", "exception"))
        elif method == "Runtime.consoleAPICalled" and content["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(one.get("value", one)) for one in content["args"]))
        elif method == "Log.entryAdded" and content["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{content['entry']['text']} {content['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(content["request"]["url"])


class Browser:
    """Chromium, of which a pipe takes commands as JSON and gives answers and events."""

    def __init__(self, *flags: str):
        self._folder = tempfile.mkdtemp()
        program = find_chromium()
        assert program is not None
        from_us, to_us = os.pipe(), os.pipe()
        usual = ("--headless=new", "--no-sandbox", "--no-first-run", "--disable-dev-shm-usage")
        command = [program, *usual, "--remote-debugging-pipe", f"--user-data-dir={self._folder}", *flags, "about:blank"]
        take_pipes = f'exec 3<&{from_us[0]} 4>&{to_us[1]}; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", take_pipes, "bash", *command],
            pass_fds=(from_us[0], to_us[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(from_us[0])
        os.close(to_us[1])
        self._writes, self._reads, self._rest, self._last = from_us[1], to_us[0], b"", 0
        self.tabs: dict[str, Tab] = {}

    def new_tab(self) -> Tab:
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        return Tab(self, self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])

    def save_downloads_to(self, folder: Path) -> None:
        self.command("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))

    def command(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._last += 1
        number = self._last
        message = {"id": number, "method": method, "params": parameters, **({"sessionId": session} if session else {})}
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        while True:
            heard = self._hear()
            if heard.get("id") == number:
                if "error" in heard:
                    raise AssertionError(f"{method}: {heard['error']['message']}")
                return heard["result"]
            if (tab := self.tabs.get(heard.get("sessionId", ""))) is not None and "method" in heard:
                tab.heard(heard["method"], heard["params"])

    def _hear(self, seconds: float = 120) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._reads], [], [], seconds)
            piece = os.read(self._reads, 1 << 20) if ready else b""
            if not piece:
                raise AssertionError("the browser says nothing any more")
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.command("Browser.close")
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
        os.close(self._writes)
        os.close(self._reads)
        shutil.rmtree(self._folder, ignore_errors=True)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    headers_to_add: ClassVar[dict[str, str]] = {}

    def log_message(self, *_: Any) -> None:
        pass

    def end_headers(self) -> None:
        for name, value in self.headers_to_add.items():
            self.send_header(name, value)
        super().end_headers()


ISOLATED = {"Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp"}
"""What lets a page have threads."""


@contextlib.contextmanager
def serving(folder: Path, headers: dict[str, str] | None = None) -> Iterator[str]:
    """The address of a folder that any static server could serve."""
    kind = type("Handler", (_Quiet,), {"headers_to_add": headers or {}})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(kind, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()
