"""Nobody is called hung in a job whose steps are slow by right.

OUTLAST_TEST_ALL=1 has it run for 30 minutes.
"""

from pathlib import Path

import pytest
from floor import LIMIT_S, Job

from thorough import ALL

SCRIPT = Path(__file__).with_name("varying.py")
SECONDS = 1800 if ALL else 10


@pytest.mark.timeout(SECONDS + 2 * LIMIT_S)
def test_a_step_time_that_varies_tenfold(floor, tmp_path, rng):
    job = Job(tmp_path / "job", 2)
    agent = floor.outlast(
        *("run", "--nproc-per-node", 2, "--dir", job.directory, SCRIPT),
        *(job.records, SECONDS, rng.randrange(1000)),
        env={"OUTLAST_HEALTH_HANG": "auto"},
    )
    assert agent.wait(SECONDS + LIMIT_S) == 0, agent.text
    assert job.events("hang") == []
    assert len(job.events("attempt_formed")) == 1
    for rank in range(2):
        steps, slowest = (job.records / f"done-{rank}").read_text().split()
        assert int(steps) >= SECONDS / 2
        assert float(slowest) > 3
        print(f"rank {rank}: {steps} steps, the slowest {slowest} s")
