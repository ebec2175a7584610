"""Whether a machine is fit to train: judgements over what the doctor has measured on it.

What is judged: memory, limits, stacks, the platform, GPUs, messages, versions; each place for
checkpoints; the notice against the bandwidth. Machines are compared with each other in
:mod:`outlast.policy.fitness_peers`.

A commit is a file written and fsynced, then a small file that names it. So at a place these are
looked at: writing, fsync, a rename that lasts, a put that only one of two can win, free space, and
bytes per second against the seconds that a notice leaves.

Guarantees: pure: the same facts give the same results on every machine, so that each of them knows
alone what all have concluded. A result that is not ok says what to do. ``failed`` means that the
job should not start; what costs speed, or a convenience, is a ``warning``.

Rejected: scores (an owner cannot act upon 0.73); limits as settings (a limit that nobody can judge
is no help; what is accepted on purpose is said with the settings that there are, such as
``checkpoint.buffers = 0``).
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

import msgspec

from outlast.policy.drain import HTTP_S, around_save, bandwidth_needed
from outlast.policy.retention import admit
from outlast.units import gigabytes, short_seconds

Status = Literal["ok", "warning", "failed", "skipped"]
FILES_LEAST: Final = 256  # open files: below this a job of some machines does not start
FILES_WANTED: Final = 4096
SHM_WANTED_BYTES: Final = 1 << 30  # data loaders' and NCCL's; containers often have 64 MiB
HOT_XIDS: Final = "13, 31, 48, 63, 64, 74, 79, 92, 94, 95, 119"
SLOW_COMMIT_S: Final = 5.0  # a small file, durable: claims and manifests wait for it
LEAST_FREE_BYTES: Final = 1 << 30
_RIGHT: Final = (
    "give this user the right to write there, or name another place. In a pod: fsGroup; where the "
    "volume's driver leaves that out, as most do for ReadWriteMany, an access point, the driver's "
    "mountPermissions, or chown once"
)
_PLACE_TODO: Final = {
    errno.EROFS: "remount it for writing, or name another place",
    errno.ENOSPC: "free some space (outlast checkpoints prune), or name another place",
    errno.EDQUOT: "free some of the quota, or name another place",
    errno.EACCES: _RIGHT,
    errno.EPERM: _RIGHT,
    errno.EIO: "look at the disk and at the kernel's log (dmesg), or name another place",
    errno.ESTALE: "mount it anew",
    errno.ETIMEDOUT: "look at the server and at the network to it",
}
_STAGES: Final = {
    "open": "cannot be used",
    "small": "takes no small file",
    "conditional": "cannot decide who of two comes first (conditional put)",
    "big": "takes no data",
    "lock": "cannot be locked",
    "read": "does not give back what was written",
    "remove": "lets nothing be removed",
}


class CheckResult(msgspec.Struct, frozen=True):
    """What one check has found.

    Attributes:
        name: of the check, such as "storage local".
        status: "failed" means that the job should not start.
        seen: what was seen, in one line, with its figures.
        todo: what to do about it; "" where nothing is to be done.
        figures: the numbers, each named with its unit last.
    """

    name: str
    status: Status
    seen: str
    todo: str = ""
    figures: Mapping[str, float] = {}


def failures(findings: Iterable[CheckResult]) -> list[CheckResult]:
    """The results for which the job should not start."""
    return [one for one in findings if one.status == "failed"]


def seconds(value: float) -> str:
    """Write a span for people: ``0.4 ms``, ``38 s``."""
    return f"{value * 1e3:.2g} ms" if value < 0.1 else short_seconds(value, ".2f")


# --- the machine ---------------------------------------------------------------------------------


class MemoryFacts(msgspec.Struct, kw_only=True):
    """What memory can be had.

    Attributes:
        available_bytes: without swapping, limits of control groups counted.
        total_bytes: of the machine.
        shm_bytes: free in /dev/shm, or None where there is none.
        refused: why a file in memory of the size that is needed cannot be made; "" if it can.
    """

    available_bytes: int
    total_bytes: int
    shm_bytes: int | None = None
    refused: str = ""


def judge_memory(
    facts: MemoryFacts, *, share_bytes: int | None, buffers: int | None, replicas: int
) -> CheckResult:
    """Whether snapshots fit into memory beside the training.

    Args:
        facts: what can be had.
        share_bytes: one snapshot of all workers of this machine, or None where it is not known.
        buffers: ``checkpoint.buffers``; None: one.
        replicas: snapshots of other machines that are kept here.
    """
    name, available = "memory", facts.available_bytes
    free = f"{gigabytes(available)} of {gigabytes(facts.total_bytes)} can be had"
    if buffers == 0:
        seen = f"{free}; no snapshots are held (checkpoint.buffers = 0)"
        return CheckResult(name, "ok", seen, figures={"available_bytes": available})
    if share_bytes is None:
        return CheckResult(
            name,
            "skipped",
            f"{free}; how large the state is, is not known yet",
            "say it with --state, such as 640GB",
            figures={"available_bytes": available},
        )
    wanted = (1 if buffers is None else buffers) + replicas
    staged = wanted * share_bytes
    figures = {"available_bytes": available, "staged_bytes": staged}
    held = f"{wanted} snapshot{'s' * (wanted != 1)} of {gigabytes(share_bytes)}"
    if replicas:
        held += f" ({replicas} of another machine)"
    seen = f"{held} take {gigabytes(staged)}, {free}"
    if facts.refused:
        todo = "raise that limit (ulimit, or the container's)"
        return CheckResult(
            name,
            "failed",
            f"{held}: the system refuses shared memory of that size: {facts.refused}",
            todo,
            figures=figures,
        )
    fit = admit(share_bytes, wanted=wanted, available_bytes=available).buffers
    if fit >= wanted:
        return CheckResult(name, "ok", seen, figures=figures)
    if fit:
        todo = "free memory, or lower checkpoint.buffers or peer.replicas; fewer will be held"
        return CheckResult(name, "warning", seen, todo, figures=figures)
    todo = (
        "free memory, raise the job's own limit (sbatch --mem, resources.limits.memory), use more "
        "machines, or let saves hold up training: checkpoint.buffers = 0"
    )
    return CheckResult(name, "failed", seen, todo, figures=figures)


def judge_shm(facts: MemoryFacts) -> CheckResult | None:
    """Files in memory (/dev/shm), for data loaders and NCCL; None where there are none."""
    if facts.shm_bytes is None:
        return None
    seen = f"{gigabytes(facts.shm_bytes)} free in /dev/shm"
    figures = {"free_bytes": facts.shm_bytes}
    if facts.shm_bytes >= SHM_WANTED_BYTES:
        return CheckResult("shared memory", "ok", seen, figures=figures)
    return CheckResult(
        "shared memory",
        "warning",
        seen,
        "data loaders and NCCL run out of it: docker run --shm-size, or a larger /dev/shm",
        figures=figures,
    )


def judge_files(soft: int, hard: int) -> CheckResult:
    """Whether enough files may be open."""
    figures = {"soft": soft, "hard": hard}
    seen = f"{soft:,} open files are allowed"
    if soft >= FILES_WANTED:
        return CheckResult("open files", "ok", seen, figures=figures)
    todo = f"ulimit -n {max(min(hard, 65536), FILES_WANTED)}"
    status: Status = "warning" if soft >= FILES_LEAST else "failed"
    return CheckResult("open files", status, seen, todo, figures=figures)


class StackFacts(msgspec.Struct, kw_only=True):
    """Whether another process's stack could be read, tried for real.

    Attributes:
        installed: whether py-spy is there.
        read: whether it read a stack.
        error: why not.
        ptrace_scope: the kernel's setting, or None where it has none.
    """

    installed: bool
    read: bool = False
    error: str = ""
    ptrace_scope: int | None = None


def judge_stacks(facts: StackFacts) -> CheckResult:
    """Whether a hang's report will have stacks from outside a process."""
    name = "stacks"
    if facts.read:
        return CheckResult(name, "ok", "py-spy reads another process's stack")
    if not facts.installed:
        return CheckResult(
            name,
            "warning",
            "py-spy is not installed: of a rank that hangs in C, no stack can be shown",
            "pip install py-spy",
        )
    scope = facts.ptrace_scope
    todo = "allow ptrace: docker run --cap-add SYS_PTRACE" + (
        ", or kernel.yama.ptrace_scope = 0" if scope else ""
    )
    return CheckResult(name, "warning", f"py-spy is refused: {facts.error}", todo)


