"""Pipelines on fleets that come and go, worked by hand and on drawn fleets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.planner.pipelines import (
    READY_S,
    LayoutCosts,
    PipelineLayout,
    PipelineRules,
    PipelineSpeed,
    fastest,
    one_by_one,
    relaid_samples,
    replay,
)
from outlast.planner.traces import FleetChange, Recording
from thorough import examples

SPEED = PipelineSpeed(samples_per_step=10, samples_per_s={2: 1.0, 4: 2.0})


def fleet(length_s, *changes):
    machines = sum(len(change.came) for change in changes)
    return Recording(
        name="drawn", kind="fleet", length_s=length_s, changes=changes, machines=machines
    )


def test_speed_is_linear_between_what_is_known():
    assert [SPEED.step_s(count) for count in (1, 2, 3, 4, 9)] == pytest.approx(
        [10, 10, 10 / 1.5, 5, 5]
    )
    three_or_four = PipelineSpeed(samples_per_step=1, samples_per_s={1: 1.0}, depths=(3, 4))
    assert [three_or_four.idle_share(count) for count in (12, 14, 29)] == pytest.approx(
        [0, 2 / 14, 1 / 29]
    )


def test_a_template_makes_one_step_again():
    # Four machines, ready at 45 s; one goes 112 s after that, in the 23rd step of 5 s.
    came = FleetChange(at_s=0.0, came=("a", "b", "c", "d"))
    recording = fleet(READY_S + 212, came, FleetChange(at_s=READY_S + 112, went=("b",)))
    out = replay(recording, SPEED, PipelineRules(regroup_s=2.0))
    # 2 s to form, 22 steps by 112 s; 2 s again, then 98 s of steps of 6.67 s: 14.
    assert (out.steps, out.losses) == (22 + 14, 1)
    assert out.kept_s == pytest.approx(22 * 5 + 14 * 20 / 3)
    assert out.regrouping_s == 4.0
    assert out.useful_share == pytest.approx(out.kept_s / 212)


def test_checkpoints_rewind_to_the_last_one():
    came = FleetChange(at_s=0.0, came=("a", "b", "c", "d"))
    recording = fleet(READY_S + 212, came, FleetChange(at_s=READY_S + 112, went=("b",)))
    rules = PipelineRules(regroup_s=10.0, save_s=5.0, save_steps=4)
    out = replay(recording, SPEED, rules)
    # Four steps and a save take 25 s: four times by 110 s. Then 90 s of steps of 6.67 s; a save
    # behind the first, the 17th, and behind the 20th and the 24th.
    assert out.saving_s == 5 * 4 + 5 * 3
    assert out.steps == 16 + 11
    assert out.losses == 1
    assert replay(recording, SPEED, PipelineRules(regroup_s=10.0)).steps > out.steps


def test_who_comes_is_used_from_the_next_group_on():
    came = FleetChange(at_s=0.0, came=("a", "b", "c"))
    late = FleetChange(at_s=10.0, came=("d",))
    gone = FleetChange(at_s=107.0, went=("a",))
    out = replay(fleet(210.0, came, late, gone), SPEED, PipelineRules(regroup_s=0.0))
    # Three at 45 s, of which nine steps by 107 s; then three again, with the one that came.
    assert out.steps == 9 + 15


@examples(50)
@given(
    machines=st.integers(2, 12),
    every_s=st.floats(60, 3000),
    regroup_s=st.floats(0, 100),
    save_s=st.floats(0, 20),
    save_steps=st.none() | st.integers(1, 20),
)
def test_times_are_within_the_wall(machines, every_s, regroup_s, save_s, save_steps):
    rules = PipelineRules(regroup_s=regroup_s, save_s=save_s, save_steps=save_steps)
    recording = one_by_one(machines, 1, every_s)
    out = replay(recording, SPEED, rules)
    assert -1e-9 <= out.kept_s <= out.begun_s
    assert out.kept_s <= out.wall_s * (1 + 1e-9)
    assert out.steps >= 0
    assert 0 <= out.published_share <= 1
    free = replay(recording, SPEED, PipelineRules(regroup_s=0.0))
    assert out.kept_s <= free.kept_s + SPEED.step_s(1) * (machines + 1)


def test_the_fastest_layout_that_fits():
    known = {PipelineLayout(1, 2): 1.0, PipelineLayout(2, 2): 1.9, PipelineLayout(1, 3): 1.2}
    assert fastest(1, known) is None
    assert fastest(3, known) == PipelineLayout(1, 3)
    assert fastest(9, known) == PipelineLayout(2, 2)


def test_changes_of_layout_by_hand():
    known = {PipelineLayout(1, 2): 1.0, PipelineLayout(2, 2): 2.0}
    came = FleetChange(at_s=0.0, came=("a", "b", "c", "d"))
    gone = FleetChange(at_s=60.0, went=("d",))
    back = FleetChange(at_s=120.0, came=("e",))
    recording = fleet(180.0, came, gone, back)
    assert relaid_samples(recording, known) == 2 * 60 + 60 + 2 * 60 + 2 * 60
    # 50 s of restart at first; then 70 s with the save, of which 10 are left when the next comes:
    # it takes 70 s and a restart besides, two minutes and none is left of the last one.
    costs = LayoutCosts(restart_s=50.0, save_s=20.0)
    assert relaid_samples(recording, known, costs) == 2 * 10


def test_groups_are_made_one_after_the_other():
    costs = LayoutCosts(
        rendezvous_s=5.0, group_s=1.0, shrunk_group_s=0.5, process_s=2.0, layer_s=3.0, layers=10
    )
    layout = PipelineLayout(2, 4)  # 2 + 4 + 1 + 8 groups, three layers a stage
    assert costs.restarted_s(layout, came=True) == 5 + 15 + 2 + 9
    assert costs.restarted_s(layout, came=False) == 7.5 + 2 + 9
