"""Who is killed when: a worker in and after its copy, a keeper, an agent, all of them."""

import contextlib
import os
import signal

import pytest
from floor import Job, until
from keeper_floor import SCRIPT, KeeperJob, keeper, keepers, memfds, stop

STEPS = 30
EVERY = 3
AT = 6  # the save that something happens to


def start(floor, job, *options, hold=0, steps=STEPS):
    env = {**job.env, **({"HOLD_AT": hold} if hold else {})}
    return floor.warm(SCRIPT, job.records, steps, *options, env=env)


def run(floor, job, *options, ranks=1, hold=0, steps=STEPS, **more):
    """Under ``outlast run``; workers are fresh interpreters, so without torch.optim."""
    env = {**job.env, **({"HOLD_AT": hold} if hold else {})}
    return floor.outlast(
        *("run", "--nproc-per-node", ranks, "--dir", job.directory),
        *(SCRIPT, job.records, steps, "--light", *options),
        env=env,
        **more,
    )


@pytest.fixture(scope="module", name="calm")
def _calm(tmp_path_factory):
    """Hashes of undisturbed runs, made when first asked for."""
    from floor import TRAIN, Floor

    place = tmp_path_factory.mktemp("calm")
    known = {}

    def hashes(num_ranks, *options, steps=STEPS):
        key = (num_ranks, options, steps)
        if key not in known:
            floor, job = Floor(place), Job(place / f"calm-{len(known)}", num_ranks)
            arguments = (TRAIN, job.records, steps, *options)
            ranks = floor.ranks(num_ranks, *arguments, env=job.env)
            assert [rank.wait() for rank in ranks] == [0] * num_ranks, ranks[0].text
            floor.close()
            known[key] = [final["hash"] for final in job.finals()]
        return known[key]

    return hashes


def hashes(job):
    return [final["hash"] for final in job.finals()]


# --- a worker is killed -------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [True, False])
def test_a_worker_killed_in_its_copy_leaves_the_older_snapshot(floor, tmp_path, calm, memory):
    job = KeeperJob(tmp_path / "job", memory=memory)
    life = start(floor, job, hold=AT)
    until(job.held, "the middle of a copy", running=life)
    life.kill()
    until(lambda: job.events("save_skipped"), "the save's end")
    (skipped,) = job.events("save_skipped")
    assert (skipped["step"], skipped["reason"]) == (AT, "rank 0 was lost during its copy")
    assert job.verified() == [AT - EVERY]
    if memory:
        assert job.same_in_memory(AT - EVERY)
    else:  # the only buffer was being written over
        assert job.in_memory().children() == []
    again = start(floor, job)
    assert again.wait() == 0, again.text
    resumed = job.events("resumed")[-1]
    assert (resumed["step"], resumed["skipped"]) == (AT - EVERY, [])
    assert resumed["source"] == ("from memory" if memory else "from local")
    assert not job.events("storage_error")
    assert hashes(job) == calm(1)


def test_a_worker_killed_after_its_copy_has_lost_nothing(floor, tmp_path, calm):
    job = KeeperJob(tmp_path / "job", 2, pause=AT - 1)
    lives = floor.ranks(2, SCRIPT, job.records, STEPS, env=job.env)
    until(job.paused, "the step before", running=lives[0])
    stop(keeper(floor))
    job.go()
    before = job.newest()
    step = until(lambda: job.whole(AT), "a whole copy", running=lives[0])
    for life in lives:
        life.kill()
    assert job.newest() == before < step
    os.kill(keeper(floor).pid, signal.SIGCONT)
    until(lambda: job.newest() == step, "the commit of those who are dead")
    assert set(job.verified()) == {before, step}
    assert job.same_in_memory(step)
    ranks = floor.ranks(2, SCRIPT, job.records, STEPS, env=job.env)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].text
    resumed = job.events("resumed")[-1]
    assert (resumed["step"], resumed["source"]) == (step, "from memory")
    assert step not in [event["step"] for event in job.events("save_skipped")]
    assert hashes(job) == calm(2)


