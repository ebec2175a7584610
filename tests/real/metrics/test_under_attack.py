"""Whatever comes to the metrics' port, or befalls its process: training goes on, bit for bit."""

import contextlib
import random
import resource
import signal
import socket

import pytest
from floor import TRAIN, Job, free_port, until
from metrics_floor import exporter, scrape, value

CROWD = 1000
STEPS = 150
GARBAGE = {
    "nothing": b"",
    "zeros": b"\0" * 5000,
    "no-http": b"HELO there\r\n\r\n",
    "another-method": b"POST /metrics HTTP/1.1\r\nContent-Length: 1000000000\r\n\r\n" + b"x" * 9999,
    "half": b"GET /metr",
    "another-path": b"GET /../../etc/passwd HTTP/1.1\r\n\r\n",
    "not-a-text": b"GET /\xff\xfe\x00 HTTP/1.1\r\nAccept: \xff\r\n\r\n",
    "odd-accept": b"GET /metrics HTTP/1.1\r\n"
    b"Accept: ;;q=,,application/openmetrics-text;version=\r\n\r\n",
    "endless-head": b"GET /metrics HTTP/1.1\r\n" + b"X-A: b\r\n" * 20_000,
    "no-lines": b"GET /metrics" + b" " * 70_000,
    "tls": bytes.fromhex("16030100a5010000a10303") + bytes(range(160)),
}


@pytest.fixture(name="port")
def _port():
    return free_port()


GATED = 60  # the step in which a job waits until it may go on


def start(floor, job, port, *more):
    command = ("run", "--nproc-per-node", 2, "--dir", job.directory, TRAIN, job.records, STEPS)
    options = ("--light", "--every", "20 steps", "--pause", "0.02", *more)
    env = {"OUTLAST_METRICS_PORT": port, "OUTLAST_HEALTH_HANG": "off"}  # gates may last
    return floor.outlast(*command, *options, env=env)


@pytest.fixture(name="undisturbed", scope="module")
def _undisturbed(tmp_path_factory):
    """Hashes of the ranks of a run without metrics."""
    from floor import Floor

    place = tmp_path_factory.mktemp("undisturbed")
    floor, job = Floor(place), Job(place / "job", 2)
    process = floor.outlast(
        *("run", "--nproc-per-node", 2, "--dir", job.directory, TRAIN, job.records, STEPS),
        *("--light", "--every", "20 steps"),
    )
    assert process.wait() == 0, process.text
    floor.close()
    return [final["hash"] for final in job.finals()]


def gated(floor, job, port):
    """A job that stays in the middle of its steps until its gate is there: (process, gate)."""
    gate = job.records / "gate"
    return start(floor, job, port, "--gate", gate, "--gate-in", GATED), gate


def finishes(process, job, undisturbed):
    assert process.wait() == 0, process.text
    assert [final["hash"] for final in job.finals()] == undisturbed
    assert job.newest() == STEPS


def test_a_scraper_that_sends_garbage(floor, tmp_path, port, rng, undisturbed):
    job = Job(tmp_path / "job", 2)
    process, gate = gated(floor, job, port)
    until(lambda: scrape(port), "metrics", running=process)
    drawn = {f"drawn-{number}": rng.randbytes(rng.randrange(1, 4000)) for number in range(20)}
    answers = {}
    for name, data in (GARBAGE | drawn).items():
        with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
            with contextlib.suppress(OSError):  # closed while it still sends
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
            answers[name] = received(sock)
        assert scrape(port), f"no metrics after {name}"
    assert process.poll() is None, process.text
    gate.touch()
    finishes(process, job, undisturbed)
    assert answers["odd-accept"].startswith(b"HTTP/1.1 200")
    assert answers["another-path"].startswith(b"HTTP/1.1 404")
    for name in ("no-http", "another-method"):
        assert answers[name].startswith(b"HTTP/1.1 400"), (name, answers[name][:100])
    assert not any(b"root:" in answer for answer in answers.values())
    assert "Traceback" not in process.text


def received(sock):
    data = b""
    with contextlib.suppress(OSError):
        while more := sock.recv(1 << 16):
            data += more
    return data


def test_a_thousand_connections_that_say_nothing(floor, tmp_path, port, undisturbed):
    """They keep neither a scraper out nor the job up, and the process stays small."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < CROWD + 500:
        pytest.skip(f"a process may have only {hard} files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, CROWD + 500), hard))
    job = Job(tmp_path / "job", 2)
    process, gate = gated(floor, job, port)
    running = lambda: value(scrape(port), "outlast_job_running") == 1  # noqa: E731
    until(running, "metrics of a job that has begun", running=process)
    with contextlib.ExitStack() as crowd:
        crowd.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        talkative = random.Random(0)
        for _ in range(CROWD):
            sock = crowd.enter_context(contextlib.closing(socket.socket()))
            sock.settimeout(20)
            sock.connect(("127.0.0.1", port))
            if talkative.random() < 0.5:
                with contextlib.suppress(OSError):
                    sock.send(b"GET /met")
        body = until(lambda: scrape(port), "metrics in the crowd", running=process)
        assert value(body, "outlast_job_running") == 1
        shown = exporter(floor)
        assert shown.num_fds() < 200
        gate.touch()
        finishes(process, job, undisturbed)


def test_its_process_is_killed_and_comes_back_with_the_same_numbers(
    floor, tmp_path, port, undisturbed
):
    job = Job(tmp_path / "job", 2)
    process, gate = gated(floor, job, port)
    number = "outlast_commits_total"
    before = until(lambda: value(scrape(port), number), "a commit in the metrics", running=process)
    killed = exporter(floor)
    killed.kill()
    after = until(lambda: value(scrape(port), number), "metrics again", running=process)
    assert exporter(floor) != killed
    assert after >= before
    gate.touch()
    finishes(process, job, undisturbed)


def test_its_process_stands_still_and_does_not_hold_up_the_end(floor, tmp_path, port, undisturbed):
    job = Job(tmp_path / "job", 2)
    process = start(floor, job, port)
    until(lambda: scrape(port), "metrics", running=process)
    stopped = exporter(floor)
    stopped.send_signal(signal.SIGSTOP)
    finishes(process, job, undisturbed)
    until(lambda: not stopped.is_running(), "the end of the exporter")


@pytest.mark.parametrize("state", ["running", "stopped"])
def test_the_agent_is_killed_and_its_process_goes_with_it(floor, tmp_path, port, state):
    job = Job(tmp_path / "job", 2)
    process = start(floor, job, port)
    until(lambda: scrape(port), "metrics", running=process)
    left = exporter(floor)
    if state == "stopped":
        left.send_signal(signal.SIGSTOP)
    process.kill()
    until(lambda: not left.is_running(), "the end of the exporter")


def test_a_port_that_is_taken_is_one_line(floor, tmp_path, undisturbed):
    job = Job(tmp_path / "job", 2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        process = start(floor, job, number)
        finishes(process, job, undisturbed)
    lines = [line for line in process.err.splitlines() if "metrics" in line]
    (line,) = lines
    assert f"metrics.port {number} on 127.0.0.1 is taken by another process" in line
    assert "training goes on without metrics" in line
