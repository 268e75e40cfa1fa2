"""Headless Chromium for tests, controlled through two pipes. Needs no package.

The protocol is Chromium DevTools: JSON messages terminated by NUL, written to its file descriptor 3 and read from 4.
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
TIMEOUT = 180.0  # seconds; a busy machine starts a browser in ten
# Chromium expects its pipes as file descriptors 3 and 4; subprocess keeps the numbers that they have here.
LAUNCHER = """
import fcntl, os, sys
reads, writes = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3])
os.dup2(reads, 3)
os.dup2(writes, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def chromium() -> str | None:
    """The path of the browser, or None; $ADLM_CHROMIUM takes precedence."""
    return os.environ.get("ADLM_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab of a browser."""

    def __init__(self, reads: int, writes: int):
        self._reads, self._writes = reads, writes
        self._buffer, self._number, self._session = b"", 0, None
        self.problems: list[str] = []
        """Exceptions and log entries of the page."""

    def send(self, method: str, **parameters: Any) -> Any:
        """Send one command and return its result; errors that the page reports meanwhile are collected."""
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
        deadline = time.monotonic() + TIMEOUT
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._reads], [], [], max(0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            more = os.read(self._reads, 1 << 20)
            assert more, "the browser has exited"
            self._buffer += more
        answer, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(answer)

    def attach(self) -> None:
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def emulate(self, width: int = 1100, height: int = 900, dark: bool = False, reduced_motion: bool = True) -> None:
        """Set the window size and the user preferences."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if reduced_motion else "no-preference"},
        ]
        self.send("Emulation.setEmulatedMedia", features=features)

    def open(self, file: Path, fragment: str = "") -> None:
        self.send("Page.navigate", url="about:blank")  # changing only the fragment would not reload the page
        self.wait_for("document.readyState == 'complete'")
        self.send("Page.navigate", url=file.resolve().as_uri() + fragment)
        self.wait_for("location.protocol == 'file:' && document.readyState == 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression on the page."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, script: str) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not self.run(script):
            assert time.monotonic() < deadline, f"never true: {script}"
            time.sleep(0.02)

    def press(self, key: str, text: str = "") -> None:
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    def point_at(self, selector: str, click: bool = False) -> None:
        """Move the pointer to the middle of an element, and click if requested."""
        x, y = self.run(
            f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getClientRects()[0];"
            " return [b.left + b.width / 2, b.top + b.height / 2]; })()"
        )
        for place in ((0, 0), (x, y)):  # a pointer that is there already causes no event
            self.send("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser(binary: str, profile: Path) -> Iterator[Page]:
    """Start a browser with one empty page, and stop it at the end."""
    their_reads, our_writes = os.pipe()
    our_reads, their_writes = os.pipe()
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    flags += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "--hide-scrollbars"]
    command = [sys.executable, "-c", LAUNCHER, str(their_reads), str(their_writes), binary, *flags]
    process = subprocess.Popen(
        command, pass_fds=(their_reads, their_writes), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(their_reads)
    os.close(their_writes)
    try:
        page = Page(our_reads, our_writes)
        page.attach()
        yield page
        page._session = None
        page.send("Browser.close")
        process.wait(TIMEOUT)
    finally:
        process.kill()
        process.wait()
        os.close(our_reads)
        os.close(our_writes)
