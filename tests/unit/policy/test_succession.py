"""When another machine counts as lost, and who coordinates then."""

import random

import pytest

from outlast.policy.succession import ASKS_PER_S, GROWTH_MAX, Seeking, Silence, successors

# --- a connection --------------------------------------------------------------------------------


BEAT_S = 1.0 / 8


def test_ten_thousand_heartbeats_on_a_busy_host():
    """Our looks are late by a heavy tail, the kernel's acknowledgements are not."""
    chance = random.Random(7)
    silence, now_s, acknowledged_s, worst_s = Silence(1.0), 0.0, 0.0, 0.0
    for _ in range(10_000):
        late_s = min(0.005 * chance.paretovariate(1.1), 20.0)
        worst_s = max(worst_s, late_s)
        now_s += BEAT_S + late_s
        silence.seen(acknowledged_s)
        assert not silence.is_lost(now_s)
        silence.asked(now_s)
        acknowledged_s = now_s + 0.0005
    assert worst_s > 1.0  # the host was held up for longer than the limit


@pytest.mark.parametrize("late_s", [0.0, 0.05])
def test_real_silence_is_found_within_the_limit_and_a_beat(late_s):
    silence, now_s = Silence(1.0), 0.0
    for _ in range(100):
        silence.seen(now_s - BEAT_S + 0.0005)
        silence.asked(now_s)
        now_s += BEAT_S + late_s
    cut_s = now_s
    while not silence.is_lost(now_s):
        silence.asked(now_s)
        now_s += BEAT_S + late_s
    assert now_s - cut_s <= 1.0 + 2 * (BEAT_S + late_s)


def test_a_slow_network_is_given_more_time_but_not_for_ever():
    silence = Silence(1.0)
    silence.asked(0.0)
    silence.seen(0.9)
    assert silence.limit_s == pytest.approx(3.6)
    silence.asked(1.0)
    silence.seen(30.0)
    assert silence.limit_s == GROWTH_MAX


def test_nobody_is_blamed_for_the_time_in_which_we_were_held_up():
    """A virtual machine that stands still takes its kernel with it."""
    silence = Silence(1.0)
    silence.asked(0.0)
    assert not silence.is_lost(0.1)
    assert not silence.is_lost(30.0)  # we come back: no answer could be heard
    assert not any(silence.is_lost(30.0 + tenth / 10) for tenth in range(10))
    assert silence.is_lost(31.1)


def test_a_host_that_is_always_late_still_finds_the_lost():
    silence, now_s = Silence(1.0), 0.0
    silence.asked(now_s)
    for _ in range(20):
        now_s += 0.9
        if silence.is_lost(now_s):
            break
    assert now_s < 6.0


def test_what_was_asked_before_we_hung_ourselves_does_not_make_the_limit_longer():
    silence = Silence(10.0)
    silence.asked(0.0)
    silence.excuse()
    silence.seen(60.0)
    assert silence.limit_s == 10.0


def test_ten_thousand_signs_of_life_of_a_process_that_hardly_ever_runs():
    """Both processes are late by a heavy tail; only one that is stopped hangs."""
    chance = random.Random(7)
    silence, now_s, heard_s = Silence(30.0, recent=32), 0.0, 0.0
    for _ in range(10_000):
        now_s += 3.0 + min(0.05 * chance.paretovariate(1.1), 10.0)
        silence.seen(heard_s)
        silence.asked(now_s)
        assert not silence.is_lost(now_s)
        heard_s = now_s + min(0.05 * chance.paretovariate(1.1), 10.0)
    stopped_s = now_s
    while not silence.is_lost(now_s):
        now_s += 3.0
        silence.asked(now_s)
    assert 30.0 <= now_s - stopped_s <= 60.0


# --- who is next ---------------------------------------------------------------------------------


def test_those_who_share_little_with_the_lost_one_come_first():
    labels = {
        "a": {"zone": "1", "rack": "1"},
        "b": {"zone": "1", "rack": "1"},
        "c": {"zone": "1", "rack": "2"},
        "d": {"zone": "2", "rack": "3"},
    }
    assert successors("abcd", labels, lost="a") == ["d", "c", "b"]
    assert successors("abcd", {}, lost="a") == ["b", "c", "d"]
    assert successors("abcd", labels, lost="a", ended={"d"}, departing={"c"}) == ["b"]
    assert successors("abcd", labels, lost="a", departing={"b", "c", "d"}) == ["d", "c", "b"]
    assert successors("ab", labels, lost="a", ended={"b"}) == []


def asked_in(machines, seconds):
    """Questions in each second, of machines that all start at once and find nobody."""
    chance = random.Random(3)
    counts = [0] * seconds
    for _ in range(machines):
        seeking = Seeking(machines, chance.random())
        at_s = seeking.first_s(chance.random())
        while at_s < seconds:
            counts[int(at_s)] += 1
            at_s += seeking.again_s(at_s, chance.random())
    return counts


def test_the_load_on_storage_does_not_grow_with_the_number_of_machines():
    for machines in (64, 1024, 10_240):
        counts = asked_in(machines, 120)
        assert max(counts) < 4 * ASKS_PER_S, machines
        assert sum(counts) / 120 < 2 * ASKS_PER_S, machines


def test_small_jobs_ask_at_once_and_often_at_first():
    counts = asked_in(3, 20)
    assert counts[0] >= 9
    assert counts[19] <= 6


def test_of_many_a_few_stay_eager():
    chance = random.Random(5)
    eager = sum(Seeking(10_240, chance.random()).is_eager for _ in range(10_240))
    assert 10 < eager < 120
