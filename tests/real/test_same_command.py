"""The same command is the same job: it goes on, or is finished; another one is refused."""

import itertools
import json

import pytest
from floor import SCRIPTS
from test_bad_input import only_line

from thorough import ALL

SWEEP, RANKS = SCRIPTS / "sweep.py", SCRIPTS / "behind_ranks.py"
WAYS = ("run", "python", "torchrun")
# Under torchrun each start imports torch: a job that it is to find is begun in another way.
FIRST = {} if ALL else {"torchrun": "python"}


ITERATORS = """import os, signal, torch, outlast

numbers = iter(range(100))
model = torch.nn.Linear(1, 1)
with outlast.session(model=model, every=4) as session:
    for epoch in range(3):
        for number in session.steps(numbers, until=3 * epoch + 3):
            model.bias.data += number
            if session.step == 4 and "DIE" in os.environ:
                while not list(session._settings.dir.glob("checkpoints/*04.a*/manifest.json")):
                    pass
                os.kill(os.getpid(), signal.SIGKILL)
        print(number)
"""


@pytest.fixture(autouse=True)
def _compared(floor):
    del floor.environ["OUTLAST_RESUME"]


def start(floor, way, *arguments, **env):
    """The script, run in one of the ways; the process has ended."""
    if way == "run":
        process = floor.outlast("run", *arguments, env=env)
    elif way == "torchrun":
        process = floor.torchrun("--nproc-per-node", 1, *arguments, env=env)
    else:
        process = floor.warm(*arguments, env=env)
    process.wait()
    return process


def trained(process):
    return [int(line.split()[1]) for line in process.out.splitlines() if "trained" in line]


def our_lines(process):
    return [line for line in process.err.splitlines() if line.startswith("outlast: ")]


@pytest.mark.parametrize("way", WAYS)
def test_other_arguments_are_refused_and_the_two_ways_on_work(floor, way):
    assert trained(start(floor, FIRST.get(way, way), SWEEP, "0.1")) == [1, 2, 3, 4, 5, 6]
    other = start(floor, way, SWEEP, "0.5")
    (line,) = our_lines(other)
    assert "sweep.py was given 0.1 and is now given 0.5" in line
    assert "resume" in line
    assert other.out == ""
    if way != "torchrun":  # torchrun has an exit code and a page of its own
        assert other.poll() == 2
        assert other.err.splitlines() == [line]
    else:
        assert "exitcode  : 2" in other.err
    on = start(floor, FIRST.get(way, way), SWEEP, "0.5", OUTLAST_RESUME="1", STEPS="8")
    assert trained(on) == [7, 8]
    if way != "torchrun":
        anew = start(floor, way, SWEEP, "0.5", OUTLAST_DIR="other")
        assert trained(anew) == [1, 2, 3, 4, 5, 6]
        assert trained(start(floor, way, SWEEP, "0.5", STEPS="9")) == [9]  # it is the job's now
        assert start(floor, way, SWEEP, "0.1", STEPS="10").poll() == 2


def test_it_is_refused_before_torch_is_imported(floor):
    floor.outlast("run", SWEEP, "0.1").wait()
    flags = ("run", "--nproc-per-node", "2", "--rdzv-conf", "a=b", "--max-restarts=3")
    process = floor.cold("-X", "importtime", "-m", "outlast", *flags, SWEEP, "0.5")
    assert process.wait() == 2, process.text
    imported = {line.rpartition("|")[2].strip() for line in process.err.splitlines()}
    assert "outlast.launch.arguments" in imported
    assert not {"torch", "numpy"} & imported
    assert not floor.offspring()


def test_another_script_is_refused(floor, tmp_path):
    floor.outlast("run", SWEEP, "0.1").wait()
    line = only_line(floor.outlast("run", SCRIPTS / "plain.py", "0.1"))
    assert "it ran sweep.py, and this is plain.py" in line
    process = floor.outlast("run", "--resume", SCRIPTS / "plain.py", tmp_path, "finish")
    assert process.wait() == 0, process.text


