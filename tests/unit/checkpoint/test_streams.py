"""Copies from GPUs with streams that only note their order, and digests that see it."""

import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

import thorough
from fake_cuda import Cuda
from outlast.checkpoint import devices, writers
from outlast.checkpoint.capture import Capture, Copiers
from outlast.checkpoint.devices import CudaCopies, in_words, sums_of
from outlast.checkpoint.plan import Share, make, structure
from outlast.checkpoint.tensors import NAMES


@pytest.fixture
def cuda(monkeypatch):
    made = Cuda(monkeypatch, current=3)
    devices.settle([])
    monkeypatch.setattr(devices, "_streams", {})
    yield made
    devices._rank.devices = ()


class Copying:
    """Two tensors into an arena, as if they lay on a GPU."""

    def __init__(self, tensors):
        self.plan = make(structure(tensors), 0, Share(), {})
        self.buffer = torch.zeros(self.plan.size, dtype=torch.uint8)
        self.arrived, self.digests = [], {}
        self.capture = Capture(
            self.plan, tensors, (), torch.zeros_like(self.buffer), on_blocks=lambda _: None
        )
        sources = [
            SimpleNamespace(write=write, tensor=tensors[write.piece.name], key=write.piece.key)
            for write in self.plan.writes
        ]
        self.copies = CudaCopies(sources, [], self.buffer)

    def count(self, start, end):
        self.arrived.append((start, end))

    def stored(self):
        return {
            write.piece.name: self.buffer[write.start : write.end].view(write.dtype)
            for write in self.plan.writes
        }


def run(copying):
    thread = devices.Thread(target=copying.copies.run, args=(copying,), name="outlast-copy-test")
    thread.start()
    return thread


def test_copies_come_behind_training_and_training_behind_them(cuda):
    copying = Copying({"a": torch.randn(5), "b": torch.randn(7)})
    (boundary,) = [number for what, _, number in cuda.log if what == "record"]
    run(copying).join()
    copying.copies.hold_back_training()
    kinds = [entry[:2] if entry[0] != "done" else entry[:1] for entry in cuda.log]
    assert kinds[:4] == [("record", "training"), ("wait", "side")] + [("record", "side")] * 2
    assert cuda.log[1] == ("wait", "side", boundary)
    last = max(entry[2] for entry in cuda.log if entry[0] == "record")
    assert cuda.log[-1] == ("wait", "training", last)
    assert copying.arrived == [(w.start, w.end) for w in copying.plan.writes]
    assert set(cuda.contexts) == {3}, "a context on somebody else's GPU"


def test_a_tensor_that_torch_conjugates_as_it_reads_it_is_so_before_the_copy_is_queued(cuda):
    """Torch would conjugate on the host at once, and the copy arrive later."""
    found = []
    copy_ = torch.Tensor.copy_
    torch.Tensor.copy_ = lambda to, source, **options: (
        found.append(source.is_conj() or source.is_neg()),
        copy_(to, source),
    )[1]
    try:
        tensors = {"c": torch.randn(5, dtype=torch.complex64).conj()}
        tensors["n"] = tensors["c"].imag
        copying = Copying(tensors)
        run(copying).join()
    finally:
        torch.Tensor.copy_ = copy_
    assert found == [False, False]
    assert all(torch.equal(one, tensors[name]) for name, one in copying.stored().items())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_where_a_copy_fails_those_that_were_begun_are_waited_for(cuda):
    tensors = {"a": torch.randn(5), "b": torch.randn(7)}
    copying = Copying(tensors)
    copying.copies._sources[1].tensor = torch.randn(8)  # does not fit
    run(copying).join()
    assert copying.copies.over.is_set()
    copying.copies.hold_back_training()  # returns
    begun = [entry[2] for entry in cuda.log if entry[:2] == ("record", "side")]
    assert cuda.log[-2:] == [("done", begun[-1]), ("wait", "training", begun[-1])]


def test_a_snapshot_that_is_whole_holds_no_memory_until_garbage_is_looked_for(cuda):
    """The next one would take it for memory that others hold, and copy it at once."""
    copying = Copying({"a": torch.randn(5)})
    one = copying.capture
    one.streams = CudaCopies(copying.copies._sources, [], copying.buffer)
    gone = weakref.ref(one)
    one.take_now()
    one.streams.run(one)
    gc.disable()
    try:
        del one, copying.capture
        assert gone() is None
    finally:
        gc.enable()


# --- graphs --------------------------------------------------------------------------------------


class Root:
    """As torch's class that is written in C++, and the one in Python around it."""

    def replay(self):
        self.log.append("replayed")

    def capture_begin(self, **_):
        self.log.append("capturing")


class Graph(Root):
    def __init__(self):
        self.log = []

    def replay(self):
        super().replay()

    def capture_begin(self, **options):
        super().capture_begin(**options)


