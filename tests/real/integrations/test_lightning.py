"""Lightning's Trainer, killed and drained, ends with the weights and metrics of one that is not.

The net has dropout and a batch norm; its schedule and its early stop look at the validations.
"""

import pytest
from floor import SCRIPTS
from frameworks import calm, disturbed

from thorough import ALL

SCRIPT = SCRIPTS / "lightning_trainer.py"
# Name → workers, arguments, batches in all.
KINDS = {
    "single": (1, (), 39),
    "ddp": (2, (), 21),
    "validated often": (1, ("val_check_interval=5",), 39),
    "to a step": (1, ("max_steps=15", "max_epochs=-1"), 29),
}
USUAL = ("ddp", "validated often")


@pytest.mark.parametrize("kind", KINDS if ALL else USUAL)
def test_killed_and_drained_it_is_the_same_run(floor, tmp_path, kind):
    workers, arguments, steps = KINDS[kind]
    wanted = calm(floor, tmp_path, SCRIPT, *arguments, workers=workers)
    found = disturbed(floor, tmp_path, SCRIPT, *arguments, steps=steps, workers=workers)
    assert found == wanted
