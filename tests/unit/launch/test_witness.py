"""What a machine has seen: counters of control groups, and the kernel's log."""

import os

import pytest

from outlast.launch.judging import EACH_S, KernelLog, Witness

V1 = "4:memory:/job/one\n9:name=systemd:/\n0::/\n"
V2 = "0::/job/one\n"
COUNTERS = {
    "v1": (V1, "sys/fs/cgroup/memory/job/one/memory.oom_control", "oom_kill_disable 0\n"),
    "v1, in a container": (V1, "sys/fs/cgroup/memory/memory.oom_control", "under_oom 0\n"),
    "v2": (V2, "sys/fs/cgroup/job/one/memory.events", "low 0\noom 3\n"),
    "v2, in a container": (V2, "sys/fs/cgroup/memory.events", "low 0\noom 3\n"),
    "neither": ("", "proc/vmstat", "nr_free_pages 7\n"),
}


class Host:
    """A machine's files."""

    def __init__(self, root, groups, path, head):
        self.root, self._path, self._head = root, root / path, head
        for place in ("proc/self", "dev"):
            (root / place).mkdir(parents=True, exist_ok=True)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        (root / "proc/self/cgroup").write_text(groups)
        self.kill(0)

    def kill(self, count):
        self._path.write_text(f"{self._head}oom_kill {count}\n")


@pytest.fixture
def now():
    return [100.0]


@pytest.fixture(params=COUNTERS, ids=list(COUNTERS))
def host(tmp_path, request):
    return Host(tmp_path, *COUNTERS[request.param])


def test_a_counter_that_rose_is_seen(host, now):
    host.kill(3)
    witness = Witness(host.root, lambda: now[0])
    assert witness.signs().oom_kills == 0
    host.kill(4)
    assert witness.signs().oom_kills == 1
    witness.begin()
    assert witness.signs().oom_kills == 0


def test_what_was_long_before_proves_nothing(host, now):
    witness = Witness(host.root, lambda: now[0])
    host.kill(1)
    seen = []
    for _ in range(3):
        now[0] += EACH_S + 0.1
        witness.look()
        seen.append(witness.signs().oom_kills)
    assert seen == [1, 0, 0]


def test_what_cannot_be_read_is_silent(tmp_path, now):
    witness = Witness(tmp_path, lambda: now[0])
    witness.look()
    assert witness.signs() == Witness(tmp_path).signs()
    assert not witness.signs().oom_kills
    witness.close()


def test_the_kernels_log_from_now_on(tmp_path):
    path = tmp_path / "kmsg"
    path.write_bytes(b"6,1,1,-;Memory cgroup out of memory: Killed process 11 (python)\n")
    log = KernelLog(path)
    with path.open("ab") as file:
        file.write(b"3,2,9,-;Out of memory: Killed process 12 (python) total-vm:1kB\n")
        file.write(b"3,3,9,-;NVRM: Xid (PCI:0000:65:00): 79, pid=12, GPU has fallen off the bus.\n")
    log.read()
    assert (log.killed, log.xids) == ({12}, [79])
    log.forget(float("inf"))
    assert (log.killed, log.xids) == (set(), [])
    log.close()
    log.read()


def test_a_log_that_nobody_may_read(tmp_path):
    log = KernelLog(tmp_path / "not there")
    log.read()
    assert not log.killed
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    log = KernelLog(fifo)  # readable, but not a log: no position in it
    log.read()
    assert not log.xids
    log.close()


def test_errors_that_a_gpu_had_counted_before_it_was_asked_first_are_not_new(tmp_path, now):
    witness = Witness(tmp_path, lambda: now[0])
    answers = iter([None, 3, 3, 3, 5])
    witness._gpus.errors = lambda: next(answers)
    witness.begin()
    assert witness.signs().ecc_errors == 0  # the driver has answered in between
    for _ in range(2):
        now[0] += EACH_S
        witness.look()
    assert witness.signs().ecc_errors == 2
    witness.close()
