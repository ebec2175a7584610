"""Which platform gives this machine notice.

Guarantees: unless an address was set, nothing is sent to find out: the platform is read from what
the firmware says about the machine and from the environment, so a machine that is not a cloud's
sends nothing to anybody. With an address and "auto", each platform's own question is sent to that
address, all at once, and the first one that is answered as its documentation says is taken.
Whatever is found, the reason can be printed in one line. Never raises, and is over in about 2 s.

What can go wrong: a container without ``/sys``, or firmware that another hypervisor imitates. Say
``notice.platform = "aws"`` then, or ``"none"``. What the firmware of Volcengine's and BytePlus's
machines says is not documented: ``"volcengine"`` has to be set.

Rejected: asking every known metadata address and taking the one that answers (packets to a
link-local address that belongs to somebody else on a private network).
"""

from __future__ import annotations

import os
import queue
import re
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final, NamedTuple

from outlast.config import in_short
from outlast.errors import ConfigError
from outlast.notice import Watcher, alibaba, aws, azure, gcp, slurm
from outlast.notice.manual import CommandWatcher, EndWatcher, FileWatcher
from outlast.notice.source import LONGEST_TIMEOUT_S, MetadataWatcher
from outlast.notice.spot_time import TencentWatcher, VolcengineWatcher

IN_POD: Final = "KUBERNETES_SERVICE_HOST"  # Kubernetes sets it in each container
KUBERNETES_GRACE_S: Final = 30.0  # terminationGracePeriodSeconds, unless the pod says otherwise
_CLOUDS: Final = ("aws", "gcp", "azure", "alibaba", "tencent", "volcengine")
_LEADS_S: Final = {
    "aws": aws.LEAD_S,
    "gcp": gcp.LEAD_S,
    "azure": azure.LEAD_S,
    "alibaba": alibaba.LEAD_S,
    "tencent": TencentWatcher.lead_s,
    "volcengine": VolcengineWatcher.lead_s,
}
_SPOT_TIMES: Final = {"tencent": TencentWatcher, "volcengine": VolcengineWatcher}
_INSTANCE_ID: Final = re.compile(r"i-([0-9a-f]{8}|[0-9a-f]{17})")
# Every machine of Azure's has this tag; the vendor alone is that of any machine under Hyper-V.
_AZURE_TAG: Final = "7783-7084-3265-9085-8269-3286-77"


class Chosen(NamedTuple):
    """The sources of notices, and why these.

    Attributes:
        watchers: all that are to be asked; none when only signals will be heard.
        reason: one line for people.
        lead_s: how long before the end the platform says it, None where that is not known.
        grace_s: how long after a signal the machine (or this job on it) is there, None where that
            is not known.
    """

    watchers: tuple[Watcher, ...]
    reason: str
    lead_s: float | None = None
    grace_s: float | None = None


def choose(
    platform: str,
    base_url: str = "",
    *,
    file: Path | None = None,
    command: Sequence[str] = (),
    end: datetime | None = None,
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
) -> Chosen:
    """Choose the watchers for this machine.

    It may take up to 2 s (an address that does not answer, a slow ``scontrol``; 4 s with both):
    call it off the training path.

    Args:
        platform: ``notice.platform``, such as "auto", "aws" or "none".
        base_url: ``notice.base_url``: another address for the metadata service, or "".
        file: ``notice.file``: heard on every platform.
        command: ``notice.command``: heard on every platform.
        end: ``notice.end``: the same; one that is past is not.
        root: where ``sys`` and ``proc`` are looked for.
        environ: the environment.
    """
    try:
        chosen = _platforms(platform, base_url, root, environ)
    except ConfigError as error:
        chosen = _nobody(str(error))
    own: list[tuple[Watcher, str]] = []
    if file is not None:
        own.append((FileWatcher(file), f"the file {file}"))
    if command:
        own.append((CommandWatcher(command), f"the command {in_short(command)}"))
    if end is not None and end.timestamp() <= time.time():
        chosen = chosen._replace(reason=f"{chosen.reason}; notice.end is past: {end.isoformat()}")
    elif end is not None:
        own.append((EndWatcher(end.timestamp()), f"notice.end ({end.isoformat()})"))
        chosen = chosen._replace(lead_s=min(chosen.lead_s or slurm.HARD_S, slurm.HARD_S))
    if not own:
        return chosen
    watchers, said = zip(*own, strict=True)
    return chosen._replace(
        watchers=(*chosen.watchers, *watchers),
        reason=f"{chosen.reason}; also from {' and '.join(said)}",
    )


def _platforms(platform: str, base_url: str, root: Path, environ: Mapping[str, str]) -> Chosen:
    if platform in ("none", "signal", "file", "command"):
        return _nobody(f"notice.platform is {platform}")
    if platform in _CLOUDS:
        return _cloud(platform, base_url, root, "as set")
    if platform == "slurm":
        return _slurm(base_url, root, environ, "as set")
    if platform == "kubernetes":
        return _kubernetes(base_url, root, "as set")
    if platform != "auto":
        return _nobody(f"{platform!r} is not a platform that can be heard")
    if environ.get("SLURM_JOB_ID"):
        return _slurm(base_url, root, environ, "SLURM_JOB_ID is set")
    if environ.get(IN_POD):
        return _kubernetes(base_url, root, f"{IN_POD} is set")
    return _cloud_of_machine(base_url, root)


def _nobody(why: str) -> Chosen:
    return Chosen((), f"notices from signals only: {why}")


