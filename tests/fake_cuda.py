"""CUDA as far as a process without a GPU can be shown it: contexts, streams, pinned memory.

Each thread has a current device, 0 until it sets another; whatever is asked of CUDA makes a context
on it. Streams and events only note their order: tensors stay on the CPU.
"""

import contextlib
import threading
from types import SimpleNamespace

import torch

INVALID, NOT_REGISTERED = 1, 713


class Cuda:
    """Put in place of ``torch.cuda``'s functions.

    Attributes:
        contexts: device → names of the threads that have a context on it made.
        registered: address → (bytes, flags) of memory that the driver has.
        log: what was done, in order.
    """

    def __init__(self, monkeypatch, num=8, current=0):
        self.num = num
        self.contexts, self.registered, self.log = {}, {}, []
        self.errors = {}  # thread → what a call of the runtime has left behind there
        self.fails = set()  # names of calls that do
        self._here = threading.local()
        self._here.device = current
        self.states = {index: torch.tensor([index], dtype=torch.uint8) for index in range(num)}
        fakes = {
            "is_initialized": lambda: True,
            "is_current_stream_capturing": lambda: False,
            "device_count": lambda: num,
            "current_device": lambda: self.device,
            "set_device": self._set,
            "memory_reserved": lambda _: 0,
            "get_rng_state": lambda index: self.states[index],
            "set_rng_state": lambda state, index: self.states.update({index: state}),
            "current_stream": lambda *_: self._stream("training"),
            "stream": self._on,
            "Stream": lambda *_: self._stream("side"),
            "Event": lambda **options: Event(self, options),
            "cudart": lambda: SimpleNamespace(
                cudaHostRegister=self._register, cudaHostUnregister=self._unregister
            ),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        # A torch with CUDA would ask its driver, which is not there, whether a step is captured.
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: None)

    @property
    def device(self):
        return getattr(self._here, "device", 0)

    def called(self):
        """Something was asked of CUDA in this thread."""
        self.contexts.setdefault(self.device, set()).add(threading.current_thread().name)

    def _set(self, device):
        self._here.device = device
        self.called()

    def _stream(self, name):
        wait = lambda event: self.log.append(("wait", name, event.number))  # noqa: E731
        asleep = lambda: self.log.append(("host waits", name))  # noqa: E731
        return SimpleNamespace(name=name, wait_event=wait, synchronize=asleep)

    @contextlib.contextmanager
    def _on(self, _):
        self.called()
        yield
        self.called()  # torch sets the device that was current before

    def _register(self, address, size, flags):
        self.called()
        if "register" in self.fails or address in self.registered:
            self.errors[threading.get_ident()] = INVALID
            return INVALID
        self.registered[address] = size, flags
        return 0

    def _unregister(self, address):
        self.called()
        if self.registered.pop(address, None) is None:
            self.errors[threading.get_ident()] = NOT_REGISTERED
            return NOT_REGISTERED
        return 0


class Event:
    numbers = iter(range(10**9))

    def __init__(self, cuda, options):
        self.cuda, self.options = cuda, options
        self.number = next(self.numbers)

    def record(self, stream):
        self.cuda.called()
        self.cuda.log.append(("record", stream.name, self.number))

    def synchronize(self):
        self.cuda.called()
        self.cuda.log.append(("done", self.number))
