"""One thing in a worker is held still, so that it is seen whether two runs differ by it.

Each change is one of ``conditions``: the clock stands, processes have one identity, generators have
a seed, loaders no processes. What reads the clock or an identity is told apart by who calls: to the
script it stands, to libraries and to us it does not, or nothing would ever time out.

Guarantees: of each such call the script's line is noted, once. What can go wrong: a script that
waits for a standing clock waits for good; whoever runs it has a limit.
"""

from __future__ import annotations

import builtins
import os
import random
import secrets
import socket
import sys
import time
import types
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from outlast.attempt.early import when_imported
from outlast.drill.proof import conditions as of
from outlast.ledger.command import is_users

Tell = Callable[[str, str], None]

_CLOCKS: Final = (
    *("time", "monotonic", "perf_counter", "process_time"),
    *("time_ns", "monotonic_ns", "perf_counter_ns", "process_time_ns"),
)
_STOPPED_S: Final = 1_700_000_000
_WORDS: Final = "does not have a deterministic implementation"


def place_of(frame: types.FrameType | None) -> str:
    """The innermost line of the script's that ``frame`` is in or was called from; "" for none."""
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def hold_still(changes: list[str], tell: Tell) -> None:
    """Do what ``changes`` name; ahead of the script.

    Args:
        changes: those of ``conditions``.
        tell: called with what was read, and the script's line.
    """
    # Loaders' processes get their seeds from torch; without them, the script's own are drawn from.
    is_alone = of.NO_LOADER_WORKERS in changes
    if is_alone or of.SEED_PYTHON in changes:
        random.seed(of.SEED)
    if is_alone or of.SEED_NUMPY in changes:
        when_there("numpy", lambda numpy: numpy.random.seed(of.SEED))
    if of.SEED_TORCH in changes:
        when_there("torch", lambda torch: torch.manual_seed(of.SEED))
    if of.CLOCK in changes:
        _stop_clocks(tell)
    if of.IDENTITY in changes:
        _be_nobody(tell)
    if of.ENTROPY in changes:
        _be_sure(tell)
    if of.NO_LOADER_WORKERS in changes:
        when_there("torch.utils.data.dataloader", _without_workers("DataLoader"))
        name = "torchdata.stateful_dataloader.stateful_dataloader"
        when_there(name, _without_workers("StatefulDataLoader"))
    if of.DETERMINISTIC in changes:
        when_there("torch", lambda torch: _be_deterministic(torch, tell))
    if of.COUNT_ON in changes:
        _count_on(tell)
    if of.ONE_THREAD in changes:
        when_there("torch", lambda torch: torch.set_num_threads(1))


def when_there(name: str, then: Callable[[Any], None]) -> None:
    """Call ``then`` with a module: now, or once it is imported."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        when_imported(name, then)


def _stands(owner: Any, name: str, what: str, answer: Callable[..., Any], tell: Tell) -> None:
    """Have the script get ``answer`` of a function, and everybody else what they always got.

    Of a script's call is what a library does that it calls directly and that is no more than this
    function under another name: one frame between them.
    """
    original = getattr(owner, name)

    def called(*args: Any, **options: Any) -> Any:
        caller: Any = sys._getframe(1)
        if not is_users(caller.f_code.co_filename):
            return original(*args, **options)
        tell(what, place_of(caller))
        return answer(*args, **options)

    setattr(owner, name, called)


def _stop_clocks(tell: Tell) -> None:
    for name in _CLOCKS:
        value: Any = _STOPPED_S * 10**9 if name.endswith("_ns") else float(_STOPPED_S)
        _stands(time, name, f"time.{name}()", lambda v=value: v, tell)
    kinds = {"localtime": time.localtime, "gmtime": time.gmtime}
    for name, real in kinds.items():
        told = lambda seconds=None, real=real: real(_STOPPED_S if seconds is None else seconds)  # noqa: E731
        _stands(time, name, f"time.{name}()", told, tell)
    import datetime

    real_datetime: Any = datetime.datetime

    class Stopped(real_datetime):  # the interpreter's own cannot be changed
        """The clock's moment, which stands for the script."""

        @classmethod
        def now(cls, tz: Any = None) -> Any:
            """What it always was."""
            place = place_of(sys._getframe(1))
            tell("datetime.now()", place)
            return real_datetime.fromtimestamp(_STOPPED_S, tz)

        @classmethod
        def utcnow(cls) -> Any:
            """What it always was."""
            tell("datetime.utcnow()", place_of(sys._getframe(1)))
            return real_datetime.fromtimestamp(_STOPPED_S, datetime.UTC).replace(tzinfo=None)

        today = now

    main_only = _OnlyFor(datetime, "datetime", real_datetime, Stopped)
    main_only.install()


class _OnlyFor:
    """Gives the script's ``from datetime import datetime`` another class than libraries'."""

    def __init__(self, module: Any, name: str, real: Any, other: Any) -> None:
        self._module, self._name, self._real, self._other = module, name, real, other

    def install(self) -> None:
        """A module's ``__class__`` may be one with a property in place of an attribute."""
        name, real, other = self._name, self._real, self._other

        def of_caller(_: Any) -> Any:
            return other if is_users(sys._getframe(1).f_code.co_filename) else real

        kind = type("module", (types.ModuleType,), {name: property(of_caller)})
        self._module.__class__ = kind


def _be_nobody(tell: Tell) -> None:
    _stands(os, "getpid", "os.getpid()", lambda: 4242, tell)
    _stands(os, "getppid", "os.getppid()", lambda: 4241, tell)
    _stands(socket, "gethostname", "socket.gethostname()", lambda: "machine", tell)
    _stands(builtins, "id", "id()", lambda _: 4242, tell)
    for name in ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"):
        if name in os.environ:
            os.environ[name] = "0"


