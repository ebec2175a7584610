"""Which rank is slow, and since when, as the page and ``--json`` say it."""

import itertools
import re

import msgspec
import pytest

from outlast import units
from outlast.ledger.events import Event
from outlast.report import plot, text
from outlast.report.facts import facts, to_json
from outlast.report.page import RANKS, ROWS, page
from outlast.report.plot import BANDS, Span
from outlast.report.series import COLUMNS, RANK_SAMPLES, rank_samples, rank_times
from report_story import STEP_S, large_job, story

MINUTE_S = 60.0
_MONO = itertools.count()


def told(t, name, attempt=1, node="a", **fields):
    head = {"job": "j", "attempt": attempt, "node": node, "rank": None, "event": name}
    return Event(t=1e9 + t, mono=float(next(_MONO)), **head, fields=fields)


def line(minute, node, ranks, own_s, *, kinds=(1,), attempt=1, **changed):
    """What a machine says of this minute: a step takes a second, whoever is waited for."""
    num = len(ranks)
    fields = {
        "seconds": MINUTE_S,
        "ranks": list(ranks),
        "kinds": list(kinds),
        "num": [60] * num,
        "step_s": [1.0] * num,
        "own_s": list(own_s),
        "wait_s": [0.1] * num,
        "data_s": [0.1] * num,
        "longest_s": [2.0 + minute] * num,
    }
    return told(MINUTE_S * (minute + 1), "rank_steps", attempt, node, **{**fields, **changed})


def a_job(minutes, own_s, machines=("a", "b"), **changed):
    """Two ranks on each machine; ``own_s`` of a rank in a minute."""
    events = [told(0, "attempt_formed", world_size=2 * len(machines), nodes=len(machines))]
    for minute in range(minutes):
        for place, node in enumerate(machines):
            ranks = [2 * place, 2 * place + 1]
            events.append(line(minute, node, ranks, [own_s(r, minute) for r in ranks], **changed))
    return events


def slow_from_10_to_20(rank, minute):
    return 0.8 if rank == 3 and 10 <= minute < 20 else 0.4


def test_who_was_slow_and_when():
    found = rank_times(a_job(40, slow_from_10_to_20))
    assert [(one.node, one.place, one.rank) for one in found] == [
        ("a", 0, 0),
        ("a", 1, 1),
        ("b", 0, 2),
        ("b", 1, 3),
    ]
    *others, slow = found
    assert {(one.slow_factor, one.slow_from_t, one.lost_s) for one in others} == {(None, None, 0.0)}
    assert slow.slow_factor == pytest.approx(0.9 / 0.5)
    assert (slow.slow_from_t, slow.slow_until_t) == (1e9 + 600, 1e9 + 1200)
    assert slow.lost_s == pytest.approx(0.4 * 600)
    assert slow.num_steps == 40 * 60
    assert slow.own_s == pytest.approx(0.5)
    assert (slow.step_s, slow.wait_s, slow.data_s) == pytest.approx((1.0, 0.1, 0.1))
    assert slow.longest_s == 41.0
    quick = [at for at, one in enumerate(slow.factors) if one < 1.2]
    assert len(slow.factors) == COLUMNS
    assert all(not 0.27 < at / COLUMNS < 0.48 for at in quick)
    assert all(slow.factors[int(part * COLUMNS)] < 1.2 for part in (0.1, 0.2, 0.6, 0.9))


def test_waits_for_batches_hold_the_others_up_as_well():
    events = [line(m, "a", [0, 1], [0.4, 0.4], data_s=[0.0, 0.3]) for m in range(5)]
    quick, slow = rank_times(events)
    assert quick.slow_factor is None
    assert slow.slow_factor == pytest.approx(0.7 / 0.4)


def test_of_two_stretches_the_costlier_one_is_told_and_both_have_cost():
    found = rank_times(a_job(30, lambda rank, m: 0.6 if rank == 1 and (m < 3 or m > 20) else 0.3))
    slow = found[1]
    assert (slow.slow_from_t, slow.slow_until_t) == (1e9 + 21 * 60, 1e9 + 1800)
    assert slow.lost_s == pytest.approx(0.3 * 60 * (3 + 9))


def test_stages_of_a_pipeline_are_not_compared_with_each_other():
    def own_s(rank, minute):
        return 0.9 if rank % 2 else 0.2

    assert {one.slow_factor for one in rank_times(a_job(9, own_s, kinds=(5, 6)))} == {None}
    assert {one.slow_factor for one in rank_times(a_job(9, own_s))} != {None}


