"""Ten minutes of faults on one clock: both cadences as a job asks them, and what is made twice."""

import random
from statistics import mean

from outlast.policy.cadence import Auto
from outlast.policy.tier_cadence import Cost, Scope, TierCadence, TierStop
from thorough import ALL

LENGTH_S, BEGIN_S, EVERY_S, BACK_S = 600.0, 15.0, 8.0, 0.3
SNAPSHOT_S = 0.005
COPY = Cost(copy_s=0.02, slowed=0.3, blocked_s=0.0005)
# As benchmarks/storm.py draws them; what harms nothing is None.
FAULTS = [
    *(Scope.PROCESS, Scope.PROCESS, None, Scope.MACHINE, Scope.ALL),
    *(Scope.MACHINE, Scope.MACHINE, Scope.MACHINE, None),
]


def storm(seed):
    """Seconds of training that were made twice, and that saving cost, as shares of the time."""
    chance = random.Random(seed)
    auto, tiers = Auto(0.0), TierCadence([TierStop(name="disk", survives=Scope.ALL)], 0.0)
    tiers.apart = Scope.MACHINE
    now_s, fault_s, twice_s, cost_s = 0.0, BEGIN_S, 0.0, 0.0
    saved_s = {Scope.MACHINE: 0.0, Scope.ALL: 0.0}  # how far what survives it has come
    turn, is_first = 0, True
    while now_s < BEGIN_S + LENGTH_S:
        due_s = max(auto.due_s(turn, now_s, 0.0), now_s)
        if due_s < fault_s:
            now_s = due_s
            names = None if is_first else tiers.due(turn, now_s)
            is_stored = names is None or bool(names)
            cost_s += SNAPSHOT_S + COPY.total_s * is_stored
            saved_s[Scope.MACHINE] = now_s
            if is_stored:
                saved_s[Scope.ALL] = now_s
                tiers.measured("disk", COPY)
            auto.taken(turn, now_s, SNAPSHOT_S)
            tiers.taken(now_s, auto.due_s(turn, now_s, 0.0) - now_s, names)
            turn, is_first = turn + 1, False
            continue
        now_s = fault_s
        fault_s += EVERY_S * chance.uniform(0.5, 1.5)
        scope = chance.choice(FAULTS)
        if scope is None:
            continue
        twice_s += now_s - saved_s[max(scope, Scope.MACHINE)]
        auto.lost(now_s)
        tiers.lost(now_s, scope)
        if scope == Scope.ALL:
            tiers.back_from(["disk"])
        now_s += BACK_S
        auto.begun(now_s)
        tiers.begun(now_s)
        saved_s = dict.fromkeys(saved_s, now_s)  # it goes on from there: nothing more to lose
        is_first = True
    return twice_s / now_s, cost_s / now_s


def test_in_a_long_storm_little_is_made_twice_and_saving_costs_little():
    found = [storm(seed) for seed in range(10 if ALL else 3)]
    assert mean(twice for twice, _ in found) < 0.05
    assert max(twice for twice, _ in found) < 0.1
    assert mean(cost for _, cost in found) < 0.03