def _be_sure(tell: Tell) -> None:
    """Have what is drawn from the machine's own randomness be the same each time."""
    source = random.Random(of.SEED)  # noqa: S311 - it is to be foreseen
    _stands(os, "urandom", "os.urandom()", source.randbytes, tell)
    _stands(uuid, "uuid4", "uuid.uuid4()", lambda: uuid.UUID(bytes=source.randbytes(16)), tell)
    _stands(uuid, "uuid1", "uuid.uuid1()", lambda *_: uuid.UUID(bytes=source.randbytes(16)), tell)
    for name, answer in (
        ("randbits", source.getrandbits),
        ("randbelow", source.randrange),
        ("token_bytes", lambda n=32: source.randbytes(n)),
        ("token_hex", lambda n=32: source.randbytes(n).hex()),
    ):
        _stands(secrets, name, f"secrets.{name}()", answer, tell)
    _seed_if_none(random, "Random", "random.Random()", tell)
    when_there("numpy", lambda np: _seed_if_none(np.random, "default_rng", _NEW_RNG, tell))
    when_there("numpy", lambda np: _seed_if_none(np.random, "RandomState", _NEW_STATE, tell))
    when_there("torch", lambda torch: _stands_torch_seed(torch, tell))


_NEW_RNG: Final = "numpy.random.default_rng()"
_NEW_STATE: Final = "numpy.random.RandomState()"


def _seed_if_none(owner: Any, name: str, what: str, tell: Tell) -> None:
    original = getattr(owner, name)

    def made(*args: Any, **options: Any) -> Any:
        caller: Any = sys._getframe(1)
        given = [one for one in [*args, *options.values()] if one is not None]
        if given or not is_users(caller.f_code.co_filename):
            return original(*args, **options)
        tell(what, place_of(caller))
        return original(of.SEED)

    def of_caller(_: Any) -> Any:
        return made if is_users(sys._getframe(1).f_code.co_filename) else original

    if isinstance(original, type):  # a class stays one for libraries, which ask what is one
        kind = type("module", (type(owner),), {name: property(of_caller)})
        owner.__class__ = kind
    else:
        setattr(owner, name, made)


def _stands_torch_seed(torch: Any, tell: Tell) -> None:
    _stands(torch, "seed", "torch.seed()", lambda: torch.manual_seed(of.SEED).initial_seed(), tell)


def _without_workers(name: str) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        kind = getattr(module, name)
        original = kind.__init__

        def __init__(self: Any, *args: Any, **options: Any) -> None:  # noqa: N807 - it is one
            names = original.__code__.co_varnames[1 : 1 + len(args)]
            options |= dict(zip(names, args, strict=True))
            options["num_workers"] = 0
            for one in ("prefetch_factor", "multiprocessing_context"):
                options.pop(one, None)
            for one in ("persistent_workers", "timeout"):
                options.pop(one, None)
            original(self, **options)

        kind.__init__ = __init__

    return change


def _be_deterministic(torch: Any, tell: Tell) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    show = warnings.showwarning

    def shown(message: Any, category: Any, filename: str, line: int, *rest: Any) -> None:
        if _WORDS in str(message):
            kernel = str(message).split(_WORDS)[0].split(".")[-1].strip()
            tell(f"kernel {kernel}", place_of(sys._getframe(1)))
        show(message, category, filename, line, *rest)

    warnings.showwarning = shown  # type: ignore[assignment]
    warnings.filterwarnings("always", message=f".*{_WORDS}.*")


def _count_on(tell: Tell) -> None:
    """Have ``enumerate(session.steps(…))`` count on from where the job is."""
    original = builtins.enumerate

    def counted(iterable: Any, start: int = 0) -> Any:
        caller: Any = sys._getframe(1)
        is_loop = getattr(getattr(iterable, "gi_code", None), "co_name", "") == "_steps"
        if is_loop and not start and is_users(caller.f_code.co_filename):
            tell("enumerate(session.steps(…))", place_of(caller))
            start = iterable.gi_frame.f_locals["self"].step
        return original(iterable, start)

    builtins.enumerate = counted  # type: ignore[misc, assignment]


class DrawnLines:
    """Finds the lines of the script that draw from the global generators, by looking at each.

    Args:
        tell: called with the generator and the line.
    """

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._known: dict[str, Any] = {}
        self._line = ""
        self._found: set[str] = set()
        self._before: Any = None

    def open(self) -> None:
        """Look at each line from here on, in this thread."""
        self._known = self._look()
        self._before = sys.gettrace()
        sys.settrace(self._called)

    def close(self) -> None:
        """Enough was seen."""
        sys.settrace(self._before)

    def _called(self, frame: types.FrameType, event: str, _: Any) -> Any:
        return self._stepped if is_users(frame.f_code.co_filename) else None

    def _stepped(self, frame: types.FrameType, event: str, _: Any) -> Any:
        now = self._look()
        for name, state in now.items():
            was = self._known.get(name)
            if was is not None and was != state and name not in self._found:
                self._found.add(name)
                self._tell(f"draws from {name}", self._line)
        self._known = now
        self._line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        return self._stepped

    @staticmethod
    def _look() -> dict[str, Any]:
        found: dict[str, Any] = {"python": random.getstate()[1]}
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        if hasattr(getattr(numpy, "random", None), "get_state"):
            state = numpy.random.get_state(legacy=False)["state"]  # type: ignore[union-attr]
            found["numpy"] = (state["pos"], state["key"].tobytes())
        if hasattr(torch, "default_generator"):
            found["torch"] = torch.get_rng_state().numpy().tobytes()  # type: ignore[union-attr]
        return found
