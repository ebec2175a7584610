"""A bucket as SkyPilot's MOUNT_CACHED mounts it: rclone, with a cache on this machine's disk.

The bucket is a directory here; the mount, its cache and what it cannot do are rclone's own.
"""

import os
import shutil
import subprocess

import pytest
from floor import TRAIN, Job, until

from outlast.durable import mount_of
from outlast.health.doctor.probes import probe_place
from outlast.policy.fitness import judge_place

FLAGS = ("--vfs-cache-mode", "full", "--dir-cache-time", "10s", "--vfs-write-back", "100ms")


@pytest.fixture(name="mounted")
def _mounted(tmp_path):
    """``mounted()``: the bucket, mounted anew with an empty cache, as on another machine."""
    unmount = shutil.which("fusermount3") or shutil.which("fusermount")
    if not (shutil.which("rclone") and unmount and os.access("/dev/fuse", os.W_OK)):
        pytest.skip("nothing can be mounted: apt install rclone fuse3, and /dev/fuse")
    bucket, place = tmp_path / "bucket", tmp_path / "outlast"
    bucket.mkdir()
    place.mkdir()
    running = []

    def end():
        # It is gone once it has uploaded all; a busy one is let go of when nobody uses it.
        while running:
            subprocess.run([unmount, "-uz", place], check=True)
            running.pop().wait(60)

    def mount():
        end()
        cache = tmp_path / f"cache-{len(list(tmp_path.glob('cache-*')))}"
        command = ["rclone", "mount", *FLAGS, "--cache-dir", cache, f":local:{bucket}", place]
        with (tmp_path / "rclone.log").open("ab") as log:
            running.append(subprocess.Popen(command, stdout=log, stderr=log))
        until(lambda: mount_of(str(place)).kind == "fuse.rclone", "the mount")
        return place

    yield mount, bucket
    end()


def test_a_job_in_it_is_resumed_from_the_bucket_and_the_doctor_says_what_it_is(floor, mounted):
    mount, bucket = mounted
    job = Job(mount() / "job")
    run = ("run", "--standalone", "--resume", "--dir", job.directory)
    records = bucket.parent / "records"
    records.mkdir()
    first = floor.outlast(*run, TRAIN, records, 20, "--light", "--every", "5 steps")
    assert first.wait() == 0, first.text
    assert "it is mounted as fuse.rclone, where two may create one name" in first.err
    manifests = lambda: list(bucket.glob("job/checkpoints/step-*20.*/manifest.json"))  # noqa: E731
    until(manifests, "the upload")
    mount()
    second = floor.outlast(*run, TRAIN, records, 30, "--light", "--every", "5 steps")
    assert second.wait() == 0, second.text
    assert "resumed from step 20" in second.err
    facts = probe_place(str(job.directory), writes=False, locks=True)
    assert not facts.outlasts
    found = judge_place("job", "/outlast/job", facts)
    assert found.status == "warning"
    assert "is uploaded later: what counts as committed may not be in the bucket yet" in found.seen
