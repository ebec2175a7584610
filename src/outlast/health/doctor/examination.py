"""One machine examined, and compared with the others it is to work with.

First everything that waits for something else than the processor, side by side (but one place after
the other: they may share a disk or a network); then the processor itself, undisturbed; then the
ways to the other machines and the comparison.

The machine's memory is looked at here: what can be had, and whether shared memory of a size is
given at all. Nothing is filled: a file in memory takes pages when it is written. What is seen this
way is a limit on sizes (RLIMIT_FSIZE, RLIMIT_AS), which would otherwise be met at the first
snapshot.

What people read of an examination: a line for each finding, and what to do below those that ask.

✔  storage local   ./job/checkpoints: 1.9 GB/s written and durable, 812 GB free
✘  clock           31 s (±0.2 ms) ahead of those of 2 others
                   → set it (chronyd or systemd-timesyncd): …
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import mmap
import os
import platform
import resource
import socket
import textwrap
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import psutil

from outlast._version import __version__
from outlast.config import Settings, all_addresses, in_public
from outlast.errors import ConfigError, Exit
from outlast.health.doctor import meeting
from outlast.health.doctor.compute import Computed
from outlast.health.doctor.meeting import Met
from outlast.health.doctor.probes import Child, PriorRun
from outlast.health.exporter import TELL_VARIABLE, has_apprise
from outlast.keeper.memory import available_bytes
from outlast.ledger.narrator import place
from outlast.notice.platform import IN_POD
from outlast.peer import Tls
from outlast.policy import fitness as judge
from outlast.policy.drain import HTTP_S
from outlast.policy.fitness import (
    CheckResult,
    Flush,
    GpusFacts,
    MemoryFacts,
    PlaceFacts,
    PlatformFacts,
    StackFacts,
    failures,
)
from outlast.policy.fitness_peers import MachineReport, compare, judge_clock

SHM: Final = "/dev/shm"  # noqa: S108 - looked at, not written


def look(wanted_bytes: int) -> MemoryFacts:
    """Look what memory can be had.

    Args:
        wanted_bytes: the size of one snapshot, 0 where that is not known.
    """
    facts = MemoryFacts(
        available_bytes=available_bytes(), total_bytes=int(psutil.virtual_memory().total)
    )
    with contextlib.suppress(OSError):
        found = os.statvfs(SHM)
        facts.shm_bytes = found.f_bavail * found.f_frsize
    facts.refused = _refused(wanted_bytes) if wanted_bytes else ""
    return facts


def container(
    root: Path = Path("/"), environ: Mapping[str, str] = os.environ
) -> judge.ContainerFacts:
    """What this process's container has been given.

    Args:
        root: where ``proc``, ``sys`` and ``dev`` are looked for.
        environ: the environment.
    """
    devices = root / "dev/infiniband"
    return judge.ContainerFacts(
        in_pod=bool(environ.get(IN_POD)),
        oom_score_adj=_whole(root / "proc/self/oom_score_adj"),
        cpu_weight=_cpu_weight(root),
        rdma=_names(root / "sys/class/infiniband"),
        rdma_given=[
            name
            for name in _names(devices)
            if name.startswith("uverbs") and os.access(devices / name, os.R_OK | os.W_OK)
        ],
    )


def _cpu_weight(root: Path) -> int | None:
    """This control group's share of the processors; None without cgroups of version 2."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                return _whole(root / "sys/fs/cgroup" / line[3:].lstrip("/") / "cpu.weight")
    return None


