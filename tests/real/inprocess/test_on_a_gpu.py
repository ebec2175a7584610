"""Workers that sum with NCCL on a GPU are lost, and the others go on in their processes.

They share one GPU. What an abort leaves of a sum on a device is any number: that none of it comes
into a state that counts is what is looked at here; never how long it took.
"""

import functools
from collections import Counter

import losses
import pytest
import torch
from floor import SCRIPTS
from losses import WORKERS, compare, ends

from thorough import ALL

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]
SCRIPT = SCRIPTS / "inprocess.py"
ON_GPU = {"TEST_DEVICE": "cuda:0"}
STEPS = 16
LOSSES = (
    *("2:3:forward:die", "0:5:stepped:die", "1:7:backward:die", "3:9:reduced:die"),
    *("1:11:reduced:die", "2:11:forward:die", "0:13:stepped:die", "2:13:resumed:die"),
)
DEATHS = ("2:3:backward", "1:9:summed", "0:14:forward")
run = functools.partial(losses.run, SCRIPTS / "many_kinds.py", env=ON_GPU)


def undisturbed(place, *options, workers=WORKERS):
    """The records of a job that nothing happens to."""
    return losses.by_ranks(SCRIPT, place, STEPS, *options, workers=workers, env=ON_GPU)


def disturbed(floor, tmp_path, *options):
    job, running = losses.start(SCRIPT, floor, tmp_path / "job", *options, steps=STEPS, env=ON_GPU)
    assert running.wait() == 0, running.text
    return job, running


def test_losses_anywhere_in_a_step_lose_nothing(floor, tmp_path):
    calm = undisturbed(tmp_path / "calm")
    job, running = disturbed(floor, tmp_path, *(part for one in LOSSES for part in ("--do", one)))
    compare(job, calm)
    ended = Counter(rank for event in job.events("survived") for rank in event["ended"])
    assert ended <= Counter(one[0] for one in LOSSES), running.text  # two may go in one step
    sources = [event["source"] for event in job.events("resumed")][1:]
    assert all(source.endswith("that survived") for source in sources), running.text
    assert "Traceback" not in running.err, running.text


def test_the_others_train_on_while_a_place_is_empty(floor, tmp_path):
    """SameBits: the bits of two workers are those of four, of three, and of four again.

    The script's beginning takes a second; nobody waits for it.
    """
    calm = undisturbed(tmp_path / "calm", "--same-bits", workers=2)
    asked = ("--same-bits", "--pause", 0.2, "--beginning", 1.0, "--do", "0:4:reduced:die")
    job, running = disturbed(floor, tmp_path, *asked)
    expected = {line["step"]: line["state"] for line in calm.lines(0)}
    lines = [line for rank in range(WORKERS) for line in job.lines(rank)]
    assert all(line["state"] == expected[line["step"]] for line in lines), running.text
    assert {line["world"] for line in lines} == {WORKERS - 1, WORKERS}, running.text
    assert {final["hash"] for final in job.finals()} == {calm.final(0)["hash"]}, running.text


@pytest.mark.parametrize("kind", ["all", "own", "hook", *(["compiled"] if ALL else [])])
def test_no_step_is_lost_and_no_bit_differs(floor, tmp_path, kind):
    calm, _ = run(floor, tmp_path / "calm", kind)
    job, running = run(floor, tmp_path / "job", kind, *DEATHS)
    assert ends(job) == ends(calm), running.text
    sources = [event["source"] for event in job.events("resumed")][1:]
    assert len(sources) == len(DEATHS), running.text
    assert all(source.endswith("that survived") for source in sources), running.text
