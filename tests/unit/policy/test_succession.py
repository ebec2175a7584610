"""Who coordinates next, and how storage is spared."""

import random

from outlast.policy.succession import ASKS_PER_S, Seeking, heirs


def test_those_who_share_little_with_the_lost_one_come_first():
    labels = {
        "a": {"zone": "1", "rack": "1"},
        "b": {"zone": "1", "rack": "1"},
        "c": {"zone": "1", "rack": "2"},
        "d": {"zone": "2", "rack": "3"},
    }
    assert heirs("abcd", labels, lost="a") == ["d", "c", "b"]
    assert heirs("abcd", {}, lost="a") == ["b", "c", "d"]
    assert heirs("abcd", labels, lost="a", ended={"d"}, departing={"c"}) == ["b"]
    assert heirs("abcd", labels, lost="a", departing={"b", "c", "d"}) == ["d", "c", "b"]
    assert heirs("ab", labels, lost="a", ended={"b"}) == []


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
