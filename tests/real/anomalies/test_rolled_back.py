"""A batch that is no good: found, undone and left out by all ranks at once, and nothing else.

The run after it is compared, bit for bit, with one that starts from the same checkpoint, on data in
which the batch is not there.
"""

import pytest
from anomalies_floor import KEPT, STEPS, of_attempt, reference, run

from thorough import ALL


def healthy_before(job, rollback):
    return [one for one in job.events("healthy") if one.t <= rollback.t]


CASES = [
    *((kind, world, mode) for kind in ("nan", "spike") for world in (1, 2, 3) for mode in ("ddp",)),
    *(("nan", world, "same-bits") for world in (1, 2, 3)),
    ("spike", 2, "same-bits"),
]
FEW = [("nan", 1, "ddp"), ("spike", 3, "ddp"), ("nan", 3, "same-bits")]


@pytest.mark.parametrize(("kind", "world", "mode"), CASES if ALL else FEW)
def test_the_rest_is_the_run_without_the_batch(floor, tmp_path, kind, world, mode):
    options = ["--same-bits"] if mode == "same-bits" else []
    job, running = run(*(floor, tmp_path, world, "--poison", f"32:{kind}", *options), env=KEPT)
    (sign,) = job.events("anomaly")
    (back,) = job.events("rollback")
    assert sign["first"] == sign["step"] == 32
    assert sign["kind"] == kind
    if kind == "nan":
        assert sign["ranks"] == ([world - 1] if mode == "ddp" else [*range(world)]), sign
        assert sign["value"] is None
    else:
        assert sign["value"] > 8 * sign["usual"]
    # The newest that three steps without a sign had followed; its commit may come too late.
    assert back["step"] == max(event["step"] for event in healthy_before(job, back))
    assert 0 < back["step"] <= 28
    assert back["batches"] == {"loop": 1, "first": 32, "last": 32}
    resumed = [event["step"] for event in job.events("resumed")]
    assert resumed == [0, back["step"]], running.text
    ends = {rank: of_attempt(job, rank, 1)[-1]["step"] for rank in range(world)}
    assert len(set(ends.values())) == 1, "all leave after the same step"
    clean = reference(
        floor, job, back["step"], *options, "--poison", f"32:{kind}", "--without", "32-32"
    )
    for rank in range(world):
        expected, found = of_attempt(clean, rank, 0), of_attempt(job, rank, 2)
        assert [line["step"] for line in found] == list(range(back["step"] + 1, STEPS + 1))
        assert found == expected
        assert job.final(rank)["hash"] == clean.final(rank)["hash"]
    assert not job.events("worker_lost")
    assert len(job.events("restart")) == 1
    assert f"rolling back to step {back['step']}, leaving out 1 batch" in running.err
