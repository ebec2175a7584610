"""A machine is not lost for being busy; one whose kernel answers no more is."""

import os
from pathlib import Path

import pytest
from floor import until

from machine_network import BlackHole
from thorough import ALL

SCRIPT = Path(__file__).with_name("heartbeats.py")
KEY = "6b" * 32
SILENCE_S = 1.0  # eight heartbeats in this time, each way
HEARTBEATS = 10_000 if ALL else 2_500
PROCESSES, CONNECTIONS = 2, 60
BUSY = 4 * (os.cpu_count() or 1)


def words(process, kind):
    return [line.split(" ", 1)[-1] for line in process.out.splitlines() if line.startswith(kind)]


@pytest.mark.alone  # it keeps every core busy
def test_thousands_of_heartbeats_on_a_busy_host(machines):
    one, other = machines(2)
    hub = one.warm(SCRIPT, "serve", one.address, KEY, SILENCE_S)
    (address,) = until(lambda: words(hub, "at"), "a hub", running=hub)
    peers = [
        other.warm(SCRIPT, "beat", address, KEY, SILENCE_S, CONNECTIONS) for _ in range(PROCESSES)
    ]
    everybody = PROCESSES * CONNECTIONS
    until(lambda: len(words(hub, "here")) == everybody, "all connections", running=peers[0])
    busy = [one.cold("-c", "while True: pass") for _ in range(BUSY)]

    def heard():
        return int((words(hub, "heard") or ["0"])[-1])

    before = heard()
    until(lambda: heard() >= before + HEARTBEATS or words(hub, "lost"), "heartbeats", running=hub)
    assert [process.poll() for process in busy] == [None] * BUSY
    for process in (hub, *peers):
        assert words(process, "lost") == []
    # The same machines, as busy as before: the network ends, and with it their kernels' answers.
    BlackHole(other.machine).inject()
    until(lambda: len(words(hub, "lost")) == everybody, "all are lost", running=hub)
    assert all(why.startswith("has been silent for") for why in words(hub, "lost"))
