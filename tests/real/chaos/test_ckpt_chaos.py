"""ckpt-chaos with the keeper as the process under test: it is killed, or all of the job.

The tool (on PyPI, written by others) records each file event of a process, kills a fresh run before
each of them or halfway through a write, starts the same command again, and judges what comes out: a
start that fails (HARD_FAIL), another end than that of a run that nobody disturbed
(SILENT_DIVERGENCE), steps done again although a checkpoint had them (LOST_WORK).

It strikes a command's first Python process. All files of a checkpoint are written by the keeper,
which is none, and by calls of which the tool hears only some: ``hook/sitecustomize.py`` arms the
keeper and tells of the others. Two things are killed there: the keeper alone, after which the job
must come to its end as if nothing had been, and all of the job.

By default a few points, chosen by ``OUTLAST_TEST_SEED``; ``OUTLAST_TEST_ALL=1`` takes all, also
those of a job with two workers (hours).
"""

import collections
import contextlib
import json
import os
import socket
import sys
import threading
from pathlib import Path

import pytest
from ckpt_chaos.invariants import ResumeOutcome, classify
from floor import Floor

from thorough import ALL, SEED

HERE = Path(__file__).parent
HEARD = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "shutil.rmtree"}
TOLD = {"os.fsync", "os.link", "os.pwrite", "os.truncate", "os.write"}
ALONE = {"keeper": 0, "job": 137}  # the exit code of a run that was struck
LONGEST_S = 3 * 3600
BEHIND_THE_COMMIT = r"os\.remove:\.manifest\.json\..*before"


class Lives:
    """Starts a life of the job, forked with torch loaded, whenever the tool starts its command.

    Args:
        directory: where what they print lies.
        without: the protection that the keeper goes without.
    """

    def __init__(self, directory, without):
        directory.mkdir()
        self.address = str(directory / "asked")
        self._without = without
        self._floor = Floor(directory, starts_afresh=True)
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(self.address)
        self._server.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self):
        """No life is started any more, and none goes on."""
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._floor.close()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                asked, _ = self._server.accept()
                with asked, asked.makefile("rw") as stream:
                    stream.write(json.dumps(self._live(*json.loads(stream.readline()))) + "\n")

    def _live(self, arguments, environ):
        environ |= {"EXPLORER_WITHOUT": self._without}
        life = self._floor.warm(HERE / "launcher.py", *arguments, env=environ)
        return life.wait(), life.out + life.err


@contextlib.contextmanager
def lives(directory, without):
    """Lives can be started, within."""
    started = Lives(directory, without)
    try:
        yield started.address
    finally:
        started.close()


def chaos(floor, directory, kills, how, *, num, pattern="", without=""):
    """Run the tool; how it ended, and what it has noted of each point."""
    work = directory / "work"
    out = ("--step-regex", r"resumed from step (\d+)", "--result-cmd", "sh -c 'cat {out}/final-*'")
    judged = ("--checkpoint-glob", "{out}/committed/step-*", "--max-points", 10**6)
    fails = ("--fail-on", "HARD_FAIL,SILENT_DIVERGENCE,LOST_WORK,CONTROL_FAIL")
    command = (sys.executable, "-I", HERE / "command.py", kills, how, "{out}")
    with lives(directory / "lives", without) as address:
        tool = floor.cold(
            *(HERE / "draw.py", num, pattern, os.environ.get(SEED, "")),
            *("run", "--work", work, *out, *judged, *fails, "--", *command),
            env={"CHAOS_FLOOR": address},
        )
        code = tool.wait(LONGEST_S)
    print(tool.out)
    points = [json.loads(path.read_text()) for path in sorted(work.glob("pt_[0-9]*/result.json"))]
    assert points, tool.text
    return code, points


def events(directory):
    """(number, kind) of each event that a run of the tool's command has logged."""
    lines = (directory / "events.log.rank0").read_text().splitlines()
    return [(int(number), kind) for number, kind, *_ in (line.split("\t") for line in lines)]


def check_struck(work, points, kills):
    """The keeper was struck at each point, if it came so far; says how many were."""
    counts = collections.Counter()
    for point in points:
        run = work / f"pt_{point['order']:03d}"
        number, mode = point["point"]
        if (run / "events.log.strike").exists():
            assert number in [one for one, _ in events(run)]
            assert point["rc"] == ALONE[kills], point
            counts[mode] += 1
        else:  # what several threads do is not the same number of events in each run
            assert point["rc"] == 0, point
            assert number > len(events(run)) - len(events(run)) // 10, point
            counts["not met"] += 1
    print(f"{kills}: {dict(counts)}")
    assert counts["not met"] <= len(points) // 10


@pytest.mark.timeout(LONGEST_S)
@pytest.mark.parametrize(
    ("kills", "how", "num"),
    [
        *(("job", "python", 3), ("keeper", "python", 2)),
        *((("job", "outlast", 0), ("keeper", "outlast", 0)) if ALL else ()),
    ],
)
def test_no_start_fails_none_ends_otherwise_and_no_work_is_lost(floor, tmp_path, kills, how, num):
    code, points = chaos(floor, tmp_path, kills, how, num=0 if ALL else num)
    assert code == 0
    check_struck(tmp_path / "work", points, kills)
    assert {kind for _, kind in events(tmp_path / "work" / "reference")} == HEARD | TOLD


@pytest.mark.skipif(not ALL, reason="it looks at this test, and not at what is ours")
def test_a_manifest_before_its_files_does_not_pass(floor, tmp_path):
    code, points = chaos(
        *(floor, tmp_path, "job", "python"),
        num=0,
        pattern=BEHIND_THE_COMMIT,
        without="manifest last",
    )
    assert code == 1
    # The first commit is all that there is, the second one the newest; a copy is missed by nobody.
    verdicts = {classify(ResumeOutcome(**point["outcome"])) for point in points}
    assert verdicts == {"HARD_FAIL", "LOST_WORK", "PASS"}