@pytest.mark.parametrize("first", ["run", "python"])
def test_who_launches_it_is_no_part_of_the_command(floor, tmp_path, first):
    second = {"run": "python", "python": "run"}[first]
    (tmp_path / "sweep.py").write_bytes(SWEEP.read_bytes())
    assert trained(start(floor, first, "sweep.py", "0.1"))[-1] == 6
    (tmp_path / "sweep.py").write_bytes(SWEEP.read_bytes() + b"# mended\n")
    assert trained(start(floor, second, tmp_path / "sweep.py", "0.1", STEPS="8")) == [7, 8]
    last = floor.outlast(
        *("run", "--nproc-per-node", "1", "--max-restarts", "2", "./sweep.py", "0.1"),
        env={"STEPS": "9"},
    )
    last.wait()
    assert trained(last) == [9]


def test_session_says_resume(floor):
    start(floor, "python", SWEEP, "0.1")
    on = start(floor, "python", SWEEP, "0.5", SAYS_RESUME="1", STEPS="7")
    assert trained(on) == [7]


def test_a_command_without_anything_committed_is_replaced(floor):
    assert start(floor, "python", SWEEP, "0.1", DIE="0").poll() == 9
    assert trained(start(floor, "python", SWEEP, "0.5"))[-1] == 6


def test_no_secret_is_in_the_jobs_directory(floor, tmp_path):
    secret = "s3cr3t-0x5f"
    words = ("--hf-token", secret, f"wandb.api_key={secret}")
    assert start(floor, "run", SWEEP, "0.1", "", *words).poll() == 0
    for path in (tmp_path / "outlast-job").iterdir():
        assert path.is_dir() or secret.encode() not in path.read_bytes(), path
    line = only_line(floor.outlast("run", SWEEP, "0.1", "", "--hf-token", "other", words[2]))
    assert "another value of --hf-token" in line


# --- nothing is left -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "where"),
    [
        *(("run", ""), ("run", "inside"), ("run", "behind"), ("run", "mean")),
        *(("python", ""), ("python", "inside"), ("python", "behind"), ("torchrun", "behind")),
    ],
)
def test_a_finished_job_is_finished(floor, way, where):
    assert start(floor, FIRST.get(way, way), SWEEP, "0.1", where).poll() == 0
    for _ in range(1 if way in FIRST else 2):
        again = start(floor, way, SWEEP, "0.1", where)
        assert again.poll() == 0, again.text
        assert "Traceback" not in again.err
        assert trained(again) == []
        (line,) = [line for line in our_lines(again) if "nothing is left to do" in line]
        assert "finished at step 6 on 2" in line
        unset = [line for line in our_lines(again) if "the loop has not set" in line]
        assert len(unset) == bool(where)
        assert ("end of the script" in again.out) == (not where)
    more = start(floor, FIRST.get(way, way), SWEEP, "0.1", where, STEPS="8")
    assert trained(more) == [7, 8]
    assert more.poll() == 0, more.text
    assert "end of the script" in more.out


# Under our agent a failure is tried once more in a fresh interpreter: one case shows its exit code.
@pytest.mark.parametrize(
    ("way", "where"),
    [("run", "bug"), ("python", "bug"), ("python", "file"), *([("run", "file")] if ALL else [])],
)
def test_what_fails_for_another_reason_is_a_failure(floor, way, where):
    assert start(floor, way, SWEEP, "0.1").poll() == 0
    failed = start(floor, way, SWEEP, "0.1", where, OUTLAST_RESUME="1")
    assert failed.poll() == {"run": 76, "python": 1}[way]
    assert "Traceback" in failed.err
    assert "has not set" not in failed.err


