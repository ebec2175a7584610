"""All ranks act at the same step: hundreds of orders of events, replayed from a seed."""

import collections
import random
import threading

import pytest
from unit_fakes import Hub, on_ranks

from outlast.attempt import link as room
from outlast.attempt.link import Agreement, LocalLink


class World:
    """Ranks, their inboxes, and one move at a time; nothing happens but what a test lets happen."""

    def __init__(self, world_size, *, completed=0, in_step=()):
        self.inboxes = [collections.deque() for _ in range(world_size)]
        self.ranks = [
            Rank(self, rank, completed, in_step=rank in in_step) for rank in range(world_size)
        ]
        self.may_save = True

    def send(self, rank, message):
        self.inboxes[rank].append(message)

    def deliver(self, rank):
        self.ranks[rank].agreement._handle(self.inboxes[rank].popleft())

    def settle(self):
        """Deliver every message there is."""
        while any(self.inboxes):
            for rank, inbox in enumerate(self.inboxes):
                if inbox:
                    self.deliver(rank)


class Rank:
    """A training loop that can be stopped between any two of its acts."""

    def __init__(self, world, rank, completed, *, in_step=False):
        self.world, self.rank, self.world_size = world, rank, 0
        self.completed, self.in_step, self.over = completed, in_step, False
        self.acted = []  # (step, kinds): what was done at each boundary that had something to do
        self.decided = []
        self.world_size = len(world.inboxes)
        self.agreement = Agreement(
            *(self, completed, self.decided.append),
            may_save=lambda: world.may_save,
            in_step=in_step,
        )

    def send(self, rank, message):
        self.world.send(rank, message)

    @property
    def waits(self):
        """Whether ``boundary`` would wait now."""
        pledges = self.agreement._progress.pledges.values()
        return not self.in_step and any(pledge <= self.completed for pledge in pledges)

    def move(self):
        if self.in_step:
            self.completed += 1
            self.in_step = False
            return
        actions = self.agreement.boundary(self.completed)
        if not actions:
            self.in_step = True
            return
        kinds = {action.kind for action in actions}
        assert all(action.step == self.completed for action in actions), "late, or too early"
        if "drain" in kinds and self.acted and self.acted[-1] == (self.completed, "save"):
            self.acted.pop()  # the drain finds that save: on another rank the two came at once
        self.acted.append((self.completed, "drain" if "drain" in kinds else "save"))
        if "drain" in kinds:
            self.over = True
            self.agreement.leave(self.completed)

    def ask(self, kind, *, hold=False):
        at = self.completed + 1
        self.agreement.request(kind, not_before=0 if kind == "drain" else at, hold=hold, reason="")
        return at


def run(seed):
    """Random moves until all have drained; returns the world."""
    chance = random.Random(seed)
    world_size = chance.randint(1, 4)
    # Behind a loss some have the interrupted step before them, others are in the midst of it.
    world = World(world_size, in_step=chance.sample(range(world_size), chance.randint(0, 1)))
    num_moves, asked = 0, 0
    speeds = [chance.choice((1, 1, 1, 5)) for _ in world.ranks]
    while not all(rank.over for rank in world.ranks):
        num_moves += 1
        assert num_moves < 20_000, "the ranks never come to an end"
        moves = [("deliver", rank) for rank, inbox in enumerate(world.inboxes) if inbox]
        for rank in world.ranks:
            if not rank.over and not rank.waits:
                moves += [("move", rank.rank)] * speeds[rank.rank]
        if not moves and not world.may_save:  # rank 0 holds, until the writer comes to its end
            world.may_save = True
            world.ranks[0].agreement.poke()
            continue
        assert moves, f"seed {seed}: every rank waits for a decision that never comes"
        if chance.random() < 0.05 and asked < 8:
            asked += 1
            rank = chance.choice(world.ranks)
            rank.ask("save", hold=rank.rank == 0 and not rank.in_step and chance.random() < 0.5)
        elif chance.random() < 0.01:
            chance.choice(world.ranks).ask("drain")
        elif chance.random() < 0.1:
            world.may_save = not world.may_save
            if world.may_save:
                world.ranks[0].agreement.poke()
        else:
            what, rank = chance.choice(moves)
            (world.deliver if what == "deliver" else lambda r: world.ranks[r].move())(rank)
    return world


