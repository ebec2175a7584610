"""The doctor's judgements about one machine: the same facts, the same finding, and what to do."""

import errno

import pytest

from outlast.policy.fitness import (
    CheckResult,
    ContainerFacts,
    Flush,
    GpuFacts,
    GpusFacts,
    MemoryFacts,
    PlaceFacts,
    PlatformFacts,
    StackFacts,
    failures,
    gigabytes,
    judge_files,
    judge_gpus,
    judge_memory,
    judge_messages,
    judge_notice,
    judge_place,
    judge_platform,
    judge_qos,
    judge_rdma,
    judge_recovery,
    judge_shm,
    judge_space,
    judge_speed,
    judge_stacks,
    judge_versions_here,
    not_in_time,
    seconds,
    share_of,
)

GB = 10**9


def place(**more):
    sound = {"free_bytes": 900 * GB, "small_s": 0.004, "put_new": True}
    return PlaceFacts(**{**sound, "written_bytes": GB, "written_s": 0.5, **more})


def fast(tier="local", rate=2 * GB, *, outlasts=True):
    return Flush(tier=tier, rate_bytes=rate, small_s=0.01, outlasts=outlasts)


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (640 * GB, "640 GB"),
        (1.5 * GB, "1.5 GB"),
        (12e6, "12 MB"),
        (2.5e12, "2.5 TB"),
        (512, "0.512 kB"),
    ],
    ids=str,
)
def test_sizes_are_said_in_decimal_units(num_bytes, words):
    assert gigabytes(num_bytes) == words


def test_spans_are_said_in_one_unit():
    assert [seconds(one) for one in (0.0004, 0.5, 38.2)] == ["0.4 ms", "0.50 s", "38 s"]


def test_a_place_that_works_is_ok_with_its_figures():
    found = judge_place("storage local", "/mnt/job", place())
    assert found.status == "ok"
    assert found.seen == ("/mnt/job: 2 GB/s written and durable, a small commit 4 ms, 900 GB free")
    assert found.figures["write_bytes_per_s"] == 2 * GB


@pytest.mark.parametrize(
    ("number", "todo"),
    [
        (errno.EROFS, "remount"),
        (errno.ENOSPC, "prune"),
        (errno.EDQUOT, "quota"),
        (errno.EACCES, "right to write"),
        (errno.EIO, "dmesg"),
        (errno.E2BIG, "mend"),
    ],
    ids=str,
)
def test_a_place_that_fails_says_where_and_what_to_do(number, todo):
    facts = PlaceFacts(stage="small", error="it is so", number=number)
    found = judge_place("storage local", "/mnt/job", facts)
    assert found.status == "failed"
    assert found.seen == "/mnt/job takes no small file: it is so"
    assert todo in found.todo


def test_a_bucket_that_fails_is_not_looked_for_in_the_kernels_log():
    facts = PlaceFacts(stage="small", error="the server cannot be reached", number=errno.EIO)
    found = judge_place("storage bucket", "s3://bucket/job", facts)
    assert found.seen == "s3://bucket/job takes no small file: the server cannot be reached"
    assert "endpoint" in found.todo


def test_a_place_where_two_can_win_is_refused_and_a_slow_or_lockless_one_is_not():
    assert judge_place("s", "w", place(put_new=False)).status == "failed"
    assert judge_place("s", "w", place(small_s=9.0)).status == "warning"
    assert judge_place("s", "w", place(locks=False)).status == "warning"
    assert not_in_time("s", "w", 45).status == "failed"


def test_space_counts_what_checkpoints_take_already():
    assert judge_space("local", place(), 100 * GB, 3).status == "ok"
    tight = judge_space("local", place(free_bytes=250 * GB), 100 * GB, 3)
    assert (tight.status, tight.todo) == ("warning", "keep = 1 would fit; or free some space")
    assert judge_space("local", place(free_bytes=150 * GB), 100 * GB, 3).status == "failed"
    assert judge_space("local", place(free_bytes=350 * GB), 100 * GB, 3).status == "warning"
    held = place(free_bytes=150 * GB, held_steps=3)
    assert judge_space("local", held, 100 * GB, 3).status == "ok"
    assert judge_space("local", place(free_bytes=10), None, 3).status == "warning"
    assert judge_space("local", place(), None, 3).status == "ok"
    assert judge_space("bucket", place(free_bytes=None), GB, 3) is None
    assert judge_space("local", PlaceFacts(stage="small"), GB, 3) is None


