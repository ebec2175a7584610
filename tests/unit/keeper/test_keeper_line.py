"""A worker's line to the keeper, through deaths: one connection to its successor, and no other."""

import contextlib
import socket
import threading

import pytest

from outlast.keeper import wire
from outlast.keeper.client import KeeperLine
from outlast.keeper.process import Setup

LIMIT_S = 20.0


class Keepers:
    """A keeper that is being killed, and its successor, on one socket.

    Args:
        path: the socket.
        num_dying: connections that come to the one that is being killed: accepted, and dropped,
            every second one a moment later.
    """

    def __init__(self, path, num_dying):
        self.left = []  # by connection to the successor: whether its worker has left
        self._num_dying = num_dying
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen()
        self._serving = []
        threading.Thread(target=self._serve, daemon=True).start()

    def wait(self):
        """Wait until nobody is connected any more."""
        for thread in self._serving:
            thread.join(LIMIT_S)

    def close(self):
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _serve(self):
        with contextlib.suppress(OSError):
            for number in range(100):
                accepted, _ = self._server.accept()
                if number < self._num_dying:
                    threading.Timer(0.05 * (number % 2), accepted.close).start()
                    continue
                self.left.append(False)
                thread = threading.Thread(
                    target=self._answer, args=(len(self.left) - 1, accepted), daemon=True
                )
                self._serving.append(thread)
                thread.start()

    def _answer(self, number, accepted):
        line = wire.KeeperSocket(accepted)
        while (frame := line.receive()) is not None:
            if isinstance(frame[0], wire.Fetch):
                line.send(wire.Fetched(number=frame[0].number, error="no such tier"))
        line.close()
        self.left[number] = True


@pytest.mark.parametrize("num_dying", [1, 2, 3, 5])
def test_one_connection_to_the_successor_and_to_nobody_else(tmp_path, monkeypatch, num_dying):
    path = tmp_path / "k.sock"
    monkeypatch.setenv("OUTLAST_KEEPER", str(path))
    keepers = Keepers(path, num_dying)
    line = KeeperLine(
        Setup(job="j", directory=str(tmp_path), socket=str(path), tiers=()),
        wire.Hello(job="j"),
        on_message=lambda *_: None,
        on_lost=lambda: None,
        on_back=lambda: None,
        say=lambda _: None,
    )
    line.start()
    line.wait_until_ready()
    refused = 0
    while True:  # the first connection may be dropped as it is made, or a little later
        assert refused < 2, "one that has not said a word was taken for the successor"
        assert line.wait_for_keeper(LIMIT_S)
        client = line.client
        try:
            client.hear(LIMIT_S)
        except (OSError, AttributeError):  # lost meanwhile
            refused += 1
            continue
        break
    line.close(clean=False, copying_s=None)
    keepers.wait()
    assert keepers.left == [True]
    keepers.close()
