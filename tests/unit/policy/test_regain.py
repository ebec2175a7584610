"""Which state of the survivors is gone on from."""

import msgspec
import pytest

from outlast.policy.regain import OwnState, RegainPlan, StateOffer, decide


def known(rank, step, *, timeline=1, attempt=1, world=3, rest="r", stage=2):
    whose = {"timeline": timeline, "attempt": attempt, "rank": rank, "world_size": world}
    return OwnState(**whose, step=step, rest=rest, stage=stage)


def survivor(rank, step, *others, digest="d", timeline=1, attempt=1, world=3):
    return StateOffer(
        step=step,
        timeline=timeline,
        attempt=attempt,
        world_size=world,
        digest=digest,
        rest="r",
        is_grouped=True,
        known=[known(rank, step, timeline=timeline, attempt=attempt, world=world), *others],
    )


def fresh(*others, grouped=True):
    return StateOffer(is_grouped=grouped, known=list(others))


def test_nobody_has_anything_at_a_first_start():
    assert decide([fresh(), fresh()], []) == RegainPlan()


def test_the_end_of_no_step_is_nothing_to_go_on_from():
    assert decide([survivor(0, 0), survivor(1, 0), fresh(known(2, 0))], []) == RegainPlan()


def test_survivors_and_what_the_lost_one_left_behind_are_complete():
    plan = decide([survivor(0, 7), fresh(known(1, 7)), survivor(2, 7)], [3])
    assert (plan.step, plan.sources, plan.lacking, plan.committed) == (7, {0: 0}, [1], 3)
    assert plan.own == {0: 0, 1: 1, 2: 2}


def test_the_furthest_wins_and_others_take_it_from_there():
    behind = survivor(0, 6, known(0, 7, rest=""))
    plan = decide([behind, survivor(1, 7), fresh(known(2, 7, rest=""))], [])
    assert (plan.step, plan.sources, plan.lacking) == (7, {0: 1}, [0, 2])


def test_a_lost_stream_of_random_numbers_is_not_made_up():
    plan = decide([survivor(0, 7), fresh(known(1, 6)), survivor(2, 7)], [])
    assert plan.step is None
    assert "random numbers of rank 1 at step 7" in plan.why_not


def test_nor_with_another_number_of_workers():
    """Nobody could prove what the lost one was given."""
    plan = decide([survivor(0, 7), survivor(2, 7)], [])
    assert plan.step is None
    assert "random numbers of rank 1" in plan.why_not


def test_more_workers_than_before_go_on_from_what_all_of_them_knew():
    plan = decide([survivor(0, 7), survivor(1, 7), survivor(2, 7), fresh()], [])
    assert (plan.step, plan.own, plan.world_size) == (7, {0: 0, 1: 1, 2: 2}, 3)


def test_a_newer_checkpoint_is_gone_on_from():
    plan = decide([survivor(0, 7), survivor(1, 7), survivor(2, 7)], [9])
    assert plan.step is None
    assert "step 9 is committed" in plan.why_not


def test_survivors_that_differ_are_not_believed():
    plan = decide([survivor(0, 7), survivor(1, 7, digest="e"), survivor(2, 7)], [])
    assert plan.step is None
    assert "differ" in plan.why_not


def test_what_a_lost_rank_alone_held_is_not_replaced_by_another_ranks():
    plan = decide([survivor(0, 7), fresh(known(1, 7, rest="other")), survivor(2, 7)], [])
    assert plan.step is None
    assert "rank 1 held" in plan.why_not


def test_a_single_survivor_is_compared_with_what_the_lost_one_held_a_step_before():
    alone = survivor(1, 8, known(1, 7, world=2), world=2)
    for held, step in (("r", 8), ("other", None)):
        left = fresh(known(0, 7, world=2, rest=held), known(0, 8, world=2, rest=""))
        assert decide([left, alone], []).step == step


def test_state_of_another_line_of_steps_is_older_however_far_it_is():
    """An attempt that went back to a checkpoint has begun another one."""
    old, new = survivor(0, 9, timeline=1), survivor(1, 7, timeline=4)
    left = fresh(known(2, 7, timeline=4), known(0, 7, timeline=4))
    plan = decide([old, new, left], [5])
    assert (plan.step, plan.timeline, plan.sources, plan.lacking) == (7, 4, {0: 1}, [0, 2])


