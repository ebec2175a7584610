"""What is kept: snapshots in memory, copies on other machines, checkpoints."""

import collections
import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outlast.policy.retention import (
    GIB,
    RESERVE_BYTES,
    RESERVE_SHARE,
    PlacedMachine,
    admit,
    holders,
    num_replicas,
    removable,
)
from thorough import examples

# --- snapshots: numbers in, a decision in words out ----------------------------------------------


@pytest.mark.parametrize(
    ("snapshot", "wanted", "available", "buffers"),
    [
        (10 * GIB, None, 16 * GIB, 1),
        (10 * GIB, 1, 16 * GIB, 1),
        (10 * GIB, 2, 32 * GIB, 2),
        (10 * GIB, 2, 20 * GIB, 1),  # two would leave nothing to train with
        (10 * GIB, 2, 10 * GIB, 0),
        (10 * GIB, None, 10 * GIB, 0),
        (10 * GIB, 0, 64 * GIB, 0),  # asked for
        (10 * GIB, 3, 32 * GIB, 3),
        (0, 2, 0, 2),  # nothing to hold
        (GIB, 1, 0, 0),
        (GIB, 1, -5, 0),
        (100 * GIB, 8, 420 * GIB, 3),
    ],
)
def test_as_many_as_fit(snapshot, wanted, available, buffers):
    decision = admit(snapshot, wanted=wanted, available_bytes=available)
    assert decision.buffers == buffers
    asked = 1 if wanted is None else wanted
    assert bool(decision.words) == (buffers < asked)


@pytest.mark.parametrize(
    ("wanted", "available", "buffers"),
    [(None, 40, 2), (None, 39, 1), (None, 4, 0), (1, 100, 1), (3, 40, 3), (0, 100, 0)],
)
def test_what_is_only_useful_takes_half_of_what_is_free_at_most(wanted, available, buffers):
    decision = admit(10 * GIB, wanted=wanted, useful=2, available_bytes=available * GIB)
    assert decision.buffers == buffers
    assert not decision.words or not buffers, "nobody has asked for two"


def test_fewer_buffers_are_said_with_both_numbers():
    words = admit(10 * GIB, wanted=2, available_bytes=20 * GIB).words
    assert words == (
        "a snapshot takes 10.00 GiB of this machine's memory and 20.00 GiB are free: "
        "1 buffer in place of 2"
    )


def test_no_buffer_is_said_with_what_it_costs_and_what_to_do():
    words = admit(10 * GIB, wanted=None, available_bytes=4 * GIB).words
    assert "10.00 GiB" in words
    assert "4.00 GiB" in words
    assert "training waits for each" in words
    assert "free memory, or save less often" in words


sizes = st.integers(min_value=0, max_value=1 << 42)


@given(snapshot=sizes, wanted=st.none() | st.integers(0, 8), available=sizes)
def test_what_is_admitted_leaves_the_reserve(snapshot, wanted, available):
    decision = admit(snapshot, wanted=wanted, available_bytes=available)
    assert 0 <= decision.buffers <= (1 if wanted is None else wanted)
    if snapshot and decision.buffers:
        left = available - decision.buffers * snapshot
        assert left >= RESERVE_BYTES
        assert left >= int(available * RESERVE_SHARE)


@given(snapshot=sizes, wanted=st.integers(0, 8), available=sizes, more=sizes)
def test_more_memory_never_admits_less(snapshot, wanted, available, more):
    less = admit(snapshot, wanted=wanted, available_bytes=available)
    assert admit(snapshot, wanted=wanted, available_bytes=available + more).buffers >= less.buffers


# --- copies: nothing is lost with as many machines as there are replicas -------------------------


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


# --- checkpoints: the newest valid ones are never among what may go ------------------------------


steps = st.sets(st.integers(0, 30), max_size=15)


