"""A keeper of another version still runs: nobody talks past it, and each stays what it is."""

import hashlib
import socket
import tempfile
import threading
from pathlib import Path

import msgspec
import pytest
from floor import TRAIN, Job, until
from lean import Place

from outlast.errors import StorageError
from outlast.keeper.process import SOCKET_VARIABLE, Supervisor


class Older:
    """Listens where a keeper of before would, and notes what it is told."""

    def __init__(self, path):
        self.heard = b""
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen()
        self._server.settimeout(0.1)
        self._over = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while not self._over:
            try:
                sock, _ = self._server.accept()
            except TimeoutError:
                continue
            sock.settimeout(5)
            with sock:
                self.heard += sock.recv(4096)  # nothing from one that looks whether it lives

    def close(self):
        self._over = True
        self._thread.join()
        self._server.close()


@pytest.fixture
def runtime():
    """A directory whose name is short: those of tests are long, and those of sockets may not be."""
    with tempfile.TemporaryDirectory(prefix="o-") as directory:
        yield Path(directory)


def test_a_session_beside_an_older_keeper_starts_its_own(floor, tmp_path, runtime):
    job = Job(tmp_path / "job")
    env = {**job.env, "OUTLAST_RUNTIME_DIR": runtime}
    first = floor.warm(TRAIN, job.records, 3, "--light", env=env)
    assert first.wait() == 0, first.text
    name = msgspec.json.decode((job.directory / "job.json").read_bytes())["id"]
    digest = hashlib.sha256(f"{name}\0{job.directory}".encode()).hexdigest()[:20]
    olds = [Older(runtime / f"{digest}{end}.sock") for end in ("", "-00000000")]
    try:
        second = floor.warm(TRAIN, job.records, 6, "--light", env=env)
        assert second.wait() == 0, second.text
    finally:
        for old in olds:
            old.close()
    assert [old.heard for old in olds] == [b"", b""]
    assert job.newest() == 6
    assert not job.events("storage_error")
    theirs = {f"{digest}.sock", f"{digest}-00000000.sock"}
    until(lambda: len([*runtime.glob("*.sock")]) == 2, "the new keeper has left")
    assert {path.name for path in runtime.glob("*.sock")} == theirs  # untouched


def test_a_worker_does_not_speak_to_an_older_agents_keeper(floor, tmp_path):
    job = Job(tmp_path / "job")
    env = {**job.env, SOCKET_VARIABLE: tmp_path / f"{'0' * 20}.sock"}
    worker = floor.warm(TRAIN, job.records, 3, "--light", env=env)
    assert worker.wait() == 77, worker.text
    (line,) = [line for line in worker.err.splitlines() if "upgraded" in line]
    assert line.endswith("start the same command again")
    assert "Traceback" not in worker.err


@pytest.mark.parametrize("name", [f"{'0' * 20}.sock", f"{'0' * 20}-00000000.sock"])
def test_a_keeper_does_not_serve_who_is_of_another_version(floor, tmp_path, monkeypatch, name):
    for variable, value in floor.environ.items():
        monkeypatch.setenv(variable, value)
    place = Place(floor, tmp_path / "place")
    path = str(Path(place.setup.socket).with_name(name))
    supervisor = Supervisor(msgspec.structs.replace(place.setup, socket=path))
    with pytest.raises(StorageError, match="upgraded while the job ran; start the same command"):
        supervisor.start()
