"""The platform is recognised without a packet, and the reason is one line."""

import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from outlast.config import PLATFORMS
from outlast.notice import platform as chooser
from outlast.notice.alibaba import AlibabaWatcher
from outlast.notice.aws import AwsWatcher
from outlast.notice.azure import AzureWatcher
from outlast.notice.gcp import MaintenanceWatcher, PreemptedWatcher, StopWatcher
from outlast.notice.manual import CommandWatcher, EndWatcher, FileWatcher
from outlast.notice.platform import choose
from outlast.notice.slurm import SlurmWatcher
from outlast.notice.spot_time import TencentWatcher, VolcengineWatcher

DMI = "sys/class/dmi/id/"
PLACES = {
    "vendor": DMI + "sys_vendor",
    "product": DMI + "product_name",
    "tag": DMI + "board_asset_tag",
    "chassis": DMI + "chassis_asset_tag",
    "hypervisor": "sys/hypervisor/uuid",
    "nvidia": "proc/driver/nvidia/version",
}
AZURE_TAG = b"7783-7084-3265-9085-8269-3286-77\n"
EC2 = {"vendor": b"Amazon EC2\n"}
CLOUDS = {
    "aws": (EC2, [AwsWatcher], 120, "http://169.254.169.254"),
    "gcp": (
        {"vendor": b"Google\n", "product": b"Google Compute Engine\n"},
        [PreemptedWatcher, MaintenanceWatcher, StopWatcher],
        30,
        "http://169.254.169.254",
    ),
    "azure": (
        {"vendor": b"Microsoft Corporation\n", "chassis": AZURE_TAG},
        [AzureWatcher],
        30,
        "http://169.254.169.254",
    ),
    "alibaba": (
        {"vendor": b"Alibaba Cloud\n", "product": b"Alibaba Cloud ECS\n"},
        [AlibabaWatcher],
        180,
        "http://100.100.100.200",
    ),
    "tencent": (
        {"vendor": b"Tencent Cloud\n", "product": b"CVM\n"},
        [TencentWatcher],
        120,
        "http://169.254.0.23",
    ),
    # What its firmware says is not known, so it is never found.
    "volcengine": ({}, [VolcengineWatcher], 300, "http://100.96.0.96"),
}


@pytest.fixture(autouse=True)
def _no_socket(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "__init__", refuse)


@pytest.fixture(autouse=True)
def _no_scontrol(monkeypatch):
    monkeypatch.setattr(chooser.slurm, "kill_wait_s", lambda environ: 45.0)


def machine(root, **files):
    for name, text in files.items():
        place = root / PLACES[name]
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(text)
    return root


def kinds(chosen):
    return [type(watcher) for watcher in chosen.watchers]


@pytest.mark.parametrize("name", [name for name, row in CLOUDS.items() if row[0]])
def test_a_cloud_is_recognised_by_its_firmware(tmp_path, name):
    files, watchers, lead_s, place = CLOUDS[name]
    chosen = choose("auto", root=machine(tmp_path, **files), environ={})
    assert kinds(chosen) == watchers
    assert (chosen.lead_s, chosen.grace_s) == (lead_s, None)
    assert {watcher.base_url for watcher in chosen.watchers} == {place}
    assert chosen.reason.startswith(f"notices from {name} at {place} ({lead_s} s ahead): its ")
    assert "\n" not in chosen.reason


@pytest.mark.parametrize(
    "files",
    [
        {"vendor": b"Amazon EC2\n", "tag": b"Not Specified\n"},
        {"tag": b"i-0123456789abcdef0\n"},
        {"tag": b"i-01234567"},
        {"vendor": b"Xen\n", "hypervisor": b"ec2e1916-9099-7caf-fd21-012345abcdef\n"},
        {"hypervisor": b"EC2E1916-9099-7CAF-FD21-012345ABCDEF\n"},
    ],
)
def test_ec2_has_other_signs(tmp_path, files):
    assert kinds(choose("auto", root=machine(tmp_path, **files), environ={})) == [AwsWatcher]


def test_the_reason_names_the_sign(tmp_path):
    assert choose("auto", root=machine(tmp_path, **EC2), environ={}).reason == (
        "notices from aws at http://169.254.169.254 (120 s ahead): its vendor is Amazon EC2"
    )


@pytest.mark.parametrize(
    ("files", "vendor"),
    [
        ({}, "not known"),
        ({"vendor": b""}, "not known"),
        ({"vendor": b"QEMU\n", "tag": b"\n"}, "QEMU"),
        ({"vendor": b"Google\n", "product": b"Caroline\n"}, "Google"),  # a Chromebook
        ({"vendor": b"Microsoft Corporation\n"}, "Microsoft Corporation"),  # Hyper-V at home
        ({"vendor": b"Microsoft Corporation\n", "chassis": b"1234\n"}, "Microsoft Corporation"),
        ({"vendor": b"QEMU\n", "chassis": AZURE_TAG}, "QEMU"),
        ({"vendor": b"Dell Inc.\n", "tag": b"i-17 rack 3\n"}, "Dell Inc."),
        ({"vendor": b"Not Amazon EC2\n"}, "Not Amazon EC2"),
        ({"vendor": b"Xen\n", "hypervisor": b"00000000-0000-ec2e-0000-000000000000\n"}, "Xen"),
        ({"vendor": b"\xff\xfe\n"}, "\ufffd\ufffd"),
    ],
)
def test_other_machines_send_nothing(tmp_path, files, vendor):
    chosen = choose("auto", root=machine(tmp_path, **files), environ={})
    assert chosen.watchers == ()
    assert chosen.reason == (
        f"notices from signals only: this machine is not a known cloud's (its vendor: {vendor})"
    )


