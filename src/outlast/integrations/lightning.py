"""Lightning's ``Trainer``: ``callbacks=[LightningCallback()]`` is all that a script needs.

    from outlast.integrations.lightning import LightningCallback

    trainer = Trainer(max_epochs=3, callbacks=[LightningCallback()])
    trainer.fit(module, train_dataloaders=loader)

The Trainer's loops stay its own. The training dataloader is put on Outlast's feed, and each of its
batches is a step of a session: saved behind the loop, gone on from at the same batch with the same
random numbers, ended with exit code 75 where a notice was agreed. The progress of the loops, the
state of callbacks, of the datamodule and what the module puts into a checkpoint are saved with it.

A boundary stands in front of a batch, where the one before it was validated and logged. Lightning's
own checkpoints stand within a step; so of its ways back only the one in the midst of an epoch is
used, and nothing is validated again.

Whenever Lightning saves, Outlast is asked for a checkpoint too. ``fit(ckpt_path=…)`` goes on from
the job's own where it is as new. ``ckpt_path="last"`` is the newest whole one of a
``ModelCheckpoint``: Lightning alone takes ``last.ckpt``, which is the one before for a moment.

What can go wrong: means over an epoch of what ``training_step`` logs are those since the resume.
More than one training dataloader, loaders that are made anew in epochs, and ``dataloader_iter`` are
refused. A script that uses ``pytorch_lightning`` imports that before this module.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import signal
from pathlib import Path
from typing import Any

from outlast.errors import ConfigError
from outlast.integrations import state_file
from outlast.integrations.lightning_run import (
    NAME,
    EpochLoop,
    FitBatches,
    FitLoop,
    LoopCounts,
    Signals,
)
from outlast.integrations.trainer_checkpoints import broken_file
from outlast.ledger.narrator import one_line_errors, say
from outlast.training.driven import Driven, numbered, open_session
from outlast.training.session import Session

_pl: Any = importlib.import_module(NAME)
_fetchers: Any = importlib.import_module(f"{NAME}.loops.fetchers")


class LightningCallback(_pl.Callback):  # type: ignore[misc]
    """Keeps a Trainer's run going.

    Args:
        **options: as of :func:`outlast.session`: ``dir``, ``every``, ``keep``, ``resume`` and
            further objects to save.

    Attributes:
        session: once the Trainer has come to its loop.
        early_signal: a SIGTERM that came before it.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._stack = contextlib.ExitStack()
        self._driven: Driven | None = None
        self.session: Session | None = None
        self.early_signal: int | None = None
        self._has_ended = False

    def __getstate__(self) -> dict[str, Any]:
        """Callbacks are copied, and pickled with their trainer; a fit under way is this one's."""
        return {**vars(self), "_stack": contextlib.ExitStack(), "_driven": None, "session": None}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The loops ask for what is theirs alone here, until the fit is over."""
        if stage != "fit":
            return
        loop, signals = trainer.fit_loop, trainer._signal_connector
        for one, mixin in ((loop, FitLoop), (loop.epoch_loop, EpochLoop), (signals, Signals)):
            if not isinstance(one, mixin):
                kind = type(one)
                self._stack.callback(setattr, one, "__class__", kind)
                one.__class__ = type(kind.__name__, (mixin, kind), {"outlast_callback": self})

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The loop is over: its end is committed."""
        if self._driven is not None:
            self._driven.end(is_complete=self._driven.is_used)
            self._driven, self._has_ended = None, True
        self._stack.close()

    on_fit_end = on_train_end  # where there was nothing to do

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The loop is left: an exception, or the exit of a drain."""
        self._driven = None
        self._stack.__exit__(type(exception), exception, exception.__traceback__)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Lightning saves: neither checkpoint is to be older than the other."""
        if self._driven is not None and self.session is not None:
            self.session.save()

    # --- for the loops --------------------------------------------------------------------------

    def drive(self, trainer: Any, combined: Any) -> None:
        """Open the session over what the Trainer has made, and put it in front of its loader.

        Args:
            trainer: is about to enter its loop.
            combined: its ``CombinedLoader``.
        """
        loaders = combined.flattened
        with one_line_errors():
            self._refuse(trainer, loaders)
        objects = {"model": trainer.lightning_module, **numbered("optimizer", trainer.optimizers)}
        objects |= numbered("scheduler", (one.scheduler for one in trainer.lr_scheduler_configs))
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            objects["scaler"] = trainer.precision_plugin.scaler
        step = trainer.fit_loop.epoch_loop.batch_progress.total.processed
        # Who asks for a checkpoint goes on on purpose, be it by another command than the job's.
        resume = {"resume": True} if trainer.ckpt_path else {}
        session = open_session(at_step=step, **{**resume, **self._options}, **objects)
        self.session = self._stack.enter_context(session)
        if self.early_signal is not None:  # heard before there was anybody to act on it
            number, self.early_signal = self.early_signal, None
            signal.raise_signal(number)
        self._driven = Driven(session, loaders[0], LoopCounts(trainer))
        self._stack.callback(self._driven.close)
        self._driven.begin()
        self._stack.callback(setattr, combined, "flattened", loaders)
        combined.flattened = [FitBatches(loaders[0], self._driven, trainer)]

    def _refuse(self, trainer: Any, loaders: list[Any]) -> None:
        if len(loaders) != 1:
            raise ConfigError(
                "LightningCallback keeps the place in one training dataloader, not in "
                f"{len(loaders)}"
            )
        if self._has_ended:
            raise ConfigError(
                "this job has ended, and fit() was called again: give each call a callback and a "
                "directory of its own, LightningCallback(dir=…)"
            )
        if self._driven is not None or trainer.reload_dataloaders_every_n_epochs:
            raise ConfigError(
                "LightningCallback cannot keep the place in dataloaders that are made anew in "
                "epochs (reload_dataloaders_every_n_epochs)"
            )
        fetcher = _fetchers._DataLoaderIterDataFetcher
        if isinstance(_pl_fetcher(trainer), fetcher):
            raise ConfigError(
                "LightningCallback cannot tell where a step ends that takes its batches itself: "
                "give training_step a batch in place of dataloader_iter"
            )


def _pl_fetcher(trainer: Any) -> Any:
    made: Any = importlib.import_module(f"{NAME}.loops.utilities")
    stages: Any = importlib.import_module(f"{NAME}.trainer.states")
    return made._select_data_fetcher(trainer, stages.RunningStage.TRAINING)


def _finding(find: Any) -> Any:
    @functools.wraps(find)
    def _find_last_checkpoints(checkpoints: Any, trainer: Any) -> set[str]:
        found: set[str] = find(checkpoints, trainer)
        is_ours = any(isinstance(one, LightningCallback) for one in trainer.callbacks)
        if not is_ours or trainer.state.fn != "fit":
            return found
        places = {Path(one).parent for one in found}
        places |= {Path(checkpoints.dirpath)} if checkpoints.dirpath else set()
        every = [one for place in places for one in place.glob("*.ckpt")]
        for one in sorted(every, key=lambda one: one.stat().st_mtime, reverse=True):
            why_not = "" if state_file.is_one(one) else broken_file(one)
            if not why_not:
                return {str(one)}
            say(f"{one} is not whole ({why_not}): it is passed over")
        return found  # in an object store, or for Lightning's own error

    return _find_last_checkpoints


_checkpoint: Any = importlib.import_module(f"{NAME}.callbacks").ModelCheckpoint
_checkpoint._find_last_checkpoints = _finding(_checkpoint._find_last_checkpoints)
