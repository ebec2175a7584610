"""Change what torch does in a worker, before it is imported; nothing here imports it.

**Process groups are watched from the first one on** (``watch_groups``), where workers may live
through the loss of others.

**The first model is heard of** (``watch_models``): by then the script has imported what it needs,
and what follows until it trains is building. It is one call of ``torch.nn.Module.__init__``, after
which torch is as it was. A model that an import makes is taken for the script's.

**Connections of torch's stores ask for no names** (``nameless``, ``spare_torch``). For a message
that next to nobody reads, torch asks for the name of each address that one of its stores connects
to, and of each that connects to it. That is a question to the name servers: no file of hosts has
the addresses as torch writes them (``::ffff:127.0.0.1``). Where an answer is lost, five seconds
pass in which an attempt stands still; several are asked for in each attempt, by each worker. All
our stores are at numbers. Within ``nameless`` the C library knows of no name server, in this thread
alone, and answers from its files. It counts its servers in a structure of each thread's, which it
leaves as it is where somebody has changed it. This is done only under our agent, and where it was
in time to tell torch that it need not log the name that it did not get. torch asks for none in this
process after that, in no thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import ipaddress
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, Final

from outlast.attempt.over import LINE_VARIABLE, STANDBY_VARIABLE

QUIET_VARIABLE: Final = "OUTLAST_TORCH_IS_QUIET"  # set by the agent, before torch is here
_READY: Final = 1  # RES_INIT
_RENDEZVOUS: Final = "torch.distributed.rendezvous"
_MAKES: Final = "_create_c10d_store"


class _ResolverState(ctypes.Structure):
    """The beginning of glibc's ``struct __res_state``, which is part of its ABI."""

    _fields_ = (
        ("retrans", ctypes.c_int),
        ("retry", ctypes.c_int),
        ("options", ctypes.c_ulong),
        ("nscount", ctypes.c_int),
    )


@contextlib.contextmanager
def nameless(host: str) -> Iterator[None]:
    """Within, this thread asks no name server; nothing changes where ``host`` is a name."""
    state = _state() if QUIET_VARIABLE in os.environ and _is_number(host) else None
    if state is None:
        yield
        return
    before, state.nscount = state.nscount, 0
    try:
        yield
    finally:
        state.nscount = before


def spare_torch() -> None:
    """Have stores that torch makes for a script ask for no names, if torch is here already."""

    def spared(make: Any) -> Any:
        if hasattr(make, "__wrapped__"):
            return make

        def made(hostname: str, *args: Any, **options: Any) -> Any:
            with nameless(hostname):
                return make(hostname, *args, **options)

        return made

    around_stores(spared)


def around_stores(around: Callable[[Any], Any]) -> None:
    """Have torch make stores for scripts by ``around`` of its own function, if it is here."""
    module: Any = sys.modules.get(_RENDEZVOUS)
    make = getattr(module, _MAKES, None)
    if make is not None and (made := around(make)) is not make:
        setattr(module, _MAKES, functools.wraps(make)(made))


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def _state() -> _ResolverState | None:
    """This thread's, ready for use; None where the C library is another one."""
    try:
        library = ctypes.CDLL(None)
        find, begin = library.__res_state, library.__res_ninit
    except (OSError, AttributeError):
        return None
    find.restype = ctypes.POINTER(_ResolverState)
    begin.argtypes = [ctypes.POINTER(_ResolverState)]
    found = find()
    is_ready = found.contents.options & _READY or not begin(found)
    return found.contents if is_ready else None


_MODULE: Final = "torch.distributed.distributed_c10d"
_HELPER: Final = "_new_process_group_helper"


def watch_groups() -> None:
    """Where workers may live through the loss of others, have groups watched; else nothing."""
    if not os.environ.get(LINE_VARIABLE):
        return
    if _MODULE in sys.modules:  # forked from a process that had imported it
        _trap(sys.modules[_MODULE])
    else:
        when_imported(_MODULE, _trap)


_MODULES: Final = "torch.nn.modules.module"
_made_s: list[float] = []  # when the first model was made, by the monotonic clock


def first_model_s() -> float | None:
    """When the script made its first model, by the monotonic clock; None where nobody saw it."""
    return _made_s[0] if _made_s else None


def watch_models() -> None:
    """Have the moment noted in which the script makes its first model."""
    if _MODULES in sys.modules:  # forked from a process that had imported it
        _note_first(sys.modules[_MODULES])
    else:
        when_imported(_MODULES, _note_first)


def _note_first(module: ModuleType) -> None:
    owner = getattr(module, "Module", None)
    init = getattr(owner, "__init__", None)
    if owner is None or init is None:
        return

    @functools.wraps(init)
    def noted(self: Any, *args: Any, **options: Any) -> None:
        if not _made_s:
            _made_s.append(time.monotonic())
        if owner.__init__ is noted:  # else somebody has put a function of his own around this one
            owner.__init__ = init
        init(self, *args, **options)

    owner.__init__ = noted


def _trap(module: ModuleType) -> None:
    """The first group that is asked for has the watching begin."""
    make = getattr(module, _HELPER, None)
    if make is None:
        return

    if os.environ.get(STANDBY_VARIABLE):
        _do_without_store()

    def first(*args: Any, **options: Any) -> Any:
        setattr(module, _HELPER, make)
        watched = importlib.import_module("outlast.attempt.groups").groups
        watched.watch()
        return getattr(module, _HELPER)(*args, **options)

    setattr(module, _HELPER, first)


def _do_without_store() -> None:
    """Who stands by has no attempt: the one that ran when it was started may be over any time."""

    def around(make: Any) -> Any:
        def made(*args: Any, **options: Any) -> Any:
            if os.environ.get(STANDBY_VARIABLE):
                return importlib.import_module("torch.distributed").HashStore()
            return make(*args, **options)

        return made

    around_stores(around)


def when_imported(name: str, then: Callable[[ModuleType], None]) -> None:
    """Have ``then`` called with a module once it is imported, which it must not be yet."""
    sys.meta_path.insert(0, _Finder(name, then))


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for one module, and is in nobody's way before or after."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module as others find it, and one more thing to do once it is there."""
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                self._then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
