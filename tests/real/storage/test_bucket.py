"""An object store keeps the contract, and its guarantees when the network and the server fail."""

import errno
import http.client
import random
import re
import threading
import time

import pytest
from bucket_server import Answer, CutAnswer, CutRequest, Delay, DoneAnd500, LoseAnswer, Silence
from storage_contract import StorageContract, memory

from outlast.storage import ObjectStore, Patience
from thorough import some

MIB = 2**20
BLOCK = 16 * MIB
PART = r"PUT .*partNumber="


@pytest.fixture
def storage(bucket, proxy):
    return ObjectStore(f"s3://{bucket}/jobs/7", patience=Patience(retry_s=10.0, stall_s=10.0))


class TestContract(StorageContract):
    """The same as for directories."""


def upload(storage, name, data):
    blob = storage.create(name, len(data))
    try:
        for start in range(0, len(data), BLOCK):
            blob.write_at(data[start : start + BLOCK], start)
        blob.finish()
    except BaseException:
        blob.abandon()
        raise


def check(storage, name, data):
    reader, into = storage.open(name), memory(BLOCK)
    assert reader.size == len(data)
    for start in range(0, len(data), BLOCK):
        count = reader.read_into(into, start)
        assert into[:count] == data[start : start + BLOCK]
    reader.close()


# --- big objects ----------------------------------------------------------------------------------


def test_64_mib_up_and_down(storage, proxy):
    data = memory(64 * MIB + 12_345)
    upload(storage, "step/f", data)
    check(storage, "step/f", data)
    assert len([line for line in proxy.lines() if re.search(PART, line)]) == 5


def test_a_blob_keeps_what_it_was_given(storage):
    """The keeper writes the next block over the last one, while that is still on its way."""
    data, block = memory(5 * BLOCK), memory(BLOCK)
    blob = storage.create("f", len(data))
    for start in range(0, len(data), BLOCK):
        block[:] = data[start : start + BLOCK]
        blob.write_at(block, start)
        block[:] = bytes(BLOCK)
    blob.finish()
    check(storage, "f", data)


def test_no_more_than_four_parts_are_in_memory(storage, proxy):
    """A writer waits when uploads do not keep up; else a slow network would fill the memory."""
    waiting, most, lock, real = [0], [0], threading.Lock(), Delay.befall

    class Counting(Delay):
        def befall(self, exchange):
            with lock:
                waiting[0] += 1
                most[0] = max(most[0], waiting[0])
            real(self, exchange)
            with lock:
                waiting[0] -= 1

    proxy.faults.append(Counting(PART, delay_s=0.3))
    upload(storage, "f", memory(9 * BLOCK))
    assert 2 <= most[0] <= 4


def test_more_than_a_page_of_names(storage, server, bucket):
    """A listing comes in pages of 1,000; unsigned, since 1,100 signed puts would take long."""
    connection = http.client.HTTPConnection(*server.address)
    for num in range(1_100):
        connection.request("PUT", f"/{bucket}/jobs/7/many/{num:04}/f", b"")
        connection.getresponse().read()
    connection.close()
    assert storage.children("many") == [f"{num:04}" for num in range(1_100)]
    storage.put("other", b"")
    storage.remove_tree("many")
    assert storage.children() == ["other"]


def test_an_abandoned_upload_is_aborted(storage, server, bucket):
    blob = storage.create("f", 4 * BLOCK)
    blob.write_at(memory(2 * BLOCK), 0)
    assert server.uploads(bucket) == ["jobs/7/f"]
    blob.abandon()
    assert server.uploads(bucket) == []
    assert storage.children() == []


# --- servers that answer 5xx ----------------------------------------------------------------------


