"""Lightning's own checkpoints, written whole or not at all, and verified when they are read.

    from outlast.integrations.lightning_checkpoints import OutlastCheckpointIO

    trainer = Trainer(plugins=[OutlastCheckpointIO()], callbacks=[ModelCheckpoint(…)])

A ``.ckpt`` is then a file of safetensors (``state_file.py``). ``load_from_checkpoint()`` reads such
files too, once this module is imported; ``state_file.to_torch()`` makes the file that Lightning
alone would have written. Files that Lightning has written itself are read if they need no code.

What can go wrong: a checkpoint holds something that is no data. Of hyperparameters that one is left
out, and said; a callback, a loop or a module that gives such a state is refused by its path in the
checkpoint, since it could not go on from there.
"""

from __future__ import annotations

import functools
import importlib
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from outlast.checkpoint.tree import flatten
from outlast.errors import ConfigError
from outlast.integrations import state_file
from outlast.integrations.lightning_run import NAME
from outlast.integrations.state_file import FileDamagedError
from outlast.ledger.narrator import say

_HYPER: Final = ("hyper_parameters", "datamodule_hyper_parameters")
_TYPES: Final = ("hparams_type", "datamodule_hparams_type")  # OmegaConf's: they come back plain
_saving: Any = importlib.import_module(f"{NAME}.core.saving")
_io: Any = importlib.import_module(f"{NAME}.plugins.io")


class OutlastCheckpointIO(_io.TorchCheckpointIO):  # type: ignore[misc]
    """A plugin of the Trainer.

    Args:
        falls_back: whether the newest whole checkpoint of the same directory is loaded in place of
            one that is damaged, which is said.
    """

    def __init__(self, *, falls_back: bool = True) -> None:
        super().__init__()
        self._falls_back = falls_back
        self._said: set[str] = set()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Write ``path``, durably.

        Raises:
            ConfigError: something in it is no data, or the path is none of a file system.
            OSError: it cannot be written; nothing is left of it.
        """
        if storage_options is not None or "://" in str(path):
            raise ConfigError(f"{path}: OutlastCheckpointIO writes to directories only")
        state = {key: value for key, value in checkpoint.items() if key not in _TYPES}
        state |= {key: self._data_of(state[key]) for key in _HYPER if key in state}
        state_file.write(Path(path), state)

    def _data_of(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The hyperparameters that are data, in plain containers."""
        found: dict[str, Any] = {}
        for name, value in given.items():
            try:
                flatten(data := _plain(value), name)
            except ConfigError as error:
                if name not in self._said:
                    self._said.add(name)
                    say(f"left out of the hyperparameters in checkpoints: {error}")
            else:
                found[name] = data
        return found

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read ``path``, or the newest whole one beside it.

        Raises:
            FileDamagedError: it is damaged, and none is whole.
            ConfigError: it needs code to be loaded.
            FileNotFoundError: there is none.
        """
        del weights_only  # nothing else is read
        path = Path(path)
        if not path.exists():
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        try:
            return state_file.read(path, map_location)
        except FileDamagedError as error:
            others = [one for one in path.parent.glob("*.ckpt") if one.name != path.name]
            others.sort(key=lambda one: one.stat().st_mtime, reverse=True)
            for other in others if self._falls_back else ():
                try:
                    found = state_file.read(other, map_location)
                except FileDamagedError:
                    continue
                say(f"{error}: {other} is loaded, the newest whole one beside it")
                return found
            raise


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping | Namespace):
        items = vars(value) if isinstance(value, Namespace) else value
        return {key: _plain(one) for key, one in items.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return (tuple if isinstance(value, tuple) else list)(map(_plain, value))
    return str(value) if isinstance(value, Path) else value


def _reading(load: Any) -> Any:
    @functools.wraps(load)
    def _load(path: Any, *args: Any, **given: Any) -> Any:
        if state_file.is_one(path):
            return state_file.read(Path(path), given.get("map_location"))
        return load(path, *args, **given)

    return _load


_saving.pl_load = _reading(_saving.pl_load)