@pytest.mark.parametrize("block", range(8))
def test_all_ranks_act_at_the_same_steps_whatever_the_order(block):
    for seed in range(block * 50, block * 50 + 50):
        world = run(seed)
        first = world.ranks[0].acted
        assert all(rank.acted == first for rank in world.ranks), f"seed {seed}"
        steps = [step for step, _ in first]
        assert steps == sorted(set(steps)), f"seed {seed}: a step was saved twice"
        kinds = [kind for _, kind in first]
        assert kinds[-1] == "drain", f"seed {seed}"
        assert "drain" not in kinds[:-1], f"seed {seed}"
        assert [a.kind for a in world.ranks[0].decided].count("drain") == 1
        world.settle()  # whatever was still under way changes nothing
        assert all(len(rank.decided) == len(world.ranks[0].decided) for rank in world.ranks)


# --- no time for a drain -------------------------------------------------------------------------


def no_time(info):
    info["choice"] = "keep"
    return False


def test_without_time_everybody_leaves_at_once_wherever_they_are():
    world = World(3)
    world.ranks[0].agreement._coordinator._may_drain = no_time
    for rank, completed in enumerate((2, 7, 4)):
        in_step(world, rank, completed)
    world.ranks[2].agreement.request("drain", not_before=0, left_s=1.0)
    world.settle()
    for rank in world.ranks:
        (action,) = rank.decided
        assert (action.kind, action.step, action.info["choice"]) == ("leave", 0, "keep")
        assert not rank.waits
        rank.move()
        assert not rank.agreement.boundary(rank.completed)  # nothing is due at any step
    world.ranks[1].agreement.request("drain", not_before=0)
    world.ranks[1].ask("save")
    world.settle()
    assert all(len(rank.decided) == 1 for rank in world.ranks)


def test_whoever_plans_the_drain_may_tell_the_others():
    world = World(2)
    world.ranks[0].agreement._coordinator._may_drain = lambda info: bool(
        info.update(tiers=["shared"]) or True
    )
    world.ranks[1].agreement.request("drain", not_before=0, reason="a notice")
    world.settle()
    assert [rank.decided[0].info["tiers"] for rank in world.ranks] == [["shared"], ["shared"]]