def judge_recovery(*, is_wanted: bool, workers: int, lacking: str) -> CheckResult:
    """How the job goes on when it loses a worker.

    Args:
        is_wanted: the setting ``workers.in_process``.
        workers: of the job, at most.
        lacking: what torch does not have of what that takes; "" for nothing.
    """
    name = "recovery"
    if workers == 1:
        seen = "a lost worker: it is the only one, and starts again, warm, from memory"
        return CheckResult(name, "ok", seen)
    if not is_wanted:
        seen = "a lost worker: all start again, warm, from memory (workers.in_process = true "
        seen += "keeps the others' processes: docs/recovery.md)"
        return CheckResult(name, "ok", seen)
    if lacking:
        seen = f"a lost worker: all start again, warm, from memory: this torch has no {lacking}"
        todo = "install a torch that docs/recovery.md names, or leave workers.in_process off"
        return CheckResult(name, "warning", seen, todo)
    seen = "a lost worker: the others go on in their processes, and no step is lost, where the "
    seen += "script has a session and DDP, outlast.SameBits or HSDP (on CPUs)"
    return CheckResult(name, "ok", seen)


class ContainerFacts(msgspec.Struct, kw_only=True):
    """What this process's container has been given; None where nothing says.

    Attributes:
        in_pod: whether Kubernetes runs it.
        oom_score_adj: how soon the kernel kills it, as the kubelet has set it: 1000 for a pod that
            asks for nothing, less for one that asks for more memory, below 0 for one that is
            limited to what it asks for.
        cpu_weight: its share of the processors (of cgroups v2; 1 without a request).
        rdma: devices of the machine's network that can do RDMA.
        rdma_given: those of them that this container may open.
    """

    in_pod: bool = False
    oom_score_adj: int | None = None
    cpu_weight: int | None = None
    rdma: list[str] = []
    rdma_given: list[str] = []


