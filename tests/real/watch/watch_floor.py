"""What the tests of ``outlast watch`` share: a job that listens, and what a server says wrongly."""

from floor import SCRIPTS, until

from outlast.drill.metadata_server import ACTION_PATH, AnswerFault

LISTENER = SCRIPTS / "listener.py"
NO_PID = 2**22 + 1  # above the kernel's largest

FAULTS = {
    "500": AnswerFault(status=500),
    "503 to the question": AnswerFault(status=503),
    "garbage": AnswerFault(body=b"<html>terminate</html>"),
    "another action": AnswerFault(body=b'{"action":"noop","time":"2030-01-01T00:00:00Z"}'),
    "another year": AnswerFault(body=b'{"action":"terminate","time":"2001-01-01T00:00:00Z"}'),
    "not HTTP": AnswerFault(raw=b"terminate\r\n\r\n"),
    "hangs up": AnswerFault(raw=b""),
}


class Listening:
    """A process that notes its signals."""

    def __init__(self, floor, name, with_child=False):
        self.record = floor.directory / f"{name}.record"
        self.child_record = floor.directory / f"{name}.child"
        records = [self.record, self.child_record][: 1 + with_child]
        self.process = floor.cold(LISTENER, *records)
        self.pid = self.process.pid
        for record in records:
            until(record.exists, f"{name} listens", running=self.process)
            until(record.read_text, f"{name} listens", running=self.process)

    @property
    def heard(self):
        return self.record.read_text().split()[1:]


def asked(server, times=1):
    """Whether the question itself was put so often, whatever was answered."""
    return sum(request.path == ACTION_PATH for request in server.requests) >= times


def watching(server, process):
    return until(lambda: asked(server), "the server is asked", running=process)


def lines(process):
    found = process.err.splitlines()
    assert all(line.startswith("outlast: ") for line in found), process.text
    return [line.removeprefix("outlast: ") for line in found]
