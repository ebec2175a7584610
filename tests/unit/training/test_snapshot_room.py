"""How many snapshots a worker wants to hold at once, and that the GPU's driver has their memory."""

import threading
from types import SimpleNamespace

import pytest

from fake_cuda import Cuda
from outlast import config
from outlast.checkpoint import devices
from outlast.keeper import wire
from outlast.keeper.memory import Arena
from outlast.training.sharing import KeptSteps, SnapshotRoom, StepKept, snapshots_stay


def wanted(monkeypatch, world_size, local, arguments):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    return SnapshotRoom(config.load(arguments, environ={}), world_size)._wanted


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("world_size", "local", "arguments", "expected"),
    [
        (4, 4, {}, None),
        (4, 2, {}, 2),
        (3, 2, {}, 2),
        (4, 2, {"peer.replicas": 0}, None),
        (4, 2, {"peer.replicas": 2}, 2),
        (4, 2, {"checkpoint.buffers": 1}, 1),
        (4, 4, {"peer.replicas": 1}, None),
    ],
)
def test_what_others_keep_a_copy_of_stays_while_the_next_is_copied(
    monkeypatch, world_size, local, arguments, expected
):
    assert wanted(monkeypatch, world_size, local, arguments) == expected


@pytest.mark.parametrize(
    ("environ", "arguments", "toml", "expected"),
    [
        ({"OUTLAST_STORE": "h:1"}, {}, "", True),
        ({}, {}, "", False),
        ({"OUTLAST_STORE": "h:1"}, {"checkpoint.every": "5 steps"}, "", False),
        ({"OUTLAST_STORE": "h:1"}, {"checkpoint.every": "5 min"}, "", False),
        ({"OUTLAST_STORE": "h:1"}, {"checkpoint.optimizer_every": 2}, "", False),
        (
            {"OUTLAST_STORE": "h:1"},
            {},
            "[[tier]]\nurl = 'memory:'\n[[tier]]\nurl = '/disk'\n",
            False,
        ),
    ],
)
def test_where_a_snapshot_may_be_all_there_is(
    monkeypatch, tmp_path, environ, arguments, toml, expected
):
    monkeypatch.delenv("OUTLAST_STORE", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "outlast.toml").write_text(toml)
    settings = config.load(arguments, environ={})
    assert snapshots_stay(settings) is expected
    assert (SnapshotRoom(settings, 1)._useful == 2) is expected


# --- the driver ----------------------------------------------------------------------------------


class Client:
    """A keeper that gives some arenas of any size."""

    alone = -1

    def __init__(self, count=2):
        self.count = count
        self.asked = []

    def reserve(self, size, *_, **__):
        self.asked.append(size)
        arenas = [Arena.make(size) for _ in range(self.count)]
        numbers = tuple(range(self.count))
        reserved = SimpleNamespace(
            arenas=numbers, ring_bytes=0, num_bytes=size, words="", alone=self.alone
        )
        return reserved, arenas


@pytest.fixture
def cuda(monkeypatch):
    made = Cuda(monkeypatch, current=2)
    devices.settle([])
    yield made
    devices._rank.devices = ()


@pytest.fixture
def room():
    return SnapshotRoom(config.load({}, environ={}), 1)


def test_arenas_are_registered_on_the_rank_s_device_for_all_of_its_devices(cuda, room):
    reserving = threading.Thread(target=room.reserve, args=(Client(), 5000))  # of anybody's
    reserving.start()
    reserving.join()
    _, buffer = room.take({1})
    assert cuda.registered[buffer.data_ptr()] == (buffer.numel(), 1)
    assert len(cuda.registered) == 2
    assert set(cuda.contexts) == {2}


def test_memory_is_the_driver_s_no_more_before_it_is_unmapped(cuda, room):
    room.reserve(Client(), 5000)
    first = set(cuda.registered)
    held = [room.buffer(number) for number in range(2)]
    room.forget()
    room.reserve(Client(), 9_000_000)
    assert len(cuda.registered) == 2
    assert not first & set(cuda.registered)
    room.close()
    room.close()
    assert cuda.registered == {}
    assert cuda.errors == {}
    del held