BEST_EFFORT_ADJ: Final = 1000
NO_MEMORY_ADJ: Final = 999  # the least that a pod gets which asks for something else
_QOS_TODO: Final = (
    "give resources.requests of cpu and memory: what training and its snapshots take "
    "(outlast init k8s --memory)"
)


def judge_messages(
    addresses: Sequence[str], answers: Sequence[str], problem: tuple[str, str] = ("", "")
) -> CheckResult:
    """Whether people can be told of incidents.

    Args:
        addresses: where, as it may be shown.
        answers: for each of them "" or why no message can be sent there.
        problem: why nobody can be told at all, and what to do; empty where that is not so.
    """
    name, (why, todo) = "messages", problem
    if why:
        return CheckResult(name, "warning", f"nobody would be told of incidents: {why}", todo)
    if not addresses:
        return CheckResult(name, "skipped", "nobody is to be told of incidents: tell.urls is empty")
    refused = [f"{one}: {why}" for one, why in zip(addresses, answers, strict=True) if why]
    if refused:
        seen = f"of {len(addresses)} addresses no message can be sent to {'; '.join(refused)}"
        return CheckResult(name, "warning", seen, "correct them; outlast tell --test sends one")
    seen = f"apprise reads {', '.join(addresses)}; outlast tell --test sends one"
    return CheckResult(name, "ok", seen, figures={"addresses": len(addresses)})


