"""A step that is being kept is left by those who live on in their processes, when one is lost."""

import functools

import losses
from floor import SCRIPTS
from losses import ends

SCRIPT = SCRIPTS / "replicas.py"
ENV = {"OUTLAST_CHECKPOINT_EACH_STEP": "true"}


def test_survivors_leave_the_step_that_is_being_kept(floor, tmp_path):
    """Each rank that dies has completed its step, and has not kept it: the others wait for that."""
    deaths = ("2:4:ended", "0:8:step", "3:12:ended", "1:16:ended")
    job, running = losses.run(SCRIPT, floor, tmp_path / "job", "plain", *deaths, env=ENV)
    calm = functools.partial(losses.undisturbed, SCRIPT)
    assert ends(job) == calm("plain"), running.text
    resumed = job.events("resumed")[1:]
    assert len(resumed) == len(deaths), running.text
    assert [
        event["step"] >= int(death.split(":")[1]) - 1
        for event, death in zip(resumed, deaths, strict=True)
    ] == [True] * len(deaths)
    survived = [event for event in resumed if event["source"].endswith("that survived")]
    assert len(survived) >= len(deaths) - 1, running.text
    assert "Traceback" not in running.err, running.text
