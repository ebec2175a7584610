"""When what strikes for good can be healed: the job has acted on it."""

from types import SimpleNamespace

import pytest

from outlast.drill.faults.fault import Promise, Struck, is_answered


def answered(*events, event="verify_failed", agent=7, **promised):
    """``events``: (name, when); the strike was at 10."""
    target = SimpleNamespace(
        events=lambda: [SimpleNamespace(event=name, t=t) for name, t in events],
        machines=[SimpleNamespace(agent=7), SimpleNamespace(agent=agent)],
    )
    done = Struck(what="a bit is flipped", t=10.0, last_step=6, event=event)
    return is_answered(target, Promise(**promised), done)


def test_its_event_answers_it():
    assert answered(("verify_failed", 11.0))
    assert not answered(("verify_failed", 9.0))
    assert not answered(("commit", 11.0))


def test_another_attempt_answers_it_though_the_damaged_file_was_never_read():
    assert answered(("attempt_formed", 12.0))
    assert not answered(("attempt_formed", 9.0))


@pytest.mark.parametrize("event", ["", "job_started"])
def test_what_nobody_can_name_is_answered_where_an_agent_is_down(event):
    again = {"event": event, "exit_codes": (-9,)}
    assert not answered(**again)
    assert answered(**again, agent=None)
    assert answered(event=event), "nothing is to be started again"
