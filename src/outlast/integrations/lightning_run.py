"""What a ``LightningCallback`` puts in front of Lightning's loops, and what these count.

A boundary stands in front of a batch, where the one before it was validated and logged. The loops'
own classes stay beneath: each of these is a mixin that asks the callback first.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

from outlast.training.driven import Driven

NAME: Final = "pytorch_lightning" if "pytorch_lightning" in sys.modules else "lightning.pytorch"
_METRICS: Final = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_call: Any = importlib.import_module(f"{NAME}.trainer.call")


class LoopCounts:
    """Of the loops, the callbacks, the datamodule and the module; each rank has its own."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """As they stand at this boundary."""
        trainer = self._trainer
        more: dict[str, Any] = {}
        _call._call_lightning_module_hook(trainer, "on_save_checkpoint", more)
        if trainer.datamodule is not None:
            state = _call._call_lightning_datamodule_hook(trainer, "state_dict")
            more["datamodule"] = state
        loops = trainer.fit_loop.state_dict()
        loops["state_dict"] = {}  # the loader's place is the feed's to keep
        callbacks = {
            str(key): value for key, value in _call._call_callbacks_state_dict(trainer).items()
        }
        metrics = {name: dict(getattr(trainer._logger_connector, name)) for name in _METRICS}
        return {"loops": loops, "callbacks": callbacks, "metrics": metrics, "module": more}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Back to that; the loops begin in the midst of an epoch."""
        trainer, more = self._trainer, dict(state["module"])
        trainer.fit_loop.load_state_dict(dict(state["loops"]))
        _call._call_callbacks_load_state_dict(trainer, {"callbacks": dict(state["callbacks"])})
        for name in _METRICS:
            getattr(trainer._logger_connector, name).update(state["metrics"][name])
        if trainer.datamodule is not None and more.get("datamodule"):
            own = more["datamodule"]
            _call._call_lightning_datamodule_hook(trainer, "load_state_dict", own)
        _call._call_lightning_module_hook(trainer, "on_load_checkpoint", more)


class FitBatches:
    """What the Trainer iterates in place of its dataloader, once for each epoch."""

    def __init__(self, loader: Any, driven: Driven, trainer: Any) -> None:
        self._loader, self._driven, self._trainer = loader, driven, trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        first = True
        while True:
            if self._driven.is_used:
                self._driven.boundary()
            if first:
                first = False
                self._driven.enter_epoch(self._trainer.fit_loop.epoch_progress.current.processed)
            try:
                batch = self._driven.batch()
            except StopIteration:
                return
            yield batch


class FitLoop:
    """In front of the Trainer's fit loop."""

    outlast_callback: Any  # LightningCallback
    trainer: Any
    _is_driven = False

    def run(self) -> None:
        """Not for a tuner, which tries something in this loop and undoes it."""
        kept: Any = super()
        self._is_driven = self.outlast_callback in self.trainer.callbacks
        if self._is_driven:
            vars(self)["_combined_loader"] = None  # a tuner may have set one up
        try:
            kept.run()
        finally:
            self._is_driven = False

    def _load_combined_loader_states(self) -> None:
        kept: Any = super()
        kept._load_combined_loader_states()
        if self._is_driven:
            self.outlast_callback.drive(self.trainer, vars(self)["_combined_loader"])


class EpochLoop:
    """In front of the Trainer's loop over an epoch."""

    def on_run_start(self, data_fetcher: Any) -> None:
        """The epoch begins, or is gone on in."""
        kept: Any = super()
        kept.on_run_start(data_fetcher)
        # It stands where it stood. From here on it is as one that was never left: what asks for
        # ``restarting`` would leave out what Lightning's own checkpoints have not behind them.
        mine: Any = self
        session = mine.outlast_callback.session
        if session is not None and session.resumed:
            mine.trainer.fit_loop.restarting = False


class Signals:
    """In front of what hears signals: the session answers SIGTERM, at a boundary."""

    outlast_callback: Any  # LightningCallback
    trainer: Any

    def _sigterm_notifier_fn(self, signum: int, frame: Any) -> None:
        """Keep it for the session, and hand it on to processes that Lightning has started.

        Lightning would broadcast, wherever training stands: a rank that hears it alone would hang.
        """
        launcher = self.trainer.strategy.launcher
        if launcher is not None:
            launcher.kill(signum)
        if self.outlast_callback.session is None:
            self.outlast_callback.early_signal = signum

    @property
    def received_sigterm(self) -> bool:
        """Lightning would end its loops in the midst of a step."""
        return False

    @received_sigterm.setter
    def received_sigterm(self, value: bool) -> None:
        del value