def test_what_fails_leaves_no_error_behind_in_the_thread_that_trains(cuda, room, caplog):
    """Torch would take it for that of its next kernel."""
    cuda.fails.add("register")
    room.reserve(Client(), 5000)
    assert "could not be registered" in caplog.text
    room.close()
    assert threading.get_ident() not in cuda.errors
    assert len(cuda.errors) == 1


def test_without_a_gpu_nobody_is_asked(room):
    room.reserve(Client(), 5000)
    room.close()
    assert room._registered == []


# --- what is nowhere else ------------------------------------------------------------------------


def test_what_is_nowhere_else_is_not_written_over():
    room, client = SnapshotRoom(config.load({}, environ={}), 1), Client()
    client.alone = 1  # the newest snapshot of the attempt before
    room.reserve(client, 100)
    assert room.take(set())[0] == 0
    assert not room.is_free({0}), "a commit is on its way, and the other is all there is"
    room.ended(0, alone=False)
    assert room.take(set())[0] == 1
    room.ended(1, alone=True)
    assert [room.take(set())[0] for _ in range(2)] == [0, 0], "a void one is taken again there"
    room.ended(0, alone=True)
    assert room.take(set())[0] == 1
    del room._buffers[1]
    assert room.take(set())[0] == 0, "with room for one there is no choice"


# --- each step -----------------------------------------------------------------------------------


def each_step_room(alone=-1, count=4):
    """A room whose keeper has given it so many arenas."""
    settings = config.load({"checkpoint.each_step": True}, environ={})
    room, client = SnapshotRoom(settings, 1), Client(count)
    client.alone = alone
    room.reserve(client, 100)
    return room


def test_each_step_asks_for_two_versions_one_in_the_making_and_one_for_storage(monkeypatch):
    assert wanted(monkeypatch, 4, 2, {"checkpoint.each_step": True}) == 4
    assert wanted(monkeypatch, 1, 1, {"checkpoint.each_step": True}) == 4
    assert wanted(monkeypatch, 1, 1, {"checkpoint.each_step": True, "checkpoint.buffers": 6}) == 6


def test_the_newest_step_that_all_hold_is_not_written_over():
    room = each_step_room()
    steps = KeptSteps(room)
    arenas = []
    for serial in range(1, 10):
        held = 2 if serial > 2 else 0  # of what came later some machine has no copy
        arenas.append(room.take(set())[0])
        steps.whole(serial, arenas[-1], held)
    assert arenas.count(arenas[1]) == 1
    steps.whole(10, room.take(set())[0], 9)
    assert room.is_free({arenas[8]})
    assert arenas[1] in [room.take(set())[0] for _ in range(3)]


def test_what_an_attempt_begins_with_stays_until_a_step_of_it_is_held():
    room = each_step_room(alone=3)
    steps = KeptSteps(room)
    taken = set()
    for serial in range(1, 6):
        number = room.take(set())[0]
        taken.add(number)
        steps.whole(serial, number, 0)
    assert taken == {0, 1}, "2 and 3 hold the newest two of the attempt before"
    steps.whole(6, room.take(set())[0], 5)
    assert room.take(set())[0] in {2, 3}


@pytest.mark.parametrize("count", [2, 3, 4])
def test_after_a_resume_each_step_finds_room_however_late_copies_are(count):
    """Nothing is held before one is kept, and none is kept before one is free."""
    room = each_step_room(alone=count - 1, count=count)
    steps = KeptSteps(room)
    taken = []
    for serial in range(1, 4):
        assert room.is_free({99}), "the flight that asks has no arena yet"
        taken.append(room.take(set())[0])
        steps.whole(serial, taken[-1], 0)
    assert taken[:2] == [0, 1]