def judge_qos(
    facts: ContainerFacts, *, total_bytes: int, staged_bytes: int | None
) -> CheckResult | None:
    """Whether Kubernetes evicts this pod before others; None outside of it.

    Args:
        facts: what the container has been given.
        total_bytes: memory of the machine.
        staged_bytes: what snapshots take of it, or None where that is not known.
    """
    adj = facts.oom_score_adj
    if not facts.in_pod or adj is None:
        return None
    name, figures = "pod", {"oom_score_adj": float(adj)}
    if adj >= BEST_EFFORT_ADJ:
        seen = (
            "QoS class BestEffort: this pod asks for neither memory nor processors, so it is the "
            "first to be evicted, and to be killed with its snapshots when memory is short"
        )
        return CheckResult(name, "warning", seen, _QOS_TODO, figures)
    if adj < 0:
        return CheckResult(name, "ok", "QoS class Guaranteed", figures=figures)
    # The kubelet's formula: kubernetes.io/docs/concepts/scheduling-eviction/node-pressure-eviction
    asks_bytes = (BEST_EFFORT_ADJ - adj) * total_bytes // 1000
    asks = f"it asks for about {gigabytes(asks_bytes)} of the machine's {gigabytes(total_bytes)}"
    problems = []
    if adj >= NO_MEMORY_ADJ:
        problems.append("it asks for no memory to speak of, so it is among the first to be evicted")
    elif staged_bytes is not None and asks_bytes < staged_bytes:
        problems.append(f"{asks}, and snapshots alone take {gigabytes(staged_bytes)}")
    if facts.cpu_weight is not None and facts.cpu_weight <= 1:
        problems.append("it asks for no processors, and gets what others leave")
    if problems:
        seen = f"QoS class Burstable: {'; '.join(problems)}"
        return CheckResult(name, "warning", seen, _QOS_TODO, figures)
    return CheckResult(name, "ok", f"QoS class Burstable: {asks}", figures=figures)


def judge_rdma(facts: ContainerFacts) -> CheckResult | None:
    """Whether the machine's fast network can be used; None where it has none."""
    if not facts.rdma:
        return None
    name, figures = "rdma", {"devices": float(len(facts.rdma))}
    have = f"{', '.join(facts.rdma[:4])}{' …' * (len(facts.rdma) > 4)}"
    if facts.rdma_given:
        return CheckResult(name, "ok", f"{have} can be opened", figures=figures)
    return CheckResult(
        name,
        "warning",
        f"the machine has {have}, and nothing of /dev/infiniband can be opened here: NCCL uses TCP",
        "in a pod: ask for its resource (outlast init k8s --resource rdma/ib=1, or "
        "vpc.amazonaws.com/efa=1); docker run --device /dev/infiniband",
        figures,
    )


class PlatformFacts(msgspec.Struct, kw_only=True):
    """Who gives notice here.

    Attributes:
        reason: which sources and why, in words.
        was_set: whether the owner named the platform.
        silent: sources that did not answer, with what they said.
        loses_tokens: those that answer, and whose session tokens do not come: the hop limit.
        num_sources: how many there are.
        notice_s: seconds between a notice and the end; None where nobody says.
    """

    reason: str
    was_set: bool = False
    silent: list[str] = []
    loses_tokens: list[str] = []
    num_sources: int = 0
    notice_s: float | None = None


_HOPS: Final = {
    "aws": "aws ec2 modify-instance-metadata-options --instance-id ID "
    "--http-put-response-hop-limit 2 (of new machines: HttpPutResponseHopLimit in the launch "
    "template)",
    "alibaba": "aliyun ecs ModifyInstanceMetadataOptions --InstanceId ID "
    "--HttpPutResponseHopLimit 2 --HttpEndpoint enabled",
}


def judge_platform(facts: PlatformFacts) -> CheckResult:
    """Whether a notice would be heard."""
    name = "platform"
    figures = {} if facts.notice_s is None else {"notice_s": facts.notice_s}
    if not facts.silent:
        return CheckResult(name, "ok", facts.reason, figures=figures)
    seen = f"no notice would be heard: {'; '.join(facts.silent)}"
    todo = 'let this machine reach its metadata service, or set notice.platform = "none"'
    if facts.loses_tokens:
        seen += (
            "; it answers without a token, so the hop limit of the answers is 1, and a container"
        )
        seen += " is a hop further"
        todo = " or ".join(_HOPS[name] for name in facts.loses_tokens) + "; or hostNetwork: true"
    status: Status = "failed" if facts.was_set else "warning"
    return CheckResult(name, status, seen, todo, figures=figures)