@pytest.mark.parametrize(("ranks", "kinds"), [((0,), (5,)), ((0, 1), (5, 6))], ids=str)
def test_nobody_is_slower_than_itself(ranks, kinds):
    own_s = {0: 0.2, 1: 0.3}
    events = [
        line(m, "a", ranks, [own_s[one] * (3 if m % 2 else 1) for one in ranks], kinds=kinds)
        for m in range(400)  # several lines to a column
    ]
    found = rank_times(events)
    assert [(one.slow_factor, one.lost_s) for one in found] == [(None, 0.0)] * len(ranks)


def test_what_is_little_of_a_step_is_nothing():
    events = [line(m, "a", [0, 1], [0.01, 0.05], data_s=[0.0, 0.0]) for m in range(5)]
    assert {one.slow_factor for one in rank_times(events)} == {None}


def test_ranks_that_are_dealt_out_anew_are_the_same_workers():
    before = [line(m, "a", [0, 1], [0.4, 0.4]) for m in range(5)]
    after = [line(5 + m, "a", [6, 7], [0.4, 0.9], attempt=2) for m in range(5)]
    first, second = rank_times([*before, *after])
    assert (first.rank, second.rank, second.num_steps) == (6, 7, 600)
    assert second.slow_from_t == 1e9 + 300


def test_one_that_has_made_no_step_leaves_its_place_to_nobody():
    whole = [line(m, "a", [0, 1, 2], [0.4, 0.4, 0.9]) for m in range(3)]
    first, second, third = rank_times([*whole, line(3, "a", [1, 2], [0.4, 0.9])])
    assert [one.num_steps for one in (first, second, third)] == [180, 240, 240]
    assert (second.slow_factor, third.slow_until_t) == (None, 1e9 + 240)


def test_several_agents_on_one_machine_have_places_of_their_own():
    events = [one for m in range(3) for one in (_pair(m, 0, 0.4), _pair(m, 2, 0.9))]
    found = rank_times(events)
    assert [(one.place, one.rank, one.num_steps) for one in found] == [
        (0, 0, 180),
        (1, 1, 180),
        (2, 2, 180),
        (3, 3, 180),
    ]
    assert [one.slow_factor is not None for one in found] == [False, False, True, True]


def _pair(minute, first, own_s):
    return line(minute, "a", [first, first + 1], [own_s, own_s])


def test_a_pause_is_no_part_of_what_is_told():
    events = [line(m, "a", [0, 1], [0.4, 0.4]) for m in (0, 1, 98, 99)]
    (found, _) = rank_times([told(0, "attempt_formed"), *events])
    known = [at for at, one in enumerate(found.factors) if one]
    assert known[0] == 0
    assert known[-1] == COLUMNS - 1
    assert not set(range(5, 90)) & set(known)


@pytest.mark.parametrize(
    "changed",
    [
        {"own_s": [0.1]},
        {"own_s": [0.1, None]},
        {"own_s": [0.1, -0.1]},
        {"own_s": "x"},
        {"own_s": None},
        {"kinds": []},
        {"num": [1.5, 2]},
        {"seconds": -1.0},
        {"seconds": None},
        {"ranks": 7},
    ],
    ids=str,
)
def test_a_damaged_line_says_nothing(changed):
    whole = line(1, "a", [0, 1], [0.4, 0.4])
    assert len(rank_samples(whole)) == 2
    odd = msgspec.structs.replace(whole, fields={**whole.fields, **changed})
    assert rank_samples(odd) == []
    assert rank_times([odd]) == []
    (one, _) = rank_times([line(0, "a", [0, 1], [0.4, 0.4]), odd])
    assert one.num_steps == 60
    assert page([odd])


def test_of_very_many_lines_some_are_looked_at_and_all_count():
    minutes = RANK_SAMPLES // 4 + 100  # one more than all
    found = rank_times(a_job(minutes, lambda rank, m: 0.8 if rank == 3 and m >= 1000 else 0.4))
    assert found[3].num_steps == pytest.approx(60 * minutes, rel=1e-3)
    assert found[3].lost_s == pytest.approx(0.4 * 60 * (minutes - 1000), rel=1e-3)
    assert found[3].slow_from_t == pytest.approx(1e9 + 60_000, abs=120)


def test_of_very_many_lines_of_two_agents_some_of_each_are_looked_at():
    minutes = RANK_SAMPLES // 4 + 100
    pairs = ((_pair(m, 0, 0.4), _pair(m, 2, 0.9)) for m in range(minutes))
    found = rank_times([one for pair in pairs for one in pair])
    assert [one.rank for one in found] == [0, 1, 2, 3]
    assert [one.num_steps for one in found] == pytest.approx([60 * minutes] * 4, rel=1e-3)