@pytest.fixture
def graph(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    return Graph()


class Held:
    """A capture whose device copies on."""

    error = None
    is_confirmed = False

    def __init__(self, log):
        self.log = log

    def help(self):
        self.log.append("helped")

    def wait(self):
        self.log.append("waited")
        self.is_confirmed = True

    def wait_for_devices(self):
        self.log.append("devices waited for")

    def storages(self):
        return []


def test_a_replay_is_waited_with_and_told_also_one_that_was_bound_before(graph):
    replay = graph.replay  # a script that keeps it at hand
    leave = writers.watch_graphs(lambda: graph.log.append("told"))
    held = Held(graph.log)
    writers.hold_back(held)
    replay()
    assert graph.log == ["told", "helped", "waited", "replayed"]
    graph.log.clear()
    writers.let_go(held)
    replay()
    assert graph.log == ["told", "replayed"]
    leave()
    graph.log.clear()
    replay()
    assert graph.log == ["replayed"]
    assert Root.replay.__module__ == __name__
    assert Root.replay.__qualname__ == "Root.replay"


def test_no_graph_is_captured_while_a_device_copies(graph):
    held = Held(graph.log)
    writers.hold_back(held)
    graph.capture_begin(capture_error_mode="global")
    assert graph.log == ["helped", "waited", "devices waited for", "capturing"]
    writers.let_go(held)
    graph.capture_begin()
    assert graph.log[4:] == ["capturing"]
    assert Root.capture_begin.__qualname__ == "Root.capture_begin"


def test_a_graph_is_looked_after_until_the_device_has_copied_not_only_until_training_goes_on(
    graph, cuda
):
    """The optimizer's stream has waited by then; a graph would take in what is queued."""
    tensors = {"w": torch.randn(5)}
    plan = make(structure(tensors), 0, Share(), {})
    buffer = torch.zeros(plan.size, dtype=torch.uint8)
    one = Capture(plan, tensors, {"w"}, buffer, on_blocks=lambda _: None)
    one.take_now()
    one.streams = SimpleNamespace(over=threading.Event(), hold_back_training=lambda: None)
    one.hold_back()
    one.wait()
    begun = threading.Thread(target=graph.capture_begin)
    begun.start()
    begun.join(0.2)
    assert begun.is_alive()
    one.streams.over.set()
    begun.join(30)
    one.let_go()
    assert not begun.is_alive()
    assert Root.capture_begin.__qualname__ == "Root.capture_begin"


def test_copiers_that_are_stopped_end_what_was_begun():
    """Training may wait for it."""
    for _ in range(20):
        copiers = Copiers(lambda _: None)
        tensors = {"w": torch.randn(5)}
        plan = make(structure(tensors), 0, Share(), {})
        buffer = torch.zeros(plan.size, dtype=torch.uint8)
        one = Capture(plan, tensors, {"w"}, buffer, on_blocks=lambda _: None)
        one.take_now()
        copiers.submit(one)
        copiers.stop()
        assert copiers.current is None


# --- digests -------------------------------------------------------------------------------------


@pytest.fixture
def _small_chunks(monkeypatch):
    monkeypatch.setattr(devices, "_CHUNK", 16)
    monkeypatch.setattr(devices, "_drawn", {})


def digest(tensor):
    return in_words(sums_of(tensor))


@pytest.mark.usefixtures("_small_chunks")
def test_a_digest_sees_what_has_changed_places():
    rng = torch.Generator().manual_seed(thorough.seed())
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.bool):
        one = torch.randn(300, generator=rng).mul_(3).to(dtype)
        if dtype == torch.bool:
            one = torch.rand(300, generator=rng) < 0.5
        for _ in range(50):
            first, second = torch.randint(300, (2,), generator=rng).tolist()
            if one[first] == one[second]:
                continue
            other = one.clone()
            other[first], other[second] = one[second], one[first]
            assert digest(other) != digest(one), (dtype, first, second)
        assert digest(one.flip(0)) != digest(one)
        assert digest(one.roll(1)) != digest(one)
        assert digest(one.roll(16)) != digest(one), "by a chunk"


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_digest_sees_where_numbers_lie_that_differ_in_their_highest_bits_alone(dtype):
    """Signs and exponents: sums of products lose what comes above 64 bits."""
    for usual, other in ((1.0, -1.0), (0.0, -0.0), (1.0, 2.0), (0.0, float("inf"))):
        places, found = [2**n for n in range(12)], set()
        for place in places:
            one = torch.full((4096,), usual, dtype=dtype)
            one[place] = other
            found.add(digest(one))
        assert len(found) == len(places)


def test_a_digest_is_of_the_bits_however_they_lie():
    for dtype in NAMES:
        raw = torch.randint(0, 256, (3 * 5 * 16,), dtype=torch.uint8)
        one = raw > 127 if dtype == torch.bool else raw.view(dtype)
        one = one[: one.numel() // 5 * 5].view(5, -1)
        assert digest(one.T.contiguous().T) == digest(one)
        apart = torch.empty(one.numel() + 1, dtype=dtype)[1:].view(one.shape)
        apart.view(torch.uint8).copy_(one.view(torch.uint8))
        assert digest(apart) == digest(one)
    assert digest(torch.empty(0)) == digest(torch.empty(0))
    assert digest(torch.tensor(3.5)) != digest(torch.tensor(-3.5))
