"""Which platform gives this machine notice.

Guarantees: unless an address was set, nothing is sent to find out: the platform is read from what
the firmware says about the machine, so a machine that is not a cloud's sends nothing to anybody.
Whatever is found, the reason can be printed in one line. Never raises.

What can go wrong: a container without ``/sys``, or firmware that another hypervisor imitates. Say
``notice.platform = "aws"`` then, or ``"none"``.

Rejected: asking every known metadata address and taking the one that answers (packets to a
link-local address that belongs to somebody else on a private network).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

from outlast.errors import ConfigError
from outlast.notice import Watcher
from outlast.notice.aws import BASE_URL, LONGEST_TIMEOUT_S, AwsWatcher

_INSTANCE_ID: Final = re.compile(r"i-([0-9a-f]{8}|[0-9a-f]{17})")


class Chosen(NamedTuple):
    """The source of notices, and why this one.

    Attributes:
        watcher: None when only signals will be heard.
        reason: one line for people.
    """

    watcher: Watcher | None
    reason: str


def choose(platform: str, base_url: str = "", *, root: Path = Path("/")) -> Chosen:
    """Choose the watcher for this machine.

    It may take up to 2 s (``"auto"`` with a ``base_url`` that does not answer): call it off the
    training path.

    Args:
        platform: ``notice.platform``: "auto", "aws" or "none".
        base_url: ``notice.base_url``: another address for the metadata service, or "".
        root: where ``sys`` is looked for.
    """
    try:
        if platform == "none":
            return _nobody("notice.platform is none")
        if platform == "aws":
            watcher = AwsWatcher(base_url or BASE_URL)
            return Chosen(watcher, f"notices from aws at {watcher.base_url}: as set")
        if platform != "auto":
            return _nobody(f"{platform!r} is not a platform that can be heard")
        return _asked(base_url) if base_url else _recognised(root)
    except ConfigError as error:
        return _nobody(str(error))


def _nobody(why: str) -> Chosen:
    return Chosen(None, f"notices from signals only: {why}")


def _asked(base_url: str) -> Chosen:
    # The patience is the first question's only; polls keep their own, shorter one.
    asked = AwsWatcher(base_url, timeout_s=LONGEST_TIMEOUT_S)
    if not asked.answers():
        return _nobody(f"no metadata service answers ({asked.last_error})")
    watcher = AwsWatcher(base_url)
    return Chosen(watcher, f"notices from aws at {watcher.base_url}: it answers as EC2's does")


def _recognised(root: Path) -> Chosen:
    vendor = _line(root / "sys/class/dmi/id/sys_vendor")
    sign = ""
    if vendor == "Amazon EC2":
        sign = f"its vendor is {vendor}"
    elif _INSTANCE_ID.fullmatch(_line(root / "sys/class/dmi/id/board_asset_tag")):
        sign = "its asset tag is an EC2 instance's"
    elif _line(root / "sys/hypervisor/uuid").lower().startswith("ec2"):
        sign = "its hypervisor is EC2's"
    if sign:
        return Chosen(AwsWatcher(), f"notices from aws at {BASE_URL}: {sign}")
    return _nobody(f"this machine is not EC2's (its vendor: {vendor or 'not known'})")


def _line(path: Path) -> str:
    """The first line of a file of the kernel's; "" where there is none or it may not be read."""
    try:
        with path.open(errors="replace") as file:
            return file.readline(200).strip()
    except OSError:
        return ""