class GpuFacts(msgspec.Struct, kw_only=True):
    """One GPU, as NVML knows it; None where it does not say.

    Attributes:
        index: its number.
        model: its name.
        uncorrected: ECC errors that could not be corrected, since the driver was loaded.
        retired_pending: whether pages wait for a reset to be retired, or rows to be remapped.
        remap_failed: whether remapping rows has failed.
        throttled: reasons for which its clocks are down, in words; being idle is none.
        temperature_c: degrees.
        links_up: NVLinks that are up.
        used_bytes: memory that somebody uses already.
    """

    index: int
    model: str
    uncorrected: int | None = None
    retired_pending: bool | None = None
    remap_failed: bool | None = None
    throttled: list[str] = []
    temperature_c: int | None = None
    links_up: int = 0
    used_bytes: int = 0


class GpusFacts(msgspec.Struct, kw_only=True):
    """All GPUs of a machine.

    Attributes:
        gpus: those that NVML lists.
        error: why some that should be there are not listed; "" where none are missing.
        xids: newest of the kernel's Xid lines, as far as they can be read.
        driver: its version.
    """

    gpus: list[GpuFacts] = []
    error: str = ""
    xids: list[str] = []
    driver: str = ""


def judge_gpus(facts: GpusFacts) -> CheckResult:
    """Whether the GPUs are healthy: ECC, retired pages, NVLink, throttling, Xid."""
    name = "gpu"
    if not facts.gpus:
        if facts.error:
            todo = "nvidia-smi must work first; pip install nvidia-ml-py reads more"
            return CheckResult(name, "warning", facts.error, todo)
        return CheckResult(name, "skipped", "no NVIDIA GPU on this machine")
    sick = [words for gpu in facts.gpus for words in _sick(gpu)]
    # How many a machine has depends on its board and bridges: its GPUs are compared.
    links = max(gpu.links_up for gpu in facts.gpus)
    sick += [
        f"GPU {gpu.index} has {gpu.links_up} NVLinks up, others {links}"
        for gpu in facts.gpus
        if gpu.links_up < links
    ]
    if facts.error:  # one of them, beside others that answer
        sick.append(facts.error)
    tired = [words for gpu in facts.gpus for words in _tired(gpu)]
    models = sorted({gpu.model for gpu in facts.gpus})
    figures = {"count": len(facts.gpus)}
    if sick:
        todo = "reset it (nvidia-smi -r) or drain the machine; if it comes back, have it replaced"
        return CheckResult(name, "failed", "; ".join(sick), todo, figures=figures)
    if tired or facts.xids:
        said = [*tired, *(f"the kernel said {line}" for line in facts.xids[-2:])]
        todo = f"look at cooling and power (nvidia-smi -q); Xids that count: {HOT_XIDS}"
        return CheckResult(name, "warning", "; ".join(said), todo, figures=figures)
    seen = f"{len(facts.gpus)} × {', '.join(models)}, driver {facts.driver}, nothing wrong"
    return CheckResult(name, "ok", seen, figures=figures)


def _sick(gpu: GpuFacts) -> list[str]:
    found = []
    if gpu.uncorrected:
        found.append(f"GPU {gpu.index} has {gpu.uncorrected} uncorrected ECC errors")
    if gpu.remap_failed:
        found.append(f"GPU {gpu.index} could not remap a row of its memory")
    if gpu.retired_pending:
        found.append(f"GPU {gpu.index} waits for a reset to retire bad memory")
    return found


def _tired(gpu: GpuFacts) -> list[str]:
    found = [f"GPU {gpu.index}'s clocks are down: {reason}" for reason in gpu.throttled]
    if gpu.used_bytes > 2e9:
        found.append(f"GPU {gpu.index}: somebody uses {gigabytes(gpu.used_bytes)} of its memory")
    return found