@given(
    committed=steps,
    unfinished=steps,
    invalid=steps,
    weights_only=steps,
    superseded=steps,
    in_use=steps,
    keep=st.integers(-1, 6),
)
@example(
    committed={1, 2},
    unfinished=set(),
    invalid={1, 2},
    weights_only=set(),
    superseded=set(),
    in_use=set(),
    keep=1,
)
@example(
    committed={5},
    unfinished=set(),
    invalid={3},
    weights_only=set(),
    superseded=set(),
    in_use=set(),
    keep=1,
)
@examples(300)
def test_what_may_go(committed, unfinished, invalid, weights_only, superseded, in_use, keep):
    unfinished = unfinished - committed
    gone = removable(
        committed,
        unfinished,
        keep=keep,
        invalid=invalid,
        weights_only=weights_only,
        superseded=superseded,
        in_use=in_use,
    )
    assert list(gone) == sorted(set(gone))
    assert set(gone) <= committed | unfinished, "what is not there cannot be removed"
    assert set(gone).isdisjoint(in_use)
    keep = max(keep, 1)
    old = (committed - invalid) & superseded
    weights = sorted(((committed - invalid) & weights_only) - old)
    full = sorted(committed - invalid - weights_only - old)
    assert set(gone).isdisjoint(full[-keep:])
    if not full:
        assert set(gone) == (set(weights[:-keep]) | old) - in_use
        return
    older = {step for step in committed & invalid if step < full[-1]} | unfinished | old
    older |= {step for step in weights if step < full[-keep:][0]}
    assert set(gone) == (set(full[:-keep]) | older) - in_use


@given(
    committed=steps,
    invalid=steps,
    weights_only=steps,
    in_use=steps,
    healthy=steps,
    keep=st.integers(1, 4),
)
@examples(300)
def test_one_to_roll_back_to_stays(committed, invalid, weights_only, in_use, healthy, keep):
    known = {"keep": keep, "invalid": invalid, "weights_only": weights_only, "in_use": in_use}
    gone = set(removable(committed, [], **known, healthy=healthy))
    full = sorted(committed - invalid - weights_only)
    if full:
        stays = max(set(full) & healthy, default=full[0])
        assert stays not in gone
        candidates = [step for step in full if step > stays][:1] if stays in healthy else []
        assert gone == set(removable(committed, [], **known)) - {stays, *candidates}


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=60), st.integers(1, 3))
def test_however_the_loss_goes_there_is_one_from_before_the_sign(story, keep):
    """Commits follow each other; each turns out healthy a little later, or never."""
    committed, healthy, first_bad = set(), set(), None
    for step, (is_bad, is_noticed) in enumerate(story, 1):
        committed.add(step)
        first_bad = first_bad or (step if is_bad else None)
        if first_bad is None and step > 1:
            healthy.add(step - 1)
        if first_bad is not None and is_noticed and min(committed) < first_bad:
            assert max(s for s in committed if s < first_bad) <= first_bad - 1
        committed -= set(removable(committed, [], keep=keep, invalid=(), healthy=healthy))
        if first_bad != 1:
            assert min(committed) < (first_bad or step + 1)


def test_weights_do_not_push_out_what_can_be_resumed_from():
    gone = removable([100, 200, 300, 400], [], keep=2, invalid=[], weights_only=[200, 300, 400])
    assert list(gone) == []
    gone = removable([50, 100, 150, 200, 250], [], keep=1, invalid=[], weights_only=[50, 150, 250])
    assert list(gone) == [50, 100, 150]


def test_rotten_ones_do_not_push_out_the_last_that_can_be_read():
    assert list(removable([100, 200, 300, 400], [], keep=3, invalid={200, 300, 400})) == []
    assert list(removable([100, 200, 300, 400, 500], [], keep=2, invalid={200, 300, 400})) == [
        200,
        300,
        400,
    ]


def test_unfinished_ones_go_only_where_there_is_one_to_resume_from():
    assert list(removable([100, 200], [150, 250], keep=1, invalid=set())) == [100, 150, 250]
    assert list(removable([100], [150], keep=1, invalid={100})) == []
