"""A loop of one's own with Accelerate, killed and drained, ends as one does that is not.

Equal are the weights, each batch's loss, the learning rate, a registered object, and the batches of
an accumulation. The net has dropout and a batch norm, in bf16, and three batches an accumulation;
the last batch of an epoch is short. The undisturbed run has no Outlast in it.
"""

import pytest
from floor import SCRIPTS
from frameworks import TEST_S, Kind, check_the_same_run

from thorough import ALL

SCRIPT = SCRIPTS / "accelerate_loop.py"
pytestmark = pytest.mark.timeout(TEST_S)
SEEDABLE = "use_seedable_sampler=true"
KINDS = {
    "single": Kind(42, (SEEDABLE,)),
    "ddp": Kind(21, workers=2),
    "seedable": Kind(21, (SEEDABLE,), workers=2),
    "noisy": Kind(42, ("--noisy", "--asks", "--saves", "5")),
    "split": Kind(42, ("split_batches=true",), workers=2),
    "uneven": Kind(21, ("even_batches=false",), workers=2),
    "stateful": Kind(42, (SEEDABLE, "use_stateful_dataloader=true", "--noisy")),
    "stateful, ddp": Kind(21, (SEEDABLE, "use_stateful_dataloader=true"), workers=2),
    "processes": Kind(42, ("--processes", "2")),
    "dispatched": Kind(21, ("dispatch_batches=true",), workers=2),
    "stream": Kind(21, ("--stream",), workers=2),
    "sharded stream": Kind(21, ("--stream", "dispatch_batches=false"), workers=2),
    "skipping": Kind(15, ("--skip", "2"), workers=2),
    "saving": Kind(21, ("--saves", "4"), workers=2),
}
USUAL = ("ddp",)


@pytest.mark.parametrize("kind", KINDS if ALL else USUAL)
def test_killed_and_drained_it_is_the_same_run(floor, tmp_path, kind):
    check_the_same_run(floor, tmp_path, SCRIPT, KINDS[kind])


@pytest.mark.skipif(not ALL, reason="the long tail: make test-all")
def test_what_it_has_loaded_itself_is_not_loaded_over_a_resume(floor, tmp_path):
    """The script calls load_state() whenever it starts; a resumed session is further."""
    before = floor.warm(SCRIPT, tmp_path, "--plain", "--saves", 20)
    assert before.wait() == 0, before.text
    loaded = ("--load", tmp_path / "project" / "checkpoints" / "checkpoint_0")
    check_the_same_run(floor, tmp_path, SCRIPT, Kind(42, loaded))


def test_code_behind_a_loop_that_had_ended_reads_what_its_body_sets(floor, tmp_path):
    """What it was resumed from is an epoch's end: the loop has no batch left, but its last one."""
    script, finals = SCRIPTS / "accelerate_behind.py", []
    for name, is_killed in (("calm", False), ("killed", True)):
        place = tmp_path / name
        place.mkdir()
        if not is_killed:
            (place / "killed").touch()
        run = floor.outlast("run", "--nproc-per-node", 1, "--dir", place / "job", script, place)
        assert run.wait() == 0, run.text
        finals.append((place / "final").read_text())
        losses = (place / "losses").read_text().splitlines()
        assert (place / "killed").exists(), run.text
        assert len(losses) == 3 + is_killed, run.text
    assert finals[0] == finals[1]
