"""Headless Chromium, driven through its DevTools protocol: for the tests of pages, and pictures.

The protocol goes through two pipes (``--remote-debugging-pipe``: JSON, a zero byte after each
message), so nothing besides Chromium is needed and no port is open. Each answer has a deadline.
axe-core, which judges whether all people can use a page, is the copy in the package
``axe-playwright-python``; nothing else of that package is used.

Rejected: Playwright (it brings a browser and a server of its own), Selenium (a second program that
must fit the browser's version).
"""

from __future__ import annotations

import base64
import fcntl
import importlib.util
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

LIMIT_S: Final = 60.0
NAMES: Final = ("chromium", "google-chrome")
_START: Final = """
import os, sys
os.dup2(int(sys.argv[1]), 3), os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
# The element that has the focus, and whether that can be seen.
_FOCUS: Final = """(() => {
  const one = document.activeElement;
  if (!one || one === document.body) return null;
  const all = [...document.querySelectorAll("*")];
  return {index: all.indexOf(one), tag: one.tagName, open: one.parentElement.open === true,
          visible: getComputedStyle(one).outlineStyle !== "none"};
})()"""
_REACHABLE: Final = """[...document.querySelectorAll("a[href], summary, button, [tabindex='0']")]
  .filter(one => one.checkVisibility())
  .map(one => [...document.querySelectorAll("*")].indexOf(one))"""


class Violation(NamedTuple):
    """What axe-core found: the rule, how bad it is, and the first element that breaks it."""

    rule: str
    impact: str
    element: str


def chromium() -> str | None:
    """The browser's path, or None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def axe_path() -> Path | None:
    """axe-core as one file, or None where it is not installed."""
    spec = importlib.util.find_spec("axe_playwright_python")
    places = spec.submodule_search_locations if spec is not None else None
    paths = [Path(place) / "axe.min.js" for place in places or ()]
    return next((path for path in paths if path.is_file()), None)