def test_the_notice_is_compared_with_the_bandwidth_to_the_published_figures():
    # 640 GB at 1.5 GB/s take 426.67 s, at 15 GB/s 42.67 s.
    args = {"share_bytes": 640 * GB, "notice_s": 180.0, "heard_s": 0.0}
    slow = judge_notice([fast(rate=1.5 * GB)], **args)
    assert slow.status == "failed"
    assert slow.figures["needs_s"] == pytest.approx(426.67 + 0.01 + 0.2 + 2.0, abs=0.01)
    assert "it would fit at 3.6 GB/s" in slow.todo
    good = judge_notice([fast(rate=15 * GB)], **args)
    assert good.status == "ok"
    assert good.figures["needs_s"] == pytest.approx(42.67 + 0.01 + 0.2 + 2.0, abs=0.01)


def test_the_notice_is_best_met_by_a_tier_that_stays():
    args = {"share_bytes": 10 * GB, "notice_s": 30.0}
    own, shared = fast(outlasts=False), fast("shared", GB)
    assert judge_notice([own, shared], **args).status == "ok"
    assert "to shared" in judge_notice([own, shared], **args).seen
    gone = judge_notice([own, fast("shared", GB / 10)], **args)
    assert gone.status == "warning"
    assert "local is on this machine's own disk" in gone.seen
    assert judge_notice([], **args).status == "failed"
    assert judge_notice([own], share_bytes=GB, notice_s=None).status == "skipped"
    assert judge_notice([own], share_bytes=None, notice_s=30.0).status == "skipped"
    never = judge_notice([own], share_bytes=GB, notice_s=2.0, heard_s=2.0)
    assert "before a save begins" in never.todo


def test_memory_counts_buffers_and_the_copies_of_others():
    facts = MemoryFacts(available_bytes=100 * GB, total_bytes=128 * GB, shm_bytes=64 << 20)
    status = {
        (buffers, replicas, share): judge_memory(
            facts, share_bytes=share, buffers=buffers, replicas=replicas
        ).status
        for buffers, replicas, share in [
            (None, 0, 61 * GB),
            (None, 1, 61 * GB),
            (2, 1, 30 * GB),
            (None, 0, 98 * GB),
            (0, 1, 98 * GB),
            (None, 0, None),
        ]
    }
    assert list(status.values()) == ["ok", "warning", "ok", "failed", "ok", "skipped"]
    refused = MemoryFacts(available_bytes=100 * GB, total_bytes=1, refused="File too large")
    assert judge_memory(refused, share_bytes=GB, buffers=1, replicas=0).status == "failed"
    assert judge_shm(facts).status == "warning"
    assert judge_shm(refused) is None
    assert share_of(100, 3) == 34
    assert share_of(None, 3) is None


def test_limits_stacks_and_the_platform():
    assert [judge_files(soft, 1 << 20).status for soft in (65536, 1024, 64)] == [
        "ok",
        "warning",
        "failed",
    ]
    assert judge_stacks(StackFacts(installed=True, read=True)).status == "ok"
    assert "pip install py-spy" in judge_stacks(StackFacts(installed=False)).todo
    refused = StackFacts(installed=True, error="Permission denied", ptrace_scope=1)
    assert "ptrace_scope" in judge_stacks(refused).todo
    deaf = PlatformFacts(reason="aws", silent=["no answer"])
    assert judge_platform(deaf).status == "warning"
    deaf.was_set = True
    assert judge_platform(deaf).status == "failed"
    assert judge_platform(PlatformFacts(reason="aws")).status == "ok"


def test_gpus_are_sick_tired_or_well():
    def status(**facts):
        gpus = [GpuFacts(index=0, model="H100"), GpuFacts(index=1, model="H100", **facts)]
        return judge_gpus(GpusFacts(gpus=gpus, driver="570")).status

    assert status() == "ok"
    assert status(uncorrected=2) == "failed"
    assert status(remap_failed=True) == "failed"
    assert status(retired_pending=True) == "failed"
    assert status(links_up=1) == "failed"
    assert status(throttled=["power brake"]) == "warning"
    assert status(used_bytes=9 * GB) == "warning"
    assert judge_gpus(GpusFacts()).status == "skipped"
    assert judge_gpus(GpusFacts(error="it does not answer")).status == "warning"
    gone = GpusFacts(gpus=[GpuFacts(index=0, model="H100")], error="GPU 1 does not answer: lost")
    assert judge_gpus(gone).status == "failed"