def judge_versions_here(
    here: Mapping[str, str], job: Mapping[str, str] | None, loaded: Mapping[str, str]
) -> CheckResult:
    """Versions on this machine against the job's first start and against what is really loaded.

    Args:
        here: package → version that is installed.
        job: what job.json says, or None where there is no job yet.
        loaded: package → version that the package itself says, as far as known.
    """
    seen = ", ".join(f"{name} {version}" for name, version in here.items())
    torn = [name for name, version in loaded.items() if here.get(name, version) != version]
    if torn:
        said = "; ".join(f"{one} {here[one]} is installed, {loaded[one]} is loaded" for one in torn)
        todo = "two installations are mixed: install it anew, look at PYTHONPATH"
        return CheckResult("versions", "failed", said, todo)
    other = [name for name, version in (job or {}).items() if here.get(name, version) != version]
    if other:
        said = "; ".join(
            f"{one} {here[one]}, the job began with {(job or {})[one]}" for one in other
        )
        todo = "fine if that was meant; else install what the job began with"
        return CheckResult("versions", "warning", said, todo)
    return CheckResult("versions", "ok", seen)


def judge_speed(
    matmul_gflops: float | None, all_reduce_bytes: float | None, device: str, workers: int
) -> CheckResult:
    """A machine's own speed: a figure, good or bad only beside its peers'."""
    if matmul_gflops is None:
        return CheckResult(
            "compute",
            "failed",
            "a short multiplication of matrices did not come to its end",
            'try: python -c "import torch; torch.ones(9).sum()"',
        )
    figures = {"matmul_gflops": round(matmul_gflops, 1)}
    seen = f"matmul {matmul_gflops:,.0f} GFLOP/s on {device}"
    if all_reduce_bytes is not None:
        figures["all_reduce_bytes_per_s"] = round(all_reduce_bytes)
        seen += f"; all-reduce among {workers} processes {gigabytes(all_reduce_bytes)}/s"
        return CheckResult("compute", "ok", seen, figures=figures)
    return CheckResult(
        "compute",
        "failed",
        f"{seen}; a short all-reduce among {workers} processes did not come to its end",
        "try with GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME set to this machine's interface",
        figures=figures,
    )


