"""The process that sends one message: ``python -m outlast.health.send``, and how it is called.

It reads one JSON object from standard input, the addresses included: what stands in a command line
can be read by everybody on the machine. It answers with one JSON list: for each address an empty
text, or why it did not take the message, without any part of the address.

Guarantees: ``apprise`` is imported in it alone, and in the process in which the doctor checks
addresses. So a library that hangs, or a server that trickles, is ended at ``SEND_S`` with the
process that waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import re
import subprocess
import sys
import time
from typing import IO, Final

import msgspec

from outlast.config import in_public

SEND_S: Final = 40.0
_KINDS: Final = {"info": "info", "warning": "warning", "critical": "failure"}
NOT_FILLED: Final = "the name of a variable stands where its value should"
_NAME: Final = re.compile(r"[/:@=]\$(\w+|\{\w+\})(?=[/:@?&]|$)")  # nobody fills it in
_STATUS: Final = re.compile(r"error=(\d{3})\b")


class Errand(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be sent, and where; without a title the addresses are only checked."""

    urls: tuple[str, ...]
    severity: str = "info"
    title: str = ""
    body: str = ""


class Delivery:
    """A message on its way; never waits.

    Args:
        errand: what is sent.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self, errand: Errand) -> None:
        self.errand = errand
        self._until_s = time.monotonic() + SEND_S
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "outlast.health.send"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
        )
        with contextlib.suppress(OSError), _pipe(self._process.stdin) as stream:
            stream.write(msgspec.json.encode(errand))  # less than a pipe holds

    def look(self) -> list[str] | None:
        """For each address "" or why not; None while it is on its way."""
        if self._process.poll() is None:
            if time.monotonic() < self._until_s:
                return None
            self.stop()
            return ["no answer in time"] * len(self.errand.urls)
        with _pipe(self._process.stdout) as stream:
            said = stream.read()
        with contextlib.suppress(msgspec.MsgspecError):
            found = msgspec.json.decode(said, type=list[str])
            if len(found) == len(self.errand.urls):
                return found
        return ["the process that sends has failed"] * len(self.errand.urls)

    def wait(self) -> list[str]:
        """The answer; it comes within ``SEND_S``."""
        while (found := self.look()) is None:
            time.sleep(0.02)
        return found

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None  # noqa: S101 - both are pipes
    return stream


def refusals(url: str, why: str) -> str:
    """Why an address did not take a message, with its public part."""
    return f"{in_public(url)}: {why}"


def answers_to(errand: Errand) -> list[str]:
    """Send it, in this process: for each address "" or why not, without any part of it."""
    try:
        import apprise
    except ImportError as error:
        return [f"apprise cannot be imported: {type(error).__name__}"] * len(errand.urls)
    answers = []
    for url in errand.urls:
        try:
            target = apprise.Apprise.instantiate(url)
            if not target:
                answers.append("apprise knows no such address")
                continue
            if not errand.title:
                answers.append(NOT_FILLED if _NAME.search(url) else "")
                continue
            with apprise.LogCapture(level=logging.INFO) as said:  # type: ignore[no-untyped-call]
                kind = _KINDS[errand.severity]
                done = target.notify(body=errand.body, title=errand.title, notify_type=kind)
                words = said.getvalue()
            answers.append("" if done else _why(words))
        except Exception as error:  # noqa: BLE001 - a plugin's fault is an answer; its text may hold a secret
            answers.append(type(error).__name__)
    return answers


def _why(words: str) -> str:
    status = _STATUS.search(words)
    if status is not None:
        return f"it answered with status {status[1]}"
    return "no connection, or no answer" if "onnection" in words else "it did not take it"


def main() -> None:
    """Entry point of the process."""
    errand = msgspec.json.decode(sys.stdin.buffer.read(), type=Errand)
    answers = answers_to(errand)
    sys.stdout.buffer.write(msgspec.json.encode(answers))


if __name__ == "__main__":
    main()
