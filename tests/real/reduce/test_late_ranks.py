"""A worker that is late: others make its shards, with the same bits, or they are left out.

Slowness is a sleep in the script's own loop over the shards, so that it does not depend on what
else the machine does: of the others' too, so that theirs take mostly as long as one another. What
is decided is waited for, and then the script is told to end.
"""

import itertools
import json

import pytest
from floor import SCRIPTS, TRAIN, Floor, Job, free_port, until

SCRIPT = SCRIPTS / "same_bits.py"
WORLD, SHARDS, SAMPLES = 3, 12, 24
KNOWN = 120  # steps of the undisturbed run, at first
MOST = 2000
SLOW = ("--shard-pause", 0.01, "--slow", 1, "--slow-pause", 0.04)


def command(job, steps=MOST):
    return (SCRIPT, job.records, steps, "--shards", SHARDS, "--hashes")


class Undisturbed:
    """What one worker alone comes to, as many steps of it as anybody asks for."""

    def __init__(self, directories):
        self._directories = directories
        self._known = {}

    def until(self, last):
        """Step → what was recorded of it, up to ``last`` at least."""
        if last not in self._known:
            steps = max(KNOWN, 2 * len(self._known), last)
            job = Job(self._directories.mktemp("undisturbed") / "job", 1)
            floor = Floor(self._directories.mktemp("floor"))
            try:
                more = ("--every", "5000 steps")
                ended(floor.ranks(1, *command(job, steps), *more, env=job.env))
            finally:
                floor.close()
            self._known = {line["step"]: line for line in job.lines()}
        return self._known


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return Undisturbed(tmp_path_factory)


class LateJob(Job):
    """One with a worker that is slow as long as a file is there."""

    def __init__(self, directory):
        super().__init__(directory, WORLD)
        self.slow, self.end = directory.with_name("slow"), directory.with_name("end")
        self.slow.touch()

    def start(self, floor, answer, *more, world=WORLD):
        env = {**self.env, "OUTLAST_WORKERS_LATE": answer}
        files = ("--slow-while", self.slow, "--end", self.end)
        return floor.ranks(world, *command(self), *SLOW, *files, *more, env=env)

    def wait_for(self, name, field, ranks):
        """The first event in which rank 1 is in ``field``."""
        found = lambda: [one for one in self.events(name) if field(one)]  # noqa: E731
        return until(found, name, running=ranks[0])[0]

    def stop(self, ranks):
        self.end.write_text(str(self.begun() + 2))
        ended(ranks)

    def by_rank(self):
        """Step → rank → what it recorded of the step, in the attempt that made it last."""
        found = {}
        for rank in range(WORLD):
            for line in self.lines(rank):
                found.setdefault(line["step"], {})[rank] = line
        return found


def ended(ranks):
    assert [rank.wait() for rank in ranks] == [0] * len(ranks), "".join(one.text for one in ranks)


def made(of, world=WORLD):
    return [of[rank]["ids"] for rank in range(world)]


def check(job, undisturbed, world=WORLD):
    """Each step's samples, losses and weights are those of the undisturbed run, on all ranks."""
    steps = job.by_rank()
    assert list(steps) == list(range(1, len(steps) + 1))
    alone = undisturbed.until(len(steps))
    for step, of in steps.items():
        expected = alone[step]
        assert [one for rank in sorted(of) for one in of[rank]["ids"]] == expected["ids"], step
        for name in ("loss", "hash"):
            assert {line[name] for line in of.values()} == {expected[name]}, (step, name)
    assert job.audit()["proved"]


