"""``outlast drill resume``: what is right is proved; each planted cause is named, with its line."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from outlast.drill.proof.script_lines import ScriptLines
from outlast.drill.workplace import JobScript
from thorough import ALL, some

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
EXAMPLES = ROOT / "examples"
LIMIT_S = 540
pytestmark = pytest.mark.timeout(600)


class Planted(NamedTuple):
    """A script of ``planted/``, its cause, and parts of the line and of what is to be written."""

    script: str
    kind: str
    line: str
    write: str
    differs_from_itself: bool = False


PLANTED = [
    Planted("unseeded_model", "unseeded torch", "nn.Linear", "torch.manual_seed(0)", True),
    Planted("unseeded_shuffle", "unseeded python", "random.shuffle", "random.seed(0)", True),
    Planted("hash_order", "hash order", "for name in names", "sorted(", True),
    Planted("clock", "clock", "time.time()", "session.step", True),
    Planted("entropy", "entropy", "np.random.default_rng()", "default_rng(0)", True),
    Planted("kernel", "kernel", "table[picked]", "use_deterministic_algorithms", True),
    Planted("unnamed_average", "unnamed object", "outlast.session(", "teacher=teacher"),
    Planted("unnamed_schedule", "unnamed object", "outlast.session(", "schedule=schedule"),
    Planted("unprotected_variable", "unprotected variable", "running = 1.0", "running"),
    Planted("replay_buffer", "unprotected variable", "replay = ", "replay"),
    Planted("accumulation", "enumerate", "enumerate(session.steps(", "start=session.step"),
    Planted("drawing_data_set", "loader workers", "DataLoader(", "index"),
    Planted("dropout_that_grows", "unprotected attribute", "model[1].p += 0.01", "session.step"),
    Planted("data_set_with_a_place", "unprotected attribute", "self.given = 0", "index"),
]


def drilled(floor, tmp_path, *command, env=None):
    started = floor.outlast(
        *("drill", "resume", "--json", "--dir", tmp_path / "drill", *command), env=env
    )
    code = started.wait(LIMIT_S)
    assert started.out, started.text
    return code, json.loads(started.out)


@pytest.mark.parametrize("planted", some(PLANTED, 2), ids=lambda one: one.script)
def test_a_planted_cause_is_named(floor, tmp_path, planted):
    script = tmp_path / f"{planted.script}.py"
    shutil.copy(HERE / "planted" / script.name, script)
    code, found = drilled(floor, tmp_path, "--", script)
    assert code == 1
    assert not found["is_proved"]
    assert not found["trouble"]
    assert bool(found["differs_from_itself"]) == planted.differs_from_itself
    (cause,) = found["causes"]
    assert cause["kind"] == planted.kind, found
    lines = ScriptLines(JobScript(name=str(script)))
    places = [lines.text(place) for place in cause["where"].split(", ")]
    assert any(planted.line in place for place in places), cause
    assert planted.write in cause["write"]
    assert [one["helped"] for one in found["tried"]][-1]


def test_an_example_is_proved(floor, tmp_path):
    shutil.copy(EXAMPLES / "plain.py", tmp_path / "plain.py")
    code, found = drilled(floor, tmp_path, "--at", 6, "--at", 11, "--", "plain.py")
    assert code == 0, found
    assert found["is_proved"]
    assert found["has_session"]
    assert [stop["exit_code"] for stop in found["stops"]] == [75, 75]
    assert [stop["compared"] for stop in found["stops"]] == [20, 20]
    first, second = (stop["went_on_from"] for stop in found["stops"])
    assert 6 <= first < 11 <= second < 20
    assert not found["tried"]


def test_two_ranks_are_proved(floor, tmp_path):
    shutil.copy(EXAMPLES / "ddp.py", tmp_path / "ddp.py")
    code, found = drilled(floor, tmp_path, "--workers", 2, "--", "ddp.py")
    assert code == 0, found
    assert found["workers"] == 2


def test_a_script_that_fails_undisturbed_is_answered_in_json_too(floor, tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("import torch\n\nraise RuntimeError('no such data')\n")
    place = tmp_path / "drill"
    started = floor.outlast("drill", "resume", "--json", "--dir", place, "--", script)
    assert started.wait(LIMIT_S) == 1
    found = json.loads(started.out)
    assert not found["is_proved"]
    assert found["verdict"].startswith("the script made no step that could be seen (exit ")
    (line,) = started.err.splitlines()
    assert found["verdict"] in line


@pytest.mark.parametrize("number", some([signal.SIGINT, signal.SIGTERM], 1))
def test_whoever_ends_the_search_is_told_what_was_tried_and_what_was_not(tmp_path, number):
    shutil.copy(HERE / "planted" / "clock.py", tmp_path / "clock.py")
    command = (sys.executable, "-u", "-m", "outlast", "drill", "resume", "--", "clock.py")
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as running:
        said = []
        for line in running.stdout:
            said.append(line)
            if line.startswith("  try:"):
                running.send_signal(number)
                break
        said += running.stdout.readlines()
    assert running.returncode == 1, said
    assert any("no cause was found; tried: " in line for line in said), said
    assert any("the same with more time: not tried yet are " in line for line in said), said
    assert any(line.startswith("not proved: two undisturbed runs") for line in said)


def test_an_unchanged_script_is_told_what_it_can_get(floor, tmp_path):
    script = HERE / "recorded.py"
    code, found = drilled(floor, tmp_path, "--steps", 12, "--", script, "plain")
    assert code == 0, found
    assert not found["has_session"]
    (stop,) = found["stops"]
    assert stop["went_on_from"] == 0
    assert stop["again"] == 6
    assert "all work until then is lost" in found["verdict"]


@pytest.mark.skipif(not ALL, reason="other frameworks: with all examples")
@pytest.mark.parametrize(
    "command",
    [
        ["trainer.py"],
        ["lightning_fit.py"],
        ["accelerate_loop.py"],
        ["stream.py"],
        ["without_outlast/trainer.py"],
    ],
    ids=lambda command: command[0],
)
def test_other_examples_are_proved(floor, tmp_path, command):
    pytest.importorskip("transformers")
    env = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    script = tmp_path / Path(command[0]).name
    shutil.copy(EXAMPLES / command[0], script)
    code, found = drilled(floor, tmp_path, "--steps", 12, "--", script, env=env)
    assert code == 0, found


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--", "nowhere.py"], 2, "there is no script nowhere.py"),
        (["--steps", "5", "--at", "5", "--", "recorded.py"], 2, "leave no step behind the resume"),
        (["--steps", "2", "--", "recorded.py"], 2, "--steps 2: a resume shows in 4 steps at least"),
        ([], 2, "no script is named"),
        (["--", "idle.py"], 1, "made no step that could be seen"),
        (["--", "fails.py"], 1, "made no step that could be seen"),
    ],
)
def test_bad_input_is_one_line(floor, tmp_path, arguments, code, words):
    shutil.copy(HERE / "recorded.py", tmp_path / "recorded.py")
    (tmp_path / "idle.py").write_text("print('nothing to do')\n")
    (tmp_path / "fails.py").write_text("1 / 0\n")
    started = floor.outlast("drill", "resume", "--json", *arguments)
    assert started.wait() == code, started.text
    assert words in started.err, started.text
    assert started.err.count("\n") == 1, started.err
