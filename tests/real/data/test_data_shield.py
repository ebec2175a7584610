"""Loader workers and real signals: to the group, from the training process, and its end."""

import contextlib
import os
import pickle
import signal
import subprocess
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from floor import Floor, until

from outlast.data import open_feed
from outlast.data.shield import ShieldedInit, signals_held

SCRIPT = Path(__file__).with_name("shield_script.py")
LIMIT_S = 60.0
WEDGE_S = 0.7  # until the workers of the script are wedged
PATIENCE_S = 50.0  # as in the script


@pytest.fixture(name="floor")
def _floor(tmp_path):
    """Whose processes have no children but the loader's."""
    started = Floor(tmp_path, starts_afresh=True)
    yield started
    started.close()


class Training:
    """The script; cold where its workers are no forks of it, or where it ends by itself."""

    def __init__(self, floor, method, kind, is_cold):
        orders = floor.directory / "orders"
        os.mkfifo(orders)
        self.orders = os.open(orders, os.O_RDWR)  # waits for no reader
        start = floor.cold if is_cold or method != "fork" else floor.warm
        self.process = start(SCRIPT, method, kind, orders)
        self.num_read = 0
        self.workers = []

    def wait_for_workers(self):
        self.workers = [psutil.Process(pid) for pid in self.read("workers")]

    def children(self):
        workers = psutil.Process(self.process.pid).children()
        assert len(workers) >= 2
        return workers

    def read(self, word):
        def whole_lines():
            return self.process.out.rpartition("\n")[0].splitlines()[self.num_read :]

        line = until(whole_lines, word, running=self.process)[0].split()
        self.num_read += 1
        assert line[0] == word
        return [float(item) if "." in item else int(item) for item in line[1:]]

    def tell(self, line):
        os.write(self.orders, f"{line}\n".encode())

    def signal_group(self, number):
        os.killpg(self.process.pid, number)


@contextlib.contextmanager
def training(floor, method, kind, *, is_cold=False):
    run = Training(floor, method, kind, is_cold)
    try:
        run.wait_for_workers()
        yield run
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.process.pid, signal.SIGKILL)
        run.process.wait()
        os.close(run.orders)


def gone(workers, limit_s):
    _, alive = psutil.wait_procs(workers, timeout=limit_s)
    return not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("fork", "stock"),
        ("spawn", "stock"),
        ("forkserver", "ours"),
        ("fork", "ours"),
        ("fork", "stateful"),
        ("fork", "covered"),
    ],
)
def test_batches_go_on_through_signals_to_the_group(floor, method, kind):
    with training(floor, method, kind) as run:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
            run.signal_group(number)
            time.sleep(0.2)  # real time for a worker to die of it
        run.tell("go on")
        assert run.read("received") == [signal.SIGUSR1, signal.SIGTERM]
        assert all(worker.is_running() for worker in run.workers)
        run.tell("close")
        assert run.read("closed")[0] < PATIENCE_S  # torch's, with a worker that does not end
        assert run.process.wait(LIMIT_S) == 0
        assert gone(run.workers, LIMIT_S)


def test_without_the_shield_workers_die(floor):
    with training(floor, "fork", "unshielded") as run:
        run.signal_group(signal.SIGTERM)
        run.tell("go on")
        # It ends by whatever meets the dead worker first: the loader that looks at its workers, or
        # the fetch of a tensor's descriptor from one that dies of it (a ConnectionResetError).
        with pytest.raises(AssertionError, match="Traceback"):
            run.read("received")
        assert run.process.wait(LIMIT_S) == 1
        assert gone(run.workers, LIMIT_S)


@pytest.mark.parametrize("kind", ["stock", "wedged"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_end_with_their_training_process(floor, method, kind):
    with training(floor, method, kind) as run:
        workers = run.children()
        time.sleep(WEDGE_S if kind == "wedged" else 0)
        run.process.kill()
        # Without the shield an idle worker looks for its parent in ten minutes, a wedged one never.
        assert gone(workers, LIMIT_S)


@pytest.mark.parametrize("kind", ["stuck", "wedged"])
def test_a_worker_that_does_not_end_is_ended(floor, kind):
    with training(floor, "fork", kind) as run:
        workers = run.children()
        time.sleep(WEDGE_S if kind == "wedged" else 0)
        run.tell("close")
        run.read("closed")
        assert gone(workers, 0)
        assert run.process.wait(LIMIT_S) == 0


def test_a_process_that_leaves_without_closing_ends_its_stuck_workers(floor):
    with training(floor, "fork", "stuck", is_cold=True) as run:
        workers = run.children()
        run.tell("leave")
        assert run.process.wait(30) == 0
        assert gone(workers, LIMIT_S)


def test_signals_are_delivered_after_the_block():
    received = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    try:
        with signals_held():
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
            assert received == []
        assert received == [signal.SIGUSR1]
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGTERM}
    finally:
        signal.signal(signal.SIGUSR1, before)


class Helped(torch.utils.data.Dataset):
    """Starts helper processes for its items and ends them, the ways that libraries do."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGTERM)  # as one to the group; it is left to the trainer
        os.kill(os.getpid(), signal.SIGUSR1)
        helper = subprocess.Popen(["/bin/sleep", "60"])
        helper.terminate()
        try:
            ends = [helper.wait(5)]
        except subprocess.TimeoutExpired:
            helper.kill()
            ends = [helper.wait()]
        for number in (signal.SIGTERM, signal.SIGUSR1):
            child = os.fork()
            if not child:
                time.sleep(5)
                os._exit(7)
            os.kill(child, number)  # at once: it must not be lost before the child is ready
            ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return torch.tensor(ends)


def test_what_a_data_set_starts_is_not_shielded():
    feed = open_feed(torch.utils.data.DataLoader(Helped(), num_workers=1), rank=0, world_size=1)
    try:
        expected = [-signal.SIGTERM, -signal.SIGTERM, -signal.SIGUSR1]
        assert [next(feed).tolist() for _ in range(2)] == [[expected]] * 2
    finally:
        feed.close()


def _user_init(worker_id):
    raise KeyError(worker_id)


def test_the_users_init_travels_and_is_called():
    init = pickle.loads(pickle.dumps(ShieldedInit(_user_init)))
    assert init.user_init is _user_init
