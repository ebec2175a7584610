"""``outlast drill`` on small jobs: what it grades, what it writes, and what it leaves behind."""

import json
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import psutil
import pytest

from thorough import ALL, some

thorough = pytest.mark.skipif(not ALL, reason="OUTLAST_TEST_ALL")
SCRIPT = Path(__file__).with_name("graded.py")
LIMIT_S = 300
pytestmark = pytest.mark.timeout(LIMIT_S + 60)


@pytest.fixture
def place(tmp_path):
    """A working directory with a file of the user's in it."""
    (tmp_path / "thesis.tex").write_text("years of work")
    return tmp_path


def command(*arguments, job=()):
    options = ["--steps", "40", "--json", *arguments]
    return [sys.executable, "-m", "outlast", "drill", *options, "--", str(SCRIPT), *job]


def drill(place, *arguments, job=(), limit_s=LIMIT_S):
    """(exit code, what it found)."""
    done = subprocess.run(
        command(*arguments, job=job), cwd=place, capture_output=True, timeout=limit_s, check=False
    )
    assert done.stdout, done.stderr.decode()
    return done.returncode, json.loads(done.stdout)


def test_what_is_promised_holds_and_is_measured(place):
    code, found = drill(place, "kill-worker", "notice", "--junit", "grades.xml")
    assert code == 0, found
    killed, noticed = found["grades"]
    assert killed["fault"] == "kill-worker"
    assert killed["survived"]
    assert killed["stood_s"] > 0
    assert killed["found_after_s"] is not None
    assert killed["differs"] == noticed["differs"] == ""
    assert killed["verified"]["checkpoints"] > 0 < killed["verified"]["num_bytes"]
    assert noticed["lost_steps"] == 0
    assert noticed["exit_codes"] == [75]
    assert found["has_session"]
    assert found["commits"] > 1
    suite = ET.parse(place / "grades.xml").getroot()
    assert [case.get("name") for case in suite] == ["kill-worker", "notice"]
    assert suite.get("failures") == "0"


def test_state_that_nothing_protects_breaks_a_promise(place):
    code, found = drill(place, "kill-worker", "--junit", "grades.xml", job=["--average"])
    assert code == 1, found
    (grade,) = found["grades"]
    broken = [one["what"] for one in grade["held"] if not one["holds"]]
    assert ["differs from step" in one for one in broken] == [True]
    assert not found["differs_itself"]
    assert "differs" in ET.parse(place / "grades.xml").getroot()[0][0].get("message")


def test_a_job_that_gives_up_ends_its_run_though_the_fault_still_lasts(place):
    # A run in which nothing moves is ended after more than 180 s.
    code, found = drill(place, "slow-rank", job=["--breaks"], limit_s=150)
    assert code == 1, found
    (grade,) = found["grades"]
    assert grade["exit_codes"] == [76]
    assert not grade["survived"]


@thorough
def test_a_script_that_differs_from_itself_is_told_so(place):
    code, found = drill(place, "kill-worker", job=["--unseeded"])
    assert code == 1, found
    assert "from step 1 on" in found["differs_itself"]


def test_a_script_without_a_session_is_graded_by_its_end(place):
    code, found = drill(place, "kill-worker", job=["--no-session"])
    assert code == 0, found
    (grade,) = found["grades"]
    assert grade["survived"]
    assert not found["has_session"]
    assert grade["lost_steps"] > 0
    assert grade["differs"] == "", "it began again from nothing, and came to the same"


@thorough
def test_the_same_seed_strikes_the_same_again(place):
    struck = []
    for again in ("one", "two"):
        arguments = ("--random", "1", "--seed", "3", "--dir", again, "kill-worker", "kill-keeper")
        _, found = drill(place, *arguments)
        struck.append([(grade["fault"], grade["what"]) for grade in found["grades"]])
    assert struck[0] == struck[1]


def of_run(run):
    """Processes of a run, by the mark in their environment."""
    every = psutil.process_iter(["environ"])
    return [one.pid for one in every if str(run) in str(one.info["environ"])]


@pytest.mark.parametrize("number", some([signal.SIGTERM, signal.SIGKILL], 1))
def test_a_drill_that_is_ended_leaves_no_job_behind(place, number):
    running = subprocess.Popen(command("kill-worker"), cwd=place, stdout=subprocess.DEVNULL)
    records = place / "outlast-drill" / "faults" / "undisturbed" / "records"
    while not (records.is_dir() and any(records.iterdir())):
        assert running.poll() is None
        time.sleep(0.05)
    assert of_run(place / "outlast-drill")
    running.send_signal(number)
    running.wait(60)
    end = time.monotonic() + 60
    while (left := of_run(place / "outlast-drill")) and time.monotonic() < end:
        time.sleep(0.1)
    assert left == []


def test_nothing_of_the_users_is_touched(place):
    (place / "outlast.toml").write_text(
        f'[[tier]]\nname = "mine"\nurl = "{place}/mine"\n\n'
        f'[health]\nnotify = "touch {place}/told"\n'
    )
    code, _ = drill(place, "kill-worker")
    assert code == 0
    names = {path.name for path in place.iterdir()}
    assert names == {"thesis.tex", "outlast.toml", "outlast-drill"}
    assert (place / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["kil-worker", "--", "a.py"], "is not a fault; did you mean kill-worker?"),
        (["--", "nowhere.py"], "there is no script nowhere.py"),
        ([], "no script is named"),
        (["--steps", "0", "--", "a.py"], "--steps 0: there must be one at least"),
        (["--random", "0", "--", "a.py"], "--random 0: there must be one at least"),
        (["--soak", "soon", "--", "a.py"], "is not a stretch of time"),
        (["--soak", "1min", "--random", "2", "--", "a.py"], "leave out --random"),
        (["--", "fails.py"], "does not come to the end of its first step by itself"),
        (["--dir", ".", "--", "a.py"], "is not empty and no drill made it"),
        (["--dir", "a.py", "--", "a.py"], "a.py is a file; give another with --dir"),
        (["--junit", "nowhere/grades.xml", "--", "a.py"], "cannot be written; give a file"),
        (["--soak", "5s", "--", "a.py"], "--soak 5s: nothing is seen to grow"),
    ],
)
def test_bad_input_is_one_line_with_what_to_do(place, arguments, words):
    (place / "a.py").write_text("")
    (place / "fails.py").write_text("import nothing_of_that_name\n")
    done = subprocess.run(
        [sys.executable, "-m", "outlast", "drill", *arguments],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 2, done
    assert words in done.stderr
    assert "Traceback" not in done.stderr or "fails.py" in arguments