def test_versions_against_what_is_loaded_and_what_the_job_began_with():
    here = {"torch": "2.13.0", "numpy": "2.0"}
    assert judge_versions_here(here, None, {"torch": "2.13.0", "cuda": "13.0"}).status == "ok"
    assert judge_versions_here(here, None, {"torch": "2.12.0"}).status == "failed"
    old = judge_versions_here(here, {"torch": "2.12.0"}, {})
    assert (old.status, old.seen) == ("warning", "torch 2.13.0, the job began with 2.12.0")


def test_speeds_that_could_not_be_measured_fail():
    assert judge_speed(14.0, 5e8, "cpu", 2).status == "ok"
    assert judge_speed(14.0, None, "cpu", 2).status == "failed"
    assert judge_speed(None, None, "", 2).status == "failed"


def test_whatever_asks_for_something_says_what():
    findings = [
        CheckResult(name="a", status="ok", seen=""),
        CheckResult(name="b", status="failed", seen="", todo="mend"),
    ]
    assert [one.name for one in failures(findings)] == ["b"]


@pytest.mark.parametrize(
    ("facts", "status", "words"),
    [
        ({"workers": 1, "is_wanted": True}, "ok", "only one"),
        ({"workers": 8, "is_wanted": False}, "ok", "workers.in_process = true"),
        ({"workers": 8, "is_wanted": True}, "ok", "no step is lost"),
        ({"workers": 8, "is_wanted": True, "lacking": "_world"}, "warning", "no _world"),
    ],
)
def test_how_the_job_goes_on_without_a_worker(facts, status, words):
    found = judge_recovery(**({"lacking": ""} | facts))
    assert (found.status, words in found.seen) == (status, True), found


@pytest.mark.parametrize(
    ("adj", "weight", "staged", "status", "said"),
    [
        (1000, 1, None, "warning", "QoS class BestEffort: this pod asks for neither"),
        (999, 39, None, "warning", "it asks for no memory to speak of"),
        (900, 1, None, "warning", "it asks for no processors"),
        (
            900,
            39,
            30,
            "warning",
            "about 10 GB of the machine's 100 GB, and snapshots alone take 30",
        ),
        (900, 39, 10, "ok", "QoS class Burstable: it asks for about 10 GB"),
        (900, None, None, "ok", "Burstable"),
        (-997, 39, 10**6, "ok", "QoS class Guaranteed"),
    ],
)
def test_what_a_pod_asks_for_decides_when_it_is_evicted(adj, weight, staged, status, said):
    facts = ContainerFacts(in_pod=True, oom_score_adj=adj, cpu_weight=weight)
    staged_bytes = None if staged is None else staged * GB
    found = judge_qos(facts, total_bytes=100 * GB, staged_bytes=staged_bytes)
    assert found.status == status
    assert said in found.seen
    assert (status == "ok") is (not found.todo)
    facts.in_pod = False
    assert judge_qos(facts, total_bytes=GB, staged_bytes=None) is None


def test_a_network_that_a_container_cannot_open_is_found():
    assert judge_rdma(ContainerFacts(rdma_given=["uverbs0"])) is None
    closed = judge_rdma(ContainerFacts(rdma=["mlx5_0"]))
    assert closed.status == "warning"
    assert "the machine has mlx5_0, and nothing of /dev/infiniband can be opened" in closed.seen
    assert judge_rdma(ContainerFacts(rdma=["mlx5_0"], rdma_given=["uverbs0"])).status == "ok"


def test_messages_that_can_and_cannot_be_sent():
    assert judge_messages((), ()).status == "skipped"
    good = judge_messages(("slack://…", "json://h/…"), ("", ""))
    assert (good.status, good.figures) == ("ok", {"addresses": 2})
    assert "slack://…, json://h/…" in good.seen
    one = judge_messages(("slack://…", "json://h/…"), ("apprise knows no such address", ""))
    assert (one.status, bool(one.todo)) == ("warning", True)
    assert "to slack://…: apprise knows no such address" in one.seen
    assert "json://h" not in one.seen
    none = judge_messages((), (), ("apprise is not here", "pip install apprise"))
    assert (none.status, none.todo) == ("warning", "pip install apprise")