def _cloud(name: str, base_url: str, root: Path, why: str) -> Chosen:
    watchers: tuple[MetadataWatcher, ...]
    if name == "gcp":
        place = base_url or gcp.BASE_URL
        gpus = (root / "proc/driver/nvidia").exists()
        ahead_s = gcp.GPU_MAINTENANCE_LEAD_S if gpus else gcp.MAINTENANCE_LEAD_S
        watchers = (
            gcp.PreemptedWatcher(place),
            gcp.MaintenanceWatcher(place, lead_s=ahead_s),
            gcp.StopWatcher(place),
        )
    elif name == "aws":
        watchers = (aws.AwsWatcher(base_url or aws.BASE_URL),)
    elif name == "azure":
        watchers = (azure.AzureWatcher(base_url or azure.BASE_URL),)
    elif name == "alibaba":
        watchers = (alibaba.AlibabaWatcher(base_url or alibaba.BASE_URL),)
    else:
        kind = _SPOT_TIMES[name]
        watchers = (kind(base_url or kind.address),)
    lead_s = _LEADS_S[name]
    return Chosen(
        watchers,
        f"notices from {name} at {watchers[0].base_url} ({lead_s:g} s ahead): {why}",
        lead_s,
    )


def _slurm(base_url: str, root: Path, environ: Mapping[str, str], why: str) -> Chosen:
    wait_s = slurm.kill_wait_s(environ)
    own = Chosen(
        (slurm.SlurmWatcher(environ),),
        f"notices from slurm ({slurm.HARD_S:g} s before the time limit; {wait_s:g} s after a "
        f"signal): {why}",
        slurm.HARD_S,
        wait_s,
    )
    return _with_machine(own, base_url, root)


def _kubernetes(base_url: str, root: Path, why: str) -> Chosen:
    reason = f"notices from kubernetes ({KUBERNETES_GRACE_S:g} s after a signal): {why}"
    return _with_machine(Chosen((), reason, None, KUBERNETES_GRACE_S), base_url, root)


def _with_machine(own: Chosen, base_url: str, root: Path) -> Chosen:
    """A scheduler's word, and that of the cloud whose machine this is: both can end it."""
    machine = _cloud_of_machine(base_url, root)
    leads_s = [lead_s for lead_s in (own.lead_s, machine.lead_s) if lead_s is not None]
    return Chosen(
        (*own.watchers, *machine.watchers),
        f"{own.reason}; of the machine, {machine.reason}",
        min(leads_s, default=None),
        own.grace_s,
    )


def _cloud_of_machine(base_url: str, root: Path) -> Chosen:
    """The cloud that this machine is of: by the address if one was set, or by its firmware."""
    if base_url:
        return _asked(base_url, root)
    name, sign = _recognised(root)
    return _cloud(name, "", root, sign) if name else _nobody(sign)


def _asked(base_url: str, root: Path) -> Chosen:
    answered: queue.SimpleQueue[tuple[MetadataWatcher, bool]] = queue.SimpleQueue()
    until = time.monotonic() + LONGEST_TIMEOUT_S
    # The patience is the first question's only; polls keep their own, shorter one. Alibaba's takes
    # two questions, of which both must fit.
    asked: list[MetadataWatcher] = [
        aws.AwsWatcher(base_url, timeout_s=LONGEST_TIMEOUT_S),
        gcp.PreemptedWatcher(base_url, timeout_s=LONGEST_TIMEOUT_S),
        azure.AzureWatcher(base_url, timeout_s=LONGEST_TIMEOUT_S),
        alibaba.AlibabaWatcher(base_url, timeout_s=LONGEST_TIMEOUT_S / 2),
        *(kind(base_url, timeout_s=LONGEST_TIMEOUT_S) for kind in _SPOT_TIMES.values()),
    ]
    for watcher in asked:
        threading.Thread(
            target=lambda one=watcher: answered.put((one, one.answers())),
            name=f"outlast-platform-{watcher.name}",
            daemon=True,
        ).start()
    problems: dict[str, str] = {}
    for _ in asked:
        try:
            # A little longer than the questions may take, so that they end in their own words.
            watcher, fits = answered.get(timeout=max(0.0, until + 0.2 - time.monotonic()))
        except queue.Empty:
            break
        if fits:
            return _cloud(watcher.name, base_url, root, f"it answers as {watcher.name}'s does")
        problems[watcher.name] = watcher.last_error.removeprefix(f"{watcher.base_url}: ")
    said = "; ".join(f"{name}: {problem}" for name, problem in sorted(problems.items()))
    return _nobody(f"no metadata service answers ({base_url}: {said})")


def _recognised(root: Path) -> tuple[str, str]:
    """The cloud's name and the sign of it; "" and what the machine is instead."""
    dmi = root / "sys/class/dmi/id"
    vendor = _line(dmi / "sys_vendor")
    product = _line(dmi / "product_name")
    if vendor == "Amazon EC2":
        return "aws", f"its vendor is {vendor}"
    if _INSTANCE_ID.fullmatch(_line(dmi / "board_asset_tag")):
        return "aws", "its asset tag is an EC2 instance's"
    if _line(root / "sys/hypervisor/uuid").lower().startswith("ec2"):
        return "aws", "its hypervisor is EC2's"
    if product == "Google Compute Engine":
        return "gcp", f"its product is {product}"
    if vendor == "Microsoft Corporation" and _line(dmi / "chassis_asset_tag") == _AZURE_TAG:
        return "azure", f"its vendor is {vendor} and its asset tag is Azure's"
    if vendor == "Alibaba Cloud":
        return "alibaba", f"its vendor is {vendor}"
    if vendor == "Tencent Cloud":
        return "tencent", f"its vendor is {vendor}"
    return "", f"this machine is not a known cloud's (its vendor: {vendor or 'not known'})"


def _line(path: Path) -> str:
    """The first line of a file of the kernel's; "" where there is none or it may not be read."""
    try:
        with path.open(errors="replace") as file:
            return file.readline(200).strip()
    except OSError:
        return ""