def test_json_has_each_rank_and_no_picture():
    said = to_json(a_job(40, slow_from_10_to_20))["ranks"]
    assert [one["rank"] for one in said] == [0, 1, 2, 3]
    assert said[3]["slow_from_t"] == 1e9 + 600
    assert "factors" not in said[3]


def test_when_a_rank_was_slow_in_words():
    found = rank_times(a_job(40, slow_from_10_to_20))
    assert text.slow_words(found[3]) == (
        "up to 1.8 times the others' work in a step, 2001-09-09 01:56:40 to 02:06:40 UTC"
    )
    longer = msgspec.structs.replace(found[3], slow_until_t=1e9 + 86_400)
    assert "2001-09-09 01:56:40 to 2001-09-10 01:46:40 UTC" in text.slow_words(longer)
    assert text.slow_words(found[0]) == ""


# --- the picture ----------------------------------------------------------------------------------


def cells(paths):
    """Column → band, of one row."""
    found = {}
    for band, path in paths:
        for first, num in re.findall(r"M(\d+) 0h(\d+)", path):
            for column in range(int(first), int(first) + int(num)):
                assert column not in found
                found[column] = band
    return found


def test_cells_have_the_colour_of_their_band():
    factors = [0.0, 0.9, 1.0, *BANDS, 1.19, 7.0, 0.0]
    drawn = plot.strips([("a", "r", "w", factors)], label="", x_label="", x=Span(0.0, 1.0))
    assert cells(drawn.rows[0].paths) == {1: 0, 2: 0, 3: 1, 4: 2, 5: 3, 6: 4, 7: 1, 8: 4}
    assert [band for band, _ in drawn.legend] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("each", [1, 4, 16, 64])
def test_labels_have_room_on_a_phone(each):
    rows = [(f"n{number // each}", f"rank {number}", "w", [1.0] * COLUMNS) for number in range(64)]
    drawn = plot.strips(rows, label="", x_label="", x=Span(0.0, 1.0))
    at = [row.at for row in drawn.rows if row.label]
    assert at
    assert all(b - a >= plot.WORDS_HIGH for a, b in itertools.pairwise(at))
    assert drawn.height < 700


def test_machines_go_by_what_tells_them_apart():
    hosts = [f"ip-10-0-3-{number}.compute.internal" for number in range(64)]
    rows = [(one, "rank", "w", [1.0]) for one in hosts]
    drawn = plot.strips(rows, label="", x_label="", x=Span(0.0, 1.0))
    labels = [row.label for row in drawn.rows if row.label]
    assert (labels[0], labels[-1]) == ("ip-10-0-3-0", "ip-10…-3-63")
    alike = [(f"gpu.rack-{number}", "rank", "w", [1.0]) for number in range(64)]
    drawn = plot.strips(alike, label="", x_label="", x=Span(0.0, 1.0))
    assert drawn.rows[0].label == "gpu.rack-0"


def test_a_job_of_one_worker_has_nobody_beside_it():
    assert "<h3>Ranks" not in page([line(0, "a", [0], [0.4])])


def test_the_page_of_the_story_names_the_slow_rank():
    job = facts(story())
    (line,) = text.slow_lines(job)
    assert line.plain.startswith("rank 11 on node-2: slow, its steps 62 % longer than")
    html = page(story())
    assert line.plain.replace("'", "&#39;") in html
    assert f"{units.seconds(job.waited_s)} lost waiting" in line.plain  # one figure
    assert html.count("lost waiting") == 1
    assert len(html.split("<h3>Ranks")[1].split("</svg>")[0].split("<title>rank")) == 33
    assert sum(one.num_steps for one in job.ranks) >= 32 * 10_500
    assert all(one.step_s == pytest.approx(STEP_S, rel=0.15) for one in job.ranks)


@pytest.mark.parametrize(("machines", "rows"), [(64, 64), (200, RANKS)])
def test_the_page_of_hundreds_of_ranks_stays_small_whatever_they_do(machines, rows):
    """At worst each cell of each row has another colour than the one beside it."""
    html = page(large_job(machines))
    assert len(html.encode()) < 300_000
    picture = html.split("<h3>Ranks")[1].split("</svg>")[0]
    assert picture.count("<g><title>") == rows
    assert "each machine&#39;s slowest rank" in picture
    table = html.split("<h3>Ranks")[1].split("</table>")[0]
    assert table.count("<tr>") == ROWS + 1