@pytest.mark.parametrize("way", ["python", *(["run"] if ALL else [])])
def test_what_was_added_since_it_finished_is_no_part_of_what_is_done(floor, tmp_path, way):
    script = tmp_path / "sweep.py"
    script.write_bytes(SWEEP.read_bytes())
    assert start(floor, way, script, "0.1").poll() == 0
    old = 'print("end of the script")'
    script.write_text(SWEEP.read_text().replace(old, f"print(loss)\n    {old}"))
    failed = start(floor, way, script, "0.1")
    assert failed.poll() == {"run": 76, "python": 1}[way], failed.text
    assert "has not set" not in failed.err


def start_two(floor, way, *arguments, **env):
    """Two ranks of the script that meet behind their loop, and what they say together.

    "ranks" are what torchrun starts, without torchrun, which imports torch for each of them anew.
    """
    flags = ("--nproc-per-node", 2, RANKS, *arguments)
    if way == "ranks":
        processes = floor.ranks(2, RANKS, *arguments, env=env)
    elif way == "run":
        processes = [floor.outlast("run", *flags, env=env)]
    else:
        processes = [floor.torchrun(*flags, env=env)]
    codes = [process.wait() for process in processes]
    return codes, "".join(one.out for one in processes), "".join(one.err for one in processes)


@pytest.mark.parametrize(
    ("way", "who", "where"),
    [
        *itertools.product(["run", "ranks"], [0, 1], ["BEHIND", "INSIDE"]),
        *(itertools.product(["torchrun"], [0, 1], ["BEHIND", "INSIDE"]) if ALL else ()),
    ],
)
def test_one_ranks_excuse_is_all_ranks(floor, way, who, where):
    for times in range(2):
        codes, out, err = start_two(floor, way, who, where)
        assert set(codes) == {0}, out + err
        assert out.count("past the barrier") == (0 if times else 2)
        assert "Traceback" not in err
    assert err.count("the loop has not set loss") == 1
    assert err.count("another rank had no step left") == 1


# Under our agent it is tried once more, in two fresh interpreters; see above.
@pytest.mark.parametrize("way", ["ranks", *(["run", "torchrun"] if ALL else [])])
def test_one_ranks_mistake_is_no_excuse_for_another(floor, way):
    first = floor.outlast("run", "--nproc-per-node", 2, RANKS, 1)
    assert first.wait() == 0, first.text
    codes, out, err = start_two(floor, way, 1, "WRONG", OUTLAST_RESUME="1")
    assert set(codes) == {76 if way == "run" else 1}, out + err
    assert "KeyError: 'lsos'" in err
    assert "another rank had no step left" not in err


def test_what_was_cut_off_behind_the_loop_is_done_by_the_next_attempt(floor):
    cut = start(floor, "run", SWEEP, "0.1", "behind", DIE="behind")
    assert cut.poll() == 0, cut.text
    assert sum(": attempt " in line for line in our_lines(cut)) == 2
    assert "what its body does changes nothing" in cut.err
    assert cut.out.count("end of the script") == 1


def test_an_error_behind_the_loop_is_what_the_job_ends_with(floor):
    for _ in range(2):
        broken = start(floor, "run", SWEEP, "0.1", "breaks")
        assert broken.poll() == 76, broken.text
        assert "ValueError: the report cannot be written" in broken.err
        assert "the loop has not set" not in broken.err


def test_what_no_loader_can_give_again_is_still_to_be_done(floor, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ITERATORS)
    assert floor.warm(script, env={"DIE": "1"}).wait() == -9
    again = floor.warm(script)
    assert again.wait() == 76, again.text
    last = our_lines(again)[-1]
    assert "the loop has not set number at script.py:" in last
    assert "cut off before and is still to be done: set that ahead of the loop" in last


def test_it_is_the_first_finish_that_is_told(floor, tmp_path):
    start(floor, "python", SWEEP, "0.1")
    ledger = tmp_path / "outlast-job" / "ledger.jsonl"
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    for line in lines:
        line["t"] -= 10 * 86_400
    ledger.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    told = []
    for _ in range(2):
        again = start(floor, "python", SWEEP, "0.1")
        told += [line for line in our_lines(again) if "finished at step" in line]
    assert len(told) == 2
    assert told[0] == told[1]