def test_one_of_two_killed_before_its_copy_is_whole_voids_the_save(floor, tmp_path, calm):
    job = KeeperJob(tmp_path / "job", 2, free=-9)
    lives = [
        floor.warm(SCRIPT, job.records, STEPS, env={**job.env, **extra})
        for extra in rank_environments(2, {1: {"HOLD_AT": AT}})
    ]
    until(lambda: job.held(1), "the middle of a copy", running=lives[1])
    newest = job.newest()
    for life in reversed(lives):
        life.kill()
    until(lambda: job.events("save_skipped"), "the save's end")
    assert job.verified() == [newest]
    ranks = floor.ranks(2, SCRIPT, job.records, STEPS, env=job.env)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].text
    assert job.events("resumed")[-1]["step"] == newest > 0
    assert hashes(job) == calm(2)


def rank_environments(count, extra):
    """What torchrun gives its workers, with something more for some of them."""
    from floor import free_port

    shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for rank in range(count):
        yield {**shared, "RANK": rank, "LOCAL_RANK": rank, **extra.get(rank, {})}


def test_a_restarted_worker_resumes_from_memory_bit_for_bit(floor, tmp_path, calm):
    job = KeeperJob(tmp_path / "job", 2, memory=True, free=-9, pause=AT + 1)
    agent = run(floor, job, ranks=2)
    until(job.paused, "a commit", running=agent)
    newest = job.newest()
    os.kill(floor.workers()[1], signal.SIGKILL)
    job.go()
    assert agent.wait() == 0, agent.text
    first, second = job.events("resumed")
    assert (first["step"], second["source"]) == (0, "from memory")
    assert second["step"] == newest > 0
    assert second["places"][0] == "this machine's memory"
    assert hashes(job) == calm(2, "--light")


def test_snapshots_of_two_workers_are_resumed_by_one_from_memory(floor, tmp_path):
    job = KeeperJob(tmp_path / "job", 2, free=-9, pause=AT + 1)
    ranks = floor.ranks(2, SCRIPT, job.records, STEPS, env=job.env)
    until(job.paused, "a commit", running=ranks[0])
    newest = job.newest()
    for rank in ranks:
        rank.kill()
    job.go()
    alone = start(floor, job)
    assert alone.wait() == 0, alone.text
    resumed = job.events("resumed")[-1]
    assert resumed["source"] == "from memory"
    assert (resumed["from_world_size"], resumed["step"]) == (2, newest)
    assert job.newest() == STEPS
    assert job.final()["step"] == STEPS


# --- a keeper is killed -------------------------------------------------------------------------


def kill_keeper(floor):
    old = keeper(floor)
    old.kill()
    until(lambda: [one for one in keepers(floor) if one.pid != old.pid], "another keeper")


@pytest.mark.parametrize("under_agent", [True, False])
def test_a_keepers_successor_finds_its_memory(floor, tmp_path, calm, under_agent):
    job = KeeperJob(tmp_path / "job", memory=True, free=-9, pause=13)
    begin = run if under_agent else start
    life = begin(floor, job, "--every=10 steps")
    until(job.paused, "a commit", running=life)
    kill_keeper(floor)
    assert job.same_in_memory(10)
    job.go()
    if under_agent:
        os.kill(floor.workers()[0], signal.SIGKILL)
    else:
        life.kill()  # with it goes whoever held the memory: the keeper has it now
        life = start(floor, job, "--every=10 steps")
    assert life.wait() == 0, life.text
    resumed = job.events("resumed")[-1]
    assert (resumed["step"], resumed["source"]) == (10, "from memory")
    assert [event["step"] for event in job.events("commit")] == [10, 20, 30]
    assert hashes(job) == calm(1, *(["--light"] if under_agent else []))


