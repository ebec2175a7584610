"""Sees to it that a worker's process groups are watched from the first one on.

Imports nothing heavy: a worker asks for this before its script has imported torch.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Final

from outlast.attempt.line import LINE_VARIABLE, STANDBY_VARIABLE
from outlast.attempt.nameless import around_stores

_MODULE: Final = "torch.distributed.distributed_c10d"
_HELPER: Final = "_new_process_group_helper"


def await_it() -> None:
    """Where workers may live through the loss of others, have groups watched; else nothing."""
    if not os.environ.get(LINE_VARIABLE):
        return
    if _MODULE in sys.modules:  # forked from a process that had imported it
        _trap(sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _Finder())


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


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for one module, and is in nobody's way before or after."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module as others find it, and one more thing to do once it is there."""
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                _trap(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
