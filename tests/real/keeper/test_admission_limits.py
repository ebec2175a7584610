"""Little memory, set by a control group: fewer buffers, then none, in words; never the OOM killer.

The keeper is started inside the group; what is asked for is never touched beyond what fits.
"""

import contextlib
import os
from pathlib import Path

import pytest
from floor import until
from lean import HEAD_BYTES, Place, shard

from outlast.checkpoint.manifest import BLOCK_BYTES
from outlast.keeper import wire

pytestmark = pytest.mark.alone
GROUPS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.oom_control"),
    (Path("/sys/fs/cgroup"), "memory.max", "memory.events"),
)
MIB = 1 << 20
LIMIT = 1400 * MIB  # of which 512 MiB are training's


@pytest.fixture(name="group")
def _group():
    """A new control group with a memory limit, or a skipped test."""
    for top, limit, events in GROUPS:
        group = top / f"outlast-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            group.mkdir()
            try:
                (group / limit).write_text(str(LIMIT))
            except OSError:
                group.rmdir()
                continue
            yield group, events
            until(lambda group=group: not (group / "cgroup.procs").read_text(), "it is empty")
            group.rmdir()
            return
    pytest.skip("no control group with a memory limit can be made here")


@pytest.fixture(name="place")
def _place(floor, tmp_path, group):
    place = Place(floor, tmp_path / "place")
    process = place.keeper()
    (group[0] / "cgroup.procs").write_text(str(process.pid))
    yield place
    process.kill()
    process.wait()
    events = (group[0] / group[1]).read_text().splitlines()
    assert [line for line in events if line.startswith("oom_kill ")] == ["oom_kill 0"]


@pytest.mark.parametrize(
    ("size_mib", "wanted", "num_arenas", "words"),
    [
        (100, 2, 2, ""),
        (500, 2, 1, "1 buffer in place of 2"),
        (1200, None, 1, "written directly"),
        (50_000, 2, 1, "written directly"),  # a huge state: nothing near it is touched
    ],
)
def test_what_is_asked_for_is_cut_to_what_fits(place, size_mib, wanted, num_arenas, words):
    worker = place.worker(size=0)
    answer, arenas = worker.client.reserve(size_mib * MIB, wanted, 1)
    assert len(arenas) == num_arenas
    assert words in answer.words
    assert bool(answer.words) == bool(words)
    assert bool(answer.ring_bytes) == ("directly" in words)
    for arena in arenas:  # what was given can be written in full
        for start in range(0, answer.ring_bytes or size_mib * MIB, 4096):
            arena.view[start] = 1
    worker.close()


def test_a_snapshot_larger_than_memory_goes_through_block_by_block(place, rng):
    size = 10 * BLOCK_BYTES + rng.randrange(1, BLOCK_BYTES)
    worker = place.worker(size=size)
    worker.close()
    worker = place.worker(size=size)  # the layout of so many bytes, but too little memory for it
    answer, (ring,) = worker.client.reserve(20_000 * MIB, None, 1)
    assert answer.ring_bytes == 4 * BLOCK_BYTES
    message = wire.BeginSave(
        step=3,
        serial=1,
        layout=1,
        arena=answer.arenas[0],
        tiers=None,
        kind="full",
        exact=True,
        started_s=0.0,
    )
    worker.client.send(message)
    data = shard(3, size)
    for block in range(-(-len(data) // BLOCK_BYTES)):
        before = block - 4
        until(lambda before=before: before < 0 or before in worker.written, "room in the ring")
        part = data[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        start = block % 4 * BLOCK_BYTES
        ring.view[start : start + len(part)] = part
        worker.client.send(wire.BlocksReady(step=3, serial=1, blocks=(block,)))
    worker.complete(3, 1)
    assert worker.wait(1) == ""
    assert place.committed() == [3]
    assert len(data) == size + HEAD_BYTES
    assert worker.client.recall().children() == []  # a ring holds no snapshot
    worker.close()