def test_without_a_process_group_nothing_can_be_sent():
    plan = decide([survivor(0, 7), fresh(known(1, 7), grouped=False), survivor(2, 7)], [])
    assert plan.step is None
    assert "init_process_group()" in plan.why_not


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)], ids=["as they were", "moved"])
def test_ranks_that_have_moved_find_their_own_state(order):
    offers = [survivor(old, 7) for old in order]
    plan = decide(offers, [])
    assert [order[plan.own[rank]] for rank in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("draws", [0, 1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_who_died_within_a_step_is_not_sure_to_have_drawn_what_others_drew_in_it(stage, draws):
    """As of an evaluation that samples every hundred steps, in which a worker dies."""
    who_did = msgspec.structs.replace(survivor(2, 7), draws=draws)
    plan = decide([survivor(0, 7), fresh(known(1, 7, rest="", stage=stage)), who_did], [])
    assert (plan.step == 7) == (stage >= draws)


def test_a_step_that_has_changed_no_weights_counts_once_all_have_ended_it():
    """One rank has left out a batch's backward pass; another one accumulates its gradients."""
    left_out = msgspec.structs.replace(survivor(0, 7), stepped=False)
    in_it = survivor(1, 4, known(1, 7, rest="", stage=1))
    plan = decide([left_out, in_it, fresh(known(2, 7))], [])
    assert plan.step is None
    assert plan.why_not == "rank 1 had not ended step 7, which has changed no weights"
    ended = msgspec.structs.replace(survivor(1, 7), stepped=False)
    assert decide([left_out, ended, fresh(known(2, 7))], []).step == 7
    assert decide([survivor(0, 7), in_it, fresh(known(2, 7))], []).step == 7


def test_who_is_in_the_midst_of_accumulating_goes_back_to_its_beginning():
    """Ranks are in different batches since then, and one was lost in another."""
    pending = [known(rank, 6 + rank, rest="", stage=0) for rank in range(3)]
    offers = [survivor(0, 4, pending[0]), survivor(1, 4, pending[1])]
    plan = decide([*offers, fresh(known(2, 4), pending[2])], [])
    assert (plan.step, plan.lacking, plan.own) == (4, [2], {0: 0, 1: 1, 2: 2})


def test_what_is_known_of_the_number_of_workers_before_will_do():
    """Two of three were lost on the way from four: one is in the new attempt, one was not yet."""
    before = [known(rank, 7, world=4) for rank in range(4)]
    there = survivor(0, 7, *before[:2], world=3)
    late = survivor(1, 7, *before[2:], known(1, 7, world=3), world=4)
    plan = decide([there, late, fresh()], [])
    assert (plan.step, plan.world_size, plan.lacking) == (7, 4, [2])
    assert plan.own == {0: 0, 1: 1, 2: 1, 3: 1}
    alone = decide([survivor(0, 7, *before, world=3)], [])
    assert (alone.step, alone.world_size) == (7, 4)


def test_the_number_of_workers_that_the_state_is_of_comes_first():
    before = [known(rank, 7, world=4) for rank in range(4)]
    plan = decide([survivor(rank, 7, *before) for rank in range(3)], [])
    assert (plan.world_size, plan.own) == (3, {0: 0, 1: 1, 2: 2})
    plan = decide([survivor(0, 7), survivor(1, 7, *before[:3]), fresh()], [])
    assert plan.why_not == "the random numbers of rank 2 at step 7 went with its process"


def test_what_was_undone_is_not_put_beside_what_was_made_again():
    """Rank 2 died in step 8; its place was empty while others made that step once more."""
    undone = fresh(known(2, 8, attempt=5, rest="", stage=1))
    again = [survivor(rank, 8, attempt=6) for rank in range(3)]
    plan = decide([again[0], again[1], undone, again[2]], [])
    assert (plan.attempt, plan.own) == (6, {0: 0, 1: 1, 2: 3})
    plan = decide([again[0], again[1], undone], [])
    assert plan.why_not == "the random numbers of rank 2 at step 8 went with its process"


@pytest.mark.parametrize(("num", "attempt"), [(4, 3), (3, 1)])
def test_own_states_of_one_attempt_go_together_and_no_others(num, attempt):
    """Between two attempts of four was one of three, and ``num`` have come into the last."""
    before = [known(rank, 7, world=4) for rank in range(4)]
    there = [survivor(rank, 7, before[rank], attempt=3, world=4) for rank in range(num)]
    plan = decide([*there, *(fresh(one) for one in before[num:])], [])
    assert (plan.step, plan.attempt, plan.own) == (7, attempt, {0: 0, 1: 1, 2: 2, 3: 3})


# --- a state that is divided: ranks 0 and 2 have one part, 1 and 3 the other ----------------------


def parts(*offers):
    """The offers of four ranks of two replica groups."""
    return [msgspec.structs.replace(offer, part=rank % 2) for rank, offer in enumerate(offers)]


def twin(rank, step, *others, **options):
    """One that has ended ``step``, of four; the twins of a part have the same."""
    return survivor(rank, step, *others, digest=f"part {rank % 2}", world=4, **options)


def undecided(rank, step):
    """One that has ended ``step``, and the state of before too."""
    found = twin(rank, step, known(rank, step - 1, world=4))
    return msgspec.structs.replace(found, before=twin(rank, step - 1))


def lost(rank, *steps):
    return fresh(*(known(rank, step, world=4) for step in steps))


def test_each_part_comes_from_a_twin():
    plan = decide(parts(lost(0, 7), lost(1, 7), twin(2, 7), twin(3, 7)), [])
    assert (plan.step, plan.sources, plan.lacking) == (7, {0: 2, 1: 3}, [0, 1])


def test_a_part_that_nobody_has_is_lost():
    plan = decide(parts(lost(0, 7), twin(1, 7), lost(2, 7), twin(3, 7)), [])
    assert plan.step is None
    assert "nobody has the part of ranks 0 and 2 any more" in plan.why_not


def test_twins_are_compared_and_no_others():
    plan = decide(parts(twin(0, 7), twin(1, 7), twin(3, 7), twin(3, 7)), [])
    assert "they differ at step 7" in plan.why_not


def test_a_step_that_a_part_has_not_completed_is_gone_back_from():
    void = twin(1, 6), twin(3, 6)
    offers = parts(undecided(0, 7), void[0], lost(2, 6, 7), void[1])
    plan = decide(offers, [])
    assert (plan.step, plan.sources, plan.lacking) == (6, {0: 0, 1: 1}, [2])
    certain = msgspec.structs.replace(offers[0], before=None)
    plan = decide([certain, *offers[1:]], [])
    assert plan.why_not == "their parts of it are of different steps"


def test_a_step_that_all_parts_have_completed_counts():
    plan = decide(parts(undecided(0, 7), undecided(1, 7), lost(2, 6, 7), undecided(3, 7)), [])
    assert (plan.step, plan.lacking) == (7, [2])


def test_what_a_lost_rank_would_have_drawn_is_known_of_the_step_before():
    plan = decide(parts(undecided(0, 7), undecided(1, 7), lost(2, 6), undecided(3, 7)), [])
    assert (plan.step, plan.lacking) == (6, [2])
