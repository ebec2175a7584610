"""Notices to one of three ranks, each in the middle of something.

Ten by default; ``OUTLAST_TEST_ALL=1`` gives fifty.
"""

from floor import SCRIPTS, Job

from thorough import ALL

PHASES = SCRIPTS / "phases.py"
RANKS = 3
NOTICES = 50 if ALL else 10
GRACE_S = 30
KINDS = ("warm-up", "forward", "backward", "optimizer", "save", "evaluation", "after")


def test_notices_in_the_middle_of_everything(floor, rng, tmp_path):
    job = Job(tmp_path / "job", RANKS)
    env = {**job.env, "OUTLAST_NOTICE_GRACE": f"{GRACE_S} s"}
    kinds = [KINDS[number % len(KINDS)] for number in range(NOTICES)]
    rng.shuffle(kinds)
    done = 0
    for number, kind in enumerate(kinds):
        at = done + rng.randrange(1, 8)
        until = max(at, done + 1) if kind == "after" else 10_000
        strike = ("--strike", kind, "--at", 0 if kind == "warm-up" else at)
        hits = ("--on", rng.randrange(RANKS), "--times", rng.choice([1, 1, 3]))
        ranks = floor.ranks(RANKS, PHASES, job.records, until, *strike, *hits, env=env)
        codes = [rank.wait() for rank in ranks]
        where = (number, kind, at, done, [rank.text for rank in ranks])
        assert codes == [75] * RANKS, where
        drained = job.events("drained")
        assert len(drained) == number + 1, where
        assert drained[-1]["committed"] or not drained[-1]["step"], where
        heard = job.events("notice")[-1]
        assert drained[-1].t < heard["deadline_t"], where
        stopped = drained[-1]["step"]
        assert stopped == job.newest(), where
        expected = {"warm-up": done, "after": until}.get(kind)
        assert stopped >= at if expected is None else stopped == expected, where
        newest = [max((line["step"] for line in job.lines(r)), default=0) for r in range(RANKS)]
        assert newest == [stopped] * RANKS, where  # nobody has begun another one
        done = stopped
    ranks = floor.ranks(RANKS, PHASES, job.records, done + 20, env=env)
    assert [rank.wait() for rank in ranks] == [0] * RANKS, ranks[0].text
    calm = Job(tmp_path / "calm", RANKS)
    ranks = floor.ranks(RANKS, PHASES, calm.records, done + 20, env=calm.env)
    assert [rank.wait() for rank in ranks] == [0] * RANKS, ranks[0].text
    assert [final["hash"] for final in job.finals()] == [final["hash"] for final in calm.finals()]
    assert all(job.consumed(rank) == calm.consumed(rank) for rank in range(RANKS))
    print(f"{done} steps, stopped at {[event['step'] for event in job.events('drained')]}")


def test_an_evaluation_that_does_not_end_in_time_costs_what_is_not_committed(floor, tmp_path):
    """It is in the loop, behind the optimizer: no state of this moment could be gone on from."""
    job = Job(tmp_path / "job", RANKS)
    env = {**job.env, "OUTLAST_NOTICE_GRACE": "6 s"}
    strike = ("--strike", "evaluation", "--at", 8, "--on", 1, "--evaluation", 100_000)
    arguments = (job.records, 1000, "--every", "3 steps", *strike, "--evaluated-from", 8)
    ranks = floor.ranks(RANKS, PHASES, *arguments, env=env)
    assert [rank.wait() for rank in ranks] == [75] * RANKS, [rank.text for rank in ranks]
    drained, heard = job.events("drained")[-1], job.events("notice")[-1]
    assert (drained["step"], drained["committed"]) == (7, False)
    assert drained.t < heard["deadline_t"]
    newest = job.newest()  # on a slow disk step 6 may have been left out
    assert newest in (3, 6)
    said = [rank.err for rank in ranks]
    assert "step 7 could not be committed (the step did not end in time)" in said[0]
    lost = {6: "1 step lost", 3: "4 steps lost"}[newest]
    assert f"the newest commit, step {newest}, stands: {lost}" in said[0]
    assert not any("Traceback" in text for text in said), said
    ranks = floor.ranks(RANKS, PHASES, job.records, 20, env=env)
    assert [rank.wait() for rank in ranks] == [0] * RANKS, ranks[0].text
    calm = Job(tmp_path / "calm", RANKS)
    ranks = floor.ranks(RANKS, PHASES, calm.records, 20, env=calm.env)
    assert [rank.wait() for rank in ranks] == [0] * RANKS, ranks[0].text
    assert [final["hash"] for final in job.finals()] == [final["hash"] for final in calm.finals()]
