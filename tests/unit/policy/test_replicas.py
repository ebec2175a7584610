"""Who keeps whose snapshot: nothing is lost with as many machines as there are replicas."""

import collections
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.policy.retention import PlacedMachine, holders, num_replicas

LABELS = st.fixed_dictionaries(
    {}, optional={name: st.sampled_from("abc") for name in ("zone", "rack", "pool")}
)
MACHINES = st.lists(LABELS, min_size=1, max_size=14).map(
    lambda labels: [PlacedMachine(node=f"n{n}", labels=one) for n, one in enumerate(labels)]
)


@settings(deadline=None)
@given(machines=MACHINES, replicas=st.integers(0, 2))
def test_every_part_is_still_somewhere_after_as_many_losses_as_replicas(machines, replicas):
    found = holders(machines, replicas)
    nodes = {machine.node for machine in machines}
    copies = num_replicas(replicas, len(machines))
    assert found.keys() == nodes
    for lost in itertools.combinations(sorted(nodes), copies):
        for owner, places in found.items():
            assert {owner, *places} - set(lost)
    for owner, places in found.items():
        assert len({owner, *places}) == copies + 1
        assert set(places) <= nodes


@settings(deadline=None)
@given(machines=MACHINES, replicas=st.integers(0, 2))
def test_everybody_keeps_as_many_as_are_kept_of_its_own(machines, replicas):
    found = holders(machines, replicas)
    loads = collections.Counter(place for places in found.values() for place in places)
    assert all(loads[m.node] == len(found[m.node]) for m in machines)


@settings(deadline=None)
@given(machines=MACHINES, replicas=st.integers(0, 2), seed=st.randoms(use_true_random=False))
def test_the_order_in_which_machines_are_named_does_not_matter(machines, replicas, seed):
    shuffled = list(machines)
    seed.shuffle(shuffled)
    assert holders(shuffled, replicas) == holders(machines, replicas)


@pytest.mark.parametrize("label", ["zone", "rack", "pool"])
@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=2, max_size=6),
    replicas=st.integers(1, 2),
)
def test_copies_lie_in_other_places_whenever_no_place_has_more_than_its_share(
    label, sizes, replicas
):
    machines = [
        PlacedMachine(node=f"n{n}", labels={label: name})
        for n, name in enumerate(
            name for name, size in zip("abcdef", sizes, strict=False) for _ in range(size)
        )
    ]
    if max(sizes) > len(machines) // (replicas + 1):
        return
    where = {machine.node: machine.labels[label] for machine in machines}
    for owner, places in holders(machines, replicas).items():
        assert len({where[node] for node in (owner, *places)}) == replicas + 1


@settings(deadline=None)
@given(racks=st.lists(st.integers(1, 3), min_size=2, max_size=5))
def test_in_one_zone_copies_lie_in_other_racks(racks):
    machines = [
        PlacedMachine(node=f"n{rack}-{n}", labels={"zone": "only", "rack": str(rack)})
        for rack, size in enumerate(racks)
        for n in range(size)
    ]
    if max(racks) > len(machines) // 2:
        return
    rack_of = {machine.node: machine.labels["rack"] for machine in machines}
    assert all(rack_of[a] != rack_of[b] for a, (b,) in holders(machines, 1).items())


@pytest.mark.parametrize(
    ("setting", "machines", "expected"),
    [(None, 1, 0), (None, 2, 1), (None, 3, 1), (0, 5, 0), (2, 2, 1), (2, 3, 2), (1, 1, 0)],
)
def test_how_many(setting, machines, expected):
    assert num_replicas(setting, machines) == expected


def test_three_machines_in_two_zones_stand_for_each_other():
    zones = {"n0": "a", "n1": "a", "n2": "b"}
    machines = [PlacedMachine(node=node, labels={"zone": zone}) for node, zone in zones.items()]
    found = holders(machines, 1)
    assert sorted(place for (place,) in found.values()) == ["n0", "n1", "n2"]
    assert sum(zones[a] != zones[b] for a, (b,) in found.items()) == 2
