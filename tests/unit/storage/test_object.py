"""What an object store says and refuses before any server is asked; the rest is in tests/real."""

import subprocess
import sys

import pytest

from outlast.errors import ConfigError
from outlast.storage import Directory, ObjectStore, Patience, open_storage
from outlast.storage import object as object_store

SECRET = "s3cr3t"


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", SECRET)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")


# --- places ---------------------------------------------------------------------------------------


def test_a_path_is_a_directory(tmp_path):
    storage = open_storage(str(tmp_path), num_spares=1)
    assert isinstance(storage, Directory)
    assert storage.describe("a") == str(tmp_path / "a")


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("s3://bucket", "s3://bucket/a/b"),
        ("s3://bucket/", "s3://bucket/a/b"),
        ("s3://bucket/jobs/7/", "s3://bucket/jobs/7/a/b"),
        ("gs://bucket/jobs", "gs://bucket/jobs/a/b"),
        ("az://container/jobs", "az://container/jobs/a/b"),
    ],
)
def test_a_url_is_an_object_store(url, place):
    storage = open_storage(url)
    assert isinstance(storage, ObjectStore)
    assert storage.describe("a/b") == place
    assert SECRET not in storage.describe() + repr(storage)


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("", "write a directory or a bucket's URL"),
        ("http://host/x", "no storage for http://; write a directory or s3://, gs://, az://"),
        ("file:///x", "no storage for file://"),
        ("s3://", "is not the URL of a bucket; write s3://BUCKET/PREFIX"),
        ("s3:///x", "is not the URL of a bucket"),
        ("s3://bucket/../x", "is not a plain prefix"),
        (f"s3://me:{SECRET}@bucket/x", "credentials belong into the environment"),
        (f"az://container/x?sig={SECRET}", "credentials belong into the environment"),
    ],
)
def test_a_place_that_cannot_be_used_is_refused_in_one_line(url, what):
    with pytest.raises(ConfigError) as caught:
        open_storage(url)
    assert what in str(caught.value)
    assert "\n" not in str(caught.value)
    assert SECRET not in str(caught.value)


def test_without_obstore_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match="pip install obstore"):
        open_storage("s3://bucket/x")


def test_what_the_environment_lacks_is_said(monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    with pytest.raises(ConfigError, match="check what the environment says") as caught:
        open_storage("az://container/x")
    assert caught.value.__suppress_context__


def test_obstore_is_imported_only_for_an_object_store():
    code = (
        "import sys, outlast.storage as s; s.open_storage('/tmp'); print('obstore' in sys.modules);"
        "s.open_storage('s3://bucket/x'); print('obstore' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_a_forked_process_is_refused_and_does_not_hang(monkeypatch):
    storage = open_storage("s3://bucket/x")
    monkeypatch.setattr(object_store, "_process", -1)
    for act in (storage.children, lambda: storage.put("a", b""), lambda: open_storage("s3://b")):
        with pytest.raises(RuntimeError, match="forked process"):
            act()


def test_what_the_environment_says_about_the_connection_stands(monkeypatch):
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    patience = Patience(retry_s=0.2, connect_s=1.0)
    with pytest.raises(OSError, match="the server cannot be reached"):
        ObjectStore("s3://bucket/x", patience=patience).children()


# --- parts ----------------------------------------------------------------------------------------

MIB = 2**20


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        (None, 16 * MIB),
        (0, 16 * MIB),
        (10_000 * 16 * MIB, 16 * MIB),
        (10_000 * 16 * MIB + 1, 17 * MIB),
        (5 * 2**40, 525 * MIB),
    ],
)
def test_ten_thousand_parts_are_enough(size, wanted):
    assert object_store.part_bytes(size) == wanted
    assert (size or 0) <= 10_000 * wanted


# --- words ----------------------------------------------------------------------------------------

SERVER = (
    "Generic S3 error: Error performing GET http://host/b/x?X-Amz-Signature=s3cr3t in 3ms - "
    "Server returned non-2xx status code: {status}: <Error><Code>{code}</Code></Error>\nmore s3cr3t"
)


@pytest.mark.parametrize(
    ("text", "kind", "what"),
    [
        (
            SERVER.format(status="503 Unavailable", code="SlowDown"),
            OSError,
            "answers 503 SlowDown, ",
        ),
        (SERVER.format(status="400 Bad", code="Oops"), OSError, "the server answers 400 Oops"),
        (SERVER.format(status="404 Not Found", code="NoSuchKey"), FileNotFoundError, "no such obj"),
        (SERVER.format(status="404", code="NoSuchBucket"), OSError, "there is no bucket b; create"),
        (
            SERVER.format(status="403 Forbidden", code="AccessDenied"),
            PermissionError,
            "refuses (403 AccessDenied); check the credentials in AWS_* and",
        ),
        ("kind: Timeout, source: TimedOut s3cr3t", OSError, "does not answer in time"),
        ("ConnectError(tcp connect error) s3cr3t", OSError, "cannot be reached"),
        ("s3cr3t", OSError, "the connection broke"),
    ],
)
def test_one_line_without_secrets(text, kind, what):
    from obstore.exceptions import GenericError

    with (
        pytest.raises(OSError, match="reading f: ") as caught,
        object_store.in_words("reading f", "s3", "b"),
    ):
        raise GenericError(text)
    assert type(caught.value) is kind
    assert what in str(caught.value)
    assert "\n" not in str(caught.value)
    assert SECRET not in str(caught.value)
    assert caught.value.__suppress_context__
