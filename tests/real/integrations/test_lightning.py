"""Lightning's Trainer, killed and drained, ends with the weights and metrics of one that is not.

The net has dropout and a batch norm; its schedule and its early stop look at the validations. The
undisturbed one has no Outlast in it, but with max_steps: there Lightning draws between making its
loader's iterator and the first batch, and Outlast makes that iterator later.
"""

import pytest
from floor import SCRIPTS
from frameworks import calm, disturbed

from thorough import ALL

SCRIPT = SCRIPTS / "lightning_trainer.py"
# Name → workers, arguments, batches in all, whether the calm one is without Outlast.
KINDS = {
    "single": (1, (), 39, True),
    "ddp": (2, (), 21, True),
    "validated often": (1, ("val_check_interval=5",), 39, True),
    "to a step": (1, ("max_steps=15", "max_epochs=-1"), 28, False),
}
USUAL = ("ddp", "validated often")


@pytest.mark.parametrize("kind", KINDS if ALL else USUAL)
def test_killed_and_drained_it_is_the_same_run(floor, tmp_path, kind):
    workers, arguments, steps, is_plain = KINDS[kind]
    wanted = calm(floor, tmp_path, SCRIPT, *arguments, workers=workers, is_plain=is_plain)
    found = disturbed(floor, tmp_path, SCRIPT, *arguments, steps=steps, workers=workers)
    assert found == wanted
