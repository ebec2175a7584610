"""A session in this very process: what it refuses, and what it leaves in the ledger."""

import contextlib
import os
import threading
import time

import psutil
import pytest
import torch
from floor import Job
from saved import saved

import outlast
from outlast.errors import ConfigError, StateMismatch
from outlast.ledger.file import Ledger, read_events
from outlast.policy import cadence
from outlast.report.facts import facts


def test_waiting_for_a_save_ahead_of_its_boundary_is_refused(job):
    with outlast.session(model=torch.nn.Linear(2, 1), dir=job, every="1 h") as session:
        pending = None
        for _ in session.steps([0] * 4000, until=4000):
            if pending is None:
                pending = session.save()
                with pytest.raises(ConfigError, match="would wait for ever"):
                    pending.wait()
                assert not pending.wait(60)  # at once: it would wait for itself
            elif pending.step is not None and session.step > pending.step:
                assert pending.wait(60)
                break
    assert pending.committed
    commits = [e["step"] for e in read_events(job) if e.event == "commit"]
    assert commits == [pending.step, session.step]  # and the end, where the loop was left


def test_a_save_asked_for_outside_of_the_loop_is_the_final_one(job):
    with outlast.session(model=torch.nn.Linear(2, 1), dir=job, every="1 h") as session:
        for _ in session.steps([0] * 3, until=3):
            pass
        pending = session.save()
        with pytest.raises(ConfigError, match="would wait for ever"):
            pending.wait()
    assert pending.wait(0)
    assert pending.step == 3


def test_what_trackers_read_goes_with_the_session(job, monkeypatch):
    """What comes behind it in this process is no part of the job's run."""
    monkeypatch.setenv("WANDB_RESUME", "must")
    before = dict(os.environ)
    with outlast.session(model=torch.nn.Linear(2, 1), dir=job) as session:
        assert os.environ["WANDB_RUN_ID"] == os.environ["OUTLAST_RUN_ID"]
        for _ in session.steps([0], epochs=1):
            pass
    assert dict(os.environ) == before


class Slowly:
    """Batches that are read over again by whoever goes on from the midst of them."""

    def __iter__(self):
        for number in range(20):
            time.sleep(0.05)
            yield number


def test_bringing_the_data_back_is_part_of_a_restart(job):
    had = []
    for until in (5, 8):
        with outlast.session(model=torch.nn.Linear(2, 1), dir=job) as session:
            had += list(session.steps(Slowly(), until=until))
    assert had == list(range(8))
    first, again = (
        [e["catch_up_s"] for e in read_events(job) if e.event == "step" and lo < e["step"] <= hi]
        for lo, hi in ((0, 5), (5, 8))
    )
    assert sum(first) == 0
    assert sum(again) >= 5 * 0.05


def test_misuse_is_named(job):
    with pytest.raises(ConfigError, match="did you mean every"):
        outlast.session(model=torch.nn.Linear(2, 1), dir=job, evry="5 steps")
    with outlast.session(model=torch.nn.Linear(2, 1), dir=job) as session:
        assert not list(session.steps([0], epochs=0))
        with pytest.raises(ConfigError, match="epochs=-1"):
            next(session.steps([0], epochs=-1))
        with pytest.raises(ConfigError, match="until=-3"):
            next(session.steps([0], until=-3))
    with pytest.raises(ConfigError, match="the session is over"):
        next(session.steps([0], until=3))


def test_the_ledger_knows_how_it_ended_without_our_launcher(job):
    def state():
        return facts(read_events(job)).state

    with outlast.session(model=torch.nn.Linear(2, 1), dir=job) as session:
        assert state() == "running"
        list(session.steps([0] * 3, until=3))
    assert state() == "finished"
    with pytest.raises(ZeroDivisionError):
        _fail_in_the_loop(job)
    assert state() == "failed"