@pytest.mark.parametrize("status", some([500, 503], 1))
def test_a_burst_of_5xx_is_survived(storage, proxy, status):
    """Some seconds of nothing but errors, for each kind of request."""
    data = memory(2 * BLOCK + 5)
    for act in (
        lambda: upload(storage, "a/big", data),
        lambda: check(storage, "a/big", data),
        lambda: storage.put("a/small", b"1"),
        lambda: storage.put_new("a/new", b"1") or pytest.fail("it was new"),
        lambda: storage.read("a/small"),
        lambda: storage.children("a") == ["big", "new", "small"] or pytest.fail("not all"),
        lambda: storage.exists("a/new") or pytest.fail("it exists"),
        lambda: storage.remove_tree("a"),
    ):
        proxy.faults[:] = [Answer(times=4, status=status)]
        act()
        assert proxy.faults[0].times == 0
    assert storage.children() == []


def test_5xx_for_longer_than_our_patience_is_an_error_in_words(bucket, proxy):
    storage = ObjectStore(f"s3://{bucket}/x", patience=Patience(retry_s=1.5))
    proxy.faults.append(Answer(status=503, code="SlowDown"))
    began = time.monotonic()
    for act in (storage.children, lambda: storage.put("f", b""), lambda: storage.read("f")):
        with pytest.raises(OSError, match="the server answers 503 SlowDown, also when") as caught:
            act()
        assert caught.value.errno == errno.EIO
    assert 2.0 < time.monotonic() - began < 20.0
    assert len(proxy.lines("Answer")) > 6


# --- connections that break -----------------------------------------------------------------------


@pytest.mark.parametrize("after", some([0, 100_000, 10 * MIB], 2))
def test_a_connection_cut_while_a_part_goes_up(storage, proxy, after):
    data = memory(4 * BLOCK + 77, seed=after)
    proxy.faults.append(CutRequest(PART, times=3, skip=1, after=after))
    upload(storage, "f", data)
    assert len(proxy.lines("CutRequest")) == 3
    check(storage, "f", data)


def test_a_connection_cut_before_the_answer_to_a_part_comes(storage, proxy):
    data = memory(3 * BLOCK)
    proxy.faults.append(LoseAnswer(PART, times=2))
    upload(storage, "f", data)
    check(storage, "f", data)
    assert len(proxy.lines("LoseAnswer")) == 2


@pytest.mark.parametrize("after", some([0, 100_000, 3 * MIB], 2))
def test_a_connection_cut_while_a_range_comes_down(storage, proxy, after):
    data = memory(2 * BLOCK + 77)
    upload(storage, "f", data)
    proxy.faults.append(CutAnswer(r"GET .*/f", times=3, after=after))
    check(storage, "f", data)
    assert len(proxy.lines("CutAnswer")) == 3


def test_connections_that_always_break_are_an_error_and_leave_nothing(
    bucket, proxy, server, monkeypatch
):
    storage = ObjectStore(f"s3://{bucket}/x", patience=Patience(retry_s=1.0))
    storage.put("f", b"old")
    proxy.faults.append(CutRequest(PART, skip=1, after=100_000))
    with pytest.raises(OSError, match=r"writing s3://.*/f: ") as caught:
        upload(storage, "f", memory(6 * BLOCK))
    assert "s3cr3t" not in str(caught.value)
    assert storage.read("f") == b"old"
    assert server.uploads(bucket) == []


# --- a name that must be new ----------------------------------------------------------------------


def test_a_put_whose_answer_was_lost_was_ours(storage, proxy):
    """The repeated put finds an object: ours. A second writer's must not be taken for ours."""
    proxy.faults.append(DoneAnd500("PUT .*/f$", times=1))
    assert storage.put_new("f", b"mine") is True
    assert proxy.lines("DoneAnd500") != []
    assert storage.put_new("f", b"mine") is False
    assert storage.read("f") == b"mine"


def test_a_conflict_is_not_somebody_else_s_success(storage, proxy):
    """S3 says 409 while another request for the same name is under way; that one may fail."""
    proxy.faults.append(Answer("PUT .*/f$", times=2, status=409, code="ConditionalRequestConflict"))
    assert storage.put_new("f", b"mine") is True
    assert storage.read("f") == b"mine"
    proxy.faults.append(Answer("PUT .*/g$", status=409, code="ConditionalRequestConflict"))
    with pytest.raises(OSError, match="writing s3://"):
        storage.put_new("g", b"mine")


