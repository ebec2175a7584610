"""The batch script: what Slurm is told, and which input never becomes one."""

import re

import pytest

from outlast.cli.init import Slurm, Training, _limit_s, name_of, nodes_of
from outlast.errors import ConfigError, Exit


def training(**settings):
    return Training(**({"name": "job", "script": "train.py"} | settings))


def directives(text):
    """What sbatch reads: option → value, from the lines before the first command."""
    head = re.split(r"^(?!#|$)", text, maxsplit=1, flags=re.MULTILINE)[0]
    lines = re.findall(r"^#SBATCH --(\S+)$", head, re.MULTILINE)
    return dict((*line.split("=", 1), "")[:2] for line in lines)


def test_what_slurm_is_told():
    text = Slurm(training=training(nodes=2, gpus=4), partition="spot", grace_s=90).render()
    assert directives(text) == {
        "job-name": "job",
        "nodes": "2",
        "ntasks-per-node": "1",
        "cpus-per-task": "32",
        "gres": "gpu:4",
        "time": "24:00:00",
        "partition": "spot",
        "requeue": "",
        "signal": "TERM@90",
        "open-mode": "append",
        "output": "%x-%j.out",
    }
    assert "export OUTLAST_NOTICE_GRACE" not in text  # a preempted job has less than the limit's
    assert "outlast run --nnodes 2 --nproc-per-node 4 \\\n" in text
    assert "--rdzv" not in text


@pytest.mark.parametrize(("mem", "told"), [("", None), ("200G", "200G"), ("0", "0")])
def test_memory_is_asked_for_where_it_is_said(mem, told):
    assert directives(Slurm(training=training(), mem=mem).render()).get("mem") == told


@pytest.mark.parametrize(("directory", "is_said"), [("job", True), ("/shared/job", False)])
def test_what_a_relative_directory_lies_below_is_said(directory, is_said):
    text = Slurm(training=training(), directory=directory).render()
    assert ("below the directory of sbatch" in text) is is_said


def test_slurm_may_start_a_job_on_as_many_machines_as_there_are():
    text = Slurm(training=training(nodes=4, fewest=2)).render()
    told = directives(text)
    assert told["nodes"] == "2-4"
    assert "ntasks-per-node" not in told  # with it Slurm gives no more than the fewest
    assert '--nnodes 2:"$SLURM_JOB_NUM_NODES" ' in text


def test_a_job_without_gpus_asks_for_none():
    text = Slurm(training=training(cpus=3)).render()
    told = directives(text)
    assert told["cpus-per-task"] == "3"
    assert not {"gres", "partition"} & set(told)
    assert "outlast run --standalone --nproc-per-node 3 " in text
    assert "--rdzv" not in text


def test_the_exit_codes_are_those_of_the_program():
    text = Slurm(training=training()).render()
    assert re.search(rf"^  {int(Exit.DRAINED)}\) ;;", text, re.MULTILINE)
    for code in (Exit.USAGE, Exit.GAVE_UP, Exit.STORAGE, Exit.REFUSED):
        assert not re.search(rf"^  .*\b{int(code)}\b.*\)", text, re.MULTILINE), code


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("2", 120), ("1:30", 90), ("0:02:00", 120), ("0-0:2", 120), ("0-0:01:59", 119), ("00", None)],
)
def test_a_time_limit_that_the_notice_would_use_up_is_refused(time, seconds):
    def slurm(grace_s):
        return Slurm(training=training(), time=time, grace_s=grace_s)

    if seconds is None:  # no limit
        assert slurm(65_535)
        return
    assert slurm(seconds - 1)
    for grace_s in (seconds, seconds + 1):
        with pytest.raises(ConfigError, match=f"--time {time} is {seconds} s"):
            slurm(grace_s)


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("2-1", 176_400), ("1-2:03", 93_780), ("1-2:03:04", 93_784), ("3:02:01", 10_921)],
)
def test_every_form_of_a_time_limit_is_counted_as_slurm_does(time, seconds):
    assert _limit_s(time) == seconds


def test_an_empty_directory_is_refused():
    with pytest.raises(ConfigError, match="--dir '' names no directory"):
        Slurm(training=training(), directory="")


@pytest.mark.parametrize("time", ["90", "90:30", "24:00:00", "2-12", "2-12:30", "2-12:30:00"])
def test_times_that_slurm_knows(time):
    assert directives(Slurm(training=training(), time=time).render())["time"] == time


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"time": "a day"}, "--time a day is not a time limit"),
        ({"time": "1:2:3:4"}, "not a time limit"),
        ({"time": "60\n#SBATCH --account=x"}, "not a time limit"),
        ({"partition": "a b"}, "sinfo lists them"),
        ({"partition": "a\n"}, "sinfo lists them"),
        ({"grace_s": 0}, "--grace 0 is not between 5 and 65535"),
        ({"cpus_per_gpu": 0}, "--cpus-per-gpu 0"),
        ({"directory": "a\0"}, "zero byte"),
        ({"mem": "200 GB"}, "--mem 200 GB is not what Slurm reads; write 200G"),
    ],
)
def test_what_slurm_would_refuse_is_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        Slurm(training=training(), **wrong)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"name": ""}, "--name"),
        ({"name": "Train"}, "--name"),
        ({"name": "1st"}, "a letter first"),
        ({"name": "a-"}, "--name"),
        ({"name": "a\n"}, "--name"),
        ({"name": "a" * 41}, "40 at most"),
        ({"script": "--lr"}, "--script"),
        ({"script": ""}, "--script"),
        ({"nodes": 0}, "--nodes 0 is not between 1 and 10000"),
        ({"nodes": 2, "fewest": 3}, "--nodes 3:2: 3 is not between 1 and 2"),
        ({"nodes": 2, "fewest": 0}, "--nodes 0:2: 0 is not between 1 and 2"),
        ({"gpus": 0}, "--cpus N"),
        ({"gpus": 129}, "--gpus 129 is not between"),
        ({"cpus": -1}, "--cpus -1"),
    ],
)
def test_what_no_scheduler_would_take_is_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        training(**wrong)


@pytest.mark.parametrize(("text", "numbers"), [("4", (4, 4)), ("2:4", (2, 4)), ("4:4", (4, 4))])
def test_numbers_of_machines(text, numbers):
    assert nodes_of(text) == numbers


@pytest.mark.parametrize(
    "text", ["", "many", "2:", ":4", "1:2:3", "2-4", "-1", "²", "2\n", "9" * 10]
)
def test_what_is_no_number_of_machines(text):
    with pytest.raises(ConfigError, match="is neither N nor MIN:MAX; write 4 or 2:4"):
        nodes_of(text)


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("train.py", "train"),
        ("src/Train_GPT2.py", "train-gpt2"),
        ("a.b.py", "a-b"),
        ("x" * 39 + "_y.py", "x" * 39),
        ("___.py", ""),
    ],
)
def test_a_job_is_named_after_its_script(script, name):
    assert name_of(script) == name
