"""Files of other machines in a slower tier: words end the waiting, storage is asked little."""

import pytest
from test_keeper_flight import calls_of
from unit_names import save_of

from outlast.checkpoint.manifest import FORMAT, Manifest, PartEntry, part_file
from outlast.keeper import copies
from outlast.keeper.copies import Late, NoOthers, NotComing, Waiting, WordsHeard, WordsSaid
from outlast.keeper.protocol import Brought

SAVE = save_of(5)
TIER = "shared"
SIZE = 100
LOCAL = 8  # ranks of a machine


class Shelf:
    """A tier of which only sizes are asked."""

    def __init__(self):
        self.files, self.num_asked = {}, 0

    def size(self, path):
        self.num_asked += 1
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path]

    def lay(self, ranks):
        self.files |= {f"{SAVE}/{part_file(rank)}": SIZE for rank in ranks}


class Machines:
    """As rank 0's keeper hears them."""

    def __init__(self, num_ranks):
        self.heard = WordsHeard()
        firsts = range(LOCAL, num_ranks, LOCAL)
        self.living = {first: range(first, first + LOCAL) for first in firsts}
        self.gone = {}

    def say(self, first, state="", **more):
        word = Brought(serial=SAVE.serial, tier=TIER, state=state, **more)
        self.heard.note(range(first, first + LOCAL), word)

    def go(self, first):
        self.gone[first] = self.living.pop(first)

    def arrived(self, save, tier):
        living, gone = list(self.living.values()), list(self.gone.values())
        return self.heard.arrived(tier, save.serial, living, gone)


class Scene:
    def __init__(self, num_ranks=3 * LOCAL, others=None):
        self.now_s, self.shelf = 0.0, Shelf()
        self.others = others or Machines(num_ranks)
        entry = PartEntry(SIZE, ("0" * 32,), 0, 0)
        manifest = Manifest(
            format=FORMAT,
            job="job",
            step=SAVE.step,
            attempt=SAVE.attempt,
            serial=SAVE.serial,
            nonce=SAVE.nonce,
            world_size=num_ranks,
            layout={"world": num_ranks},
            created_t=0.0,
            parts=(entry,) * num_ranks,
        )
        self.waiting = Waiting(
            manifest,
            range(LOCAL),
            tier=TIER,
            storage=self.shelf,
            others=self.others,
            clock=lambda: self.now_s,
        )

    def until(self, end_s=10_000, act=lambda now_s: None):
        """Look until everything is there; how long that was."""
        while not self.waiting.look():
            assert self.now_s < end_s, "it waits for ever"
            self.now_s += self.waiting.pause_s
            act(self.now_s)
        return self.now_s


def test_words_end_the_waiting_and_one_file_of_each_machine_is_looked_for():
    scene = Scene(4096)
    scene.waiting.look()
    assert scene.shelf.num_asked == 0  # nobody has said anything
    scene.shelf.lay(range(LOCAL, 4096))
    for first in list(scene.others.living):
        scene.others.say(first, "there")
    assert scene.until() <= copies.LOOK_S
    assert scene.shelf.num_asked == 4096 / LOCAL - 1


def test_a_machine_that_left_after_its_word_is_not_missed():
    scene = Scene()
    scene.shelf.lay(range(3 * LOCAL))
    for first in (LOCAL, 2 * LOCAL):
        scene.others.say(first, "there")
        scene.others.go(first)
    assert scene.until() <= copies.LOOK_S


def test_a_word_is_not_believed_where_the_file_is_not_there():
    scene = Scene()
    scene.shelf.lay(range(2 * LOCAL))
    for first in (LOCAL, 2 * LOCAL):
        scene.others.say(first, "there")
    with pytest.raises(Late, match=r"rank-00016\.part\.json did not come .* 7 more ranks"):
        scene.until()
    assert scene.now_s == pytest.approx(copies.STALL_S, abs=1)


def test_what_does_not_come_ends_the_waiting_at_once():
    scene = Scene()
    scene.others.say(LOCAL, "never", reason="a newer one came")
    with pytest.raises(NotComing, match="rank 8: a newer one came"):
        scene.until(1)


def test_of_a_keeper_that_is_gone_it_is_known_in_seconds():
    scene = Scene()
    scene.shelf.lay(range(LOCAL, 2 * LOCAL))
    scene.others.say(LOCAL, "there")
    scene.others.go(2 * LOCAL)
    with pytest.raises(Late, match="gone") as found:
        scene.until()
    assert scene.now_s <= copies.GONE_S + 1
    assert not found.value.is_final  # it may be started again


def test_files_of_a_keeper_that_is_gone_are_looked_for():
    scene = Scene()
    scene.others.go(LOCAL)
    scene.others.say(2 * LOCAL, "there")
    scene.shelf.lay(range(2 * LOCAL, 3 * LOCAL))

    def act(now_s):
        if now_s > 3:  # its successor has brought them
            scene.shelf.lay(range(LOCAL, 2 * LOCAL))

    assert 3 < scene.until(act=act) < 5


def test_who_gets_on_is_waited_for_and_who_does_not_for_a_minute():
    scene = Scene()
    scene.shelf.lay(range(LOCAL, 2 * LOCAL))
    scene.others.say(LOCAL, "there")

    def act(now_s):
        if now_s < 1000:
            scene.others.say(2 * LOCAL, done=int(now_s))

    with pytest.raises(Late, match="nothing moved for 60 s") as found:
        scene.until(act=act)
    assert 1000 + copies.STALL_S - 2 < scene.now_s < 1000 + copies.STALL_S + 2
    assert found.value.is_final


def test_where_nobody_can_be_asked_storage_is_a_little_at_a_time():
    scene = Scene(4096, others=NoOthers())
    before = 0

    def act(now_s):
        nonlocal before
        assert scene.shelf.num_asked - before <= copies.LOOKS
        before = scene.shelf.num_asked
        scene.shelf.lay(range(int(now_s) * 10))  # ten ranks a second

    assert scene.until(act=act) < 4096 / 10 + 2 * 4096 / copies.LOOKS
    slow = Scene(4096, others=NoOthers())
    with pytest.raises(Late, match="4087 more ranks: nothing moved for 60 s") as found:
        slow.until()
    assert not found.value.is_final  # there may be a keeper that cannot say anything


def test_living_keepers_without_a_word_are_looked_for_when_nothing_moves():
    scene = Scene()
    scene.shelf.lay(range(3 * LOCAL))  # they were started again after they had brought them
    assert copies.ASK_STORAGE_S <= scene.until() < copies.STALL_S


def test_a_look_is_linear_in_the_ranks():
    def calls(num_ranks):
        scene = Scene(num_ranks)
        for first in list(scene.others.living):
            scene.others.say(first)
        return calls_of(scene.waiting.look) / num_ranks

    assert calls(8000) < 1.1 * calls(1000)


def test_the_last_words_are_kept_and_no_more():
    said, heard = WordsSaid(), WordsHeard()
    for serial in range(100):
        word = Brought(serial=serial, tier=TIER, state="there")
        said.note(1, word)
        heard.note(range(8, 16), word)
    said.note(2, Brought(serial=0, tier=TIER))
    assert [word.serial for word in said.of(1)] == list(range(85, 100))
    assert [word.serial for word in said.of(2)] == [0]
    assert len(heard._words) == len(heard._num_heard) == copies.MAX_KNOWN
    assert not heard.arrived(TIER, 0, [], []).there
    assert list(heard.arrived(TIER, 99, [], []).there) == [range(8, 16)]
