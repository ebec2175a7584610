"""The model of snapshots in several machines' memory: who holds what, and what can be gone on from.

What must hold, at every message, whoever pauses, is cut off or ends there:

- what a machine keeps for another is a snapshot in full, byte by byte as it was committed, or
  nothing; while its owner leaves copies there, an older one never takes a newer one's place: not by
  a message that comes late, nor of an attempt that has ended;
- what a machine believes that another keeps of its newest, that one keeps, or something newer;
- a step of which all members believe that their holders keep it can be gone on from after any
  ``replicas`` of the machines went, until the second one after it is begun;
- a resume takes the newest step of which everything is in the memory of those who reach each other.
"""

import collections
import contextlib
import copy
import itertools
import json
import logging
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from keeper_fakes import HEAD_BYTES, JOB
from keeper_network import Network, Strand
from unit_fakes import Hub
from unit_saver import small_blocks

from outlast.checkpoint.manifest import (
    FORMAT,
    FULL,
    MANIFEST,
    Chunk,
    Place,
    SaveName,
    TensorEntry,
    encode,
    encode_part,
    hashed,
    make_part,
    named,
    part_entry,
    part_file,
    shard_file,
    state_file,
)
from outlast.errors import OutlastError, ResumeRefused, StorageError
from outlast.keeper import peers, replicas, wire
from outlast.keeper.conclude import merge
from outlast.keeper.flight import RankOutcome
from outlast.keeper.memory import KeptSnapshot, MemoryTier
from outlast.training import resume
from part_contents import contents_of

SIZE = 100
BLOCK_BYTES = 64
BUFFERS = 2
MACHINES_MAX = 4
which = st.integers(0, MACHINES_MAX - 1)


def age(save):
    """What is newer of one machine's: of a later attempt, then of a later step (said anew here)."""
    return save.attempt, save.step, save.serial


def snapshot(save, world):
    """All files of a save of so many ranks, its manifest among them, as they are committed."""
    files, parts = {}, {}
    for rank in range(world):
        word = f"{save} rank {rank}; ".encode()
        files[shard_file(rank)] = bytes(HEAD_BYTES) + (word * SIZE)[:SIZE]
        state = {"format": FORMAT, "step": save.step, "rank": rank, "own": []}
        files[state_file(rank)] = json.dumps({**state, "state": {"of": str(save)}}).encode()
        chunk = Chunk(
            offsets=(0,),
            shape=(SIZE,),
            file=shard_file(rank),
            start=HEAD_BYTES,
            end=HEAD_BYTES + SIZE,
        )
        tensors = {f"x@rank-{rank:05d}": TensorEntry(dtype="U8", shape=(SIZE,), chunks=(chunk,))}
        its = {name: hashed(files[name]) for name in (shard_file(rank), state_file(rank))}
        contents = contents_of(tensors)
        data = encode_part(make_part(save.step, rank, its, contents))
        files[part_file(rank)] = data
        entry = part_entry(data, 0, its.values())
        parts[rank] = RankOutcome(entry=entry, structure=contents.structure, num_files=3)
    said = {"job": JOB, "save": save, "kind": FULL, "exact": True, "created_t": 0.0}
    files[MANIFEST] = encode(merge(parts, **said))
    return files


class TierAsPlace:
    """Other machines' memory as a worker reads it through its keeper."""

    def __init__(self, tier):
        self._tier = tier

    def __getattr__(self, name):
        return getattr(self._tier, name)

    def describe(self, name=""):
        return f"other machines' memory {name}".strip()

    def open(self, name):
        size = self._tier.size(name)

        def read_into(buffer, offset):
            return self._tier.read_into(name, buffer, offset)

        def read_copy(number, buffer, offset):
            return self._tier.read_into(name, buffer, offset, copy=number)

        return SimpleNamespace(
            size=size, read_into=read_into, read_copy=read_copy, close=lambda: None
        )


