"""The end of a loader's processes."""

from outlast.data.shield import shut_down


class Worker:
    def __init__(self):
        self.alive = True

    def is_alive(self):
        return self.alive

    def kill(self):
        self.alive = False

    def join(self):
        assert not self.alive


class Iterator:
    """As torch's, with a process that crashes while it leaves, and one that goes on."""

    def __init__(self):
        self._workers = [Worker()]

    def _shutdown_workers(self):
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Aborted.")


def test_a_process_that_crashes_as_it_leaves_does_not_end_the_training(caplog):
    iterator = Iterator()
    shut_down(iterator)
    assert not iterator._workers[0].alive
    assert "killed by signal: Aborted" in caplog.text
