"""Bad input: one clear line, exit code 2, and nothing is trained or changed."""

import json
import shutil

import pytest
from floor import SCRIPTS, TRAIN, Floor, Job, until

WRONG = SCRIPTS / "wrong.py"
PLAIN = SCRIPTS / "plain.py"


def only_line(process, code=2):
    """The one line of standard error of a process that refused."""
    assert process.wait() == code, process.text
    assert process.out == "", process.text
    (line,) = process.err.splitlines()
    assert line.startswith("outlast: ")
    return line


def line_of_run(process):
    """The one line in which ``outlast run`` says why a script's session was refused."""
    assert process.wait() == 2, process.text
    assert "Traceback" not in process.err
    assert "training" not in process.out
    *before, line = process.err.splitlines()
    told = ("worker here", "workers here", "outlast: attempt 2:", "outlast: notices from ")
    assert all(any(words in one for words in told) for one in before), before
    assert line.startswith("outlast: ")
    return line


# --- the command line and the settings -----------------------------------------------------------

COMMANDS = {
    "misspelt command": (["rum", "train.py"], "outlast rum is not a command; did you mean run?"),
    "no command": (["--version-of"], "No such option"),
    "no script": (["run"], "no script is named"),
    "only flags": (["run", "--nproc-per-node", "2"], "no script is named"),
    "near script": (["run", "scripts/trian.py"], "did you mean scripts/train.py?"),
    "no near script": (["run", "zzzz.py"], "there is no script zzzz.py; check the path"),
    "a directory": (["run", "scripts"], "scripts is a directory"),
    "no module": (["run", "-m", "nobody.has.it"], "there is no module nobody.has.it"),
    "nnodes": (["run", "--nnodes", "few", TRAIN], "--nnodes few"),
    "nnodes range": (["run", "--nnodes", "3:2", TRAIN], "MIN is at most MAX"),
    "no nodes": (["run", "--nnodes", "0", TRAIN], "0"),
    "nproc": (["run", "--nproc-per-node", "many", TRAIN], "many"),
    "no workers": (["run", "--nproc-per-node", "0", TRAIN], "--nproc-per-node 0"),
    "flag": (["run", "--nprocs", "2", TRAIN], "--nprocs"),
    "checkpoints of nothing": (["checkpoints", "list", "nowhere"], "is not a job's directory"),
    "report of nothing": (["report", "nowhere"], "is not a job's directory"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_command_line(floor, tmp_path, name):
    arguments, expected = COMMANDS[name]
    (tmp_path / "scripts").symlink_to(SCRIPTS)
    line = only_line(floor.outlast(*arguments))
    assert expected in line
    assert not (tmp_path / "outlast-job").exists()


def test_command_line_by_a_fresh_interpreter(floor, tmp_path):
    (tmp_path / "scripts").symlink_to(SCRIPTS)
    line = only_line(floor.outlast("run", "scripts/trian.py", cold=True))
    assert line == "outlast: there is no script scripts/trian.py; did you mean scripts/train.py?"


OTHERS = {
    "a flag of the doctor": ["doctor", "--faster"],
    "a short demo": ["demo", "--steps", "3"],
    "an export to nowhere": ["checkpoints", "export", "nowhere", "--out", "x"],
    "a time without a unit": ["plan", "interval", "--rate", "2/h", "--checkpoint", "3"],
    "nothing to watch": ["watch"],
    "a job that cannot be simulated": ["simulate", "--gpus", "0"],
    "no image": ["init", "k8s"],
    "rendezvous": ["run", "--rdzv-conf", "x", TRAIN],
    "a directory in a bucket": ["run", "--dir", "s3://bucket/job", TRAIN],
}
ALL_AT_ONCE = """
import json, sys
from outlast.cli import _called
for arguments in json.loads(sys.argv[1]):
    code = _called(arguments)
    print(code, "torch" in sys.modules, "numpy" in sys.modules)
"""


def test_torch_is_not_imported_to_say_what_is_wrong(floor, tmp_path):
    """One interpreter is told all of it, and would still have torch if one had imported it."""
    (tmp_path / "scripts").symlink_to(SCRIPTS)
    wrong = [arguments for arguments, _ in COMMANDS.values()] + list(OTHERS.values())
    words = json.dumps([list(map(str, arguments)) for arguments in wrong])
    process = floor.cold("-c", ALL_AT_ONCE, words)
    assert process.wait() == 0, process.text
    assert process.out.splitlines() == ["2 False False"] * len(wrong), process.text
    assert len(process.err.splitlines()) == len(wrong), process.text


SETTINGS = {
    "unknown": ("[checkpoint]\nevry = 3", {}, "checkpoint.evry is not a setting; did you mean"),
    "unknown at the top": ("dri = 'x'", {}, "dri is not a setting; did you mean dir?"),
    "not there yet": ("[workers]\nmin = 2", {}, "is not there yet"),
    "value": ("[checkpoint]\nevery = 'sometimes'", {}, "'sometimes' is not a cadence"),
    "not TOML": ("dir = ", {}, "is not valid TOML"),
    "variable, keep": ("", {"OUTLAST_CHECKPOINT_KEEP": "0"}, "'0' checkpoints cannot be kept"),
    "variable, every": ("", {"OUTLAST_CHECKPOINT_EVERY": "5 parsecs"}, "5 parsecs"),
    "variable, platform": ("", {"OUTLAST_NOTICE_PLATFORM": "awss"}, "did you mean aws?"),
    "command": ("[notice]\ncommand = 'nobody-has-it now'", {}, "there is no program nobody-has-it"),
    "file": ("", {"OUTLAST_CONFIG": "gone.toml"}, "gone.toml cannot be read"),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("way", ["run", "python"])
def test_settings(floor, tmp_path, name, way):
    text, env, expected = SETTINGS[name]
    if text:
        (tmp_path / "outlast.toml").write_text(text)
    if way == "run":
        process = floor.outlast("run", WRONG, "right", env=env)
    else:
        process = floor.warm(WRONG, "right", env=env)
    line = only_line(process)
    assert expected in line
    assert (list(env) or ["outlast.toml"])[0] in line or "OUTLAST_CONFIG" in env
    assert not (tmp_path / "outlast-job").exists()


@pytest.mark.parametrize("place", ["file/below", "file", "/proc/nothing", "/proc"])
@pytest.mark.parametrize("way", ["run", "python"])
def test_a_directory_that_cannot_be_written(floor, tmp_path, place, way):
    (tmp_path / "file").touch()
    if way == "run":
        line = only_line(floor.outlast("run", "--dir", place, WRONG, "right"))
    else:
        line = only_line(floor.warm(WRONG, "right", env={"OUTLAST_DIR": place}))
    assert f"{tmp_path / place} cannot be " in line
    assert "--dir" in line


# --- sessions ------------------------------------------------------------------------------------


@pytest.fixture(scope="module", name="saved")
def _saved(tmp_path_factory):
    """A job with a checkpoint of step 4."""
    place = tmp_path_factory.mktemp("bad-input")
    floor = Floor(place)
    job = Job(place / "saved")
    process = floor.warm(WRONG, "right", env=job.env)
    assert process.wait() == 0, process.text
    assert job.newest() == 4
    floor.close()
    return job


SESSIONS = {
    "not-open": "the session is not open; write: with outlast.session(…) as session:",
    "positional": "a session takes its objects by name, not Sequential, AdamW alone; write: ",
    "another-argument": "batch_size=32 is neither an argument of a session nor an object to save",
    "nothing": "a session needs something to save, as in outlast.session(model=model",
    "only-a-loader": "a session needs something to save",
    "stateless": "counter=3 is neither an argument of a session nor an object to save",
    "odd": "odd.inner.handle is a builtins.object, which cannot be saved as data",
    "cadence": "'now and then' is not a cadence",
    "shapes": "model.0.bias has shape (4,) in step 4 and (6,) in the model",
    "dtype": "model.0.bias has dtype torch.float32 in step 4 and torch.float64 in the model",
    "parameters": "optimizer had 4 parameters at step 4 and has 2 now (only on one side: 1.bias",
    "more-names": "step 4 does not hold 'average', which this session names",
    "fewer-names": "step 4 holds 'optimizer', which this session does not name",
}


CALLS = {
    "no-loader": "steps() was given no loader; write: session.steps(loader, until=10_000)",
    "a-number": "10000 is no loader; write: session.steps(loader, until=10_000)",
    "size-of-batches": "steps() has no batch_size: batches are made by the loader; write: session.",
    "a-slip": "steps() has no untl: did you mean until?",
    "a-text": "until='4' is no number of steps",
    "size-of-a-step": "outlast.data.Loader has no batch_size=: global_batch= says how many samples",
    "a-scalar": "numbers are logged by name; write: session.log(accuracy=…)",
    "scalars": "numbers are logged by name; write: session.log(loss=…)",
}


@pytest.mark.parametrize("case", CALLS)
def test_a_call_of_a_session_that_shows_how_it_is_written(floor, case):
    process = floor.warm(WRONG, case)
    assert process.wait() == 2, process.text
    assert CALLS[case] in process.err.splitlines()[-1]
    assert "Traceback" not in process.err
    assert process.out == ""


@pytest.mark.parametrize("case", SESSIONS)
def test_a_session_used_wrongly(floor, tmp_path, saved, case):
    shutil.copytree(saved.directory, tmp_path / "job")
    job = Job(tmp_path / "job")
    assert SESSIONS[case] in only_line(floor.warm(WRONG, case, env=job.env))
    assert job.newest() == 4
    right = floor.warm(WRONG, "right", env=job.env)  # nothing was broken by it
    assert right.wait() == 0, right.text


@pytest.mark.parametrize("case", ["nothing", "shapes", "odd"])
def test_a_session_used_wrongly_under_outlast_run(floor, tmp_path, saved, case):
    shutil.copytree(saved.directory, tmp_path / "job")
    job = Job(tmp_path / "job")
    process = floor.outlast("run", "--dir", job.directory, WRONG, case)
    assert SESSIONS[case] in line_of_run(process)
    assert not job.events("restart")


def test_a_session_used_wrongly_on_several_ranks(floor, tmp_path, saved):
    shutil.copytree(saved.directory, tmp_path / "job")
    env = {"OUTLAST_DIR": tmp_path / "job", "WORLD_SIZE": 2, "RANK": 0}
    line = only_line(floor.warm(WRONG, "right", env=env))
    assert "WORLD_SIZE is 2 and the process group is not there yet" in line


@pytest.mark.parametrize("first", ["run", "python"])
@pytest.mark.parametrize("second", ["run", "python"])
def test_a_job_that_is_running_already(floor, tmp_path, first, second):
    job = Job(tmp_path / "job")
    if first == "run":
        running = floor.outlast("run", "--dir", job.directory, PLAIN, job.records, "deaf")
        until(lambda: list(job.records.glob("worker-*")), "a worker", running=running)
    else:
        running = floor.warm(WRONG, "hold", tmp_path / "end", env=job.env)
        until(lambda: "training" in running.out, "a session", running=running)
    if second == "run":
        line = only_line(floor.outlast("run", "--dir", job.directory, WRONG, "right"))
    else:
        line = only_line(floor.warm(WRONG, "right", env=job.env))
    assert f"the job in {job.directory} is running already" in line
    assert running.poll() is None
    if first == "python":
        (tmp_path / "end").touch()
        assert running.wait() == 0, running.text
