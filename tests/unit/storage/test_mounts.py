"""Which directories outlast the machine, from the kernel's own table."""

import pytest

from outlast.storage.trust import is_network

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /mnt/shared rw,relatime - nfs4 server:/export rw,vers=4.2
31 30 8:17 / /mnt/shared/scratch rw - xfs /dev/nvme0n1 rw
32 22 0:41 / /mnt/my\\040bucket rw - fuse.gcsfuse bucket rw
33 22 0:42 / /data rw - ext4 /dev/sdb rw
34 33 0:43 / /data rw - lustre mds:/fs rw
35 22 0:44 / /proc rw - fuseblk /dev/sdc rw
torn line
"""


@pytest.mark.parametrize(
    ("directory", "expected"),
    [
        ("/root/job", False),
        ("/mnt/shared", True),
        ("/mnt/shared/job/checkpoints", True),
        ("/mnt/shared/scratch/job", False),  # a disk of its own within it
        ("/mnt/sharedness", False),
        ("/mnt/my bucket/job", True),
        ("/data/job", True),  # what was mounted last
        ("/proc/x", False),  # FUSE over a local disk
    ],
)
def test_by_the_mount_that_is_seen(directory, expected):
    assert is_network(directory, MOUNTS) is expected


def test_nothing_known_is_not_a_network():
    assert not is_network("/somewhere", "")


def test_this_machine_s_own_table_can_be_read(tmp_path):
    assert is_network(str(tmp_path / "not" / "there")) in (True, False)