@pytest.mark.parametrize("under_agent", [True, False])
def test_keepers_killed_as_they_start_end_nobody(floor, tmp_path, calm, under_agent):
    job = KeeperJob(tmp_path / "job", free=-9)
    life = (run if under_agent else start)(floor, job, "--every=10 steps")
    killed = set()
    while len(killed) < 3:
        news = [one for one in keepers(floor) if one.pid not in killed]
        for one in until(lambda found=news: found or keepers(floor), "a keeper", running=life):
            if one.pid not in killed:
                one.kill()
                killed.add(one.pid)
    assert life.wait() == 0, life.text
    assert hashes(job) == calm(1, *(["--light"] if under_agent else []))
    assert job.newest() == STEPS


@pytest.mark.parametrize("under_agent", [True, False])
def test_a_keeper_killed_in_a_save_costs_that_save_alone(floor, tmp_path, calm, under_agent):
    job = KeeperJob(tmp_path / "job", memory=True, pause=AT - 1)
    life = (run if under_agent else start)(floor, job)
    until(job.paused, "the step before", running=life)
    old = keeper(floor)
    stop(old)
    job.go()
    until(lambda: job.whole(AT), "a whole copy", running=life)
    old.kill()
    assert life.wait() == 0, life.text
    assert len(job.events("resumed")) == 1  # training never stopped
    skipped = [event for event in job.events("save_skipped") if event["step"] == AT]
    assert ["the keeper died before the commit" in event["reason"] for event in skipped] == [True]
    steps = [event["step"] for event in job.events("commit")]
    assert AT not in steps
    due = range(AT + 2 * EVERY, STEPS + 1, EVERY)  # the one before may come too early for it
    assert set(due) <= set(steps)
    job.verified()
    assert hashes(job) == calm(1, *(["--light"] if under_agent else []))


# --- nothing is left ----------------------------------------------------------------------------


def test_nothing_is_left_of_a_job_that_has_finished(floor, tmp_path):
    job = KeeperJob(tmp_path / "job", 2, memory=True, pause=AT + 1)
    agent = run(floor, job, ranks=2)
    until(job.paused, "some commits", running=agent)
    job.go()
    assert memfds(floor) == 5  # two for each rank, and the books
    assert agent.wait() == 0, agent.text
    assert not keepers(floor)
    assert list(job.runtime.iterdir()) == []


def test_nothing_is_left_of_a_job_that_has_failed(floor, tmp_path):
    job = KeeperJob(tmp_path / "job", free=-9)
    agent = run(floor, job, "--raise-in=8", "--every=2 steps")
    assert agent.wait() == 76, agent.text
    until(lambda: not floor.offspring(), "all have gone")
    assert list(job.runtime.iterdir()) == []
    assert job.newest() == 6


def test_a_keeper_that_nobody_comes_back_to_leaves(floor, tmp_path):
    job = KeeperJob(tmp_path / "job", 2, pause=AT + 1)
    agent = run(floor, job, ranks=2)
    until(job.paused, "some commits", running=agent)
    workers = floor.workers()
    agent.kill()
    for pid in workers:  # they die with the agent, but not at once
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert keepers(floor)
    job.verified()
    until(lambda: not floor.offspring(), "the keeper has left")
    assert list(job.runtime.iterdir()) == []


def test_the_next_keeper_sweeps_what_a_killed_one_left(floor, tmp_path):
    job = KeeperJob(tmp_path / "job", pause=AT + 1)
    life = start(floor, job)
    until(job.paused, "a commit", running=life)
    (old,) = keepers(floor)
    os.kill(life.pid, signal.SIGSTOP)  # so that it starts no other
    old.kill()
    life.kill()
    until(lambda: not floor.offspring(), "all have gone")
    assert memfds(floor) == 0
    left = {path.suffix for path in job.runtime.iterdir()}
    assert left == {".sock", ".lock", ".log"}
    (job.runtime / "somebody-elses").touch()
    other = KeeperJob(tmp_path / "other")
    env = {**other.env, "OUTLAST_RUNTIME_DIR": job.runtime}
    assert floor.warm(SCRIPT, other.records, 4, env=env).wait() == 0
    assert [path.name for path in job.runtime.iterdir()] == ["somebody-elses"]