def test_of_two_writers_on_a_bad_network_one_wins(bucket, proxy):
    """Each round, two ObjectStores of their own put the same name at once, through 500s."""
    rng = random.Random(7)
    stores = [ObjectStore(f"s3://{bucket}/x") for _ in range(2)]
    for num in range(12):
        name, won, start = f"lease-{num}", {}, threading.Barrier(2)
        kinds = [Answer(f"PUT .*/{name}$", times=1), DoneAnd500(f"PUT .*/{name}$", times=1)]
        proxy.faults[:] = rng.sample(kinds, rng.randrange(3))

        def write(writer, name=name, won=won, start=start):
            start.wait(20)
            won[writer] = stores[writer].put_new(name, b"%d" % writer)

        threads = [threading.Thread(target=write, args=(writer,)) for writer in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(won.values()) == [False, True]
        assert won[int(stores[0].read(name))]


# --- endpoints that are dead ----------------------------------------------------------------------


def test_silence_ends_in_an_error(bucket, proxy):
    storage = ObjectStore(f"s3://{bucket}/x", patience=Patience(stall_s=1.0, retry_s=0.5))
    proxy.faults.append(Silence())
    blob = storage.create("f", 4 * BLOCK)
    for act in (
        storage.children,
        lambda: storage.put("f", b""),
        lambda: storage.put_new("f", b""),
        lambda: storage.read("f"),
        lambda: blob.write_at(memory(4 * BLOCK), 0),
    ):
        began = time.monotonic()
        with pytest.raises(OSError, match="the server does not answer in time"):
            act()
        assert time.monotonic() - began < 10.0
    blob.abandon()


def test_a_slow_server_is_not_a_dead_one(bucket, proxy):
    storage = ObjectStore(f"s3://{bucket}/x", patience=Patience(stall_s=5.0, retry_s=0.5))
    proxy.faults.append(Delay(delay_s=1.5))
    storage.put("f", b"1")
    assert storage.read("f") == b"1"


def test_the_usual_patience_ends_within_half_a_minute():
    usual = Patience()
    assert max(usual.stall_s, usual.retry_s + usual.connect_s) <= 30.0


# --- what the server says -------------------------------------------------------------------------


def test_a_bucket_that_is_not_there(proxy):
    storage = ObjectStore("s3://no-such-bucket/x")
    for act in (
        storage.children,
        lambda: storage.put("f", b""),
        lambda: storage.put_new("f", b""),
        lambda: storage.read("f"),
        lambda: storage.remove("f"),
        lambda: storage.remove_tree("f"),
        lambda: upload(storage, "f", memory(2 * BLOCK)),
    ):
        with pytest.raises(OSError, match="there is no bucket no-such-bucket; create it or"):
            act()


def test_a_server_that_refuses_us(storage, proxy):
    proxy.faults.append(Answer(status=403, code="AccessDenied"))
    for act in (
        storage.children,
        lambda: storage.put("f", b""),
        lambda: storage.put_new("f", b""),
        lambda: storage.read("f"),
        lambda: storage.remove("f"),
        lambda: storage.remove_tree("f"),
        lambda: upload(storage, "f", memory(2 * BLOCK)),
    ):
        with pytest.raises(PermissionError, match="403 AccessDenied") as caught:
            act()
        assert "AWS_*" in str(caught.value)
        assert "s3cr3t" not in str(caught.value)
    with pytest.raises(PermissionError, match="refuses"):
        storage.exists("f")


def test_an_object_that_shrinks_while_it_is_read(storage):
    storage.put("f", bytes(100))
    reader = storage.open("f")
    storage.put("f", bytes(50))
    with pytest.raises(OSError, match="changed its size"):
        reader.read_into(memory(100), 0)
