"""What every storage does: run against directories (here) and against a bucket (tests/real)."""

import mmap
import random
import threading

import numpy as np
import pytest

from outlast.storage.trust import distrust

MIB = 2**20
BLOCK = 16 * MIB


def memory(size, seed=0):
    """Page-aligned memory, as the keeper has it; random bytes."""
    mapping = mmap.mmap(-1, max(size, 1))
    mapping[:size] = np.random.default_rng(seed).bytes(size)
    return memoryview(mapping)[:size]


def is_same(one, other):
    """Whether the bytes are the same; memoryviews would be compared one byte at a time."""
    return np.array_equal(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8))


class StorageContract:
    """Subclasses give a fixture ``storage``, empty and with nothing of another test in it."""

    def test_nothing_is_there_at_first(self, storage):
        assert storage.children() == []
        assert storage.children("a") == []
        assert not storage.exists("a")
        for act in (storage.size, storage.read, storage.open):
            with pytest.raises(FileNotFoundError):
                act("a")
        with pytest.raises(FileNotFoundError):
            storage.read_into("a", memoryview(bytearray(1)))

    def test_what_is_put_is_read(self, storage):
        storage.put("a/b/c.json", b"123")
        storage.put("a/b/empty", b"")
        storage.put("d", b"4")
        assert storage.read("a/b/c.json") == b"123"
        assert storage.read("a/b/empty") == b""
        assert (storage.size("a/b/c.json"), storage.size("a/b/empty")) == (3, 0)
        assert (storage.exists("a/b/c.json"), storage.exists("a/b")) == (True, False)
        assert storage.children() == ["a", "d"]
        assert storage.children("a") == ["b"]
        assert storage.children("a/b") == ["c.json", "empty"]
        assert storage.describe("a/b").endswith("/a/b")
        storage.put("a/b/c.json", b"new")
        assert storage.read("a/b/c.json") == b"new"

    def test_a_name_that_begins_like_another_is_another(self, storage):
        storage.put("step-1/f", b"1")
        storage.put("step-10/f", b"10")
        assert storage.children("step-1") == ["f"]
        storage.remove_tree("step-1")
        assert storage.children() == ["step-10"]

    @pytest.mark.parametrize("name", ["..", "a/../b", "/a", "a//b", ".a", "a b", "a\n"])
    def test_a_name_that_is_not_plain_is_refused(self, storage, name):
        for act in (
            storage.children,
            storage.exists,
            storage.size,
            storage.read,
            storage.open,
            storage.remove,
            storage.remove_tree,
            storage.create,
            lambda name: storage.put(name, b""),
            lambda name: storage.put_new(name, b""),
        ):
            with pytest.raises(ValueError, match="is not a name of this storage"):
                act(name)

    def test_reading_parts(self, storage):
        storage.put("f", bytes(range(100)))
        buffer = memoryview(bytearray(10))
        assert storage.read_into("f", buffer, 95) == 5
        assert bytes(buffer[:5]) == bytes(range(95, 100))
        assert storage.read_into("f", buffer) == 10
        assert bytes(buffer) == bytes(range(10))
        assert storage.read_into("f", buffer, 100) == 0
        assert storage.read_into("f", buffer, 1000) == 0
        assert storage.read_into("f", buffer[:0], 5) == 0

    def test_removing(self, storage):
        storage.remove("nothing")
        storage.remove_tree("nothing")
        storage.put("a/b", b"1")
        storage.put("a/c/d", b"1")
        storage.put("e", b"1")
        storage.remove("a/b")
        storage.remove("a/b")
        assert storage.children("a") == ["c"]
        storage.remove_tree("a")
        assert storage.children() == ["e"]
        with pytest.raises(ValueError, match="root"):
            storage.remove_tree("")

    def test_a_new_file_is_put_once(self, storage):
        assert storage.put_new("a/f", b"1") is True
        assert storage.put_new("a/f", b"2") is False
        assert storage.put_new("a/f", b"1") is False
        assert storage.read("a/f") == b"1"
        assert storage.children("a") == ["f"]
        storage.remove("a/f")
        assert storage.put_new("a/f", b"3") is True
        assert storage.read("a/f") == b"3"

    def test_it_can_say_who_comes_first(self, storage):
        storage.put("membership/alive.json", b"1")
        assert distrust(storage, "membership") is None
        assert distrust(storage, "another") is None
        assert storage.children("membership") == ["alive.json"]

    def test_of_many_who_put_a_new_file_one_does(self, storage):
        for num in range(5):
            data = [f"writer {writer} ".encode() * 50 for writer in range(6)]
            done, start = {}, threading.Barrier(len(data))

            def write(writer, name=f"lease-{num}", data=data, done=done, start=start):
                start.wait(20)
                done[writer] = storage.put_new(name, data[writer])

            threads = [threading.Thread(target=write, args=(i,)) for i in range(len(data))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            winners = [writer for writer, won in done.items() if won]
            assert (len(done), len(winners)) == (len(data), 1)
            assert storage.read(f"lease-{num}") == data[winners[0]]

    def test_a_blob_is_seen_only_when_it_is_finished(self, storage):
        blob = storage.create("step/f")
        blob.write(b"12")
        blob.write(memoryview(b"34"))
        assert storage.children("step") == []
        assert not storage.exists("step/f")
        blob.finish()
        assert storage.read("step/f") == b"1234"
        assert storage.children("step") == ["f"]

    @pytest.mark.parametrize("size", [None, 17 * MIB])
    def test_an_abandoned_blob_leaves_the_old_file(self, storage, size):
        storage.put("f", b"old")
        blob = storage.create("f", size)
        blob.write(memory(17 * MIB))
        blob.abandon()
        blob.abandon()
        assert storage.read("f") == b"old"
        assert storage.children() == ["f"]

    @pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 100_000, BLOCK, BLOCK + 5000])
    def test_a_blob_of_known_size(self, storage, size):
        data = memory(size, seed=size)
        blob = storage.create("a/f", size)
        for start in range(0, size, BLOCK):
            blob.write_at(data[start : start + BLOCK], start)
        blob.finish()
        assert storage.size("a/f") == size
        assert is_same(storage.read("a/f"), data)
        with_hole = storage.create("a/g", size + 1)
        with_hole.write(data)
        with pytest.raises(ValueError, match="bytes written"):
            with_hole.finish()
        with_hole.abandon()
        assert storage.children("a") == ["f"]

    def test_blocks_in_the_order_that_the_blob_allows(self, storage):
        size = 2 * BLOCK + 12_345
        data = memory(size)
        blob = storage.create("f", size)
        starts = list(range(0, size, BLOCK))
        if blob.positional:
            random.Random(1).shuffle(starts)
        else:
            with pytest.raises(ValueError, match="comes next"):
                blob.write_at(data[:10], 10)
        for start in starts:
            blob.write_at(data[start : start + BLOCK], start)
        blob.finish()
        self.check_reading(storage, data)

    def check_reading(self, storage, data):
        reader = storage.open("f")
        try:
            assert reader.size == len(data)
            into = memory(BLOCK)
            for start in range(0, len(data), BLOCK):
                wanted = data[start : start + BLOCK]
                assert reader.read_into(into[: len(wanted)], start) == len(wanted)
                assert is_same(into[: len(wanted)], wanted)
            # More room than file, unaligned memory, unaligned places.
            last = len(data) - len(data) % BLOCK
            assert reader.read_into(into, last) == len(data) - last
            assert is_same(into[: len(data) - last], data[last:])
            for start, size, shift in [(1, 5000, 0), (4096, 8192, 3), (4095, BLOCK - 8, 1)]:
                place = into[shift : shift + size]
                assert reader.read_into(place, start) == size
                assert is_same(place, data[start : start + size])
            assert reader.read_into(into, len(data)) == 0
        finally:
            reader.close()

    def test_a_reader_serves_several_threads(self, storage):
        data = memory(BLOCK + 100)
        blob = storage.create("f", len(data))
        blob.write(data)
        blob.finish()
        reader, wrong = storage.open("f"), []

        def read(seed):
            into, order = memory(4 * MIB), random.Random(seed)
            for _ in range(6):
                start = order.randrange(0, len(data) // 4096) * 4096
                count = reader.read_into(into, start)
                if not is_same(into[:count], data[start : start + len(into)]):
                    wrong.append(start)

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        reader.close()
        assert wrong == []