def test_a_keeper_that_dies_while_copies_are_late_leaves_room_for_the_next_step():
    room = each_step_room()
    steps = KeptSteps(room)
    arenas = []
    for serial in range(1, 4):
        arenas.append(room.take(set())[0])
        steps.whole(serial, arenas[-1], 1 if serial > 1 else 0)
    client = Client(4)
    client.alone = arenas[-1]
    room.forget()
    room.reserve(client, 100)
    for serial in range(4, 9):
        number = room.take(set())[0]
        assert number != arenas[0], "what all hold stays"
        steps.whole(serial, number, 0)


def test_where_only_what_was_resumed_from_is_left_the_older_of_it_makes_way():
    room = each_step_room(alone=3)
    room.held(0)
    room._resumed, room._alone = [2, 3], 1
    assert not room.is_free({1}), "what is in flight will end"
    assert room.take(set())[0] == 2
    assert not {0, 1, 3} & set(room._free(set()))


def test_memory_that_is_in_use_is_not_reserved_a_second_time():
    """What is made ready after the first step comes behind the first snapshot of each step."""
    room, client = (
        SnapshotRoom(config.load({"checkpoint.each_step": True}, environ={}), 1),
        Client(),
    )
    room.reserve(client, 5000, beyond=100)
    buffers = [room.buffer(number) for number in range(2)]
    room.reserve(client, 5200, beyond=100, is_ahead=True)
    room.reserve(client, 5050, beyond=100)
    assert client.asked == [5100]
    assert [room.buffer(number) for number in range(2)] == buffers
    room.reserve(client, 5101)
    assert client.asked == [5100, 5101]


def test_a_checkpoint_s_end_takes_no_step_s_protection_away():
    room = each_step_room()
    steps = KeptSteps(room)
    kept = room.take(set())[0]
    steps.whole(16, kept, 0)
    checkpoint = room.take(set())[0]
    for alone in (True, False):
        room.ended(checkpoint, alone=alone)
        assert kept not in room._free(set())
    room.ended(kept, alone=False)
    assert kept in room._free(set()), "it is in a tier now"


def test_what_is_written_over_is_no_step_s_any_more():
    """The word of what all hold comes late: by then a checkpoint may lie there."""
    room = each_step_room()
    steps = KeptSteps(room)
    arena = room.take(set())[0]
    steps.whole(16, arena, 0)
    steps.taken(arena)
    other = room.take({arena})[0]
    steps.whole(32, other, 16)
    assert room._held is None


@pytest.mark.parametrize(
    ("end", "word", "copied", "expected"),
    [
        (None, None, False, None),
        (StepKept(), None, False, StepKept()),
        (StepKept(), None, True, None),
        (StepKept(), wire.CopyMade(step=6, serial=6, num=1), True, None),
        (StepKept(), wire.CopyMade(step=7, serial=7, num=1), True, StepKept()),
        (StepKept(), wire.CopyMade(step=8, serial=8, num=1), True, StepKept()),
        (
            StepKept(),
            wire.CopyMade(step=7, serial=7, reason="b: no memory"),
            True,
            StepKept("b: no memory", is_own=True),
        ),
        (
            StepKept(),
            wire.CopyMade(step=7, serial=7),
            True,
            StepKept("no other machine is to hold copies", is_own=True),
        ),
        (StepKept("lost"), None, True, StepKept("lost")),
        (None, wire.CopyMade(step=7, serial=7, num=1), True, None),
    ],
)
def test_how_it_went_with_a_step(end, word, copied, expected):
    steps = KeptSteps(each_step_room())
    if end is not None:
        steps.ended(7, end)
    if word is not None:
        steps.copied(word)
    assert steps.how(7, copied=copied) == expected


def test_whose_fault_it_is_that_a_step_is_late():
    steps = KeptSteps(each_step_room())
    assert steps.late(7) == StepKept("not all machines had their part of it in time", is_own=True)
    steps.ended(7, StepKept())
    assert steps.late(7) == StepKept("its copy has not arrived in time", is_own=True)
