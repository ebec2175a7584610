"""Who is to blame, in one sentence."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.policy.hang import (
    Activity,
    Frame,
    Named,
    NotYet,
    RankLook,
    has_gone_on,
    held_by,
    judge,
)

SUM = (
    Frame("_engine_run_backward", "/x/site-packages/torch/autograd/graph.py", 979),
    Frame("backward", "/x/site-packages/torch/autograd/__init__.py", 395),
    Frame("train_step", "/home/a/train.py", 20),
)
BARRIER = (
    Frame("barrier", "/x/site-packages/torch/distributed/distributed_c10d.py", 5356),
    Frame("wrapper", "/x/site-packages/torch/distributed/c10d_logger.py", 83),
    Frame("train_step", "/home/a/train.py", 25),
)
COLLATE = (
    Frame("sleep", "/usr/lib/python3.11/time.py", 3),
    Frame("collate", "/home/a/data.py", 41),
    Frame("<module>", "/home/a/train.py", 99),
)


def rank(number, frames=SUM, **fields):
    """A rank of a job with a session, in step 812, over its limit."""
    usual = {"kind": Activity.STEP, "is_session": True, "step": 811, "age_s": 3.0, "limit_s": 2.0}
    usual |= {"slow_s": 600.0, "begun": 40, "pulse_age_s": 0.1, "node": "a", "frames": frames}
    return RankLook(rank=number, **(usual | fields))


def culprit(number=1, **fields):
    return rank(number, **({"frames": COLLATE, "begun": 38} | fields))


OTHERS = [rank(0), rank(2), rank(3)]


def test_the_sentence_of_the_documents():
    others = [msgspec.structs.replace(one, node="a") for one in OTHERS]
    found = judge([*others, culprit(node="b")])
    assert found.sentence == (
        "rank 1 on b has not entered step 812's gradient sum; it is in collate() at data.py:41, "
        "the other 3 ranks wait for it"
    )
    assert (found.ranks, found.nodes, found.step) == ((1,), ("b",), 812)
    assert found.place == "collate() at data.py:41"


def test_who_is_traced_is_given_time_and_named_with_its_tracer():
    traced = {"tracer": "strace (pid 71)", "outside_s": 600.0, "call": "lock", "is_still": True}
    assert isinstance(judge([*OTHERS, culprit(age_s=500.0, **traced)]), NotYet)
    found = judge([*OTHERS, culprit(age_s=601.0, **traced)])
    assert "in collate() at data.py:41, traced by strace (pid 71)" in found.sentence
    assert (found.given_s, found.is_proven, found.stack) == (600.0, False, "")
    assert "is given 600 s" in held_by(culprit(**traced))


def test_a_person_is_told_who_holds_a_rank():
    held = culprit(state="t", tracer="gdb (pid 71)")
    assert isinstance(judge([*OTHERS, held]), NotYet)
    assert held_by(held).startswith("rank 1 is held by gdb (pid 71), in collate() at data.py:41:")
    pdb = (Frame("interaction", "/usr/lib/python3.11/pdb.py", 1), *COLLATE)
    assert held_by(culprit(frames=pdb)).startswith("rank 1 is held by pdb, in")
    assert held_by(culprit()) == ""


@pytest.mark.parametrize(
    ("fields", "stack"),
    [
        ({}, "collate in /home/a/data.py < <module> in /home/a/train.py"),
        ({"state": "T"}, ""),
        ({"state": "D"}, ""),
        ({"call": "read"}, ""),
    ],
    ids=["script", "stopped", "kernel", "read"],
)
def test_a_stack_says_what_can_only_be_the_scripts(fields, stack):
    assert judge([*OTHERS, culprit(**fields)]).stack == stack


@pytest.mark.parametrize(
    ("fields", "words", "is_proven"),
    [
        ({"state": "T"}, "it is stopped in collate()", True),
        ({"moves": True, "state": "R"}, "it is in collate()", False),
        ({"pulse_age_s": 3.0, "holds_gil": True}, "it holds the interpreter's lock in", True),
        ({"call": "lock", "is_still": True}, "it waits for a lock in collate()", True),
        ({"call": "lock"}, "it waits for a lock in collate()", False),
        ({"call": "read", "is_still": True}, "it is blocked in a read in collate()", False),
        ({"state": "D"}, "the kernel does not let it go (state D) in collate()", False),
        ({"call": "sleep"}, "it sleeps in collate()", False),
        ({"frames": ()}, "where it is could not be seen", False),
    ],
    ids=[
        *("stopped", "loops", "holds-the-lock", "lock", "lock-while-others-work", "read"),
        *("kernel", "sleeps", "no-stack"),
    ],
)
def test_what_it_does(fields, words, is_proven):
    found = judge([*OTHERS, culprit(**fields)])
    assert found.ranks == (1,)
    assert words in found.sentence
    assert found.is_proven is is_proven


def test_a_rank_alone_just_makes_no_progress():
    found = judge([culprit(0)])
    assert found.sentence.startswith("rank 0 has made no progress in step 812 for 3.0 s;")


def test_who_has_come_least_far_is_the_one_that_all_wait_for():
    found = judge([rank(0, BARRIER), culprit(1), culprit(2, step=810)])
    assert found.ranks == (2,)
    assert "has not finished step 811" in found.sentence


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": Activity.EVALUATE, "limit_s": 600.0},
        {"frames": (Frame("f", "/x/site-packages/torch/_inductor/compile.py", 1),)},
        {"frames": (Frame("save", "/x/site-packages/torch/serialization.py", 1),)},
        {"frames": (Frame("validate", "/home/a/train.py", 1),)},
        {"is_session": False, "age_s": 300.0},
        {"is_starved": True},
        {"is_session": False, "is_starved": True, "moves": False, "age_s": 20.0},
        {"moves": False, "moves_below": True},
        {"kind": Activity.OUTSIDE, "age_s": 1e6},
    ],
    ids=[
        *(
            "evaluates",
            "compiles",
            "saves",
            "validates",
            "plain",
            "starved",
            "plain-starved",
            "loader",
        ),
        "after-the-loop",
    ],
)
def test_one_that_is_slow_by_right_is_not_named_and_nobody_else_is(fields):
    found = judge([*OTHERS, culprit(**({"moves": True} | fields))])
    assert isinstance(found, NotYet)
    assert found.again_s > 0


def test_who_waits_for_a_lock_may_wait_for_one_that_is_slow_by_right():
    evaluates = culprit(3, kind=Activity.EVALUATE, limit_s=600.0, moves=True)
    assert isinstance(judge([rank(0), culprit(1, call="lock"), evaluates]), NotYet)
    assert judge([rank(0), culprit(1, call="lock"), rank(3)]).ranks == (1,)


def test_one_that_passed_a_collective_by_is_ahead_of_those_that_wait_in_it():
    found = judge([rank(0, BARRIER, step=59, begun=125), rank(1, SUM, step=60, begun=124)])
    assert found.ranks == (1,)
    assert found.sentence == (
        "rank 1 has passed by step 60's barrier() (124 collectives begun, 125 by the others); it "
        "waits in step 61's gradient sum, train_step() at train.py:20, rank 0 waits for it"
    )


def test_one_that_goes_on_without_the_others_is_found_too():
    waiting = [rank(one, BARRIER, step=59) for one in (0, 2)]
    busy = rank(1, COLLATE, step=75, age_s=0.0, moves=True)
    assert judge([*waiting, busy]).ranks == (1,)


def test_fewer_collectives_in_the_same_step():
    found = judge([*OTHERS, rank(1, BARRIER, begun=39)])
    assert found.ranks == (1,)
    assert "(39 collectives begun, 40 by the others)" in found.sentence


def test_other_collectives_in_the_same_place():
    parted = rank(1, BARRIER, recorded=("gloo:barrier #40 of []",))
    others = [rank(one, recorded=("gloo:all_reduce #40 of [[280]]",)) for one in (0, 2)]
    assert judge([*others, parted]).ranks == (1,)


def test_nobody_is_to_blame_for_a_lost_message_and_it_takes_longer():
    assert isinstance(judge(OTHERS), NotYet)
    found = judge([msgspec.structs.replace(one, age_s=6.1) for one in OTHERS])
    assert found.ranks == ()
    assert "all 3 ranks wait in step 812's gradient sum" in found.sentence
    assert not found.is_proven


def test_ranks_that_spin_while_they_wait_are_not_named_for_one_that_is_slow_by_right():
    evaluates = rank(0, COLLATE, kind=Activity.EVALUATE, limit_s=600.0, moves=True, begun=39)
    spin = [rank(one, BARRIER, moves=True, state="R") for one in (1, 2)]
    assert isinstance(judge([evaluates, *spin]), NotYet)
    loader = rank(3, COLLATE, moves_below=True, begun=39)
    item = [rank(one, (Frame("main", "/home/a/train.py", 3),), moves=True) for one in (0, 1)]
    assert isinstance(judge([loader, *item]), NotYet)
    # And they are not in the way of one whose time is over.
    assert judge([culprit(0, moves=True), *spin]).ranks == (0,)
    assert judge([culprit(3, moves=True), *item]).ranks == (3,)


TORCH = "/x/site-packages/torch"
WRITES = (
    Frame("_write_files", f"{TORCH}/distributed/checkpoint/filesystem.py", 472),
    Frame("save", f"{TORCH}/distributed/checkpoint/state_dict_saver.py", 100),
    Frame("main", "/home/a/train.py", 3),
)
GATHERS = (Frame("gather_object", f"{TORCH}/distributed/distributed_c10d.py", 3000), *WRITES[1:])
SAVES = (Frame("save", f"{TORCH}/serialization.py", 9), Frame("main", "/home/a/train.py", 3))
COMPILES = (
    Frame("wait", "/usr/lib/python3.11/threading.py", 327),
    Frame("result", f"{TORCH}/_inductor/codecache.py", 4000),
    Frame("main", "/home/a/train.py", 3),
)


@pytest.mark.parametrize(
    "fields",
    [
        {"frames": SAVES, "state": "D"},
        {"frames": SAVES, "call": "write"},
        {"frames": WRITES, "state": "D", "call": "write"},
        {"frames": COMPILES, "call": "lock"},
        {"frames": (Frame("evaluate", "/home/a/train.py", 3),), "call": "read"},
    ],
    ids=["save-in-the-kernel", "save", "dcp", "compiles", "evaluates"],
)
def test_slow_by_right_is_who_shows_nothing_that_moves_too(fields):
    slow = culprit(1, **fields)
    assert isinstance(judge([*OTHERS, slow]), NotYet)
    assert isinstance(judge([rank(0, GATHERS, begun=41), slow]), NotYet)
    assert isinstance(judge([msgspec.structs.replace(slow, age_s=9.0)]), NotYet)
    late = judge([*OTHERS, msgspec.structs.replace(slow, age_s=601.0)])
    assert late.ranks == (1,)
    assert not late.is_proven


def test_who_is_being_debugged_is_left_alone_and_the_others_with_it():
    prompt = (Frame("cmdloop", "/usr/lib/python3.11/pdb.py", 2), *COLLATE)
    assert isinstance(judge([*OTHERS, culprit(frames=prompt, call="read")]), NotYet)
    assert isinstance(judge([*OTHERS, culprit(state="t", age_s=1e6)]), NotYet)


def test_the_last_of_a_job_may_take_its_time_once_another_has_left():
    left = rank(1, (), state="Z", age_s=1e4, outside_s=600.0)
    upload = culprit(0, is_session=False, call="write", outside_s=600.0)
    assert isinstance(judge([left, upload]), NotYet)
    assert isinstance(judge([left, rank(0, BARRIER, outside_s=600.0)]), NotYet)
    found = judge([left, rank(0, BARRIER, outside_s=600.0, age_s=601.0)])
    assert found.sentence.startswith("rank 1 has not entered step 812's barrier(); it has left")


def test_a_machine_that_says_nothing_is_named_where_all_others_wait_and_are_late():
    assert isinstance(judge(OTHERS, ["b"], is_silent_for_long=False), NotYet)
    assert isinstance(judge([rank(0, age_s=0.1), rank(2)], ["b"]), NotYet)
    evaluates = rank(0, COLLATE, kind=Activity.EVALUATE, limit_s=600.0, moves=True)
    assert isinstance(judge([evaluates, rank(2)], ["b"]), NotYet)
    assert judge([*OTHERS, culprit(state="T", age_s=10.0)], ["b"]).ranks == (1,)
    found = judge(OTHERS, ["b"])
    assert found.nodes == ("b",)
    assert not found.is_proven
    assert found.sentence == (
        "the agent on b says nothing, though asked; the 3 ranks elsewhere wait in step 812"
    )


seen = st.builds(
    RankLook,
    rank=st.integers(0, 9),
    node=st.sampled_from("ab"),
    kind=st.sampled_from(Activity),
    is_session=st.booleans(),
    step=st.none() | st.integers(0, 3),
    age_s=st.floats(0, 100),
    limit_s=st.floats(1.5, 50),
    slow_s=st.floats(1.5, 600),
    begun=st.integers(-1, 3),
    pulse_age_s=st.none() | st.floats(0, 9),
    state=st.sampled_from(["R", "S", "D", "T", "t", "Z", ""]),
    moves=st.booleans(),
    moves_below=st.booleans(),
    is_still=st.booleans(),
    outside_s=st.floats(1.5, 600),
    is_starved=st.booleans(),
    call=st.sampled_from(["", "lock", "read", "sleep"]),
    frames=st.sampled_from([(), SUM, BARRIER, COLLATE, WRITES, GATHERS]),
)


@given(
    st.lists(seen, min_size=1, max_size=6, unique_by=lambda one: one.rank),
    st.sampled_from([(), ("c",)]),
    st.booleans(),
)
def test_whatever_was_seen_there_is_an_answer_and_nobody_is_named_before_its_time(
    found, silent, is_for_long
):
    verdict = judge(found, silent, is_silent_for_long=is_for_long)
    if isinstance(verdict, NotYet):
        assert 0 < verdict.again_s < float("inf") or verdict.again_s == float("inf")
        return
    assert isinstance(verdict, Named)
    assert verdict.sentence
    assert verdict.given_s < float("inf")
    assert any(one.age_s >= min(one.limit_s, 10.0) for one in found)


def test_two_looks_that_a_freeze_lies_between_are_no_hang():
    """Rank 0 waited for the others, which were frozen and have made eight steps since."""
    late, thawed = rank(0), [rank(n, age_s=0.0, step=819, begun=56, moves=True) for n in (1, 2)]
    assert judge([late, *thawed]).sentence.startswith("rank 1 has passed by")
    assert has_gone_on([late, *thawed], {0: (820, 58), 1: (820, 58), 2: (820, 58)})
    # One that takes part in nothing any more goes on while the others wait: that is the hang.
    assert not has_gone_on([late, *thawed], {0: (811, 40), 1: (830, 56), 2: (830, 56)})
    assert not has_gone_on([late, *thawed], {})  # nobody has said anything else
    assert has_gone_on([rank(0, age_s=0.5, state="T")], {0: (811, 41)})
