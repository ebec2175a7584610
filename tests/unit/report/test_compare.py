"""Several jobs side by side: each figure of each job, at the same step, and what cannot be told."""

import json
import re
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from test_page import Reader, whole
from unit_prices import priced

from outlast.cli.report import command
from outlast.errors import ConfigError
from outlast.ledger.events import EVENT_NAMES, Event, encode
from outlast.ledger.file import FILE_NAME
from outlast.ledger.job import Job
from outlast.report.compare import (
    MOST_JOBS,
    compare_json,
    compared,
    furthest_step,
    names_of,
    sections,
    unlike,
    verdict,
)
from outlast.report.compare_page import compare_page
from report_story import write_stories
from thorough import examples

START_T = 1e6
HOUR_S = 3600.0


class Told:
    """A made-up ledger, event by event; ``wait`` lets time pass."""

    def __init__(self, job="j"):
        self.t, self.attempt, self.step, self._job, self.events = 0.0, 0, 0, job, []

    def tell(self, name, rank=None, node="n", **fields):
        head = {"job": self._job, "attempt": self.attempt, "node": node, "rank": rank}
        self.events.append(
            Event(t=START_T + self.t, mono=self.t, event=name, fields=fields, **head)
        )
        return self

    def wait(self, seconds):
        self.t += seconds
        return self

    def form(self, step=0):
        self.attempt += 1
        self.step = step
        self.tell("attempt_formed", world_size=2, nodes=1)
        return self.wait(10).tell("resumed", 0, step=step, source="")

    def train(self, until, step_s, **logged):
        seconds = (until - self.step) * step_s
        self.wait(seconds)
        self.step = until
        return self.tell("step", 0, step=until, seconds=seconds, scalars=logged)

    def save(self, seconds=2.0, blocked_s=0.5):
        self.tell("snapshot", 0, step=self.step, blocked_s=blocked_s, bytes=10, tiers=["local"])
        size = {"bytes": 10, "files": 1, "tier": "local"}
        return self.wait(seconds).tell("commit", 0, step=self.step, durable_s=seconds, **size)

    def lose(self, kind="memory", num_told=1):
        beat_t = START_T + self.t
        self.tell("worker_lost", 1, step=self.step, beat_t=beat_t, kind=kind)
        for n in range(num_told):  # each machine writes one
            self.tell("restart", node=f"n{n}", reason="rank 1", kind=kind)
        return self.wait(20)

    def end(self):
        return self.tell("job_finished", exit_code=0, reason="").events


def quick():
    """An hour and more for 1000 steps, of which 100 were made twice."""
    one = Told("quick").tell("job_started", command="train --lr 1", versions={"torch": "2.13"})
    one.form().train(500, 4.0, loss=2.0).save().train(600, 4.0, loss=1.5).lose(num_told=2)
    one.form(500).train(1000, 4.0, loss=1.0).save()
    return one.end()


def slow():
    """Twice as long a step, no failure, 800 steps."""
    one = Told("slow").tell("job_started", command="train --lr 2", versions={"torch": "2.12"})
    one.form().train(400, 8.0, loss=3.0).save(6.0).train(800, 8.0, loss=1.2)
    return one.events


def one_of(name, events, same_step, prices="", settings=(), **more):
    record = Job(id=name, settings=dict(settings))
    place = Path("/jobs", name)
    return compared(name, place, record, events, same_step=same_step, prices=priced(prices), **more)


def both(**of_slow):
    events = [quick(), slow()]
    same_step = min(map(furthest_step, events))
    return [
        one_of("quick", events[0], same_step, 3.6, {"checkpoint.every": "auto", "dir": "/a"}),
        one_of(
            *("slow", events[1], same_step),
            **({"prices": 7.2, "settings": {"checkpoint.every": "5 min", "dir": "/b"}} | of_slow),
        ),
    ]


def rows_of(jobs):
    return {(one.name, row.name): row for one in sections(jobs) for row in one.rows}