def _fail_in_the_loop(job):
    with outlast.session(model=torch.nn.Linear(2, 1), dir=job) as session:
        for _ in session.steps([0] * 6, until=6):
            raise ZeroDivisionError


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_cell_of_a_notebook_can_be_run_again(job, error):
    """After an exception the process goes on; the next session in it resumes, and ends."""

    def train(until, wrong=None):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        with outlast.session(model=model, optimizer=optimizer, dir=job, every="1 steps") as session:
            entered = session.step
            for _ in session.steps([0] * 99, until=until):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                time.sleep(0.05)
                if session.step == wrong:
                    raise error
        return entered

    before = {thread.name for thread in threading.enumerate()}
    for wrong in (4, 8):
        with pytest.raises(error):
            train(99, wrong)
        assert {thread.name for thread in threading.enumerate()} <= before
    assert train(12) >= 5
    assert [e["step"] for e in read_events(job) if e.event == "commit"][-1] == 12
    assert {thread.name for thread in threading.enumerate()} <= before


def test_a_session_that_is_refused_makes_place_for_the_next(job):
    def train(width):
        with outlast.session(model=torch.nn.Linear(width, 1), dir=job) as session:
            list(session.steps([0] * 3, until=3))

    train(2)
    before = {thread.name for thread in threading.enumerate()}
    for _ in range(2):
        with pytest.raises(StateMismatch, match="has shape"):
            train(3)
        assert {thread.name for thread in threading.enumerate()} <= before
    train(2)


