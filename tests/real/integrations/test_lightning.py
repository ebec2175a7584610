"""Lightning's Trainer, killed and drained, ends with the weights and metrics of one that is not.

The net has dropout and a batch norm; its schedule and its early stop look at the validations. The
undisturbed one has no Outlast in it, but with max_steps: there Lightning draws between making its
loader's iterator and the first batch, and Outlast makes that iterator later.
"""

import pytest
from floor import SCRIPTS, Job
from frameworks import ENV, TEST_S, Kind, check_the_same_run

from thorough import ALL

SCRIPT = SCRIPTS / "lightning_trainer.py"
pytestmark = pytest.mark.timeout(TEST_S)
KINDS = {
    "single": Kind(39),
    "ddp": Kind(21, workers=2),
    "validated often": Kind(39, ("val_check_interval=5",)),
    "to a step": Kind(28, ("max_steps=15", "max_epochs=-1"), is_plain=False),
}
USUAL = ("ddp", "validated often")


@pytest.mark.parametrize("kind", KINDS if ALL else USUAL)
def test_killed_and_drained_it_is_the_same_run(floor, tmp_path, kind):
    check_the_same_run(floor, tmp_path, SCRIPT, KINDS[kind])


def test_a_notice_that_one_worker_alone_hears_ahead_of_the_loop(floor, tmp_path):
    """Lightning would broadcast in its handler, and wait for the others for ever."""
    job = Job(tmp_path / "job")
    command = ("run", "--nproc-per-node", 2, "--dir", job.directory, SCRIPT, job.records, "--early")
    first = floor.outlast(*command, env=ENV)
    assert first.wait() == 75, first.text
    assert floor.outlast(*command, env=ENV).wait() == 0
    assert not job.events("worker_lost")