def test_they_are_compared_at_the_step_that_all_have_come_to():
    first, second = both()
    assert (first.same_step.step, second.same_step.step) == (800, 800)
    # 10 s until it begins, 600 steps, 2 s and 20 s lost, 10 s, and 300 steps from 500 on.
    assert first.same_step.wall_s == pytest.approx(10 + 2400 + 2 + 20 + 10 + 1200)
    assert first.same_step.cost == pytest.approx(first.same_step.machine_s * 3.6 / HOUR_S)
    assert first.same_step.attempts == 2
    assert second.same_step.wall_s == pytest.approx(10 + 3200 + 6 + 3200)
    assert second.same_step.cost == pytest.approx(second.same_step.machine_s * 7.2 / HOUR_S)
    assert second.same_step.machine_s == pytest.approx(second.same_step.wall_s)


def test_a_step_between_two_samples_was_made_between_them():
    assert one_of("quick", quick(), 300).same_step.wall_s == pytest.approx(10 + 300 * 4.0)
    # What was lost and made again was reached the first time; 2 s for a save are in these steps.
    assert one_of("quick", quick(), 550).same_step.wall_s == pytest.approx(10 + 550 * 4.0 + 1.0)
    assert one_of("quick", quick(), 1001).same_step is None


def test_what_went_wrong_by_reason():
    first, second = both()
    ((kind, wrong),) = first.incidents.items()
    assert kind == "worker lost"
    assert (wrong.num, wrong.lost_steps) == (1, 100)
    assert wrong.per_day == pytest.approx(24 * HOUR_S / first.held_s)
    # Until the first sample behind the resume, in which the hundred steps were made again.
    assert wrong.lost_s == pytest.approx(first.recovery_s)
    assert first.restarts == {"memory": 1}  # that both machines have told
    assert (second.incidents, second.restarts, second.recovery_s) == ({}, {}, None)


def test_the_verdict_says_which_is_better_and_by_how_much():
    first, second = both()
    goodput, cost = verdict([first, second])
    assert goodput.startswith("goodput: ")
    better = max((first, second), key=lambda one: one.fraction_productive)
    other = second if better is first else first
    gap = 100 * (better.fraction_productive - other.fraction_productive)
    assert f"{better.name} is better, {100 * better.fraction_productive:.1f} %" in goodput
    assert goodput.endswith(f"of {other.name} ({gap:.1f} points more)")
    cheap = min((first, second), key=lambda one: one.cost_per_step)
    assert cost.startswith(f"money for a step: {cheap.name} is better, ")
    same = msgspec.structs.replace(first, name="same")
    assert verdict([first, same])[0].startswith("goodput: quick and same are alike")
    assert "the next" in verdict([first, same, second])[0]
    assert verdict([first, msgspec.structs.replace(second, steps_done=0, money=None)]) == []


def test_unlike_machines_are_said():
    first, _ = both()
    assert unlike([first, msgspec.structs.replace(first, name="same")]) == []
    other = msgspec.structs.replace(first, name="other", workers=16, kinds=["p5"])
    assert unlike([first, other]) == [f"workers: {first.workers} (quick), 16 (other)"]
    more = msgspec.structs.replace(first, kinds=["g6"])
    assert unlike([more, other])[1] == "kinds of machines: g6 (quick), p5 (other)"


def test_checkpoints_and_money():
    first, second = both()
    assert (first.blocked_s, second.blocked_s) == (0.5, 0.5)
    assert first.tiers["local"].seconds / first.tiers["local"].num == 2.0
    assert second.tiers["local"].slowest_s == 6.0
    assert first.cost_per_step == pytest.approx(first.money.cost / 1000)
    found = rows_of([first, second])
    assert found["checkpoints", "local: written in"] == (
        "local: written in",
        ["2.0 s", "6.0 s"],
        {0},
    )
    assert found["money", "for a thousand steps"].best == {0}
    assert found["money", "lost"].best == set()  # a job that has done less has lost less


