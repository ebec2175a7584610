"""A worker that was killed and does not end: waited for, said, and its machine left out.

It is held as a debugger can hold a process: stopped in its exit, until whoever traces it has gone.
"""

import contextlib
import os
import signal

import pytest
from floor import Job, until
from held import holding

SCRIPT = """import os, signal, sys
from pathlib import Path
records, rank = Path(sys.argv[1]), os.environ["RANK"]
if os.environ["OUTLAST_ATTEMPT"] == "1":
    (records / f"pid-{rank}").write_text(str(os.getpid()))
    if rank == "0":
        while not (records / "held").exists():
            signal.sigtimedwait([], 0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
"""


@pytest.fixture(name="held", params=["warm", "cold"])
def _held(request, floor, tmp_path):
    """A job whose rank 1 does not end though it was killed, and how it is let go."""
    script = tmp_path / "script.py"
    script.write_text(("import torch\n" if request.param == "warm" else "") + SCRIPT)
    job = Job(tmp_path / "job", 2)
    run = floor.outlast("run", "--nproc-per-node", 2, script, job.records, env=job.env)
    file = job.records / "pid-1"
    pid = int(until(lambda: file.exists() and file.read_text(), "a worker", running=run))
    with contextlib.ExitStack() as stack:
        stack.enter_context(holding(pid))
        (job.records / "held").touch()
        until(lambda: job.events("held"), "word of the one that does not end", running=run)
        yield job, run, pid, stack.close


def test_the_next_attempt_waits_for_it_and_that_is_said(held):
    job, run, pid, let_go = held
    until(lambda: f"process {pid}" in run.err, "word of it", running=run)
    assert "has not ended" in run.err
    let_go()
    assert run.wait() == 0, run.text
    first, last = job.events("held")
    assert (first["over"], last["over"]) == (False, True)
    assert str(pid) in first["what"]
    assert "python" in first["what"], "who holds it is said"
    begun = [event.t for event in job.events("attempt_formed")]
    assert len(begun) == 2
    assert begun[1] >= last.t


def test_a_notice_is_heard_meanwhile(held):
    job, run, pid, let_go = held
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait() == 75, run.text
    assert f"process {pid}" in run.err
    assert len(job.events("attempt_formed")) == 1
    let_go()
