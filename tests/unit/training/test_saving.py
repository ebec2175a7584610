"""A save that fails is said once, and that saving works again; the end's goes to who is there."""

from types import SimpleNamespace

import pytest

from outlast.errors import ConfigError
from outlast.training.saving import Saving, Unsaved, Written


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


@pytest.mark.parametrize(
    ("was_there", "is_gone", "num_tries"),
    [(True, True, 2), (True, False, 1), (False, True, 1)],
)
def test_a_keeper_that_dies_as_it_is_asked_has_a_successor(
    monkeypatch, was_there, is_gone, num_tries
):
    saving = Saving(None, None, None, None)
    line = SimpleNamespace(wait_for_keeper=lambda _: was_there, is_gone=is_gone)
    written = Written(step=6, tier="local")
    saving.snapshots = SimpleNamespace(
        engine=SimpleNamespace(line=line, wait=lambda _: written, committed_step=4)
    )
    tries = []

    def take(step, _):
        tries.append(step)
        return len(tries) == 2

    monkeypatch.setattr(saving, "take", take)
    saving.commit(6, "finished", 60.0)
    assert tries == [6] * num_tries


# --- a state that cannot be had ------------------------------------------------------------------


def saving_of(monkeypatch, error):
    """A Saving whose state is that error, and what its engine and its people hear."""
    heard, said = [], []
    engine = SimpleNamespace(
        wait_for_room=lambda _: True,
        wait_for_copies=lambda _: True,
        refuse=lambda step, reason, *, each_step=False: heard.append((step, reason, each_step)),
    )
    made = Saving(None, None, None, None)
    made.snapshots = SimpleNamespace(engine=engine, skipped=lambda *of: said.append(of))
    made.optimizers = SimpleNamespace(is_due=lambda _: False)

    def state(step):
        raise error

    monkeypatch.setattr(made, "state", state)
    return made, heard, said


def test_a_state_that_changed_its_kind_is_refused_and_training_goes_on(monkeypatch):
    made, heard, said = saving_of(monkeypatch, ConfigError("no tensor"))
    assert not made.take(3, {})
    assert heard == [(3, "no tensor", False)]
    assert said == [(3, "no tensor")]


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), OSError("a collective failed")])
def test_any_other_failure_of_a_state_ends_training_as_ever(monkeypatch, error):
    """This rank would be beside the others from here on."""
    made, heard, said = saving_of(monkeypatch, error)
    with pytest.raises(type(error)):
        made.take(3, {})
    assert not heard
    assert not said


@pytest.mark.parametrize("error", [ConfigError("no tensor"), RuntimeError("out"), OSError("gone")])
def test_others_hear_of_each_step_whose_state_could_not_be_had(monkeypatch, error):
    made, heard, _ = saving_of(monkeypatch, error)
    made._objects = SimpleNamespace(stateful={})
    made.snapshots.states = SimpleNamespace(of=lambda *_: None)
    with pytest.raises(type(error)):
        made.keep(3, 1.0)
    assert heard == [(3, str(error), True)]