def test_a_late_workers_shards_are_made_by_others_and_come_back(floor, tmp_path, undisturbed):
    job = LateJob(tmp_path / "job")
    ranks = job.start(floor, "move", "--num-workers", 1)
    away = job.wait_for("late_moved", lambda one: 1 in one["late"], ranks)
    job.slow.unlink()
    back = job.wait_for("late_moved", lambda one: 1 in one["back"], ranks)
    until(lambda: job.begun() >= back["from_step"], "the shares to be back", running=ranks[0])
    job.stop(ranks)
    check(job, undisturbed)
    assert sum(away["counts"]) == SHARDS
    assert away["counts"][1] < SHARDS // WORLD
    # Each change holds from the step on that was said, and not before: more was loaded ahead.
    said = {one["from_step"]: one["counts"] for one in job.events("late_moved")}
    assert all(one["from_step"] > one["step"] + 1 for one in job.events("late_moved"))
    counts = [SHARDS // WORLD] * WORLD
    for step, of in sorted(job.by_rank().items()):
        counts = said.get(step, counts)
        assert [len(ids) for ids in made(of)] == [SAMPLES // SHARDS * one for one in counts], step
    words = f"rank 1 takes {away['factors'][away['late'].index(1)]:.1f} times as long as the others"
    assert words in ranks[0].text
    assert "rank 1 is as quick as the others again" in ranks[0].text


def test_what_a_late_worker_does_not_make_is_in_no_sum_and_is_told(floor, tmp_path, undisturbed):
    job = LateJob(tmp_path / "job")
    ranks = job.start(floor, "drop")
    job.wait_for("late_dropped", lambda one: "1" in one["samples"], ranks)
    job.stop(ranks)
    missing = [0] * WORLD
    steps = job.by_rank()
    alone = undisturbed.until(max(steps))
    for step, of in steps.items():
        part = SAMPLES // WORLD
        for rank, ids in enumerate(made(of)):
            due = alone[step]["ids"][rank * part : (rank + 1) * part]
            assert ids == due[: len(ids)]  # what is missing are its last ones, never all of them
            assert ids
            missing[rank] += len(due) - len(ids)
        assert len({line["hash"] for line in of.values()}) == 1
    assert missing[1] > 0
    verdict = job.audit()
    assert verdict["proved"]
    assert verdict["num_dropped"] == sum(missing)
    told = [one["samples"] for one in job.events("late_dropped")]
    for rank in range(WORLD):
        assert sum(one.get(str(rank), 0) for one in told) == missing[rank]
    assert "in no sum: rank" in ranks[0].text
    last = job.final()["step"]
    shown = floor.outlast("checkpoints", "show", "--ids", f"1-{last}", "--json", job.directory)
    assert shown.wait() == 0, shown.text
    listed = {int(step): ids for step, ids in json.loads(shown.out)["ids"].items()}
    assert listed == {step: [*itertools.chain(*made(of))] for step, of in job.by_rank().items()}


def test_shares_that_had_moved_make_no_difference_to_a_resume(floor, tmp_path, undisturbed):
    job = LateJob(tmp_path / "job")
    first = job.start(floor, "move")
    away = job.wait_for("late_moved", lambda one: 1 in one["late"], first)
    until(lambda: job.newest() >= away["from_step"], "a checkpoint behind it", running=first[0])
    for one in first:
        one.kill()
    again = job.start(floor, "move", world=2)
    seen = job.begun()
    until(lambda: job.begun() > seen, "steps behind the resume", running=again[0])
    job.stop(again)
    assert job.final()["resumed"]
    assert job.events("resumed")[-1]["step"] >= away["from_step"]
    last = max(line["step"] for rank in range(WORLD) for line in job.lines(rank))
    expected = {step: line["hash"] for step, line in undisturbed.until(last).items()}
    for rank in range(WORLD):
        assert all(line["hash"] == expected[line["step"]] for line in job.lines(rank))
    assert job.audit()["proved"]


def test_workers_that_do_not_all_take_part_wait_and_say_who(floor, tmp_path, undisturbed):
    job = Job(tmp_path / "job", 2)
    place = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": free_port(), **job.env}
    ranks = [
        floor.warm(
            *(*command(job, 8), *SLOW),
            env={**place, "RANK": rank, "LOCAL_RANK": rank, "OUTLAST_WORKERS_LATE": late},
        )
        for rank, late in enumerate(["drop", "wait"])
    ]
    ended(ranks)
    words = "late workers are waited for: rank 1 has another loader or other settings"
    assert words in ranks[0].err
    for rank in range(2):
        assert [line["hash"] for line in job.lines(rank)] == [
            undisturbed.until(8)[step]["hash"] for step in range(1, 9)
        ]


def test_without_our_sums_one_line_says_what_it_takes(floor, tmp_path):
    job = Job(tmp_path / "job", 2)
    ranks = floor.ranks(2, TRAIN, job.records, 4, env={**job.env, "OUTLAST_WORKERS_LATE": "move"})
    ended(ranks)
    words = 'workers.late is "move", and late workers are waited for: this takes outlast.SameBits'
    assert ranks[0].err.count(words) == 1
    assert words not in ranks[1].err
