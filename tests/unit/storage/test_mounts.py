"""Which directories outlast the machine, from the kernel's own table."""

import pytest

from outlast.durable import mount_of
from outlast.storage.trust import doubt_of_lasting, is_network, outlasts

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /mnt/shared rw,relatime - nfs4 server:/export rw,vers=4.2
31 30 8:17 / /mnt/shared/scratch rw - xfs /dev/nvme0n1 rw
32 22 0:41 / /mnt/my\\040bucket rw - fuse.gcsfuse bucket rw
33 22 0:42 / /data rw - ext4 /dev/sdb rw
34 33 0:43 / /data rw - lustre mds:/fs rw
35 22 0:44 / /proc rw - fuseblk /dev/sdc rw
36 22 0:45 / /outlast rw - fuse.rclone bucket: rw
37 22 0:46 / /dev/shm rw - tmpfs shm rw
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


def test_a_cache_on_this_machine_s_disk_is_no_storage_yet():
    """As SkyPilot mounts a bucket with MOUNT_CACHED: it is brought there, and later."""
    assert is_network("/outlast/job", MOUNTS)
    assert not outlasts("/outlast/job", MOUNTS)
    assert outlasts("/mnt/shared/job", MOUNTS)
    assert not outlasts("/root/job", MOUNTS)


@pytest.mark.parametrize(
    ("directory", "in_pod", "said"),
    [
        ("/outlast/job", False, "is uploaded later"),
        ("/dev/shm/job", False, "in this machine's memory"),
        ("/root/job", True, ""),  # a disk of the node's, perhaps a volume: nothing tells
        ("/mnt/shared/job", True, ""),
    ],
)
def test_what_is_written_may_be_gone_sooner_than_it_seems(directory, in_pod, said):
    doubt = doubt_of_lasting(mount_of(directory, MOUNTS), in_pod=in_pod)
    assert said in doubt.seen if said else doubt is None


def test_a_container_s_own_layer_goes_with_a_pod():
    layer = mount_of("/job", "22 1 0:1 / / rw - overlay overlay rw")
    assert doubt_of_lasting(layer, in_pod=False) is None
    assert "container's own layer" in doubt_of_lasting(layer, in_pod=True).seen
