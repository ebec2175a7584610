"""A save that fails is said once, and that saving works again."""

from outlast.training.saving import Unsaved, Written


def test_once_and_once_more():
    said = []
    unsaved = Unsaved(said.append)
    for step in (1, 2, 3):
        unsaved.ended(Written(step=step, error="EIO", by_storage=True))
    assert len(said) == 1
    assert said[0].startswith("step 1 was not saved: EIO; training goes on")
    unsaved.ended(Written(step=4))  # in memory alone
    assert len(said) == 1
    for step in (5, 6):
        unsaved.ended(Written(step=step, tier="local"))
    assert said[1:] == [
        "step 5 is saved: saving works again (it had failed since step 1)",
    ]
    unsaved.ended(Written(step=7, error="EIO", by_storage=True))
    assert len(said) == 3


def test_what_is_not_the_storages_and_the_end_are_said_by_others():
    said = []
    unsaved = Unsaved(said.append)
    unsaved.ended(Written(step=1, error="rank 1 was lost"))
    unsaved.is_ending = True
    unsaved.ended(Written(step=2, error="EIO", by_storage=True))
    unsaved.ended(Written(step=2, tier="local"))
    assert said == []
