"""Who starts keepers and holds their memory; and what a keeper makes of those who misbehave."""

import os
import random
import signal
import socket
import struct
import threading
import time

import msgspec
import pytest
from floor import until
from keeper_floor import keepers
from lean import Place

import thorough
from outlast.errors import StorageError
from outlast.keeper import wire
from outlast.keeper.memory import MemoryTier
from outlast.keeper.process import Supervisor, connect

MOMENTS = 200 if thorough.ALL else 10


@pytest.fixture(name="place")
def _place(floor, tmp_path, monkeypatch):
    for name, value in floor.environ.items():  # keepers that are started here are the floor's
        monkeypatch.setenv(name, value)
    return Place(floor, tmp_path / "place")


@pytest.fixture(name="supervisor")
def _supervisor(place):
    supervisor = Supervisor(place.setup)
    supervisor.start()
    yield supervisor
    supervisor.close(20.0)


def kill(supervisor):
    old = supervisor.pid
    os.kill(old, signal.SIGKILL)
    until(lambda: supervisor.pid != old, "another keeper")


def test_several_who_look_for_a_keeper_find_one(floor, place):
    supervisors = [Supervisor(place.setup) for _ in range(3)]
    threads = [threading.Thread(target=one.start) for one in supervisors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len([one for one in supervisors if one.pid]) == len(keepers(floor)) == 1
    ends = [threading.Thread(target=one.close, args=(30.0,)) for one in supervisors]
    for end in ends:
        end.start()
    for end in ends:
        end.join(60)
    assert not keepers(floor)
    assert list((place.directory / "run").iterdir()) == []


def test_memory_goes_from_keeper_to_keeper(place, supervisor):
    worker = place.worker(buffers=2)
    assert worker.save(1) == ""
    for _ in range(3):
        kill(supervisor)
        worker = place.worker(buffers=2)
        memory = worker.client.recall()
        assert isinstance(memory, MemoryTier)
        assert place.committed(memory) == [1]
        arenas = worker.reserved.arenas
        assert len(arenas) == 2
    assert worker.save(2, arena=1) == ""
    worker.close()


def test_a_keeper_outlives_what_a_scheduler_sends_to_every_process(place, supervisor):
    worker = place.worker(buffers=1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        os.kill(supervisor.pid, number)
    assert worker.save(1) == ""
    assert worker.client.recall() is not None
    worker.close()


@pytest.mark.parametrize("is_starting", [False, True])
def test_a_keeper_that_dies_when_all_is_over_does_not_hold_anybody(floor, place, is_starting):
    supervisor = Supervisor(place.setup)
    supervisor.start()
    if is_starting:
        kill(supervisor)  # its successor does not listen yet
    else:
        os.kill(supervisor.pid, signal.SIGKILL)
    supervisor.close(None)
    until(lambda: not keepers(floor), "no keeper is left")


def test_a_keeper_that_does_not_move_does_not_hold_anybody(floor, place):
    supervisor = Supervisor(place.setup)
    supervisor.start()
    worker = place.worker()
    os.kill(supervisor.pid, signal.SIGSTOP)
    serial = worker.begin(1)  # all of it is said, and nobody waits
    assert not supervisor.close(0.5)
    assert serial not in worker.ended
    os.kill(supervisor.pid, signal.SIGCONT)
    assert supervisor._process.wait(60) in (0, 1)  # its time may be over by now
    assert not keepers(floor)
    assert place.committed() in ([1], [])


def test_a_keeper_that_cannot_start_says_why(place):
    (place.directory / "local").write_text("")
    broken = msgspec.structs.replace(place.setup, directory=str(place.directory / "local"))
    broken = msgspec.structs.replace(broken, socket=str(place.directory / "none" / "k.sock"))
    with pytest.raises(StorageError, match="keeper"):
        Supervisor(broken).start()


def test_a_keeper_killed_at_any_moment_of_its_start_is_followed_by_another(place):
    """And so is the one that follows; whoever started them is told of no error."""
    moments = random.Random(thorough.seed())
    for _ in range(MOMENTS):
        supervisor = Supervisor(place.setup)
        killed, ends = [], threading.Event()

        def kill_two(supervisor=supervisor, killed=killed, ends=ends):
            while len(killed) < 2 and not ends.is_set():
                process = supervisor._process
                if process is not None and process.pid not in killed:
                    time.sleep(moments.uniform(0.0, 0.4))
                    process.kill()
                    killed.append(process.pid)
                time.sleep(0.001)

        killer = threading.Thread(target=kill_two)
        killer.start()
        try:
            supervisor.start()
            killer.join(60)
            assert len(killed) == 2
            until(lambda s=supervisor, k=killed: s.pid not in k, "a third keeper")
            until(lambda s=supervisor: not s._process.poll() and _answers(place), "its answer")
            worker = place.worker()
            assert worker.save(1) == ""
            worker.close()
        finally:
            ends.set()
            killer.join(60)
            supervisor.close(20.0)


def _answers(place):
    try:
        connect(place.directory / "run" / "k.sock").close()
    except OSError:
        return False
    return True


def test_strangers_and_garbage_change_nothing(floor, place, supervisor):
    worker = place.worker()
    path = place.directory / "run" / "k.sock"
    said = [
        b"GET / HTTP/1.1\r\n\r\n" * 50,
        b"\x00" * 12,
        struct.pack("<III", 2, 0, 0) + b"{}",
        struct.pack("<III", 1 << 31, 0, 0),
    ]
    for data in said:
        sock = connect(path)
        sock.sendall(data)
        sock.close()
    for message in (
        wire.Hello(job="another", rank=0),
        wire.BlocksReady(step=1, serial=1, blocks=(0,)),
        wire.Goodbye(over=True),
    ):
        end = wire.KeeperSocket(connect(path))
        end.send(message)
        end.sock.shutdown(socket.SHUT_WR)
        while end.receive() is not None:
            pass
        end.close()
    hello = wire.Hello(job="lean", attempt=1, rank=5)
    for message in (
        wire.Fetch(number=1, tier="none", operation="read", name="x"),
        wire.Fetch(number=2, tier="local", operation="read", name="../../etc/passwd"),
        wire.Goodbye(over=True, deadline_s=0.0),  # a worker has no say in this
        hello,
    ):
        end = wire.KeeperSocket(connect(path))
        end.send(hello)
        end.send(message)
        end.sock.shutdown(socket.SHUT_WR)
        while (frame := end.receive()) is not None:
            assert frame[0].error
            assert frame[1] == b""
        end.close()
    assert worker.save(1) == ""
    assert len(keepers(floor)) == 1
    worker.close()


def test_a_stuck_worker_of_an_old_attempt_does_not_hold_up_the_new_one(place, supervisor):
    stuck = place.worker()
    assert stuck.save(1) == ""
    stuck.begin(2, whole=False)
    new = place.worker()
    # Its snapshot was being written over; the new attempt is answered at once all the same.
    assert new.client.recall().children() == []
    assert new.save(2) == ""
    assert "attempt ended" in stuck.wait(2)
    for worker in (stuck, new):
        worker.close()
    assert place.committed() == [1, 2]
