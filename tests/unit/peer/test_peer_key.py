"""The job's key: one for all, for this user alone, refused when others could have had a hand in."""

import os
import stat

import pytest
from unit_fakes import at_once

from outlast.errors import StorageError
from outlast.peer.key import KEY_NAME, job_key
from outlast.storage import Directory


@pytest.fixture(name="job")
def _job(tmp_path):
    return Directory(tmp_path / "job")


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_the_key_is_made_once_and_is_for_this_user_alone(job):
    before = os.umask(0)
    try:
        key = job_key(job)
    finally:
        os.umask(before)
    assert len(key) == 32
    assert job_key(job) == key
    assert mode(job.root / KEY_NAME) == 0o600
    assert mode(job.root / "membership") == 0o700
    assert job_key(Directory(job.root.parent / "other")) != key


def test_all_who_make_it_at_once_have_the_same(job):
    keys = at_once(8, lambda _: job_key(Directory(job.root)))
    assert len(set(keys)) == 1
    assert isinstance(keys[0], bytes)


def test_a_directory_that_was_there_is_closed_to_readers(job):
    (job.root / "membership").mkdir(parents=True, mode=0o755)
    key = job_key(job)
    assert mode(job.root / "membership") == 0o700
    (job.root / "membership").chmod(0o755)
    assert job_key(job) == key
    assert mode(job.root / "membership") == 0o700


def refused(job, words):
    with pytest.raises(StorageError, match=words) as error:
        job_key(job)
    assert "\n" not in str(error.value)
    assert str(job.root) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("bits", [0o604, 0o640, 0o660, 0o644])
def test_a_key_that_others_can_read_is_refused(job, bits):
    key = job_key(job)
    (job.root / KEY_NAME).chmod(bits)
    words = refused(job, f"permissions {bits:04o}")
    assert "Remove it" in words
    assert key.hex() not in words


@pytest.mark.parametrize("exists", [True, False])
def test_a_directory_that_others_can_write_to_is_refused(job, exists):
    (job.root / "membership").mkdir(parents=True)
    if exists:
        job_key(job)
    (job.root / "membership").chmod(0o777)
    refused(job, "permissions 0777")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("name", ["membership", KEY_NAME])
def test_another_users_key_is_refused(job, name):
    job_key(job)
    os.chown(job.root / name, 12345, -1)
    refused(job, "belongs to user 12345")


@pytest.mark.parametrize("size", [0, 31, 33, 4096])
def test_a_key_of_another_length_is_refused(job, size):
    job_key(job)
    (job.root / KEY_NAME).write_bytes(bytes(size))
    refused(job, "and not 32; remove it")


def test_a_link_is_not_followed(job, tmp_path):
    (tmp_path / "elsewhere").write_bytes(bytes(32))
    (job.root / "membership").mkdir(parents=True)
    (job.root / KEY_NAME).symlink_to(tmp_path / "elsewhere")
    refused(job, "cannot be had")


def test_what_is_no_file_is_refused(job):
    (job.root / "membership").mkdir(parents=True)
    os.mkfifo(job.root / KEY_NAME, 0o600)
    refused(job, "is not a file")


def test_a_storage_that_fails_is_named(job):
    job.root.parent.joinpath("job").write_text("a file where the directory should be")
    refused(job, "cannot be had")


class Bucket:
    """A storage without permissions."""

    def __init__(self):
        self.files = {}

    def describe(self, name=""):
        return f"s3://bucket/{name}"

    def read(self, name):
        if name not in self.files:
            raise FileNotFoundError(name)
        return self.files[name]

    def put_new(self, name, data):
        return self.files.setdefault(name, data) is data


def test_a_bucket_holds_it_too():
    bucket = Bucket()
    assert job_key(bucket) == job_key(bucket) == bucket.files[KEY_NAME]