def _whole(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return None


def _names(directory: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(path.name for path in directory.iterdir())
    return []


def open_files() -> tuple[int, int]:
    """How many files may be open: now, and at most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 20
    return (most if soft < 0 else soft), (most if hard < 0 else hard)


def _refused(num_bytes: int) -> str:
    fd = os.memfd_create("outlast-doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, num_bytes)
        mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ).close()
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    finally:
        os.close(fd)
    return ""


LIMITS_S: Final = {
    "past": 15.0,
    "platform": 12.0,
    "stacks": 15.0,
    "gpus": 20.0,
    "messages": 20.0,
    "place": 45.0,
    "compute": 90.0,
}
MEETING_S: Final = 420.0  # besides the time that others are waited for
LOOK_S: Final = 0.02
PATIENCE_S: Final = 2.0  # before it is said what is still looked at
AGAIN_S: Final = 3.0  # and each time half as long again, up to
AGAIN_MAX_S: Final = 30.0
JOB: Final = "job directory"


class WantedMachines(msgspec.Struct, frozen=True, kw_only=True):
    """The machines that the job wants.

    Attributes:
        min_nodes, max_nodes: the fewest and the most.
        workers: of this machine.
        place: the directory or bucket where they meet; "" where they cannot.
        host: the address that others reach this one at.
        wait_s: for enough of them.
    """

    min_nodes: int = 1
    max_nodes: int = 1
    workers: int = 1
    place: str = ""
    host: str = ""
    wait_s: float = 60.0


class Examined(msgspec.Struct, frozen=True, kw_only=True):
    """What came of an examination.

    Attributes:
        machine: this one's name.
        fit: whether the job should start here.
        enough: whether enough machines are fit; True where there is only one to ask.
        findings: all of them, in the order they are shown.
        others_sick: machines that are left out besides, with why.
        seconds: that it took.
        stopped: the signal that came before it was done; "" where none did.
    """

    machine: str
    fit: bool
    enough: bool = True
    findings: list[CheckResult]
    others_sick: dict[str, str] = {}
    seconds: float
    stopped: str = ""

    @property
    def exit_code(self) -> int:
        """0, or 1 where the job should not start; that of a drain where it was stopped."""
        if self.stopped:
            return int(Exit.DRAINED)
        return 0 if self.fit and self.enough else 1


def examine(
    settings: Settings,
    machines: WantedMachines,
    *,
    state_bytes: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
    heard: Callable[[], str] = lambda: "",
) -> Examined:
    """Look at this machine, and at those that it is to work with.

    Args:
        settings: the job's.
        machines: that it wants.
        state_bytes: the size of the whole state; None: that of the newest checkpoint.
        progress: told what is still looked at, once that takes longer.
        heard: the name of a signal that asks this process to leave, "" so far.
    """
    examination = _Examination(settings, machines, state_bytes, progress, heard)
    try:
        return examination.run()
    except _LeavingError:
        return Examined(
            machine=socket.gethostname(), fit=False, findings=[], seconds=0.0, stopped=heard()
        )
    finally:
        examination.close()


class _FindingTold(NamedTuple):
    """Who is to be told: where, as it may be shown; the probe of that; why it cannot be done."""

    addresses: tuple[str, ...] = ()
    asked: Child | None = None
    problem: tuple[str, str] = ("", "")

    def judged(self) -> CheckResult:
        answers = None if self.asked is None else self.asked.answer(list[str])
        if self.asked is not None and answers is None:
            problem = (
                f"apprise does not read the addresses: {self.asked.problem()}",
                "outlast tell",
            )
            return judge.judge_messages((), (), problem)
        return judge.judge_messages(self.addresses, answers or (), self.problem)


class _LeavingError(Exception):
    """Somebody wants this process to leave."""


class _Examination:
    def __init__(
        self,
        settings: Settings,
        machines: WantedMachines,
        state_bytes: int | None,
        progress: Callable[[str], None],
        heard: Callable[[], str],
    ) -> None:
        self._settings = settings
        self._machines = machines
        self._state_bytes = state_bytes
        self._progress = progress
        self._heard = heard
        self._begun_s = self._said_s = time.monotonic()
        self._children: list[Child] = []
        self._again_s = AGAIN_S
        self._name = socket.gethostname()
        self._node = f"{self._name}-{uuid.uuid4().hex[:8]}"
        self._meeting: Child | None = None

    def run(self) -> Examined:
        machines = self._machines
        if machines.max_nodes > 1 and machines.place:
            self._meeting = self._meet()
        first = {name: self._child(name, **self._request(name)) for name in ("past", "platform")}
        first |= {name: self._child(name) for name in ("stacks", "gpus")}
        told = self._told()
        if told.asked is not None:
            first["messages"] = told.asked
        places = self._places(first.values())
        self._wait(first.values())
        computing = self._child("compute", workers=machines.workers)
        past = first["past"].answer(PriorRun) or PriorRun(problem=first["past"].problem())
        findings = self._of_places(places, past, first["platform"])
        self._wait([computing])
        computed = computing.answer(Computed) or Computed(error=computing.problem())
        versions = versions_here()
        findings.insert(
            0, judge.judge_versions_here(versions, _plain(past.versions), computed.loaded)
        )
        stacks = first["stacks"].answer(StackFacts)
        gpus = first["gpus"].answer(GpusFacts) or GpusFacts(
            error=f"the GPUs' health cannot be asked for: {first['gpus'].problem()}"
        )
        findings += [
            judge.judge_files(*open_files()),
            judge.judge_stacks(
                stacks or StackFacts(installed=True, error=first["stacks"].problem())
            ),
            judge.judge_gpus(gpus),
            told.judged(),
            judge.judge_recovery(
                is_wanted=self._settings.workers_in_process,
                workers=machines.workers * machines.max_nodes,
                lacking=computed.lacking,
            ),
            _speed(computed),
        ]
        return self._compared(findings, versions | computed.loaded, computed)

    def close(self) -> None:
        """Whatever still runs is ended."""
        for child in self._children:
            child.ask_to_end()
        for child in self._children:
            child.close()

    # --- this machine ------------------------------------------------------------------------

    def _child(self, name: str, **request: Any) -> Child:
        child = Child(name, request, LIMITS_S[name])
        self._children.append(child)
        return child

    def _request(self, name: str) -> dict[str, Any]:
        settings = self._settings
        if name == "past":
            return {"directory": str(settings.dir)}
        return {
            "platform": settings.notice_platform,
            "base_url": settings.notice_base_url,
            "file": str(settings.notice_file or ""),
            "command": list(settings.notice_command),
            "end": settings.notice_end.isoformat() if settings.notice_end else "",
            "grace_s": settings.notice_grace_s,
        }

    def _places(self, others: Iterable[Child]) -> dict[str, tuple[str, Child]]:
        """Name → where it is and its probe; the job's directory first."""
        settings = self._settings
        wanted = [(JOB, str(settings.dir), False)]
        wanted += [(t.name, t.url, True) for t in settings.tiers if t.kind != "memory"]
        found: dict[str, tuple[str, Child]] = {}
        for name, url, writes in wanted:
            child = self._child("place", url=url, writes=writes, locks=name == JOB)
            found[name] = (url, child)
            self._wait([child], beside=others)
        return found

    def _of_places(
        self, places: dict[str, tuple[str, Child]], past: PriorRun, platform_child: Child
    ) -> list[CheckResult]:
        settings, machines = self._settings, self._machines
        state_bytes = self._state_bytes or past.state_bytes
        share_bytes = judge.share_of(state_bytes, machines.min_nodes)
        facts = {name: child.answer(PlaceFacts) for name, (_, child) in places.items()}
        findings = []
        for name, (url, child) in places.items():
            where = url if "://" in url else place(Path(url))
            check = JOB if name == JOB else f"storage {name}"
            known = facts[name]
            if known is not None:
                findings.append(judge.judge_place(check, where, known))
            elif child.timed_out:
                findings.append(judge.not_in_time(check, where, child.limit_s))
            else:
                broken = PlaceFacts(stage="open", error=child.problem())
                findings.append(judge.judge_place(check, where, broken))
        if past.problem:
            seen = f"the job's record cannot be read: {past.problem}"
            todo = "give another --dir, or mend it"
            findings.append(CheckResult(name="record", status="failed", seen=seen, todo=todo))
        for tier in settings.tiers:
            held = facts.get(tier.name)
            if held is not None:
                there = state_bytes if held.outlasts else share_bytes
                space = judge.judge_space(tier.name, held, there, tier.keep)
                findings += [space] if space is not None else []
        heard = platform_child.answer(PlatformFacts) or PlatformFacts(
            reason="", silent=[platform_child.problem()]
        )
        findings.append(judge.judge_platform(heard))
        findings.append(self._notice(facts, heard, past, share_bytes))
        findings += self._clock(places, facts)
        findings += self._memory(share_bytes)
        return findings

    def _notice(
        self,
        facts: dict[str, PlaceFacts | None],
        heard: PlatformFacts,
        past: PriorRun,
        share_bytes: int | None,
    ) -> CheckResult:
        flushes = [
            Flush(
                tier=name,
                rate_bytes=one.rate_bytes,
                small_s=one.small_s or 0.0,
                outlasts=one.outlasts,
            )
            for name, one in facts.items()
            if name != JOB and one is not None and not one.stage and one.rate_bytes is not None
        ]
        heard_s = self._settings.notice_poll_s + HTTP_S if heard.num_sources else 0.0
        return judge.judge_notice(
            flushes,
            share_bytes=share_bytes,
            notice_s=heard.notice_s,
            heard_s=heard_s,
            step_s=past.step_s or 0.0,
        )

    @staticmethod
    def _clock(
        places: dict[str, tuple[str, Child]], facts: dict[str, PlaceFacts | None]
    ) -> list[CheckResult]:
        """This machine's clock against those of its places; the worst of them."""
        seen = [
            (one.clock_offset_s, one.clock_bound_s, places[name][0])
            for name, one in facts.items()
            if one is not None and one.clock_offset_s is not None
        ]
        if not seen:
            return []
        offset_s, bound_s, url = max(seen, key=lambda one: abs(one[0]) - one[1])
        return [judge_clock(-offset_s, bound_s, f"that of {url}", name="storage's clock")]

    def _memory(self, share_bytes: int | None) -> list[CheckResult]:
        settings, machines = self._settings, self._machines
        many = machines.max_nodes > 1
        replicas = (1 if settings.peer_replicas is None else settings.peer_replicas) * many
        facts = look(share_bytes or 0)
        found = [
            judge.judge_memory(
                facts,
                share_bytes=share_bytes,
                buffers=settings.checkpoint_buffers,
                replicas=replicas,
            )
        ]
        given = container()
        staged = None if share_bytes is None else share_bytes * (settings.checkpoint_buffers or 1)
        more = (
            judge.judge_shm(facts),
            judge.judge_qos(given, total_bytes=facts.total_bytes, staged_bytes=staged),
            judge.judge_rdma(given),
        )
        return [*found, *(one for one in more if one is not None)]

    def _told(self) -> _FindingTold:
        """Those who are to be told of incidents, and the probe that reads their addresses."""
        try:
            urls = all_addresses(self._settings).urls
        except ConfigError as error:
            return _FindingTold(problem=(str(error), "correct it, then: outlast tell"))
        if not urls and os.environ.get(TELL_VARIABLE) == "":
            todo = "give it the addresses, or unset it"
            return _FindingTold(problem=(f"{TELL_VARIABLE} is set, to nothing", todo))
        if urls and not has_apprise():
            return _FindingTold(problem=("apprise is not here", "pip install apprise"))
        if not urls:
            return _FindingTold()
        return _FindingTold(tuple(map(in_public, urls)), self._child("messages", urls=urls))

    # --- the others --------------------------------------------------------------------------

    def _meet(self) -> Child | None:
        machines = self._machines
        request = {
            "place": machines.place,
            "node": self._node,
            "machine": self._name,
            "host": machines.host,
            "nodes": (machines.min_nodes, machines.max_nodes),
            "wait_s": machines.wait_s,
            "tls": meeting.files_of(Tls.of(self._settings)),
        }
        child = Child("meeting", request, machines.wait_s + MEETING_S)
        self._children.append(child)
        return child

    def _compared(
        self, findings: list[CheckResult], versions: dict[str, str], computed: Computed
    ) -> Examined:
        own = failures(findings)
        enough = True
        sick: dict[str, str] = {}
        others: dict[str, str] = {}
        if self._meeting is not None:
            report = MachineReport(
                node=self._node,
                machine=self._name,
                versions=versions,
                device=computed.device,
                has_gpu=computed.has_gpu,
                matmul_gflops=computed.matmul_gflops,
                all_reduce_bytes=computed.all_reduce_bytes,
                failed=[f"{one.name}: {one.seen}" for one in own],
            )
            self._meeting.tell(msgspec.to_builtins(report))
            self._wait([self._meeting])
            met = self._meeting.answer(Met) or Met(outcome="failed", words=self._meeting.problem())
            more, sick, enough = self._conclusion(met)
            findings = [*findings, *more]
            names = {one.node: one.machine for one in met.reports} | met.missing
            others = {names[node]: why for node, why in sick.items() if node != self._node}
        return Examined(
            machine=self._name,
            fit=not failures(findings) and self._node not in sick,
            enough=enough,
            findings=findings,
            others_sick=others,
            seconds=round(time.monotonic() - self._begun_s, 3),
        )

    def _conclusion(self, met: Met) -> tuple[list[CheckResult], dict[str, str], bool]:
        """Findings about this machine, who is sick, and whether enough are not."""
        least = self._machines.min_nodes
        if met.outcome == "failed":
            todo = "all machines must see and write the same place; see docs/doctor.md"
            broken = CheckResult(name="machines", status="failed", seen=met.words, todo=todo)
            return [broken], {}, False
        if met.outcome == "alone":
            seen = (
                f"fewer than {least} machines came to {self._machines.place} within "
                f"{self._machines.wait_s:.0f} s"
            )
            todo = "start it on the others too; all must see that place"
            alone = CheckResult(name="machines", status="failed", seen=seen, todo=todo)
            return [alone], {}, False
        compared = compare(met.reports, met.missing)
        mine = compared.findings[self._node]
        if met.outcome == "joins":
            seen = "the job runs: compared with what its machines reported at its start"
            joins = CheckResult(name="machines", status="ok", seen=seen)
            mine = [one for one in mine if one.name != "peers"]
            return [joins, *mine], compared.sick, True
        number = len(met.reports) + len(met.missing)
        fit = number - len(compared.sick)
        figures = {"met": number, "fit": fit}
        if fit >= least:
            seen = f"{number} met, {fit} of them fit; the job needs {least}"
            return (
                [CheckResult(name="machines", status="ok", seen=seen, figures=figures), *mine],
                compared.sick,
                True,
            )
        seen = f"only {fit} of {number} machines are fit, and the job needs {least}"
        todo = "mend or replace those that are not, see above and on them"
        few = CheckResult(name="machines", status="failed", seen=seen, todo=todo, figures=figures)
        return [few, *mine], compared.sick, False

    # --- waiting -----------------------------------------------------------------------------

    def _wait(self, children: Iterable[Child], beside: Iterable[Child] = ()) -> None:
        """Until all of them are over; those beside are looked at too, for their time is bounded."""
        children, beside = list(children), list(beside)
        while True:
            running = [child for child in [*children, *beside] if not child.is_over()]
            if not any(child in running for child in children):
                return
            if self._heard():
                raise _LeavingError
            self._tell(running)
            time.sleep(LOOK_S)

    def _tell(self, running: list[Child]) -> None:
        now_s = time.monotonic()
        is_early = now_s - self._begun_s < PATIENCE_S or now_s - self._said_s < self._again_s
        if is_early or not running:
            return
        self._said_s, self._again_s = now_s, min(self._again_s * 1.5, AGAIN_MAX_S)
        words = [
            f"{_in_words(child)} ({now_s - child.started_s:.0f} s, at most {child.limit_s:.0f} s)"
            for child in running
        ]
        self._progress("still looking at " + ", ".join(words))


def _in_words(child: Child) -> str:
    if child.name == "meeting":
        for line in reversed(child.lines()):
            said = msgspec.json.decode(line)
            if "waits" in said:
                return f"the other machines, waiting for {said['waits']}"
        return "the other machines"
    if child.name == "place":
        return str(child.request["url"])
    return _WORDS[child.name]


_WORDS: Final = {
    "past": "the job's record",
    "platform": "the metadata service",
    "stacks": "whether stacks can be read",
    "gpus": "the GPUs' health",
    "messages": "the addresses of those who are told",
    "compute": "a short matmul and all-reduce",
}


def versions_here() -> dict[str, str]:
    """Package → version that is installed here."""
    found = {"python": platform.python_version(), "outlast": __version__}
    for name in ("torch", "numpy"):
        try:
            found[name] = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            raise ConfigError(f"{name} is not installed; run: pip install {name}") from None
    return found


def _plain(versions: dict[str, str] | None) -> dict[str, str] | None:
    if versions is None:
        return None
    return {name: version.partition("+")[0] for name, version in versions.items()}


def _speed(computed: Computed) -> CheckResult:
    found = judge.judge_speed(
        computed.matmul_gflops, computed.all_reduce_bytes, computed.device, computed.workers
    )
    if found.status == "failed" and computed.error:
        return msgspec.structs.replace(found, seen=f"{found.seen} ({computed.error})")
    return found


MARKS: Final = {"ok": "✔", "warning": "!", "failed": "✘", "skipped": "–"}
STYLES: Final = {"ok": "green", "warning": "yellow", "failed": "red", "skipped": "dim"}
WIDTH_LEAST: Final = 60


def lines(examined: Examined, width: int) -> Iterator[tuple[str, str]]:
    """The style of its mark, and the text, of each line."""
    room = max((len(one.name) for one in examined.findings), default=0)
    for one in examined.findings:
        yield from _finding(one, room, max(width, WIDTH_LEAST))
    for machine, why in sorted(examined.others_sick.items()):
        yield "yellow", f"!  {machine} is left out: {why}"
    yield "bold", textwrap.fill(conclusion(examined), width, break_long_words=False)


def conclusion(examined: Examined) -> str:
    """The last line of what people read."""
    failed = [one.name for one in failures(examined.findings)]
    warned = sum(one.status == "warning" for one in examined.findings)
    took = f"in {examined.seconds:.1f} s"
    if failed:
        return f"{examined.machine} should not start this job: {', '.join(failed)} ({took})"
    if not examined.enough:
        return f"{examined.machine} is fit, but too few machines are ({took})"
    more = f", {warned} warning{'s' * (warned != 1)}" if warned else ""
    return f"{examined.machine} is fit{more} ({took})"


def to_json(examined: Examined) -> dict[str, Any]:
    """What was found, as one object for programs."""
    return {
        "machine": examined.machine,
        "fit": examined.fit,
        "enough": examined.enough,
        "exit_code": examined.exit_code,
        "seconds": examined.seconds,
        "findings": [msgspec.to_builtins(one) for one in examined.findings],
        "others_sick": examined.others_sick,
    }


def _finding(one: CheckResult, room: int, width: int) -> Iterator[tuple[str, str]]:
    head = f"{MARKS[one.status]}  {one.name:<{room}}  "
    rest = " " * len(head)
    yield (
        STYLES[one.status],
        textwrap.fill(
            one.seen,
            width,
            initial_indent=head,
            subsequent_indent=rest,
            break_long_words=False,
            break_on_hyphens=False,
        ),
    )
    if one.todo and one.status != "ok":
        yield (
            "",
            textwrap.fill(
                one.todo,
                width,
                initial_indent=f"{rest}→ ",
                subsequent_indent=f"{rest}  ",
                break_long_words=False,
                break_on_hyphens=False,
            ),
        )
