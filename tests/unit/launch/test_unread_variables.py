"""Variables that do nothing are told, with what does."""

from outlast.launch.run import unread


def test_what_nobody_reads_is_told_with_what_is_read():
    found = unread(
        {
            "NCCL_TIMEOUT": "30",
            "NCCL_HEARTBEAT_TIMEOUT_SEC": "30",
            "NCCL_SOCKET_TIMEOUT": "30",
        }
    )
    assert [one.split()[0] for one in found] == [
        *("NCCL_HEARTBEAT_TIMEOUT_SEC", "NCCL_SOCKET_TIMEOUT", "NCCL_TIMEOUT")
    ]
    assert "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC" in found[0]
    assert "init_process_group(timeout=...)" in found[2]


def test_nothing_is_said_of_what_is_read():
    read = ("NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "NCCL_ASYNC_ERROR_HANDLING", "NCCL_IB_TIMEOUT")
    assert unread(dict.fromkeys((*read, "TORCH_NCCL_DUMP_ON_TIMEOUT", "HOME"), "1")) == []