def test_a_file_that_cannot_be_read_is_no_sign(tmp_path):
    (tmp_path / PLACES["vendor"]).mkdir(parents=True)
    assert choose("auto", root=tmp_path, environ={}).watchers == ()


@pytest.mark.parametrize("name", CLOUDS)
def test_a_cloud_as_set_asks_nobody_first(tmp_path, name):
    _, watchers, lead_s, place = CLOUDS[name]
    chosen = choose(name, root=tmp_path, environ={})
    assert kinds(chosen) == watchers
    assert chosen.reason == f"notices from {name} at {place} ({lead_s} s ahead): as set"
    elsewhere = choose(name, "http://127.0.0.1:1/", root=tmp_path, environ={})
    assert {watcher.base_url for watcher in elsewhere.watchers} == {"http://127.0.0.1:1"}


def test_machines_with_gpus_are_told_of_maintenance_an_hour_ahead(tmp_path):
    _, plain, _ = choose("gcp", root=tmp_path).watchers
    _, gpus, _ = choose("gcp", root=machine(tmp_path, nvidia=b"NVRM")).watchers
    assert (plain._lead_s, gpus._lead_s) == (60, 3600)


def test_slurm_is_recognised_by_its_job(tmp_path):
    environ = {"SLURM_JOB_ID": "17"}
    chosen = choose("auto", root=tmp_path, environ=environ)
    assert kinds(chosen) == [SlurmWatcher]
    assert (chosen.lead_s, chosen.grace_s) == (120, 45)
    assert chosen.reason == (
        "notices from slurm (120 s before the time limit; 45 s after a signal): SLURM_JOB_ID is "
        "set; of the machine, notices from signals only: this machine is not a known cloud's "
        "(its vendor: not known)"
    )
    on_ec2 = choose("auto", root=machine(tmp_path, **EC2), environ=environ)
    assert kinds(on_ec2) == [SlurmWatcher, AwsWatcher]
    assert kinds(choose("slurm", root=tmp_path / "none", environ={})) == [SlurmWatcher]


def test_kubernetes_gives_its_grace_and_the_node_s_cloud_is_heard(tmp_path):
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    chosen = choose("auto", root=tmp_path, environ=environ)
    assert (chosen.watchers, chosen.lead_s, chosen.grace_s) == ((), None, 30)
    assert chosen.reason.startswith(
        "notices from kubernetes (30 s after a signal): KUBERNETES_SERVICE_HOST is set; "
    )
    on_ec2 = choose("kubernetes", root=machine(tmp_path, **EC2), environ={})
    assert (kinds(on_ec2), on_ec2.lead_s, on_ec2.grace_s) == ([AwsWatcher], 120, 30)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_file_and_a_command_are_heard_on_every_platform(tmp_path, platform):
    file = tmp_path / "leave"
    alone = choose(platform, root=tmp_path, environ={})
    both = choose(platform, file=file, command=["ask", "a b"], root=tmp_path, environ={})
    assert kinds(both) == [*kinds(alone), FileWatcher, CommandWatcher]
    assert both.reason == f"{alone.reason}; also from the file {file} and the command ask …"
    assert kinds(choose(platform, command=["x"], root=tmp_path, environ={}))[-1] is CommandWatcher
    assert choose(platform, file=file, root=tmp_path, environ={}).reason == (
        f"{alone.reason}; also from the file {file}"
    )


def test_an_end_that_is_known_is_heard_on_every_platform(tmp_path):
    end = datetime.now(UTC) + timedelta(hours=1)
    alone = choose("none", end=end, root=tmp_path, environ={})
    assert kinds(alone) == [EndWatcher]
    assert alone.lead_s == 120
    assert alone.reason.endswith(f"; also from notice.end ({end.isoformat()})")
    assert choose("gcp", end=end, root=tmp_path).lead_s == 30
    assert choose("volcengine", end=end, root=tmp_path).lead_s == 120
    past = choose("none", end=end - timedelta(hours=2), root=tmp_path, environ={})
    assert past.watchers == ()
    assert "notice.end is past" in past.reason


@pytest.mark.parametrize("platform", ["none", "signal", "file", "command"])
def test_these_ask_no_cloud_even_on_ec2(tmp_path, platform):
    root = machine(tmp_path, **EC2)
    environ = {"SLURM_JOB_ID": "17", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    chosen = choose(platform, "http://127.0.0.1:1", root=root, environ=environ)
    assert chosen[:2] == ((), f"notices from signals only: notice.platform is {platform}")


@pytest.mark.parametrize("platform", [*CLOUDS, "auto"])
def test_an_address_that_cannot_be_used_is_said_not_raised(platform):
    watchers, reason, *_ = choose(platform, "https://127.0.0.1", root=Path("/none"), environ={})
    assert watchers == ()
    assert "does not speak https" in reason


def test_an_unknown_platform_is_said():
    assert choose("mars").reason == (
        "notices from signals only: 'mars' is not a platform that can be heard"
    )
