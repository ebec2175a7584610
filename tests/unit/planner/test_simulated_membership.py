"""The simulator: its clock, its losses, and that a simulated job comes back from each of them."""

import random
from pathlib import Path

import pytest

from outlast.planner.job import Clock, MachineLoss
from simulated_machines.losses import LLAMA_3, at_rates, of_bamboo, of_lanl
from simulated_machines.parts import Costs, Server
from simulated_machines.runs import run

MACHINES = 96
TRACES = Path("shared/traces")


def test_things_happen_in_order_each_at_its_moment():
    clock, seen = Clock(), []
    clock.after(2.0, lambda: seen.append((clock.now_s, "b")))
    clock.after(1.0, lambda: clock.after(1.0, lambda: seen.append((clock.now_s, "c"))))
    clock.after(5.0, lambda: seen.append("late"))
    clock.run(4.0)
    assert seen == [(2.0, "b"), (2.0, "c")]
    assert clock.now_s == 4.0


def test_a_thread_does_one_thing_after_the_other():
    clock = Clock()
    server = Server(clock)
    assert [server.spend(0.5), server.spend(0.5)] == [0.5, 1.0]
    clock.run(3.0)
    assert server.spend(0.5) == 0.5


def test_losses_come_at_the_published_rate():
    machines, days = 1000, 30
    losses = list(at_rates(machines, days * 86_400.0, random.Random(1)))
    expected = LLAMA_3 * 8 * machines * days
    assert abs(len(losses) - expected) < 4 * expected**0.5
    sizes = {len(loss.machines) for loss in losses}
    assert {1, 16} <= sizes
    assert {loss.how for loss in losses} == {"reset", "silent", "notice"}


def test_traces_are_read(tmp_path):
    spot = tmp_path / "spot.csv"
    spot.write_text("1000,add,a\n1000,add,b\n5000,remove,a\n5000,remove,b\n9000,add,c\n")
    (loss,) = of_bamboo(spot, 10, random.Random(1))
    assert (loss.at_s, loss.machines, loss.back_s) == (5.0, tuple(range(10)), 4.0)
    nodes = tmp_path / "nodes.csv"
    nodes.write_text("t_hours,node,downtime_min\n0.5,3,30.0\n0.5,14,60.0\n7.0,1,1.0\n")
    (both,) = of_lanl(nodes, 10, hours=1.0)
    assert (both.at_s, both.machines, both.back_s) == (1800.0, (3, 4), 3600.0)


@pytest.mark.parametrize("how", ["reset", "silent", "notice"])
@pytest.mark.parametrize("machines", [(40,), tuple(range(32, 64))])
def test_a_loss_is_followed_by_an_attempt_and_the_machines_come_back(how, machines):
    figures = run(MACHINES, [MachineLoss(1.0, machines, how, 30.0)], duration_s=200.0)
    assert len(figures.recovery_s) >= 2  # without them, then with them
    assert figures.worst_machines == MACHINES - len(machines)
    # The coordinator may be among them; who succeeds it waits a moment for the others.
    limit_s = 1.0 if len(machines) == 1 else 4.0
    if how == "silent":
        limit_s += 2 * Costs().silence_s
    assert figures.recovery_s[0] < limit_s


@pytest.mark.parametrize("how", ["reset", "silent"])
@pytest.mark.parametrize("size", [1, 16])
def test_the_coordinator_is_lost_with_its_rack(how, size):
    figures = run(MACHINES, [MachineLoss(1.0, (), how)], duration_s=120.0, with_role=size)
    assert figures.recovery_s
    assert figures.worst_machines == MACHINES - size


def test_all_machines_are_lost_and_come_back():
    figures = run(
        MACHINES, [MachineLoss(1.0, tuple(range(MACHINES)), "reset", 20.0)], duration_s=300.0
    )
    assert figures.attempts >= 2


def test_the_same_seed_gives_the_same_figures():
    def once():
        losses = at_rates(MACHINES, 600.0, random.Random(3), speed_up=3000.0)
        figures = run(MACHINES, losses, seed=3, duration_s=600.0)
        return figures.recovery_s, figures.storage, figures.attempts

    first = once()
    assert first == once()
    assert len(first[0]) > 3


def test_storage_is_asked_as_often_by_many_as_by_few():
    asked = {
        machines: run(machines, [], duration_s=10.0).storage_per_s[0] for machines in (128, 1024)
    }
    assert asked[1024] < 3 * 4 * 200
    assert asked[1024] < 4 * asked[128]


@pytest.mark.skipif(not TRACES.is_dir(), reason="the recorded traces are not here")
def test_a_recorded_spot_fleet():
    losses = list(of_bamboo(TRACES / "bamboo" / "p3-trace.csv", 64, random.Random(1)))
    assert losses
    figures = run(64, losses, duration_s=3600.0, min_share=0.1)
    assert figures.recovery_s
