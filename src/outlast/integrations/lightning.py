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

What can go wrong: means over an epoch of what ``training_step`` logs are those since the resume.
More than one training dataloader, loaders that are made anew in epochs, and ``dataloader_iter`` are
refused. A script that uses ``pytorch_lightning`` imports that before this module.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

from outlast.errors import ConfigError
from outlast.script import excepthook
from outlast.training.driven import Driven, open_session
from outlast.training.session import Session

_NAME: Final = "pytorch_lightning" if "pytorch_lightning" in sys.modules else "lightning.pytorch"
_METRICS: Final = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_pl: Any = importlib.import_module(_NAME)
_call: Any = importlib.import_module(f"{_NAME}.trainer.call")
_fetchers: Any = importlib.import_module(f"{_NAME}.loops.fetchers")


class LightningCallback(_pl.Callback):  # type: ignore[misc]
    """Keeps a Trainer's run going.

    Args:
        **options: as of :func:`outlast.session`: ``dir``, ``every``, ``keep``, ``resume`` and
            further objects to save.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._trainer: Any = None
        self._stack = contextlib.ExitStack()
        self._driven: Driven | None = None
        self.session: Session | None = None
        self._has_ended = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The loops ask for what is theirs alone here."""
        if stage != "fit":
            return
        self._trainer = trainer
        loop, signals = trainer.fit_loop, trainer._signal_connector
        for one, mixin in ((loop, _FitLoop), (loop.epoch_loop, _EpochLoop), (signals, _Signals)):
            if not isinstance(one, mixin):
                kind = type(one)
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

    # --- for the loops --------------------------------------------------------------------------

    def drive(self, loaders: list[Any]) -> list[Any]:
        """Open the session over what the Trainer has made; what it is to iterate."""
        trainer = self._trainer
        with excepthook.one_line_errors():
            self._refuse(loaders)
        schedulers = [one.scheduler for one in trainer.lr_scheduler_configs]
        objects = {"model": trainer.lightning_module}
        for kind, some in (("optimizer", trainer.optimizers), ("scheduler", schedulers)):
            objects |= {f"{kind}{number or ''}": one for number, one in enumerate(some)}
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            objects["scaler"] = trainer.precision_plugin.scaler
        step = trainer.fit_loop.epoch_loop.batch_progress.total.completed
        # Who asks for a checkpoint goes on on purpose, be it by another command than the job's.
        resume = {"resume": True} if trainer.ckpt_path else {}
        session = open_session(at_step=step, **{**resume, **self._options}, **objects)
        self.session = self._stack.enter_context(session)
        self._driven = Driven(session, loaders[0], _LoopCounts(trainer))
        self._stack.callback(self._driven.close)
        self._driven.begin()
        return [_FitBatches(loaders[0], self._driven, trainer)]

    def _refuse(self, loaders: list[Any]) -> None:
        trainer = self._trainer
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
    made: Any = importlib.import_module(f"{_NAME}.loops.utilities")
    stages: Any = importlib.import_module(f"{_NAME}.trainer.states")
    return made._select_data_fetcher(trainer, stages.RunningStage.TRAINING)


class _LoopCounts:
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


class _FitBatches:
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


class _FitLoop:
    """In front of the Trainer's fit loop."""

    outlast_callback: LightningCallback
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
        loaders: Any = vars(self)["_combined_loader"]
        if self._is_driven:
            loaders.flattened = self.outlast_callback.drive(loaders.flattened)


class _EpochLoop:
    """In front of the Trainer's loop over an epoch."""

    def on_run_start(self, data_fetcher: Any) -> None:
        kept: Any = super()
        kept.on_run_start(data_fetcher)
        # It stands where it stood. From here on it is as one that was never left: what asks for
        # ``restarting`` would leave out what Lightning's own checkpoints have not behind them.
        mine: Any = self
        mine.trainer.fit_loop.restarting = False


class _Signals:
    """In front of what hears signals: the session answers SIGTERM, at a boundary."""

    @property
    def received_sigterm(self) -> bool:
        """Lightning would end its loops in the midst of a step."""
        return False

    @received_sigterm.setter
    def received_sigterm(self, value: bool) -> None:
        del value