def share_of(state_bytes: int | None, machines: int) -> int | None:
    """What each of the machines has of the whole state, in bytes."""
    return None if state_bytes is None else -(-state_bytes // max(machines, 1))


# --- places for checkpoints, and the notice ------------------------------------------------------


class PlaceFacts(msgspec.Struct, kw_only=True):
    """What a probe has found at one place; fields keep their defaults where it did not get so far.

    Attributes:
        stage: where it failed, a key of ``_STAGES``; "" where it did not.
        error: why, in words.
        number: the system's number for that, or 0.
        free_bytes, total_bytes: of a directory's file system.
        held_steps: checkpoints that are there already.
        small_s: seconds until a small file is durable, the better of some.
        put_new: whether it can say who of two comes first, as claims of attempts need it.
        doubt, todo: why not, or why others may see it late; and what to do about it.
        lasting, lasting_todo: why what is written is gone sooner than it seems; what to do.
        owner: who may write there and who we are, in words, where that is the matter.
        locks: whether the job's lock works there; None where it was not tried.
        written_bytes, written_s: of the largest file that was written, fsync included.
        outlasts: whether it is there when the machine is not.
        clock_offset_s: the place's clock minus this machine's; None where it has none of its own.
        clock_bound_s: by how much that may be off.
    """

    stage: str = ""
    error: str = ""
    number: int = 0
    free_bytes: int | None = None
    total_bytes: int | None = None
    held_steps: int = 0
    small_s: float | None = None
    put_new: bool | None = None
    doubt: str = ""
    todo: str = ""
    lasting: str = ""
    lasting_todo: str = ""
    owner: str = ""
    locks: bool | None = None
    written_bytes: int = 0
    written_s: float = 0.0
    outlasts: bool = False
    clock_offset_s: float | None = None
    clock_bound_s: float = 0.0

    @property
    def rate_bytes(self) -> float | None:
        """Bytes a second, fsync included; None where nothing was written."""
        return self.written_bytes / self.written_s if self.written_s > 0 else None


def judge_place(name: str, where: str, facts: PlaceFacts) -> CheckResult:
    """Whether a place does what a commit needs.

    Args:
        name: of the check.
        where: the place, as a person would write it.
        facts: what the probe found.
    """
    if facts.stage:
        todo = _PLACE_TODO.get(facts.number, "mend that, or name another place")
        if "://" in where and facts.number in {errno.EIO, errno.EACCES}:
            todo = "look at the endpoint, the region and the credentials in the environment"
        seen = f"{where} {_STAGES[facts.stage]}: {facts.error}"
        seen += f" ({facts.owner})" if facts.owner else ""
        return CheckResult(name, "failed", seen, todo, figures=_figures(facts))
    if facts.put_new is False:
        return CheckResult(
            name,
            "failed",
            f"{where}: {facts.doubt}, so two machines could both lead",
            facts.todo,
            figures=_figures(facts),
        )
    parts = []
    if facts.rate_bytes is not None:
        parts.append(f"{gigabytes(facts.rate_bytes)}/s written and durable")
    if facts.small_s is not None:
        parts.append(f"a small commit {seconds(facts.small_s)}")
    if facts.free_bytes is not None:
        parts.append(f"{gigabytes(facts.free_bytes)} free")
    seen = f"{where}: {', '.join(parts)}"
    if facts.small_s is not None and facts.small_s > SLOW_COMMIT_S:
        todo = "every commit and every claim waits so long: look at the server, or name another"
        return CheckResult(name, "warning", seen, todo, figures=_figures(facts))
    if facts.lasting or facts.doubt:
        seen = "; ".join([seen, *filter(None, (facts.lasting, facts.doubt))])
        todo = "; ".join(filter(None, (facts.lasting_todo, facts.todo)))
        return CheckResult(name, "warning", seen, todo, figures=_figures(facts))
    if facts.locks is False:
        todo = "its file system has no locks: see to it that the job is started only once"
        return CheckResult(name, "warning", seen, todo, figures=_figures(facts))
    return CheckResult(name, "ok", seen, figures=_figures(facts))


def not_in_time(name: str, where: str, limit_s: float) -> CheckResult:
    """The place's probe hangs, and was left behind."""
    return CheckResult(
        name,
        "failed",
        f"{where} did not answer within {limit_s:.0f} s",
        "look at the mount, its server and the network to it; a save would hang there too",
    )


def judge_space(
    tier: str, facts: PlaceFacts, share_bytes: int | None, keep: int
) -> CheckResult | None:
    """Whether the checkpoints that are kept have room; None where nobody knows how much there is.

    Args:
        tier: its name.
        facts: what the probe found.
        share_bytes: what one checkpoint takes there, or None where that is not known.
        keep: how many stay; while one is written there is one more.
    """
    if facts.stage or facts.free_bytes is None:
        return None
    name, free = f"space {tier}", facts.free_bytes
    if share_bytes is None:
        status: Status = "ok" if free >= LEAST_FREE_BYTES else "warning"
        return CheckResult(
            name,
            status,
            f"{gigabytes(free)} free; how large a checkpoint is, is not known yet",
            "say how large the state is (--state 640GB) to have it compared",
            figures={"free_bytes": free},
        )
    wanted = (keep + 1) * share_bytes
    left = free + min(facts.held_steps, keep) * share_bytes
    figures = {"free_bytes": free, "held_steps": facts.held_steps, "needed_bytes": wanted}
    seen = f"{keep} checkpoints and one in the making take {gigabytes(wanted)}, " + (
        f"{gigabytes(left)} are theirs or free"
        if facts.held_steps
        else f"{gigabytes(free)} are free"
    )
    if left >= wanted:
        return CheckResult(name, "ok", seen, figures=figures)
    fits = max(left // share_bytes - 1, 0) if share_bytes else keep
    todo = f"keep = {fits} would fit; or free some space" if fits else "free some space"
    # With one and one in the making a job runs, with fewer checkpoints than its owner wanted.
    return CheckResult(name, "warning" if fits else "failed", seen, todo, figures=figures)


class Flush(msgspec.Struct, frozen=True, kw_only=True):
    """One durable tier against the notice.

    Attributes:
        tier: its name.
        rate_bytes: bytes a second that were measured there.
        small_s: seconds for the manifest.
        outlasts: whether it is there when the machine is not.
    """

    tier: str
    rate_bytes: float
    small_s: float
    outlasts: bool


def judge_notice(
    flushes: Sequence[Flush],
    *,
    share_bytes: int | None,
    notice_s: float | None,
    heard_s: float = HTTP_S,
    step_s: float = 0.0,
) -> CheckResult:
    """Whether the state can be flushed in the seconds between the notice and the end.

    Args:
        flushes: durable tiers that can be written, the fastest first.
        share_bytes: what this machine has to write, or None where that is not known.
        notice_s: what the platform (or ``notice.grace``) gives; None where nobody says.
        heard_s: longest time until the notice is heard.
        step_s: a slow step; 0 where that is not known.
    """
    name = "notice"
    if notice_s is None:
        seen = "nobody says how many seconds there are between a notice and the end"
        return CheckResult(name, "skipped", seen, "set notice.grace if you know")
    if share_bytes is None:
        seen = f"{notice_s:.0f} s of notice; how large the state is, is not known yet"
        return CheckResult(name, "skipped", seen, "say it with --state, such as 640GB")
    before_s, out_s = around_save(notice_s, heard_s=heard_s, step_s=step_s)
    needs_s = {
        one.tier: before_s + share_bytes / one.rate_bytes + one.small_s + out_s for one in flushes
    }
    if not needs_s:
        seen = f"{notice_s:.0f} s of notice, and no place that checkpoints could be written to"
        return CheckResult(name, "failed", seen, "mend a tier, see above")
    best = min(flushes, key=lambda one: needs_s[one.tier])
    lasting = [one for one in flushes if one.outlasts]
    shown = min(lasting, key=lambda one: needs_s[one.tier]) if lasting else best
    if needs_s[shown.tier] > notice_s:
        shown = best
    took_s = needs_s[shown.tier]
    figures = {"notice_s": notice_s, "needs_s": took_s, "share_bytes": share_bytes}
    seen = (
        f"{gigabytes(share_bytes)} to {shown.tier} at {gigabytes(shown.rate_bytes)}/s: needs "
        f"{seconds(took_s)} of the {notice_s:.0f} s between a notice and the end"
    )
    if took_s > notice_s:
        needed = bandwidth_needed(
            share_bytes, notice_s, step_s=before_s + shown.small_s, margin_s=out_s
        )
        todo = (
            f"it would fit at {gigabytes(needed)}/s: put a faster [[tier]] first, or use more "
            "machines"
            if needed < float("inf")
            else "the notice is over before a save begins: checkpoint.every bounds what is lost"
        )
        return CheckResult(name, "failed", seen, todo, figures=figures)
    if not shown.outlasts:
        return CheckResult(
            name,
            "warning",
            f"{seen}; {shown.tier} is on this machine's own disk",
            "if the disk goes with the machine, add a faster [[tier]] that stays",
            figures=figures,
        )
    return CheckResult(name, "ok", seen, figures=figures)


def _figures(facts: PlaceFacts) -> dict[str, float]:
    figures: dict[str, float] = {}
    if facts.rate_bytes is not None:
        figures["write_bytes_per_s"] = round(facts.rate_bytes)
    if facts.small_s is not None:
        figures["small_commit_s"] = round(facts.small_s, 6)
    if facts.free_bytes is not None:
        figures["free_bytes"] = facts.free_bytes
    return figures
