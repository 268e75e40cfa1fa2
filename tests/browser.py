"""A real browser to hold pages against: Chromium without a window, spoken to over two pipes. Needs no package.

The protocol is that of Chromium's DevTools: JSON, a NUL after each message, to its file 3 and from its file 4.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE = 60.0  # seconds until an answer must have come; a busy machine starts a browser in ten
# Chromium wants its pipes as files 3 and 4; subprocess hands them on by whatever number they have here.
LAUNCHER = """
import fcntl, os, sys
reads, writes = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3])
os.dup2(reads, 3)
os.dup2(writes, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def chromium() -> str | None:
    """Where the browser is, if there is one; $ADLM_CHROMIUM names another."""
    return os.environ.get("ADLM_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab of a browser."""

    def __init__(self, reads: int, writes: int):
        self._reads, self._writes = reads, writes
        self._buffer, self._number, self._session = b"", 0, None
        self.problems: list[str] = []
        """Whatever the page's console complained about."""

    def ask(self, method: str, **parameters: Any) -> Any:
        """One command and its answer; events that come in between are kept or dropped."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.problems.append(json.dumps(answer["params"]))
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _read(self) -> Any:
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._reads], [], [], max(0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            more = os.read(self._reads, 1 << 20)
            assert more, "the browser has gone"
            self._buffer += more
        answer, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(answer)

    def attach(self) -> None:
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def look(self, width: int = 1100, height: int = 900, dark: bool = False, still: bool = True) -> None:
        """The size of the window, and what its user prefers."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"},
        ]
        self.ask("Emulation.setEmulatedMedia", features=features)

    def open(self, file: Path, fragment: str = "") -> None:
        self.ask("Page.navigate", url="about:blank")  # a change of the fragment alone would load nothing
        self.wait_for("document.readyState == 'complete'")
        self.ask("Page.navigate", url=file.resolve().as_uri() + fragment)
        self.wait_for("location.protocol == 'file:' && document.readyState == 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression on the page."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, script: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not self.run(script):
            assert time.monotonic() < deadline, f"never true: {script}"
            time.sleep(0.02)

    def press(self, key: str, text: str = "") -> None:
        self.ask("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
        self.ask("Input.dispatchKeyEvent", type="keyUp", key=key)

    def point_at(self, selector: str, click: bool = False) -> None:
        """Move the pointer to the middle of an element; perhaps click there."""
        x, y = self.run(
            f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getClientRects()[0];"
            " return [b.left + b.width / 2, b.top + b.height / 2]; })()"
        )
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser(binary: str, profile: Path) -> Iterator[Page]:
    """A browser with one empty page, gone at the end."""
    their_reads, our_writes = os.pipe()
    our_reads, their_writes = os.pipe()
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    flags += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "--hide-scrollbars"]
    words = [sys.executable, "-c", LAUNCHER, str(their_reads), str(their_writes), binary, *flags]
    process = subprocess.Popen(
        words, pass_fds=(their_reads, their_writes), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(their_reads)
    os.close(their_writes)
    try:
        page = Page(our_reads, our_writes)
        page.attach()
        yield page
        page._session = None
        page.ask("Browser.close")
        process.wait(PATIENCE)
    finally:
        process.kill()
        process.wait()
        os.close(our_reads)
        os.close(our_writes)
