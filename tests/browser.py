"""A real browser without a driver: chromium, told what to do over its DevTools pipe."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Debian's name and others'.
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
#: Becomes the browser, which reads commands from descriptor 3 and answers on 4.
_START = """
import fcntl, os, sys
moved = [fcntl.fcntl(int(descriptor), fcntl.F_DUPFD, 10) for descriptor in sys.argv[1:3]]
for descriptor, target in zip(moved, (3, 4)):
    os.dup2(descriptor, target)
os.execv(sys.argv[3], sys.argv[3:])
"""
#: Seconds that any single answer may take on a busy machine.
_PATIENCE_S = 90.0


def find_browser() -> str | None:
    """Return the path of a chromium, None where there is none."""
    return next((path for name in _NAMES if (path := shutil.which(name)) is not None), None)


class Browser:
    """One page of a running chromium."""

    def __init__(self, process: subprocess.Popen[bytes], reader: int, writer: int) -> None:
        self._process, self._reader, self._writer = process, reader, writer
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []
        target = self.command("Target.createTarget", {"url": "about:blank"}, session=None)["targetId"]
        attach = {"targetId": target, "flatten": True}
        self._session: str = self.command("Target.attachToTarget", attach, session=None)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.command(f"{domain}.enable")

    def command(self, method: str, parameters: dict[str, Any] | None = None, *, session: str | None = "") -> Any:  # noqa: ANN401 - whatever the browser says
        """Send a command and return its result; events that come before it are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters or {}}
        if session is not None:
            message["sessionId"] = self._session
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def open(
        self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False, script: bool = True
    ) -> None:
        """Show a file and wait until it is loaded."""
        self.events.clear()
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.command("Emulation.setScriptExecutionDisabled", {"value": not script})
        self.command("Page.navigate", {"url": path.as_uri()})
        deadline = time.monotonic() + _PATIENCE_S
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            assert time.monotonic() < deadline, "the page does not load"
            self.events.append(self._read())

    def value(self, expression: str) -> Any:  # noqa: ANN401 - any JSON
        """Return the value of a JavaScript expression."""
        asked = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        result = self.command("Runtime.evaluate", asked)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key, such as Tab or Enter."""
        code = {"Tab": 9, "Enter": 13}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.command(
                "Input.dispatchKeyEvent",
                {
                    "type": kind,
                    "key": key,
                    "code": key,
                    "windowsVirtualKeyCode": code,
                    **(text if kind == "keyDown" else {}),
                },
            )

    def move(self, x: float, y: float) -> None:
        """Move the mouse."""
        self.command("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x, "y": y})

    def screenshot(self) -> bytes:
        """Return the whole page as PNG."""
        shot = self.command("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True})
        return base64.b64decode(shot["data"])

    def pdf(self) -> bytes:
        """Return the page as it is printed."""
        return base64.b64decode(
            self.command("Page.printToPDF", {"preferCSSPageSize": True, "printBackground": True})["data"]
        )

    @property
    def complaints(self) -> list[str]:
        """What the browser logged as an error or a warning, and exceptions of scripts."""
        found = []
        for event in self.events:
            parameters = event.get("params", {})
            if event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
                found.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
            elif event.get("method") == "Runtime.exceptionThrown":
                found.append(json.dumps(parameters["exceptionDetails"]))
            elif event.get("method") == "Runtime.consoleAPICalled" and parameters["type"] in (
                "error",
                "warning",
                "assert",
            ):
                found.append(json.dumps(parameters["args"]))
        return found

    @property
    def requests(self) -> list[str]:
        """Every address that the page asked for."""
        return [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._reader], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            more = os.read(self._reader, 1 << 20)
            assert more, "the browser ended"
            self._buffer += more
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer


@contextlib.contextmanager
def running(program: str, folder: Path) -> Iterator[Browser]:
    """Start chromium with an empty profile in `folder`, and end it."""
    to_browser, from_browser = os.pipe(), os.pipe()
    inherited = to_browser[0], from_browser[1]
    with (folder / "browser.log").open("wb") as log:
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _START,
                *map(str, inherited),
                program,
                *_FLAGS,
                f"--user-data-dir={folder / 'profile'}",
            ],
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "HOME": str(folder)},
        )
    os.close(to_browser[0])
    os.close(from_browser[1])
    try:
        browser = Browser(process, from_browser[0], to_browser[1])
        yield browser
        with contextlib.suppress(AssertionError, OSError):
            browser.command("Browser.close", session=None)
    finally:
        os.close(to_browser[1])
        os.close(from_browser[0])
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
