"""A job of ``scripts/elastic.py`` on several machines: its agents, and what it left behind.

The script's losses and weights do not depend on the number of workers, so that every step of every
attempt, however often machines came and went, is compared with a run that nothing happened to.
"""

import contextlib
from pathlib import Path

import psutil
from floor import SCRIPTS, Job, until

ELASTIC = SCRIPTS / "elastic.py"
STEPS = 100_000  # never reached: a test says when it is enough
AHEAD = 5


class ElasticJob:
    """The job of one test.

    Args:
        hosts: its machines; all of them see the same directory.
        directory: the test's own.
        env: what its agents have in their environment besides.
        script: what it runs, with the command line and the records of ``scripts/elastic.py``.
        options: more of that command line.
        pause_s: in each step.
        num_least: machines that it needs.
    """

    rendezvous = ("--rdzv-backend", "outlast")

    def __init__(
        self,
        hosts,
        directory: Path,
        env=None,
        script=ELASTIC,
        options=(),
        pause_s=0.05,
        num_least=1,
    ):
        self.hosts = hosts
        self._num_least = num_least
        self._env = env
        self._is_in_process = "OUTLAST_WORKERS_IN_PROCESS" in (env or {})
        self.script, self.options, self._pause_s = script, options, pause_s
        self.job = Job(directory / "job", len(hosts))
        self.agents = {}
        self._end = directory / "end"
        self._floor = hosts[0].floor

    # --- what the test does ----------------------------------------------------------------------

    def start(self, *hosts, script=None, arguments=None, num_most=None, env=None):
        """Start the agents of ``hosts``; ``num_most``: machines that train at once."""
        num_most = num_most or len(self.hosts)
        script = script or self.script
        if arguments is None:
            arguments = (STEPS, "--every", "3 steps", "--pause", self._pause_s, "--end", self._end)
            arguments += tuple(self.options)
        for host in hosts:
            self.agents[host.name] = host.outlast(
                *("run", "--nnodes", f"{self._num_least}:{num_most}", "--nproc-per-node", 1),
                *(*self.rendezvous, "--local-addr", host.address),
                *("--dir", self.job.directory, script, self.job.records, *arguments),
                env=env or self._env,
            )

    def until_trained(self, *hosts, steps=5):
        """Wait until ``hosts``, and no others, have made ``steps`` steps together from now on."""
        names = {host.name for host in hosts}
        before = {(line["attempt"], line["step"]) for line in self.lines()}

        def trained():
            found = [
                {line["node"] for line in group}
                for key, group in self.groups().items()
                if key not in before and len(group) == group[0]["world"] == len(names)
            ]
            return sum(nodes == names for nodes in found) >= steps

        running = self.agents[hosts[0].name]
        until(trained, f"{steps} steps of {', '.join(sorted(names))}", running=running)

    def finish(self, *hosts):
        """End the job where ``hosts`` train; all is compared with an undisturbed run."""
        last = self.end()
        agents = [self.agents[host.name] for host in hosts]
        assert [agent.wait() for agent in agents] == [0] * len(hosts), agents[0].text
        self.compare(len(hosts), last)

    def end(self):
        """Let the job end soon; gives its last step."""
        last = self.job.begun() + AHEAD
        unfinished = self._end.with_suffix(".tmp")
        unfinished.write_text(str(last))
        unfinished.replace(self._end)
        return last

    # --- what is seen of it ----------------------------------------------------------------------

    def lines(self):
        """What all ranks of all attempts recorded."""
        return [line for rank in range(len(self.hosts)) for line in self.job.lines(rank)]

    def groups(self):
        """(attempt, step) → what its ranks recorded, by rank."""
        found = {}
        for line in self.lines():
            found.setdefault((line["attempt"], line["step"]), []).append(line)
        return {key: sorted(group, key=lambda line: line["rank"]) for key, group in found.items()}

    def roles(self):
        """The hosts of the newest attempt by rank: the coordinator's machine has rank 0."""
        newest = max(line["attempt"] for line in self.lines())
        ranks = {line["rank"]: line["node"] for line in self.lines() if line["attempt"] == newest}
        by_name = {host.name: host for host in self.hosts}
        return [by_name[ranks[rank]] for rank in sorted(ranks)]

    def attempts(self):
        """(number, machines) of each attempt, in the order of the ledger."""
        return [(event.attempt, event["nodes"]) for event in self.job.events("attempt_formed")]

    def until_stopped(self, host):
        """Wait until the worker that a host had has ended."""
        pid = max((line["attempt"], line["pid"]) for line in self.on(host))[1]

        def ended():
            with contextlib.suppress(psutil.Error):
                return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
            return True

        until(ended, f"the worker on {host.name} is ended")

    def on(self, host, after_attempt=0):
        """What the workers of a host recorded in attempts after ``after_attempt``."""
        found = [line for line in self.lines() if line["node"] == host.name]
        return [line for line in found if line["attempt"] > after_attempt]

    def commits(self, host):
        """Steps that a host's processes committed."""
        return [event["step"] for event in self.job.events("commit") if event.node == host.name]

    def lost(self):
        """Names of the machines that the ledger calls lost."""
        return {event.node for event in self.job.events("node_lost")}

    # --- the verdict -----------------------------------------------------------------------------

    def compare(self, num_finished, last):
        """Every step of every attempt, and the end, are those of an undisturbed run."""
        calm = Job(self.job.directory.with_name("calm"))
        asked = (calm.records, last, *self.options, "--every", "100000 steps")
        (rank,) = self._floor.ranks(1, self.script, *asked, env=calm.env)
        assert rank.wait() == 0, rank.text
        expected = {line["step"]: line for line in calm.lines()}
        groups = self.groups()
        for (attempt, step), group in groups.items():
            assert {line["loss"] for line in group} == {expected[step]["loss"]}, (attempt, group)
            assert [line["rank"] for line in group] == sorted({line["rank"] for line in group})
            assert len({line["world"] for line in group}) == 1, group
            if len(group) == group[0]["world"]:
                ids = [one for line in group for one in line["ids"]]
                assert ids == expected[step]["ids"], (attempt, step)
        self._compare_history(groups, last)
        hashes = {self.job.final(rank)["hash"] for rank in range(num_finished)}
        assert hashes == {calm.final()["hash"]}

    def _compare_history(self, groups, last):
        """Attempts follow each other: what counts in the end is each step, once."""
        formed = [number for number, _ in self.attempts()]
        assert formed == sorted(set(formed)), "an attempt's number was given twice"
        resumed = {event.attempt: event["step"] for event in self.job.events("resumed")}
        owners = {}
        for attempt in sorted({attempt for attempt, _ in groups}):
            steps = sorted(step for number, step in groups if number == attempt)
            first = resumed[attempt]
            assert steps == list(range(first + 1, steps[-1] + 1)), attempt
            assert first <= max(owners, default=0), f"attempt {attempt} resumes from nowhere"
            owners = {step: owner for step, owner in owners.items() if step <= first}
            owners |= dict.fromkeys(steps, attempt)
        assert sorted(owners) == list(range(1, last + 1))
        newest = {attempt: step for step, attempt in sorted(owners.items())}
        for step, attempt in owners.items():
            group = groups[attempt, step]
            # A step counts that only others had ended: the lost one had not written it down.
            is_cut_off = self._is_in_process and step == newest[attempt] < last
            assert len(group) == group[0]["world"] or is_cut_off, (attempt, step)

    def replayed(self, attempt):
        """Steps that were computed before ``attempt`` and again in it."""
        groups = self.groups()
        before = max(step for number, step in groups if number < attempt)
        return [step for number, step in groups if number == attempt and step <= before]
