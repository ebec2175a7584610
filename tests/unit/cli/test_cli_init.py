"""``outlast init`` as a person calls it: the file, the next command, and no surprises."""

from pathlib import Path

import pytest
import yaml

KINDS = {
    "slurm": ((), "train.sbatch", "sbatch train.sbatch"),
    "k8s": (("--image", "r/i:1", "--claim", "data"), "train.yaml", "kubectl apply -f train.yaml"),
    "sky": (
        ("--gpu-type", "H100", "--bucket", "s3://b"),
        "train.sky.yaml",
        "sky jobs launch train.sky.yaml",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_and_the_next_command(outlast, kind):
    flags, file, command = KINDS[kind]
    code, out, err = outlast("init", kind, *flags, "--", "--lr", "0.1")
    assert (code, err) == (0, "")
    assert out.splitlines() == [f"wrote {file}", f"Next: {command}"]
    assert "0.1" in Path(file).read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_there_stays(outlast, kind):
    flags, file, _ = KINDS[kind]
    Path(file).write_text("mine")
    code, out, err = outlast("init", kind, *flags)
    assert (code, out) == (2, "")
    assert err == f"outlast: {file} is there already; give another file with -o, or --force\n"
    assert Path(file).read_text() == "mine"
    assert outlast("init", kind, *flags, "--force")[0] == 0
    assert "Written by `outlast init" in Path(file).read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_standard_output_holds_the_file_and_nothing_else(outlast, kind):
    flags, file, command = KINDS[kind]
    outlast("init", kind, *flags)
    code, out, err = outlast("init", kind, *flags, "-o", "-")
    assert (code, out) == (0, Path(file).read_text())
    assert err == f"Next: {command}\n"


def test_another_file_is_named_in_the_next_command(outlast):
    _, out, _ = outlast("init", "slurm", "-o", "my job.sbatch")
    assert out.splitlines()[-1] == "Next: sbatch 'my job.sbatch'"


def test_the_script_and_its_name(outlast):
    flags = (*KINDS["k8s"][0], "--script", "src/Train_GPT.py", "-o", "-")
    _, out, _ = outlast("init", "k8s", *flags)
    assert yaml.safe_load(out)["metadata"]["name"] == "train-gpt"
    _, out, _ = outlast("init", "k8s", *flags, "--name", "mine")
    assert yaml.safe_load(out)["metadata"]["name"] == "mine"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("slurm", "--nodes", "0"), "--nodes 0 is not between"),
        (("slurm", "--nodes", "many"), "--nodes many is neither N nor MIN:MAX"),
        (("slurm", "--gpus", "2", "--cpus", "2"), "give one of them"),
        (("slurm", "-o", "no/such/place"), "no/such/place cannot be written"),
        (("slurm", "--script", "1.py"), "give another with --name"),
        (("k8s", "--claim", "data"), "--image"),
        (("k8s", "--image", "i"), "--claim"),
        (("k8s", "--image", "i", "--claim", "c", "--spot", "ec2"), "'eks'"),
        (("sky", "--gpu-type", "H100"), "--bucket"),
        (("nomad",), "nomad"),
    ],
)
def test_what_is_wrong_is_one_line_and_writes_nothing(outlast, arguments, said):
    before = sorted(Path().iterdir())
    code, out, err = outlast("init", *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert err.startswith("outlast: ")
    assert err.count("\n") == 1
    assert sorted(Path().iterdir()) == before


def test_help_names_the_kinds(outlast):
    _, out, _ = outlast("init", "--help")
    assert all(kind in out for kind in KINDS)


@pytest.mark.parametrize("grace", ["2min", "120 s", "120"])
def test_a_notice_has_a_unit(outlast, grace):
    code, out, err = outlast("init", "slurm", "train.py", "--grace", grace, "-o", "-")
    assert (code, "--signal=TERM@120\n" in out) == (0, True), err
    code, out, err = outlast("init", "slurm", "train.py", "--grace", "2 parsecs", "-o", "-")
    assert code == 2
    assert "'parsecs' is not a unit of a time; write 120s" in err