def test_all_move_where_only_some_machines_leave_and_rank_0_knows_all_that_have_asked(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(room.time, "monotonic", lambda: now[0])
    seen = []
    world = World(2)
    coordinator = world.ranks[0].agreement._coordinator
    coordinator._may_move = lambda asks: bool(seen.append(asks) or True)
    coordinator._may_drain = lambda _: pytest.fail("nothing is to be saved")
    world.ranks[1].agreement.request("drain", not_before=0, leaves=[1], left_s=30.0)
    world.settle()
    assert [[one.kind for one in rank.decided] for rank in world.ranks] == [["move"], ["move"]]
    assert seen == [[{"leaves": [1], "left_s": 30.0}]]
    now[0] = 110.0
    world.ranks[0].agreement.request("drain", not_before=0, leaves=[0], left_s=9.0)
    world.settle()
    assert all(len(rank.decided) == 1 for rank in world.ranks)
    now[0] = 111.0
    asks = [{"leaves": [1], "left_s": 19.0}, {"leaves": [0], "left_s": 8.0}]
    assert world.ranks[0].agreement.drains == asks
    assert world.ranks[1].agreement.drains == []


def test_seconds_left_are_counted_down_until_the_decision(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(room.time, "monotonic", lambda: now[0])
    seen = []
    world = World(2)
    world.ranks[0].agreement._coordinator._may_drain = lambda info: not seen.append(info["left_s"])
    world.ranks[1].agreement.request("drain", not_before=0, left_s=30.0)
    world.deliver(0)
    now[0] = 104.0  # a pledge took its time
    world.settle()
    assert seen == [30.0]
    assert [rank.decided[0].info["left_s"] for rank in world.ranks] == [26.0, 26.0]


def test_a_notice_that_leaves_less_time_reaches_everybody_though_a_drain_is_agreed():
    world = World(2)
    heard = []
    for rank in world.ranks:
        rank.agreement._on_deadline = heard.append
        in_step(world, rank.rank, 3)
    world.ranks[1].agreement.request("drain", not_before=0, reason="a signal", left_s=None)
    world.settle()
    assert not heard
    world.ranks[1].agreement.request("drain", not_before=0, reason="the platform", left_s=4.0)
    world.settle()
    assert heard == [4.0, 4.0]
    assert all(len(rank.decided) == 1 for rank in world.ranks)


def test_what_is_due_at_the_end_of_a_loop_is_done_there_and_a_drain_waits():
    world = World(2)
    for rank in world.ranks:
        in_step(world, rank.rank, 3)
    world.ranks[0].ask("save")
    world.settle()
    for rank in world.ranks:
        rank.completed, rank.in_step = 4, False
    first, second = (rank.agreement for rank in world.ranks)
    (action,) = first.last_boundary(4)
    assert (action.kind, action.step) == ("save", 4)
    assert second.follow(4)
    assert not first.in_step
    assert not second.in_step
    second.request("drain", not_before=0)
    world.settle()
    assert first.last_boundary(4) == []
    assert not second.follow(4)
    for rank in world.ranks:
        assert [action.kind for action in rank.agreement.boundary(4)] == ["drain"]


@pytest.mark.parametrize("is_heard", [True, False], ids=["heard before", "heard after"])
def test_a_decision_that_comes_when_a_loop_is_over_is_followed_once(is_heard):
    """Rank 0 was held at its last step, since a save was in flight; rank 1 had gone through."""
    world = World(2)
    for rank in world.ranks:
        in_step(world, rank.rank, 3)
    first, second = (rank.agreement for rank in world.ranks)
    world.may_save = False
    first.request("save", not_before=4, hold=True)
    world.settle()
    for rank in world.ranks:
        rank.completed, rank.in_step = 4, False
        rank.agreement.leave(4)
    world.may_save = True
    first.poke()
    world.deliver(0)  # the poke: a round begins
    world.deliver(0)
    world.deliver(1)  # both have pledged
    while world.inboxes[0]:
        world.deliver(0)
    if is_heard:
        world.settle()
    assert [action.step for action in first.last_boundary(4)] == [4]
    assert second.follow(4)  # where it did not, rank 0 would wait for its part for ever
    world.settle()
    assert second.boundary(4) == []
    assert not second.follow(4)


def test_a_save_at_a_boundary_that_another_rank_had_passed_is_told_at_the_loops_end():
    """Rank 1 looked before it had pledged to wait, and its loop had no more batches."""
    world = World(2)
    for rank in world.ranks:
        in_step(world, rank.rank, 3)
    first, second = (rank.agreement for rank in world.ranks)
    assert second.boundary(4) == []
    second.leave(4)
    first.request("save", not_before=4, hold=True, reason="due")
    world.settle()
    assert [action.step for action in first.boundary(4)] == [4]
    assert first.boundary(4) == []
    first.leave(4)
    assert first.last_boundary(4) == []
    assert first.saved(4) == {"reason": "due"}
    assert second.follow(4)  # or rank 0 would wait for its part for ever
    assert not first.follow(4)
    assert first.saved(5) is None


def test_a_save_that_is_asked_for_behind_rank_0s_last_boundary_is_of_the_next_loop():
    """Rank 1 is still in the last step: it would save it alone, and wait for rank 0's part."""
    world = World(2)
    for rank in world.ranks:
        in_step(world, rank.rank, 3)
    first, second = (rank.agreement for rank in world.ranks)
    first.leave(4)
    assert first.last_boundary(4) == []
    second.request("save", not_before=4)
    world.settle()
    assert second.boundary(4) == []
    second.leave(4)
    for agreement in (first, second):
        assert agreement.boundary(4) == []
        assert [action.step for action in agreement.boundary(5)] == [5]


def test_an_early_notice_is_told_to_rank_0_alone():
    world = World(2)
    heard = []
    for rank in world.ranks:
        rank.agreement._on_hurry = heard.append
    world.ranks[1].agreement.hurry(answer="leave", left_s=None)
    world.settle()
    assert heard == [{"answer": "leave", "left_s": None}]
    assert not any(rank.decided for rank in world.ranks)


# --- one thing at a time -------------------------------------------------------------------------


def in_step(world, rank, completed):
    one = world.ranks[rank]
    while one.completed < completed or not one.in_step:
        one.move()


def test_a_save_is_taken_where_the_furthest_rank_is():
    world = World(3)
    for rank, completed in enumerate((2, 7, 4)):
        in_step(world, rank, completed)
    world.ranks[2].ask("save")
    world.settle()
    assert {action.step for rank in world.ranks for action in rank.decided} == {8}
    for rank in world.ranks:
        while not rank.acted:
            rank.move()
        assert rank.acted == [(8, "save")]


def test_a_later_step_that_was_asked_for_is_kept():
    world = World(2)
    in_step(world, 0, 3)
    world.ranks[0].agreement.request("save", not_before=20, reason="")
    world.settle()
    assert world.ranks[1].decided[0].step == 20


def test_what_was_said_comes_with_the_decision():
    world = World(2)
    world.ranks[1].agreement.request("drain", not_before=0, reason="signal", deadline_t=1.5)
    world.settle()
    assert all(r.decided[0].info == {"reason": "signal", "deadline_t": 1.5} for r in world.ranks)


def test_a_rank_does_not_pass_its_pledge_before_the_decision():
    world = World(2)
    for rank in range(2):
        in_step(world, rank, 5)
    world.ranks[0].ask("drain")
    world.deliver(0)  # the ask
    world.deliver(0)  # rank 0 pledges 6
    world.ranks[0].move()
    assert world.ranks[0].completed == 6
    assert world.ranks[0].waits
    in_step(world, 1, 9)  # rank 1 has not heard of it and goes on
    world.settle()
    assert world.ranks[0].decided[0].step == 10
    assert not world.ranks[0].waits


def test_a_drain_overtakes_saves_that_wait_and_is_the_last():
    world = World(2)
    world.may_save = False
    for rank in world.ranks:
        rank.ask("save")
    world.ranks[1].ask("drain")
    world.settle()
    world.may_save = True
    world.ranks[0].agreement.poke()
    world.ranks[1].ask("save")
    world.ranks[0].ask("drain")
    world.settle()
    assert [action.kind for action in world.ranks[0].decided] == ["drain"]


def test_a_drain_waits_for_the_round_in_progress():
    world = World(2)
    world.ranks[0].ask("save")
    world.deliver(0)  # the round begins
    world.ranks[1].ask("drain")
    world.settle()
    for rank in world.ranks:
        assert [action.kind for action in rank.decided] == ["save", "drain"]


def test_one_decision_serves_all_who_asked_for_that_step_or_an_earlier_one():
    world = World(3)
    world.may_save = False
    for rank, at in ((0, 4), (1, 6), (2, 9)):
        world.ranks[rank].agreement.request("save", not_before=at, reason="")
    in_step(world, 1, 6)
    world.settle()
    world.may_save = True
    world.ranks[0].agreement.poke()
    world.settle()
    assert [action.step for action in world.ranks[0].decided] == [7, 9]


def test_a_step_that_was_resumed_from_is_not_saved_again():
    world = World(2, completed=20)
    world.ranks[0].agreement.request("save", not_before=20, reason="")
    world.settle()
    assert [action.step for action in world.ranks[1].decided] == [20]
    in_step(world, 0, 20)
    assert world.ranks[0].acted == []
    world.ranks[0].agreement.request("drain", not_before=0, reason="")
    world.settle()
    world.ranks[1].move()
    assert world.ranks[1].decided[-1].kind == "drain"


def test_a_step_0_can_be_saved():
    world = World(1)
    world.ranks[0].agreement.request("save", not_before=0, reason="")
    world.settle()
    world.ranks[0].move()
    assert world.ranks[0].acted == [(0, "save")]


def test_a_save_that_could_not_begin_waits_to_be_poked():
    world = World(2)
    world.may_save = False
    world.ranks[1].ask("save")
    world.settle()
    assert world.ranks[0].decided == []
    world.may_save = True
    world.settle()
    assert world.ranks[0].decided == []
    world.ranks[0].agreement.poke()
    world.settle()
    assert len(world.ranks[1].decided) == 1


def test_all_ranks_ask_for_the_same_save_and_get_one():
    """A rank that waited hears of the first decision alone, the others of both at once."""
    for first_heard in range(1, 12):
        world = World(2)
        in_step(world, 0, 5)
        in_step(world, 1, 5)
        for rank in world.ranks:
            rank.ask("save")
        world.ranks[1].move()  # rank 1 is done with step 6 and may act as soon as it hears
        for _ in range(first_heard):
            for rank, inbox in enumerate(world.inboxes):
                if inbox:
                    world.deliver(rank)
            quick = world.ranks[1]
            if quick.agreement._progress.due and not quick.waits and not quick.in_step:
                quick.move()
        world.settle()
        for rank in world.ranks:
            while rank.completed < 9:
                assert not rank.waits
                rank.move()
        assert world.ranks[0].acted == world.ranks[1].acted
        steps = [step for step, _ in world.ranks[0].acted]
        assert len(steps) == len(set(steps))


def test_holding_makes_a_save_exact():
    world = World(1)
    for _ in range(3):
        rank = world.ranks[0]
        in_step(world, 0, rank.completed)
        at = rank.ask("save", hold=True)
        rank.move()
        assert rank.completed == at
        assert rank.waits  # the messages have not been handled yet, and still it does not pass
        world.settle()
        rank.move()
        assert rank.acted[-1] == (at, "save")


def test_holding_is_in_vain_where_another_rank_is_further():
    world = World(2)
    in_step(world, 0, 3)
    in_step(world, 1, 8)
    world.ranks[0].ask("save", hold=True)
    world.settle()
    assert world.ranks[0].decided[0].step == 9
    assert not world.ranks[0].waits


def test_nothing_is_held_for_what_is_asked_after_a_drain():
    world = World(1)
    world.ranks[0].ask("drain")
    world.settle()
    world.ranks[0].ask("save", hold=True)
    world.settle()
    world.ranks[0].move()
    assert world.ranks[0].over
    assert [action.kind for action in world.ranks[0].decided] == ["drain"]


def test_a_rank_that_has_left_its_loop_pledges_what_it_has():
    world = World(2)
    in_step(world, 0, 5)
    world.ranks[0].move()
    world.ranks[0].agreement.leave(6)
    in_step(world, 1, 5)
    world.ranks[1].ask("drain")
    world.settle()
    assert [action.step for action in world.ranks[1].decided] == [6]
    world.ranks[1].move()
    world.ranks[1].move()
    assert world.ranks[1].acted == [(6, "drain")]


def test_a_message_that_is_not_understood_does_no_harm(caplog):
    world = World(2)
    link = [{"kind": "ask"}, {}, {"kind": "decided"}, {"kind": "pledge", "round": 9}, {"kind": "?"}]
    answers = iter([*link, None])
    one = world.ranks[0]
    one.receive = lambda: next(answers)
    one.close = lambda: None
    one.agreement.start()
    one.agreement.stop()
    assert "was not handled" in caplog.text
    assert not one.agreement._thread.is_alive()


def test_a_pledge_of_an_older_round_does_not_count():
    world = World(2)
    world.ranks[0].ask("save")
    world.settle()
    assert len(world.ranks[0].decided) == 1
    world.send(0, {"kind": "pledge", "round": 1, "rank": 1, "at": 99})
    world.ranks[0].ask("save")
    world.settle()
    assert [action.step for action in world.ranks[0].decided] != [1, 99]


# --- with threads --------------------------------------------------------------------------------


def test_no_decision_within_the_deadline_lets_the_loop_go_on(monkeypatch, caplog):
    monkeypatch.setattr(room, "DECISION_TIMEOUT_S", 0.05)
    agreement = Agreement(Hub(2).link(0), 3, lambda action: None, may_save=lambda: True)
    agreement._pledge(1)
    assert agreement.boundary(3) == []
    assert "no decision within" in caplog.text


def test_stopping_lets_a_waiting_loop_go():
    link = LocalLink()
    agreement = Agreement(link, 3, lambda action: None, may_save=lambda: False)
    agreement.start()
    agreement.request("save", not_before=3, hold=True)
    waiting = threading.Thread(target=agreement.boundary, args=(3,), daemon=True)
    waiting.start()
    agreement.stop()
    waiting.join(10)
    assert not waiting.is_alive()
    assert not agreement._thread.is_alive()


def test_who_is_in_an_interrupted_step_comes_to_its_end_first():
    world = World(2, completed=7, in_step=[1])
    world.ranks[0].ask("drain")
    world.settle()
    assert [action.step for action in world.ranks[0].decided] == [8]
    for rank in world.ranks:
        while not rank.over:
            rank.move()
    assert [rank.acted for rank in world.ranks] == [[(8, "drain")]] * 2


def test_a_single_rank_saves_exactly_where_it_said():
    agreement = Agreement(LocalLink(), 0, lambda action: None, may_save=lambda: True)
    agreement.start()
    saved = []
    for step in range(50):
        if (step + 1) % 10 == 0:
            agreement.request("save", not_before=step + 1, hold=True)
        while actions := agreement.boundary(step):
            saved += [step for _ in actions]
    agreement.stop()
    assert saved == [10, 20, 30, 40]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_threads_that_run_as_they_like(world_size, seed):
    hub = Hub(world_size)
    gate = threading.Barrier(world_size)

    def train(link):
        chance = random.Random(seed * 10 + link.rank)
        agreement = Agreement(link, 0, lambda action: None, may_save=lambda: True)
        gate.wait(10)
        agreement.start()
        acted = []
        for step in range(100_000):
            if chance.random() < 0.02:
                agreement.request("save", not_before=step + 1, reason="")
            if step > 50 and chance.random() < 0.01:
                agreement.request("drain", not_before=0, reason="")
            while actions := agreement.boundary(step):
                assert all(action.step == step for action in actions)
                drains = any(action.kind == "drain" for action in actions)
                if drains and acted and acted[-1] == (step, "save"):
                    acted.pop()
                acted.append((step, "drain" if drains else "save"))
                if drains:
                    agreement.leave(step)
                    gate.wait(10)
                    agreement.stop()
                    return acted
            sum(range(chance.randint(0, 2000)))  # the step's work
        raise AssertionError("no drain was agreed")

    results = on_ranks(world_size, train, hub=hub)
    assert isinstance(results[0], list), results
    assert all(result == results[0] for result in results)
    assert [kind for _, kind in results[0]].count("drain") == 1


def test_a_rollback_does_not_wait_for_a_save_and_is_the_last():
    world = World(2)
    world.may_save = False
    for rank in world.ranks:
        in_step(world, rank.rank, 7)
    world.ranks[0].ask("save")
    world.ranks[0].agreement.request("rollback", not_before=0, stops=False)
    world.settle()
    world.ranks[1].ask("save")
    world.may_save = True
    world.ranks[0].agreement.poke()
    world.settle()
    for rank in world.ranks:
        assert [(one.kind, one.step) for one in rank.decided] == [("rollback", 8)]
        rank.agreement.leave(8)
        (action,) = rank.agreement.boundary(8)
        assert (action.kind, action.info) == ("rollback", {"stops": False})


def test_a_rollback_overtakes_a_drain_that_still_waits():
    world = World(1)
    in_step(world, 0, 3)
    agreement = world.ranks[0].agreement
    agreement._coordinator._asked = {"action": "save"}  # a round is in progress
    agreement.request("drain", not_before=0, reason="", left_s=None)
    agreement.request("rollback", not_before=0)
    world.settle()
    agreement._coordinator._asked = None
    agreement._coordinator._begin()
    world.settle()
    assert [one.kind for one in world.ranks[0].decided] == ["rollback"]


def test_messages_for_others_are_passed_on():
    world = World(1)
    heard = []
    world.ranks[0].agreement._on_other = heard.append
    world.ranks[0].agreement._handle({"kind": "values", "rank": 1})
    assert heard == [{"kind": "values", "rank": 1}]