def test_only_settings_that_differ_are_told_by_name():
    found = rows_of(both())
    differing = [row for (name, _), row in found.items() if name == "settings that differ"]
    assert [(row.name, row.cells) for row in differing] == [("checkpoint.every", ["auto", "5 min"])]
    assert found["jobs", "command"].cells == ["train --lr 1", "train --lr 2"]
    assert found["jobs", "torch"].cells == ["2.13", "2.12"]
    told = compare_json(both(), {})["settings_that_differ"]
    assert told == {"checkpoint.every": {"quick": "auto", "slow": "5 min"}}
    lost = both(settings={})
    assert not [one for one in sections(lost) if one.name == "settings that differ"]
    assert "has lost its record" in lost[1].notes[0]


def test_a_setting_that_another_version_does_not_have():
    jobs = [one_of(name, quick(), 0, 1, settings) for name, settings in NEWER.items()]
    (row,) = [row for (name, _), row in rows_of(jobs).items() if name == "settings that differ"]
    assert row == ("price.kind", ["none", "not there"], frozenset())


def test_that_each_job_lies_in_its_own_place_is_no_difference():
    settings = {
        place: {"dir": place, "tier.local": f"{place}/checkpoints"} for place in ("/a", "/b")
    }
    jobs = [one_of(place, quick(), 0, 1, own) for place, own in settings.items()]
    assert not [one for one in sections(jobs) if one.name == "settings that differ"]
    settings["/b"]["tier.local"] = "/nvme/checkpoints"
    jobs = [one_of(place, quick(), 0, 1, own) for place, own in settings.items()]
    row = rows_of(jobs)["settings that differ", "tier.local"]
    assert row.cells == ["JOB/checkpoints", "/nvme/checkpoints"]


NEWER = {"new": {"price.kind": "", "a": "1"}, "old": {"a": "1"}}


def test_one_without_steps_without_a_price_and_one_that_is_not_over():
    begun = Told().tell("job_started").form().events
    empty = one_of("empty", [], 800)
    jobs = [*both(prices="", age_s=90.0), one_of("begun", begun, 800), empty]
    assert [one.notes[0] for one in jobs[1:]] == [
        "is not over: its figures are as of its newest event, 1 min 30 s ago",
        "has completed no step",
        "has not been started: its ledger is empty",
    ]
    assert one_of("begun", begun, 800, age_s=90.0).state == "running"
    assert one_of("begun", begun, 800, age_s=2 * HOUR_S).state == "silent"
    found = rows_of(jobs)
    assert found["to step 800", "time"].cells[2:] == ["", ""]
    assert found["to step 800", "cost"].cells[1:] == ["", "", ""]
    assert found["money", "spent"].cells[1:] == ["", "", ""]
    assert found["where the time went", "productive"].cells[3] == ""
    assert json.loads(json.dumps(compare_json(jobs, {})))["jobs"][3]["money"] is None
    assert not Reader(compare_page(jobs, {}, written="")).open


def test_a_short_job_has_counts_and_no_rates():
    short = Told().tell("job_started").form().train(10, 1.0).lose().form(5).train(20, 1.0).end()
    jobs = [one_of("a", short, 0), *both()]
    row = rows_of(jobs)["what went wrong", "incidents"]
    assert row.cells[0] == "1"
    assert row.cells[1].startswith("1 (")
    assert row.best == frozenset()


def test_names_tell_the_jobs_apart():
    assert names_of([Path("/a/job"), Path("/b/job"), Path("/b/other")]) == [
        "a/job",
        "b/job",
        "other",
    ]
    assert names_of([Path("/job"), Path("/x/job")]) == ["//job", "x/job"]


@given(
    st.lists(
        st.lists(st.sampled_from("ab"), min_size=1, max_size=4).map(lambda p: Path("/", *p)),
        min_size=2,
        max_size=8,
        unique=True,
    )
)
def test_no_two_have_one_name(paths):
    assert len(set(names_of(paths))) == len(paths)


