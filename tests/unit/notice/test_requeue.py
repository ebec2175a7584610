"""The job that Slurm is asked about, and what is said of its answers; tests/real/slurm asks it."""

import subprocess

import pytest

from outlast.notice.slurm import REQUEUE_LIMIT_S, fields_of_job, job_name, requeue, why_not


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": ""}, None),
        ({"SLURM_JOB_ID": "7"}, "7"),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, "7"),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "1"}, None),
        # The last task of an array has the array's own id.
        (
            {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "4"},
            "7_4",
        ),
        (
            {"SLURM_JOB_ID": "8", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0"},
            "7_0",
        ),
    ],
)
def test_the_name_that_slurm_knows_the_job_by(environ, name):
    assert job_name(environ) == name


def test_outside_slurm_nothing_is_said(capsys):
    requeue({})
    assert capsys.readouterr() == ("", "")


def test_fields_of_a_shown_job():
    shown = "JobId=7 JobName=a b=c Dependency=(null) Restarts=2 Command=x=y NoValue \n"
    assert fields_of_job(shown) == {
        "JobId": "7",
        "JobName": "a",
        "b": "c",
        "Dependency": "(null)",
        "Restarts": "2",
        "Command": "x=y",
    }


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FileNotFoundError(2, "No such file", "scontrol"), "there is no scontrol here"),
        (PermissionError(13, "Permission denied"), "[Errno 13] Permission denied"),
        (
            subprocess.TimeoutExpired("scontrol", 3),
            f"scontrol has not answered within {REQUEUE_LIMIT_S:.0f} s",
        ),
        (
            subprocess.CalledProcessError(1, "scontrol", "", "Access denied.\nfor job 7\n"),
            "Access denied",
        ),
        (
            subprocess.CalledProcessError(1, "scontrol", "Disabled for job 7\n", ""),
            "Disabled for job 7",
        ),
        (subprocess.CalledProcessError(-9, "scontrol", "", ""), "scontrol failed with -9"),
    ],
)
def test_why_it_failed(error, words):
    assert why_not(error) == words
