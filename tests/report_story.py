"""A made-up job of six hours, with something in every part of its report.

Four machines of two kinds with eight workers each, a spot notice, a worker killed, a hang with
stacks, a slow rank, a burst, two tiers, losses. Its ledger is made by a seeded chance, so it is the
same each time. It is for tests of the page in a browser, and for the pictures in the documents,
which say that it is made up.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any, Final

import msgspec

from outlast.ledger.events import Event, encode
from outlast.ledger.file import FILE_NAME
from outlast.ledger.job import Job
from outlast.prices import PriceList, Prices

START_T: Final = 1_790_000_000.0
MACHINES: Final = ("node-1", "node-2", "node-3", "node-4")
EACH: Final = 8
STEP_S: Final = 1.8
SAMPLE: Final = 30  # steps
SAVE: Final = 300
KINDS: Final = ("p5.48xlarge", "p5.48xlarge", "p5.48xlarge", "p4d.24xlarge")
PRICES: Final = Prices(
    spot=PriceList(kinds={"p5.48xlarge": 12.0, "p4d.24xlarge": 7.5}),
    on_demand=PriceList(kinds={"p5.48xlarge": 31.5, "p4d.24xlarge": 21.9}),
)


class _Story:
    def __init__(self, job: str = "llama-sft-7b", seed: int = 7) -> None:
        self.events: list[Event] = []
        self._job = job
        self.t = 0.0
        self.attempt = 0
        self.step = 0
        self._chance = random.Random(seed)
        self._paces = random.Random(11)

    def tell(self, name: str, **said: Any) -> None:
        """An event; ``node`` and ``rank`` are those of its head. No two are of the same moment."""
        self.t += 1e-3
        self.events.append(
            Event(
                job=self._job,
                t=START_T + self.t,
                mono=self.t,
                attempt=0 if name == "job_started" else self.attempt,
                node=said.pop("node", "node-1"),
                rank=said.pop("rank", None),
                event=name,
                fields=said,
            )
        )

    def form(self, step: int, source: str, takes_s: float) -> None:
        self.attempt += 1
        hosts = dict.fromkeys(MACHINES, EACH)
        self.tell("attempt_formed", world_size=32, nodes=len(MACHINES), hosts=hosts)
        self.t += takes_s
        self.step = step
        places = ["local"] if step else []
        self.tell("resumed", rank=0, step=step, source=source, places=places, building_s=20.0)

    def train(self, until: int, factor: float = 1.0) -> None:
        while self.step < until:
            seconds = SAMPLE * STEP_S * factor * self._chance.uniform(0.97, 1.06)
            if self._chance.random() < 0.03:
                seconds *= 1.4
            self.t += seconds
            self.step += SAMPLE
            loss = 1.2 + 2.4 * math.exp(-self.step / 3000) + self._chance.gauss(0, 0.03)
            rate = 3e-4 * min(1.0, self.step / 500)
            scalars = {"loss": loss, "learning rate": rate}
            said = {"stalled_s": 0.02 * seconds, "data_s": 0.03 * seconds, "script_s": 0.0}
            self.tell("step", rank=0, step=self.step, seconds=seconds, scalars=scalars, **said)
            self._tell_ranks(seconds, factor)
            if self.step % SAVE == 0:
                self._save()

    def _tell_ranks(self, seconds: float, factor: float) -> None:
        """What each machine's ranks did; by so much rank 11 holds them up."""
        step_s = seconds / SAMPLE
        for place, node in enumerate(MACHINES):
            ranks = list(range(EACH * place, EACH * (place + 1)))
            own_s = [0.8 * STEP_S * self._paces.uniform(0.97, 1.03) for _ in ranks]
            own_s = [
                one * (factor if rank == 11 else 1) for rank, one in zip(ranks, own_s, strict=True)
            ]
            data_s = [0.03 * step_s for _ in ranks]
            waits = {"wait_s": [max(step_s - one, 0.0) for one in own_s], "data_s": data_s}
            steps = {"num": [SAMPLE] * EACH, "step_s": [step_s] * EACH, "own_s": own_s}
            longest = {"longest_s": [2.5 * step_s] * EACH}
            told = {"ranks": ranks, "kinds": [7], **steps, **waits, **longest}
            self.tell("rank_steps", node=node, seconds=seconds, **told)

    def _save(self) -> None:
        tiers = ["local", "s3"] if self.step % (2 * SAVE) == 0 else ["local"]
        blocked = {"blocked_s": 0.9, "bytes": 8 * 10**10, "reason": "cadence"}
        self.tell("snapshot", rank=0, step=self.step, tiers=tiers, **blocked)
        seconds = self._chance.uniform(14, 22)
        size = {"bytes": 8 * 10**10, "files": 64, "kind": "full"}
        self.tell("commit", rank=0, step=self.step, durable_s=seconds, tier="local", **size)
        if "s3" in tiers:
            seconds = self._chance.uniform(60, 110) * (3 if self.step > 6000 else 1)
            copied = {"seconds": seconds, "bytes": 8 * 10**10}
            self.tell("tier_copied", step=self.step, tier="s3", **copied)

    def restart(self, reason: str, kind: str, wait_s: float) -> None:
        self.tell("restart", reason=reason, kind=kind, restarts=self.attempt, action="restart")
        self.t += wait_s