ANY = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 2000), st.floats(-5, 2000), st.text(max_size=3)
)
FIELDS = (
    *("step", "seconds", "blocked_s", "durable_s", "bytes", "tier", "kind", "versions", "command"),
    *("nodes", "hosts", "world_size", "scalars", "beat_t", "exit_code", "tiers"),
)
EVENTS = st.lists(
    st.builds(
        Event,
        t=st.floats(0, 1e5),
        mono=st.floats(0, 1e5),
        job=st.just("j"),
        attempt=st.integers(0, 3),
        node=st.sampled_from("ab"),
        rank=st.sampled_from([None, 0, 1]),
        event=st.sampled_from(sorted(EVENT_NAMES)),
        fields=st.dictionaries(
            st.sampled_from(FIELDS),
            st.one_of(ANY, st.lists(ANY, max_size=2), st.dictionaries(st.text(max_size=2), ANY)),
            max_size=5,
        ),
    ),
    max_size=25,
)


@examples(60)
@given(st.lists(EVENTS, min_size=2, max_size=3))
def test_whatever_ledgers_say_the_comparison_stands(ledgers):
    same_step = min(filter(None, map(furthest_step, ledgers)), default=0)
    jobs = [one_of(str(n), events, same_step, "a=1, other=2") for n, events in enumerate(ledgers)]
    for one in jobs:
        total = sum(one.parts_s.values())
        assert all(seconds >= 0 for seconds in one.parts_s.values())
        if one.same_step is not None:
            assert 0 <= one.same_step.wall_s <= one.wall_s + 1e-6
            assert one.same_step.cost <= one.money.cost + 1e-6
        if total:
            assert 0 <= one.held_s <= one.wall_s + 1e-6
    json.loads(msgspec.json.encode(compare_json(jobs, {})))
    for found in sections(jobs):
        assert all(len(row.cells) == len(jobs) for row in found.rows)
    assert not Reader(compare_page(jobs, {}, written="")).open


# --- the page -------------------------------------------------------------------------------------


def test_the_page_is_whole_and_asks_nobody():
    text = compare_page(both(), {"/no<b>": "it's <i>nothing</i>"}, written="now")
    read = whole(text)
    assert '<b>"' not in text
    assert "<i>nothing" not in text
    assert text.count("<svg") == text.count("<details>") == 2  # progress and loss
    words = " ".join(" ".join(read.words).split())
    for expected in ("2 jobs compared", "to step 800", "memory", "checkpoint.every", "is left out"):
        assert expected in words, expected


def test_bars_have_one_scale():
    text = compare_page(both(), {}, written="")
    first, second = re.findall(r'<div class="bar".*?</div>', text, re.S)[:2]

    def width(bar):
        return sum(map(float, re.findall(r"width:([\d.]+)%", bar)))

    assert width(second) == pytest.approx(100, abs=0.05)
    lasted = [one.wall_s for one in both()]
    assert width(first) == pytest.approx(100 * lasted[0] / lasted[1], abs=0.05)


def test_it_stays_small_however_many_jobs_there_are():
    one = Told("x" * 200).tell("job_started", command="y" * 5000).form()
    for step in range(1, 1500):
        one.train(step, 1.0, **{f"loss{n}": 1 / step + n for n in range(6)})
        if step % 50 == 0:
            one.save().lose(kind=f"k{step}").form(step - 7)
    events = one.end()
    jobs = [
        one_of(
            f"{n}/{'n' * 80}", events, 1000, 2.0, {f"s{k}": f"{n}{'z' * 300}" for k in range(400)}
        )
        for n in range(MOST_JOBS)
    ]
    text = compare_page(jobs, {}, written="")
    assert len(text.encode()) < 300_000
    assert re.search(r"\d+ more are in --json", text)


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture(name="stories")
def _stories(tmp_path):
    return [str(path) for path in write_stories(tmp_path)]


def run(*arguments):
    result = CliRunner().invoke(command, list(map(str, arguments)))
    if isinstance(result.exception, ConfigError):
        return f"refused: {result.exception}"
    assert result.exception is None, result.exception
    return result.output