class BrowserPage:
    """One browser with one page.

    Attributes:
        errors: what was written to the console as an error or a warning, and uncaught exceptions.
        requested: every URL that was asked for, without what is inside of the page (``data:``).

    Raises:
        FileNotFoundError: no Chromium is here.
        TimeoutError: it did not answer.
    """

    def __init__(self) -> None:
        path = chromium()
        if path is None:
            raise FileNotFoundError("no Chromium is here: apt install chromium")
        self.errors: list[str] = []
        self.requested: list[str] = []
        self._loaded = 0
        self._number = 0
        self._session = ""  # of the page, once there is one
        self._data = b""
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_it, mine = _above(os.pipe())
        theirs, from_it = _above(os.pipe())
        self._from, self._to = theirs, mine
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", _START, str(to_it), str(from_it), path),
                *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu"),
                *("--no-first-run", "--disable-background-networking", "--disable-dev-shm-usage"),
                *("--disable-component-update", "--hide-scrollbars", "--force-color-profile=srgb"),
                f"--user-data-dir={self._profile.name}",
            ],
            pass_fds=(to_it, from_it),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_it)
        os.close(from_it)
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> BrowserPage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the browser."""
        for fd in (self._to, self._from):
            os.close(fd)
        try:
            self._process.wait(5)  # it ends with its pipe
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()
        self._profile.cleanup()

    def show(self, *, width: int = 1100, height: int = 900, scheme: str = "light") -> None:
        """How wide and high the window is in pixels, and whether its reader likes it dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self._call("Emulation.setEmulatedMedia", features=[feature])

    def open(self, url: str) -> None:
        """Go to a page, and wait until it is there with all that it asks for."""
        before = self._loaded
        answer = self._call("Page.navigate", url=url)
        if answer.get("errorText"):
            raise ConnectionError(f"{url}: {answer['errorText']}")
        until_s = time.monotonic() + LIMIT_S
        while self._loaded == before:
            self._hear(self._read(until_s))

    def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        given = {"expression": script, "awaitPromise": True, "returnByValue": True}
        answer = self._call("Runtime.evaluate", **given)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press and let go of a key."""
        codes = {"Tab": 9, "Enter": 13}
        given = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", **given, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", **given)

    def violations(self) -> list[Violation]:
        """What axe-core says of the page as it is now."""
        path = axe_path()
        if path is None:
            raise FileNotFoundError("axe-core is not installed: make test does that")
        self.run(path.read_text(encoding="utf-8") + "\n;0")
        found = self.run("axe.run().then(found => found.violations)")
        return [
            Violation(one["id"], one["impact"] or "", str(one["nodes"][0]["html"])[:200])
            for one in found
        ]

    def unreached_by_keyboard(self) -> list[str]:
        """What can be acted on and Tab does not come to, or without a sign that it has the focus.

        Each table behind a picture is opened with Enter on the way.
        """
        self.run("document.activeElement.blur()")
        seen: set[int] = set()
        hidden: list[int] = []
        while True:
            self.press("Tab")
            focus = self.run(_FOCUS)
            if focus is None or focus["index"] in seen:
                break
            seen.add(focus["index"])
            if not focus["visible"]:
                hidden.append(focus["index"])
            if focus["tag"] == "SUMMARY" and not focus["open"]:
                self.press("Enter")
        missed = sorted({*self.run(_REACHABLE), *hidden} - (seen - {*hidden}))
        shut = self.run("[...document.querySelectorAll('details:not([open])')].length")
        html = [self.run(f"document.querySelectorAll('*')[{at}].outerHTML") for at in missed]
        return [*(one[:200] for one in html), *["a table that stays shut"] * shut]

    def picture(self, *, whole: bool = False) -> bytes:
        """What the window shows, or the whole page, as PNG."""
        given = {"format": "png", "captureBeyondViewport": whole}
        return base64.b64decode(self._call("Page.captureScreenshot", **given)["data"])

    def printed_pages(self) -> int:
        """How many sheets of paper it takes."""
        data = base64.b64decode(self._call("Page.printToPDF", printBackground=True)["data"])
        return data.count(b"/Type /Page\n") + data.count(b"/Type /Page ")

    # --- the protocol ----------------------------------------------------------------------------

    def _call(self, method: str, **given: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": given}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        until_s = time.monotonic() + LIMIT_S
        while True:
            heard = self._read(until_s)
            if heard.get("id") == number:
                if "error" in heard:
                    raise RuntimeError(f"{method}: {heard['error']}")
                return dict(heard["result"])
            self._hear(heard)

    def _read(self, until_s: float) -> dict[str, Any]:
        while b"\0" not in self._data:
            if not select.select([self._from], [], [], max(until_s - time.monotonic(), 0))[0]:
                raise TimeoutError(f"Chromium did not answer within {LIMIT_S:g} s")
            more = os.read(self._from, 1 << 20)
            if not more:
                raise ConnectionError("Chromium has ended")
            self._data += more
        message, _, self._data = self._data.partition(b"\0")
        return dict(json.loads(message))

    def _hear(self, message: dict[str, Any]) -> None:
        name, given = message.get("method"), message.get("params", {})
        if name == "Page.loadEventFired":
            self._loaded += 1
        elif name == "Runtime.exceptionThrown":
            self.errors.append(str(given["exceptionDetails"]))
        elif name == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning"):
            self.errors.append(str(given["args"]))
        elif name == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
            self.errors.append(str(given["entry"]))
        elif name == "Network.requestWillBeSent" and not given["request"]["url"].startswith(
            "data:"
        ):
            self.requested.append(given["request"]["url"])


def _above(ends: tuple[int, int]) -> tuple[int, int]:
    """The two ends under numbers that the browser's own pipes do not take."""
    found = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in ends]
    for fd in ends:
        os.close(fd)
    return found[0], found[1]
