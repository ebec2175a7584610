"""The exporter's process: ``python -m outlast.metrics SETUP``, started by ``health/exporter.py``.

It reads what the agent says of new attempts from standard input, one ``Begin`` a line, and says on
standard output, one line each, what people should know. It ends with SIGTERM, or within half a
second of its parent's death.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

from outlast.errors import remedy
from outlast.health.exporter import TELL_VARIABLE, ExporterSetup, TellSetup
from outlast.health.processes import wake_when_alone
from outlast.health.watched import Begin
from outlast.metrics.exposition import Exposition
from outlast.metrics.live import LivePage
from outlast.metrics.server import Answer, MetricsRequest, MetricsServer, Page, plain
from outlast.metrics.teller import Teller

NICE: Final = 10
LOOK_S: Final = 0.5
TEXTFILE_S: Final = 15.0
_PIPE_BYTES: Final = 1 << 16


class ExporterProcess:
    """The loop of the process.

    Args:
        setup: what it was told.
    """

    def __init__(self, setup: ExporterSetup) -> None:
        self._setup = setup
        directory = Path(setup.directory)
        self._exposition = Exposition(setup.job, directory, setup.node, setup.cadence, setup.prices)
        self._live = LivePage(directory, setup.prices)
        self._server: MetricsServer | None = None
        if setup.listener >= 0:
            self._server = MetricsServer(socket.socket(fileno=setup.listener), self._pages())
        self._teller = None if setup.tell is None else self._new_teller(setup.tell, directory)
        self._textfile = Path(setup.textfile) if setup.textfile else None
        self._written_s = -TEXTFILE_S
        self._said = ""
        self._input: bytes | None = b""  # what has come of the next line; None once it is closed
        self._ends = False

    def _new_teller(self, tell: TellSetup, directory: Path) -> Teller:
        setup = self._setup
        return Teller(
            tell,
            tuple(os.environ.pop(TELL_VARIABLE, "").split()),
            self._exposition.fold,
            job=setup.job,
            directory=directory,
            node=setup.node,
            prices=setup.prices,
            say=self._say,
        )

    def _pages(self) -> dict[str, Page]:
        """Path → what answers it; a further page of the port is one more entry here."""
        return {"/metrics": self._metrics, "/": self._live.answer}

    def _metrics(self, asked: MetricsRequest) -> Answer:
        if not self._exposition.is_complete:
            return plain("503 Service Unavailable", "the ledger is still being read")
        body, kind = self._exposition.text(asked.accept)
        return Answer("200 OK", kind, body)

    def end(self, *_: object) -> None:
        """Leave the loop, soon."""
        self._ends = True

    def run(self) -> None:
        """Until the job is over."""
        looked_s = 0.0
        while not self._ends and os.getppid() == self._setup.parent:
            more = False
            if time.monotonic() - looked_s >= LOOK_S or not self._exposition.is_complete:
                self._hear()
                more = self._exposition.look()
                self._tell()
                self._write()
                self._live.rest()
                looked_s = time.monotonic()
            wait_s = 0.0 if more else LOOK_S
            if self._server is not None:
                self._server.turn(wait_s)
            elif not more:
                time.sleep(LOOK_S)
        if self._server is not None:
            self._server.close()
        if self._textfile is not None:
            with contextlib.suppress(OSError):
                self._textfile.unlink()
        if self._teller is not None:
            while self._exposition.look(math.inf):
                self._teller.take(self._exposition.settled)
            self._teller.take(self._exposition.settled)
            if not self._ends:
                self._teller.parent_died()
            self._teller.end()

    def _tell(self) -> None:
        if self._teller is not None:
            self._teller.take(self._exposition.settled)
            if self._exposition.is_complete:
                self._teller.turn()

    def _hear(self) -> None:
        while self._input is not None and select.select([0], [], [], 0)[0]:
            data = os.read(0, _PIPE_BYTES)
            if not data:
                self._input = None
                return
            *lines, self._input = (self._input + data).split(b"\n")
            for line in lines:
                with contextlib.suppress(msgspec.MsgspecError):
                    self._exposition.begin(msgspec.json.decode(line, type=Begin))

    def _write(self) -> None:
        is_due = time.monotonic() - self._written_s >= TEXTFILE_S
        if self._textfile is None or not is_due or not self._exposition.is_complete:
            return
        self._written_s = time.monotonic()
        try:
            self._exposition.write(self._textfile)
        except OSError as error:
            words = f"{error.strerror or error}; {remedy(error)}"
            self._say(f"metrics.textfile {self._textfile} cannot be written: {words}")
        else:
            self._said = ""

    def _say(self, words: str) -> None:
        if words != self._said:  # once, not every fifteen seconds
            self._said = words
            with contextlib.suppress(OSError):
                print(words, flush=True)  # noqa: T201 - whoever has started this says it


def main() -> None:
    """Entry point of the process."""
    wake_when_alone()  # a process that is stopped does not see that its parent has died
    with contextlib.suppress(OSError):
        os.nice(NICE)
    process = ExporterProcess(msgspec.json.decode(sys.argv[1], type=ExporterSetup))
    signal.signal(signal.SIGTERM, process.end)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    process.run()


if __name__ == "__main__":
    main()