def test_a_session_that_could_not_be_made_holds_nothing(job, monkeypatch):
    def train():
        with outlast.session(model=torch.nn.Linear(2, 1), dir=job) as session:
            list(session.steps([0] * 3, until=3))

    train()
    before = {thread.name for thread in threading.enumerate()}
    with monkeypatch.context() as patch:
        patch.setattr("outlast.training.saving.Engine", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train()
    with monkeypatch.context() as patch:
        patch.setattr("outlast.training.footing.Agreement", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train()
    assert {thread.name for thread in threading.enumerate()} <= before
    train()


def test_somebody_who_does_not_wait_for_the_end_can_go_on(job, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    def train(until):
        with outlast.session(model=torch.nn.Linear(2, 1), dir=job) as session:
            list(session.steps([0] * 9, until=until))

    with monkeypatch.context() as patch:
        patch.setattr("outlast.keeper.client.Supervisor.close", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(3)
    train(6)


def test_people_are_told_what_happens_without_our_launcher(job, tmp_path, monkeypatch, capfd):
    blocked = tmp_path / "blocked"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outlast.toml").write_text(
        f'[[tier]]\nname = "here"\nurl = "{tmp_path}/here"\n'
        f'[[tier]]\nname = "there"\nurl = "{blocked}"\n'
    )

    def train(until):
        with outlast.session(model=torch.nn.Linear(2, 1), dir=job, every="1 h") as session:
            for _ in session.steps([0] * 9, until=until):
                if until == 2 and session.step == 1:
                    blocked.write_text("a file where a directory should be")
        return capfd.readouterr().err

    first = train(2)
    assert "no checkpoint yet: starting at step 0" in first
    assert "storage failed (copy to there)" in first
    blocked.unlink()
    assert "resumed from step 2" in train(4)
    shard = saved(tmp_path / "here", 4) / "rank-00000.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    third = train(6)
    assert "rank-00000.safetensors in tier here is damaged" in third
    assert "rank-00000.safetensors in tier here is whole again" in third
    assert "resumed from step 4" in third


def is_keeper(process):
    try:
        return "outlast.keeper" in process.cmdline()
    except psutil.Error:  # it has ended: somebody else's
        return False


def test_a_save_that_does_not_end_is_not_skipped_over_in_silence(job, monkeypatch, capfd):
    monkeypatch.setattr("outlast.training.turns.STUCK_S", 0.2)
    said = ""
    with outlast.session(model=torch.nn.Linear(2, 1), dir=job, every="2 steps") as session:
        keepers = [child for child in psutil.Process().children(recursive=True) if is_keeper(child)]
        for _ in session.steps([0] * 10**6, until=10**6):
            if session.step == 2:
                for keeper in keepers:
                    keeper.suspend()
            time.sleep(0.01)
            said += capfd.readouterr().err
            if "does not end" in said:
                break
        for keeper in keepers:
            keeper.resume()
    (line,) = [line for line in said.splitlines() if "does not end" in line]
    assert "none can begin before it does" in line
    assert ".log" in line


def test_lbfgs_goes_on_bit_for_bit(job, tmp_path):
    """It sums over its state: the memory that state lies in must not change the sums."""

    def train(directory, until):
        torch.manual_seed(0)
        model = torch.nn.Linear(7, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        x, y = torch.randn(64, 7), torch.randn(64, 1)

        def closure():
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        with outlast.session(model=model, optimizer=optimizer, dir=directory) as session:
            for _ in session.steps([0] * 100, until=until):
                optimizer.step(closure)
        return [p.detach().clone() for p in model.parameters()]

    undisturbed = train(tmp_path / "undisturbed", 24)
    for until in (5, 11, 17):
        train(job, until)
    resumed = train(job, 24)
    assert all(torch.equal(a, b) for a, b in zip(undisturbed, resumed, strict=True))


def test_what_a_script_draws_ahead_of_its_loops_is_what_it_drew_before(job, tmp_path):
    """Random data made inside the with block; draws before, between and in two loops."""

    def train(directory, until):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        drawn = []
        with outlast.session(model=model, optimizer=optimizer, dir=directory) as session:
            data = [torch.randn(4) for _ in range(40)]
            for part in (10, 20):
                torch.rand(3)
                for x in session.steps(data, until=min(part, until)):
                    loss = (model(x) + torch.rand(())).square().sum()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            drawn.append(torch.rand(()))
        return [*model.parameters(), *drawn]

    undisturbed = train(tmp_path / "undisturbed", 20)
    for until in (4, 10, 13):
        train(job, until)
    assert all(torch.equal(a, b) for a, b in zip(undisturbed, train(job, 20), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(undisturbed, train(job, 20), strict=True))


def test_what_follows_a_loop_and_changes_nothing_is_not_saved_again(tmp_path, monkeypatch):
    monkeypatch.setattr("outlast.training.turns.END_AFTER_S", 0.0)
    model = torch.nn.Linear(4, 4)
    with outlast.session(dir=tmp_path / "job", every="1 h", model=model) as session:
        for _ in session.steps(range(10), until=5):
            pass
        model(torch.ones(2, 4))  # an evaluation
    job = Job(tmp_path / "job")
    assert [event["reason"] for event in job.events("snapshot")] == ["the loop's end"]
    assert job.newest() == 5


def test_what_follows_a_loop_and_changes_the_state_is_saved_too(tmp_path, monkeypatch):
    monkeypatch.setattr("outlast.training.turns.END_AFTER_S", 0.0)
    model = torch.nn.Linear(4, 4)
    with outlast.session(dir=tmp_path / "job", every="1 h", model=model) as session:
        for _ in session.steps(range(10), until=5):
            pass
        with torch.no_grad():
            model.weight.fill_(7.0)  # an average is put in its place
    job = Job(tmp_path / "job")
    reasons = [event["reason"] for event in job.events("snapshot")]
    assert reasons == ["the loop's end", "finished"]
    again = torch.nn.Linear(4, 4)
    with outlast.session(dir=tmp_path / "job", model=again) as session:
        assert session.step == 5
    assert (again.weight == 7.0).all()


def test_the_ends_of_short_loops_are_not_saved(tmp_path, monkeypatch):
    monkeypatch.setattr("outlast.training.turns.END_AFTER_S", 600.0)  # none is long, however busy
    model = torch.nn.Linear(4, 4)
    with outlast.session(dir=tmp_path / "job", every="1 h", model=model) as session:
        for until in range(2, 21, 2):
            for _ in session.steps(range(100), until=until):
                pass
    job = Job(tmp_path / "job")
    assert [event["reason"] for event in job.events("snapshot")] == ["finished"]


class Points(torch.utils.data.Dataset):
    def __init__(self, size):
        self._size = size

    def __len__(self):
        return self._size

    def __getitem__(self, index):
        return index


def note(seen, line):
    """What is done here is none of the loop's own: the code behind it is seen to need nothing."""
    seen.append(line)


@pytest.mark.parametrize("by", ["steps", "epochs", "passes"])
def test_a_loader_goes_on_in_the_loop_behind_the_one_that_was_over(by, job, monkeypatch, capfd):
    """Several loops over one loader; the run ends at the ends of loops, and within them."""
    monkeypatch.setattr("outlast.training.turns.END_AFTER_S", 0.0)

    def train(directory, stop):
        seen, pending = [], None
        loader = outlast.data.Loader(Points(20), global_batch=4, seed=3)
        model = torch.nn.Linear(1, 1)
        with outlast.session(model=model, dir=directory) as session:
            for part in (1, 2, 3, 4):
                limit = {"steps": {"until": 5 * part}, "epochs": {"epochs": part}, "passes": {}}[by]
                for batch in session.steps(loader, **limit):
                    note(seen, (session.step, sorted(batch.tolist())))
                    if len(seen) == stop and stop % 5:
                        pending = session.save()
                    elif pending and pending.step is not None and pending.wait(60):
                        return [line for line in seen if line[0] < session.step]
                if len(seen) == stop:
                    return seen
        return seen

    undisturbed = train(job.parent / "undisturbed", 99)
    assert len(undisturbed) == 20
    seen = []
    for stop in (5, 5, 3):
        seen += train(job, stop)
    seen += train(job, 99)
    assert seen == undisturbed
    err = capfd.readouterr().err
    assert err.count("are not run again") == (0 if by == "steps" else 2)  # once in a run


@pytest.mark.parametrize("by", ["steps", "passes"])
def test_a_script_that_counts_epochs_for_its_sampler_gets_them(by, job):
    """A loop for each epoch, as people write them for a DistributedSampler; ended in the third."""

    def build():
        sampler = torch.utils.data.DistributedSampler(Points(20), 1, 0, seed=3)
        return sampler, torch.utils.data.DataLoader(Points(20), 4, sampler=sampler)

    def train(stop):
        seen, pending = [], None
        sampler, loader = build()
        with outlast.session(model=torch.nn.Linear(1, 1), dir=job, every="1 h") as session:
            for epoch in range(4):
                sampler.set_epoch(epoch)
                limit = {"until": 5 * (epoch + 1)} if by == "steps" else {}
                for batch in session.steps(loader, **limit):
                    note(seen, (session.step, batch.tolist()))
                    time.sleep(0.01)
                    if session.step == stop:
                        pending = session.save()
                    elif pending and pending.step is not None and pending.wait(60):
                        return [line for line in seen if line[0] < session.step]
                assert sampler.epoch == epoch
        return seen

    expected = []
    sampler, loader = build()
    for epoch in range(4):
        sampler.set_epoch(epoch)
        expected += [batch.tolist() for batch in loader]
    seen = train(11)
    assert 11 <= len(seen) < 20
    assert seen + train(99) == list(enumerate(expected))


def test_auto_counts_the_jobs_failures_and_writes_down_its_interval(job, monkeypatch):
    monkeypatch.setattr(cadence, "AUTO_FIRST_S", 0.1)

    def told(burst):
        lines = [event for event in read_events(job) if event.event == "cadence"]
        return [event for event in lines if event["burst"] is burst]

    def train(burst):
        with outlast.session(model=torch.nn.Linear(2, 1), dir=job) as session:
            for _ in session.steps([0] * 10_000, until=session.step + 10_000):
                time.sleep(0.01)
                if told(burst):
                    break
        return told(burst)[0]  # the end is saved, and measured, too

    first = train(burst=False)
    assert first["before_s"] is None
    assert first["num_seen"] == 0
    with contextlib.closing(Ledger(job, job="0123456789ab")) as ledger:
        for attempt in range(2, 5):
            ledger.attempt = attempt
            ledger.append("resumed", step=0)
            ledger.append("worker_lost", exit_code=-9)
    second = train(burst=True)
    # Three within a moment are a burst: none of them says anything of the weeks.
    assert second["reason"] == "failures come in a burst"
    assert 0 < second["num_seen"] < 0.1
    assert second["failures_per_h"] > 100
    assert second["interval_s"] < 1


class Objects(torch.optim.SGD):
    """Keeps something in its state that is no data, from its first step on."""

    def step(self, closure=None):
        super().step(closure)
        self.state[self.param_groups[0]["params"][0]]["projector"] = object()


def test_state_that_cannot_be_saved_ends_the_job_after_its_first_step(job):
    model = torch.nn.Linear(2, 1)
    optimizer = Objects(model.parameters(), lr=0.1)
    trained = []

    def train():
        with outlast.session(model=model, optimizer=optimizer, dir=job, every="1 h") as session:
            for _ in session.steps([0] * 100):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                trained.append(session.step)

    with pytest.raises(ConfigError, match=r"optimizer\.state\.weight\.projector is a .*object"):
        train()
    assert trained == [0]