def story() -> list[Event]:
    """The ledger's events."""
    one = _Story()
    one.tell("job_started", command=["train.py"], age_s=9.0)
    for node, kind in zip(MACHINES, KINDS, strict=True):
        one.tell("machine", node=node, kind=kind, source="aws")
    one.t += 30
    one.form(0, "", 45.0)
    one.train(2430)
    beat_t = START_T + one.t
    one.t += 4.0
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    lost = {"pid": 4711, "exit_code": 1, "step": 2437, "beat_t": beat_t, "kind": "memory"}
    one.tell("worker_lost", node="node-3", rank=19, error=error, **lost)
    one.restart(f"rank 19: {error}", "memory", 6.0)
    one.form(2400, "from memory, local", 16.0)
    one.train(4200)
    slow = {
        "node": "node-2",
        "ranks": [11],
        "cause": "compute",
        "of": "compute",
        "factor": 1.62,
    }
    seen = {"since_step": 4202, "own_s": 2.9, "others_s": 1.8, "lost_s": 1.1}
    one.train(4800, 1.6)
    one.tell("straggler", step=4790, over=False, **(slow | seen))
    one.tell("straggler", step=4800, over=True, **(slow | seen))
    one.train(6030)
    beat_t = START_T + one.t
    one.t += 62
    told = {"sentence": "rank 26 is in all_reduce since 62 s, the others wait for it"}
    where = {"phase": "backward", "place": "train.py:118", "stacks": "hangs/one"}
    silent = {
        "beat_t": beat_t,
        "silent_s": 62.0,
        "limit_s": 60.0,
        "longest_s": 2.6,
        "step": 6030,
    }
    who = {"rank": 26, "ranks": [26], "nodes": ["node-4"], "proven": True}
    one.tell("hang", **who, **told, **where, **silent)
    one.restart("rank 26 hung", "hang", 8.0)
    one.form(6000, "from memory, local", 15.0)
    one.train(8100)
    deadline_t = START_T + one.t + 120
    one.tell("notice", node="node-2", source="aws", action="terminate", deadline_t=deadline_t)
    one.tell("drain_agreed", rank=0, step=8130, reason="notice", left_s=118.0)
    one.train(8130)
    one.t += 21
    one.tell("drained", step=8130, committed=True)
    one.tell("job_finished", exit_code=75, reason="drained for the notice of node-2", kind=None)
    one.t += 640
    one.tell("job_started", command=["train.py"], age_s=8.0)
    one.t += 25
    one.form(8130, "from local", 31.0)
    one.train(10_500)
    one.t += 3.0
    one.tell("session_ended", rank=0, step=10_500, stalled_s=3.0)
    one.t += 12
    one.tell("job_finished", exit_code=0, reason="all steps are done")
    return one.events


def calm_story() -> list[Event]:
    """The same job on machines that are not taken back, of one kind, without any trouble."""
    one = _Story("llama-sft-7b-calm", 8)
    one.tell("job_started", command=["train.py"], age_s=9.0)
    for node in MACHINES:
        one.tell("machine", node=node, kind="p4d.24xlarge", source="price.kind")
    one.t += 30
    one.form(0, "", 45.0)
    one.train(10_500, 1.12)
    one.tell("session_ended", rank=0, step=10_500, stalled_s=3.0)
    one.t += 12
    one.tell("job_finished", exit_code=0, reason="all steps are done")
    return one.events


def write_stories(root: Path) -> list[Path]:
    """Three jobs to be compared: on spot, on demand and calm, and one that is not over."""
    spot = {"price.spot": str(PRICES.spot), "price.on_demand": str(PRICES.on_demand)}
    on_demand = {"price.on_demand": spot["price.on_demand"], "checkpoint.every": "30 min"}
    told = {"restart.failures": "3"}
    jobs = {
        "spot/llama-sft": (story(), spot | {"checkpoint.every": "auto"}),
        "on-demand/llama-sft": (calm_story(), on_demand),
        "llama-sft-2": (story()[:968], spot | {"checkpoint.every": "5 min", "peer.replicas": "2"}),
    }
    for name, (events, settings) in jobs.items():
        write_story(root / name, events)
        job = Job(id=events[0].job, settings={"peer.replicas": "auto"} | told | settings)
        (root / name / "job.json").write_bytes(msgspec.json.encode(job))
    return [root / name for name in jobs]


def large_job(machines: int, minutes: int = 90) -> list[Event]:
    """Machines of eight ranks, on which each minute some are slow, others in the next one."""
    one = _Story("llama-sft-7b-large", 7)
    names = [f"ip-10-0-3-{number}.compute.internal" for number in range(machines)]
    one.tell("job_started", command=["train.py"], age_s=9.0)
    one.attempt, num = 1, machines * EACH
    one.tell("attempt_formed", world_size=num, nodes=machines, hosts=dict.fromkeys(names, EACH))
    one.tell("resumed", rank=0, step=0, source="", places=[], building_s=20.0)
    for minute in range(minutes):
        one.t += 60.0
        one.tell("step", rank=0, step=30 * (minute + 1), seconds=60.0, scalars={"loss": 1.0})
        for place, node in enumerate(names):
            own_s = [1.0 + ((minute + place) % 5) / 4] * EACH
            same = {name: [2.0] * EACH for name in ("step_s", "longest_s")}
            waits = {name: [0.1] * EACH for name in ("wait_s", "data_s")}
            ranks = list(range(EACH * place, EACH * (place + 1)))
            told = {"ranks": ranks, "kinds": [7], "num": [30] * EACH, "own_s": own_s}
            one.tell("rank_steps", node=node, seconds=60.0, **told, **same, **waits)
    return one.events


def write_story(directory: Path, events: list[Event] | None = None) -> None:
    """A job's directory with this ledger, and the stacks of its hang."""
    stacks = directory / "hangs" / "one"
    stacks.mkdir(parents=True)
    lines = 'File "train.py", line 118 in step\n  File "train.py", line 140 in main\n'
    (stacks / "rank-26.txt").write_text(f"Thread 0x1 (most recent call first):\n  {lines}")
    (directory / FILE_NAME).write_bytes(b"".join(map(encode, events or story())))
