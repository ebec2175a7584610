"""What keepers say to each other about a save stays small, and nobody waits for a lost rank 0."""

import queue

import msgspec
import pytest
from keeper_fakes import HEAD_BYTES, FakeKeeper, hello

from outlast.checkpoint.manifest import Chunk, PartEntry, TensorEntry, shard_file
from outlast.keeper import protocol
from outlast.keeper import shared_saves as followers
from outlast.keeper.copies import REASON_MAX
from outlast.keeper.flight import RankOutcome
from outlast.keeper.shared_saves import LEADER_GONE, SaveFollower
from outlast.keeper.wire import Hello
from outlast.storage import Directory
from part_contents import contents_of

LIMIT_S = 30
TRIES = 3


class Hears:
    """An attempt that is past or not, and what has become of its saves."""

    def __init__(self, *, is_past):
        self.past, self.words = is_past, []

    def is_past(self, attempt):
        return self.past

    def left_alone(self, attempt, words):
        self.words.append((attempt, words))

    def unanswered(self, attempt):
        return []


@pytest.mark.parametrize(
    ("error", "is_past", "words"),
    [
        (ConnectionRefusedError, True, [(3, LEADER_GONE)]),
        (ConnectionRefusedError, False, []),  # it may be started again, and the session with it
        (TimeoutError, True, []),  # it may be cut off, and decide all the same
    ],
)
def test_what_has_ended_with_its_attempt_is_left_alone_at_once(monkeypatch, error, is_past, words):
    tries = queue.SimpleQueue()

    def connect(*args, **kwargs):
        tries.put(args)
        raise error

    monkeypatch.setattr(followers, "connect", connect)
    monkeypatch.setattr(followers, "PAUSE_S", 0.001)
    monkeypatch.setattr(followers, "PAUSE_MAX_S", 0.001)
    hears = Hears(is_past=is_past)
    hello = Hello(job="j", attempt=3, rank=1, world_size=2, first_local=1, num_local=1)
    follower = SaveFollower(("10.0.0.1", 1), lambda: b"", None, hears, hello=hello, said=None)
    for _ in range(TRIES):
        tries.get(timeout=LIMIT_S)
    follower.close()
    assert hears.words[:1] == words


# --- what machines say to each other about a save: the same few bytes, however large the job is ---

WORD_BYTES_MAX = 1000  # a rank's report, with what comes with it
ENTRY_BYTES_MAX = 200  # of a rank in the manifest: 4,096 ranks in 1 MB
SIZE = 4000


def encoded(*messages):
    return sum(len(msgspec.json.encode(one)) for one in messages)


def large(worker, num_tensors, num_groups):
    """Give a worker's layout so many tensors, held by so many groups of ranks; their digests."""
    share = SIZE // num_tensors
    tensors, groups = {}, {}
    for number in range(num_tensors):
        name = f"model.layers.{number}.attention.weight"
        start = HEAD_BYTES + number * share
        box = {"offsets": (0,), "shape": (share,)}
        chunk = Chunk(**box, file=shard_file(worker.rank), start=start, end=start + share)
        tensors[name] = TensorEntry(dtype="U8", shape=(share,), chunks=(chunk,))
        groups[f"{name}[0]"] = f"group-{number % num_groups}"
    contents = contents_of(tensors)
    worker.layout = msgspec.structs.replace(worker.layout, contents=contents, groups=groups)
    return dict.fromkeys(groups, "0123456789abcdef" * 2)


@pytest.fixture(name="keeper_of")
def _keeper_of(monkeypatch, tmp_path):
    def make(rank, num_ranks, num_tensors):
        place = Directory(tmp_path / f"{rank}-{num_ranks}-{num_tensors}")
        keeper = FakeKeeper(monkeypatch, {"local": place})
        side = keeper.meet([rank])
        worker = keeper.worker(rank, num_ranks, size=SIZE)
        digests = large(worker, num_tensors, num_groups=3)
        worker.begin(5, 1)
        worker.fill(5, 1)
        worker.complete(5, 1, digests)
        keeper.run()
        return keeper, side

    return make


def test_a_rank_reports_the_same_few_bytes_whatever_it_holds(keeper_of):
    sizes = set()
    for num_ranks, num_tensors in ((2, 4), (2, 2000), (50_000, 2000)):
        _, side = keeper_of(1, num_ranks, num_tensors)
        ((step, serial, rank, part),) = side.reports
        assert not part.error
        assert len(part.replicas) == 3
        sizes.add(encoded(part, protocol.PartReport(step=step, serial=serial, rank=rank)))
    assert max(sizes) <= WORD_BYTES_MAX
    assert max(sizes) - min(sizes) < 20  # numbers of more digits


def test_the_manifest_has_a_few_bytes_for_each_rank_and_none_for_a_tensor(keeper_of):
    sizes = {}
    for num_ranks, num_tensors in ((100, 4), (100, 2000), (3000, 2000)):
        keeper, side = keeper_of(0, num_ranks, num_tensors)
        part = RankOutcome(
            entry=PartEntry(10**6, ("0123456789abcdef" * 2,), 0, 10**12),
            structure="0123456789abcdef" * 2,
            num_files=3,
        )
        own = next(iter(keeper.saves.table.open.values())).parts[0]
        part = msgspec.structs.replace(part, replicas=own.replicas)
        for rank in range(1, num_ranks):
            report = protocol.PartReport(step=5, serial=1, rank=rank)
            keeper.saves.reported(hello(1, num_ranks), report, part, None)
        keeper.run()
        ((ended, manifest, _),) = side.told
        assert ended.error == ""
        sizes[num_ranks, num_tensors] = len(manifest)
    assert abs(sizes[100, 2000] - sizes[100, 4]) < 20
    per_rank = (sizes[3000, 2000] - sizes[100, 2000]) / 2900
    assert per_rank <= ENTRY_BYTES_MAX


def test_an_outcome_names_the_manifest_and_does_not_carry_it():
    outcome = protocol.SaveOutcome(step=2**40, serial=2**40, manifest="0" * 32, size=2**40)
    assert encoded(outcome) <= WORD_BYTES_MAX
    word = protocol.Brought(serial=2**40, tier="x" * 64, done=2**60, state="never", reason="")
    assert encoded(word) + REASON_MAX <= 2 * WORD_BYTES_MAX
