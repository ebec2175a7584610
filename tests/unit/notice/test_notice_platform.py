"""The platform is recognised without a packet, and the reason is one line."""

import socket

import pytest

from outlast.notice.aws import AwsWatcher
from outlast.notice.platform import choose

VENDOR = "sys/class/dmi/id/sys_vendor"
TAG = "sys/class/dmi/id/board_asset_tag"
HYPERVISOR = "sys/hypervisor/uuid"


@pytest.fixture(autouse=True)
def _no_socket(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "__init__", refuse)


def machine(root, **files):
    for path, text in files.items():
        place = root / {"vendor": VENDOR, "tag": TAG, "hypervisor": HYPERVISOR}[path]
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(text)
    return root


@pytest.mark.parametrize(
    "files",
    [
        {"vendor": b"Amazon EC2\n"},
        {"vendor": b"Amazon EC2\n", "tag": b"Not Specified\n"},
        {"tag": b"i-0123456789abcdef0\n"},
        {"tag": b"i-01234567"},
        {"vendor": b"Xen\n", "hypervisor": b"ec2e1916-9099-7caf-fd21-012345abcdef\n"},
        {"hypervisor": b"EC2E1916-9099-7CAF-FD21-012345ABCDEF\n"},
    ],
)
def test_ec2_is_recognised(tmp_path, files):
    watcher, reason = choose("auto", root=machine(tmp_path, **files))
    assert isinstance(watcher, AwsWatcher)
    assert watcher.base_url == "http://169.254.169.254"
    assert reason.startswith("notices from aws at http://169.254.169.254: its ")


@pytest.mark.parametrize(
    ("files", "vendor"),
    [
        ({}, "not known"),
        ({"vendor": b""}, "not known"),
        ({"vendor": b"QEMU\n", "tag": b"\n"}, "QEMU"),
        ({"vendor": b"Google\n", "tag": b"Google Compute Engine\n"}, "Google"),
        ({"vendor": b"Dell Inc.\n", "tag": b"i-17 rack 3\n"}, "Dell Inc."),
        ({"vendor": b"Not Amazon EC2\n"}, "Not Amazon EC2"),
        ({"vendor": b"Xen\n", "hypervisor": b"00000000-0000-ec2e-0000-000000000000\n"}, "Xen"),
        ({"vendor": b"\xff\xfe\n"}, "\ufffd\ufffd"),
    ],
)
def test_other_machines_send_nothing(tmp_path, files, vendor):
    watcher, reason = choose("auto", root=machine(tmp_path, **files))
    assert watcher is None
    assert reason == (
        f"notices from signals only: this machine is not EC2's (its vendor: {vendor})"
    )


def test_a_file_that_cannot_be_read_is_no_sign(tmp_path):
    (tmp_path / VENDOR).mkdir(parents=True)
    assert choose("auto", root=tmp_path).watcher is None


def test_none_is_none_even_on_ec2(tmp_path):
    root = machine(tmp_path, vendor=b"Amazon EC2\n")
    assert choose("none", "http://127.0.0.1:1", root=root) == (
        None,
        "notices from signals only: notice.platform is none",
    )


def test_aws_as_set_asks_nobody_first(tmp_path):
    watcher, reason = choose("aws", root=tmp_path)
    assert watcher.base_url == "http://169.254.169.254"
    assert reason == "notices from aws at http://169.254.169.254: as set"
    assert choose("aws", "http://127.0.0.1:1/").watcher.base_url == "http://127.0.0.1:1"


@pytest.mark.parametrize("platform", ["aws", "auto"])
def test_an_address_that_cannot_be_used_is_said_not_raised(platform):
    watcher, reason = choose(platform, "https://127.0.0.1")
    assert watcher is None
    assert "does not speak https" in reason


def test_an_unknown_platform_is_said():
    assert choose("gcp").reason == (
        "notices from signals only: 'gcp' is not a platform that can be heard"
    )