def test_the_command_tells_three_jobs_apart(stories, tmp_path):
    text = run(*stories, "--compare")
    lines = text.splitlines()
    assert lines[0].startswith("llama-sft-2 is not over: its figures are as of its newest event, ")
    heads = ["spot/llama-sft", "on-demand/llama-sft", "llama-sft-2"]
    assert lines[1].startswith("goodput: on-demand/llama-sft is best, ")
    assert lines[2].startswith("money for a step: spot/llama-sft is best, ")
    assert lines[3].startswith("warning: the jobs are unlike, a difference may come of that: ")
    assert "paid: spot (spot/llama-sft), on demand (on-demand/llama-sft)" in lines[3]
    assert lines[4].split() == heads
    assert lines[-1] == f"Next: outlast report {stories[0]}"
    by_name = {line[:40].split("   ")[0].strip(): line for line in lines}
    assert by_name["spent"].split() == ["spent", "248.37", "531.88", "133.00"]
    assert by_name["priced as"].split()[2:] == ["spot", "on", "demand", "spot"]
    data = json.loads(run(*stories, "--compare", "--json"))
    assert [one["name"] for one in data["jobs"]] == heads
    assert (data["same_step"], data["left_out"]) == (5430, {})
    assert data["jobs"][1]["incidents"] == {}
    path = tmp_path / "compare.html"
    assert "one file; open it in a browser" in run(*stories, "--compare", "-o", path)
    assert not Reader(path.read_text()).open


def test_figures_are_those_of_each_jobs_own_report(stories):
    compared_jobs = json.loads(run(*stories, "--compare", "--json"))["jobs"]
    for directory, one in zip(stories[:2], compared_jobs, strict=False):  # those that are over
        alone = json.loads(run(directory, "--json"))
        assert one["parts_s"] == {
            part: pytest.approx(alone["workers_s"][part]) for part in one["parts_s"]
        }
        assert one["money"]["cost"] == pytest.approx(alone["cost"])
        assert one["money"]["saved"] == pytest.approx(alone["cost_saved"])
        assert sum(kind["num"] for kind in one["incidents"].values()) == len(alone["incidents"])


def test_a_report_has_the_prices_that_the_job_was_begun_with(stories, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert json.loads(run(stories[0], "--json"))["cost"] == pytest.approx(248.37, abs=0.01)
    (tmp_path / "outlast.toml").write_text("[price]\nspot = 0\n")
    assert json.loads(run(stories[0], "--json"))["cost"] == 0.0


def test_what_is_no_job_is_left_out_and_said(stories, tmp_path):
    (tmp_path / "nothing").mkdir()
    torn = Path(stories[0], FILE_NAME)
    torn.write_bytes(torn.read_bytes() + encode(slow()[0])[:30])
    text = run(*stories, tmp_path / "nothing", "--compare")
    assert "spot/llama-sft has 1 line in its ledger that cannot be read" in text
    assert f"nothing is left out: {tmp_path}/nothing is not a job's directory" in text
    unreadable = tmp_path / "unreadable"
    (unreadable / FILE_NAME).mkdir(parents=True)
    (unreadable / "job.json").write_bytes(msgspec.json.encode(Job(id="u")))
    data = json.loads(run(*stories[:2], tmp_path / "nothing", unreadable, "--compare", "--json"))
    assert len(data["jobs"]) == 2
    assert list(data["left_out"]) == [str(tmp_path / "nothing"), str(unreadable)]
    assert data["left_out"][str(unreadable)] == "its ledger cannot be read: Is a directory"


@pytest.mark.parametrize(
    ("given_to_it", "said"),
    [
        (["--compare"], "--compare takes 2 to 24 jobs, and was given 0: "),
        (["0", "--compare"], "and was given 1: "),
        (["0", "0/../llama-sft", "--compare"], "was given twice; give each job once"),
        (["0", "nothing", "--compare"], "fewer than two of these are jobs: "),
        (["0", "1"], "one job has one report, and 2 were given: outlast report "),
        (
            ["0", "1", "--compare", "-o", "c.pdf"],
            "c.pdf is no page: outlast report -o compare.html",
        ),
    ],
)
def test_the_command_says_what_is_wrong(given_to_it, said, stories):
    arguments = [re.sub(r"^[01]", lambda found: stories[int(found[0])], one) for one in given_to_it]
    told = run(*arguments)
    assert told.startswith("refused: ")
    assert said in told