class Replicas(RuleBasedStateMachine):
    """Three or four machines with one rank each, one or two copies of everything."""

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        small_blocks(self.patch, BLOCK_BYTES)
        for room in (replicas, peers):
            self.patch.setattr(room, "BLOCK_BYTES", BLOCK_BYTES)
        self.patch.setattr(logging.root.manager, "disable", logging.CRITICAL)
        self.truth = {}  # save → file → bytes
        self.began = []  # saves, in the order in which they were begun
        self.attempt = self.step = self.serial = self.num = 0
        self.members = ()  # nodes of the attempt, by rank
        self.lost = set()  # of them
        self.held = (
            set()
        )  # saves of which all members believed, at once, that all holders have them
        self.newest = {}  # (holder, owner) → age of what lies there
        self.flipped = set()  # (node, arena)

    @initialize(
        count=st.integers(3, MACHINES_MAX), num_replicas=st.integers(1, 2), each_step=st.booleans()
    )
    def begins(self, count, num_replicas, each_step):
        self.network = Network(self.patch, num_replicas, each_step)
        for _ in range(count):
            self.comes()
        self.attempt_forms()
        self.commits(0)
        self.all_move(12)

    def teardown(self):
        if hasattr(self, "network"):
            for machine in self.machines:
                machine.ends()
        self.patch.undo()

    @property
    def machines(self):
        return list(self.network.machines.values())

    def picked(self, number):
        return self.machines[number % len(self.machines)]

    # --- machines ---------------------------------------------------------------------------------

    @precondition(lambda self: len(self.machines) < MACHINES_MAX)
    @rule()
    def comes(self):
        self.num += 1
        self.network.comes(self.num)

    @precondition(lambda self: len(self.machines) > 1)
    @rule(number=which)
    def goes(self, number):
        machine = self.picked(number)
        del self.network.machines[machine.node]
        machine.ends()
        self.lost.add(machine.node)

    @rule(number=which)
    def pauses_or_goes_on(self, number):
        machine = self.picked(number)
        machine.is_paused = not machine.is_paused

    @rule(one=which, other=which)
    def cut_or_mended(self, one, other):
        one, other = self.picked(one), self.picked(other)
        if one is not other:
            self.network.cuts ^= {frozenset((one.node, other.node))}

    @rule(number=which, count=st.integers(1, 12))
    def moves(self, number, count):
        """So many messages of a machine's."""
        machine = self.picked(number)
        if not machine.is_paused:
            for _ in range(count):
                machine.moves()
                self.look()

    @rule(count=st.integers(1, 25))
    def all_move(self, count):
        for _ in range(count):
            for machine in self.machines:
                if not machine.is_paused:
                    machine.moves()
                    self.look()
            self.what_is_held_can_be_gone_on_from()

    # --- the job ----------------------------------------------------------------------------------

    @rule()
    def attempt_forms(self):
        """Of all who are awake: they go on from the newest step that is whole among them."""
        awake = [machine for machine in self.machines if not machine.is_paused]
        if not awake:
            return
        self.attempt += 1
        members = tuple(machine.member for machine in awake)
        for machine in awake:
            machine.peers.tell(wire.Members(attempt=self.attempt, members=members))
        self.step = self.resumes(awake[0])
        self.members, self.lost = tuple(machine.node for machine in awake), set()

    def resumes(self, first):
        """What the first of them finds, and whether that is right; its step."""
        there = [one for one in self.machines if one is first or self.is_asked(first, one)]
        wanted = max((save for save in self.truth if self.is_whole(save, there)), default=None)
        books = first.books
        memory = MemoryTier(books.arenas, books.everything())
        places = [Place("memory", memory, in_memory=True)]
        if first.peers.num_others:
            places.append(Place("peer", TierAsPlace(first.peers.tier), in_memory=True))
        self.network.asks = first
        found, refused = None, ""
        try:
            found = resume.find(places, Hub(1).link(0), (), lambda _: None)
        except (ResumeRefused, StorageError) as error:
            refused = str(error)
        finally:
            self.network.asks = None
        if found is None:
            assert wanted is None, f"{wanted} is whole, and was not taken: {refused}"
            return 0
        taken = None if found.loaded is None else found.loaded.save
        assert taken == wanted, f"{taken} was taken, and {wanted} is whole"
        assert taken is None or found.loaded.data == {"of": str(taken)}
        return 0 if taken is None else taken.step

    def is_asked(self, first, other):
        return not other.is_paused and self.network.reach(first, other)

    def is_whole(self, save, machines):
        """Whether each file of a save lies rightly with one of these machines."""
        have = [self.content(machine, save) for machine in machines]
        return all(
            any(files.get(name) == right for files in have)
            for name, right in self.truth[save].items()
        )

    @staticmethod
    def content(machine, save):
        """What a machine's memory has of a save."""
        books, files = machine.books, {}
        kept = [books.kept.get(str(save))]
        copies = [*books.copies.values(), *books.before.values()]
        kept += [one.kept for one in copies if one.save == str(save)]
        for one in filter(None, kept):
            files |= one.small
            for name, (arena, size) in one.files.items():
                files[name] = bytes(books.arenas[arena].view[:size])
        return files

    @rule(more=st.integers(0, 2))
    def commits(self, more):
        """All members that are there save; one that is paused is told when it goes on, or never."""
        here = [node for node in self.members if node in self.network.machines]
        if len(here) < len(self.members):
            return  # a member is lost: nothing is committed before another attempt
        if any(self.network.machines[node].is_paused for node in here):
            return
        self.step += 1 + more
        self.serial += 1
        save = SaveName(self.step, self.attempt, self.serial, f"{self.attempt:08x}")
        files = self.truth[save] = snapshot(save, len(self.members))
        self.began.append(save)
        for rank, node in enumerate(self.members):
            machine = self.network.machines[node]
            self.keeps(machine, rank, save, files)
        for node in self.members:
            self.network.machines[node].peers.committed(save)

    def keeps(self, machine, rank, save, files):
        """As a commit does: the snapshot lies in the arena that was written longest ago."""
        books = machine.books
        arenas = books.of_rank(rank)
        data = files[shard_file(rank)]
        if len(arenas) < BUFFERS:
            arena = books.make(rank, len(data))
        else:
            arena = min(arenas, key=books.newest_in)
        books.overwrite(arena)
        self.flipped.discard((machine.node, arena))
        books.arenas[arena].view[: len(data)] = data
        small = {name: files[name] for name in (state_file(rank), part_file(rank), MANIFEST)}
        kept = KeptSnapshot(
            files={shard_file(rank): (arena, len(data))}, small=small, attempt=save.attempt
        )
        books.kept[str(save)] = kept

    # --- trouble ----------------------------------------------------------------------------------

    @rule(number=which, at=st.integers(0, SIZE - 1))
    def bit_flips(self, number, at):
        """In the memory of a machine's own newest snapshot."""
        machine = self.picked(number)
        kept = machine.books.kept
        if kept:
            newest = max(kept, key=lambda save: age(named(save)))
            for arena, _ in kept[newest].files.values():
                machine.books.arenas[arena].view[at] ^= 1
                self.flipped.add((machine.node, arena))

    @rule(number=which, to=which)
    def an_older_copy_comes_late(self, number, to):
        """What a machine began to send before its newest, on a connection of its own."""
        machine, holder = self.picked(number), self.picked(to)
        kept = sorted(machine.books.kept, key=lambda save: age(named(save)))
        if len(kept) < BUFFERS or machine is holder:
            return
        save, old = named(kept[0]), machine.books.kept[kept[0]]
        late = copy.copy(machine.peers._replicator)
        late._channels, late._have = {}, {}

        def send():
            with contextlib.suppress(OSError, OutlastError, replicas.Gone):
                late._send(holder.member, save, old)

        machine.strands.append(Strand(self.network, machine, send))
        self.all_move(12)

    @rule(number=st.integers(0, 20), how=st.sampled_from(["alter", "repeat", "drop"]))
    def somebody_meddles(self, number, how):
        """On the wire, without the key."""
        under_way = [end for end in self.network.ends if end.came and not end.is_closed]
        if how == "alter":
            for end in under_way:
                end.came = collections.deque(one.replace(b'"send"', b'"have"') for one in end.came)
        elif under_way:
            came = under_way[number % len(under_way)].came
            came.append(came[0]) if how == "repeat" else came.popleft()

    # --- what must hold ---------------------------------------------------------------------------

    def look(self):
        assert not self.network.failures, self.network.failures[0]
        for machine in self.machines:
            for owner, one in machine.books.copies.items():
                save = named(one.save)
                self.check_copy(machine, owner, save, one)
                before = self.newest.get((machine.node, owner), (-1,))
                assert age(save) >= before, f"{one.save} took the place of {before}"
                self.newest[machine.node, owner] = age(save)
            for owner, one in machine.books.before.items():
                self.check_copy(machine, owner, named(one.save), one)
        for owner in self.machines:
            if owner.is_paused or owner.node not in self.members:
                continue
            newest = owner.peers._newest()  # of what is older it sends something newer soon
            for node, data in owner.believes.items():
                if newest is not None and data == newest[1].manifest:
                    self.check_belief(owner, node, data)

    def check_copy(self, machine, owner, save, there):
        right = self.truth[save]
        place = f"{machine.node}'s copy of {owner}'s {save}"
        for name, data in there.kept.small.items():
            assert data == right[name], f"{place}: {name}"
        for name, (arena, size) in there.kept.files.items():
            assert bytes(machine.books.arenas[arena].view[:size]) == right[name], f"{place}: {name}"
        assert any(name.endswith(".safetensors") for name in there.kept.files), f"{place} is a part"

    def check_belief(self, owner, node, data):
        """A machine that is there keeps what is believed, or something newer."""
        machine = self.network.machines.get(node)
        if machine is None or node not in self.members:
            return
        there = machine.books.copies.get(owner.node)
        believed = next(save for save, files in self.truth.items() if files[MANIFEST] == data)
        assert there is not None, f"{node} is believed to keep {believed} of {owner.node}"
        assert age(named(there.save)) >= age(believed), f"{node} has {there.save}, not {believed}"

    @invariant()
    def holds(self):
        if hasattr(self, "network"):
            self.look()
            self.what_is_held_can_be_gone_on_from()

    def what_is_held_can_be_gone_on_from(self):
        here = [self.network.machines[n] for n in self.members if n in self.network.machines]
        if not self.began or self.flipped:
            return
        newest = self.began[-1]
        if len(here) == len(self.members) and newest.attempt == self.attempt:
            data = self.truth[newest][MANIFEST]
            chosen = [(one, one.peers._replicator._holders) for one in here]
            if all(one.believes.get(h.node) == data for one, hs in chosen for h in hs):
                self.held.add(newest)
        most = min(self.network.replicas, len(self.members) - 1) - len(self.lost)
        for save in self.held & set(self.began[-BUFFERS:]) if most >= 0 else ():
            if save.attempt != self.attempt:
                continue
            newer = [one for one in self.truth if age(one) >= age(save)]
            for gone in itertools.combinations(here, most):
                left = [one for one in self.machines if one not in gone]
                is_held = any(self.is_whole(one, left) for one in newer)
                assert is_held, f"{save} is lost with {[one.node for one in gone]}"
