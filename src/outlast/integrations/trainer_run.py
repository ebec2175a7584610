"""One call of a Trainer's ``train()``: its session, its batches, and what the Trainer counts.

A boundary stands in front of the first batch of a step: there the Trainer has logged, evaluated and
saved what belongs to the step before. What it counts is saved with the position in the data, by
each rank for itself: its state with the logs, its control's and its callbacks' state, the losses
that it has not logged yet, and the seconds that it has trained.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from accelerate.data_loader import DataLoaderShard
from transformers.trainer_callback import ExportableState, TrainerState

from outlast import config
from outlast.data import random_state
from outlast.errors import ConfigError
from outlast.ledger.narrator import one_line_errors, say
from outlast.training.driven import Driven, open_session
from outlast.training.session import Session

_OF_THIS_PROCESS: Final = (
    *("is_local_process_zero", "is_world_process_zero", "is_hyper_param_search"),
)
_LOSSES: Final = (
    *("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged"),
    *("_initial_global_step", "_initial_num_input_tokens_seen"),
)

_ended: set[Path] = set()  # directories of jobs of this process


class TrainerRun:
    """From the Trainer's own preparations to the end of its loop.

    Args:
        trainer: is about to prepare its model.
        stack: what is opened is closed with it.
        options: of the session.

    Attributes:
        references: maximum of steps, number of epochs, trial: as the Trainer has computed them.
        is_in_loop: whether steps are being made.
        first: the epoch to go on in, and how many of its batches are behind that place.
        session: is there once :meth:`open` has returned.
    """

    session: Session
    _driven: Driven
    _place: Path

    def __init__(
        self, trainer: Any, stack: contextlib.ExitStack, options: Mapping[str, Any]
    ) -> None:
        self._trainer, self._stack, self._options = trainer, stack, options
        self._losses: Mapping[str, Any] = {}
        self._began_s, self._before_s = time.monotonic(), 0.0
        self._last_step = 0
        self._random: Mapping[str, Any] | None = None
        self.references: tuple[Any, ...] = ()
        self.first = (0, 0)
        self.is_in_loop = False
        self._loss: Any = None  # of the step in the making

    def open(self, loader: Any, stock: str | None) -> None:
        """Open the session over what the Trainer has made.

        Args:
            loader: the Trainer's own, prepared.
            stock: the checkpoint of the Trainer's own that it has gone on from, or None.
        """
        trainer = self._trainer
        objects = {"model": trainer.model, "scheduler": trainer.lr_scheduler}
        objects["optimizer"] = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        if getattr(trainer.accelerator, "scaler", None) is not None:
            objects["scaler"] = trainer.accelerator.scaler
        given = {**self._options, "dir": self._directory(), **objects}
        session = open_session(at_step=trainer.state.global_step, **given)
        self.session = self._stack.enter_context(session)
        inner = loader.base_dataloader if isinstance(loader, DataLoaderShard) else loader
        per_turn = trainer.args.gradient_accumulation_steps
        self._driven = Driven(self.session, inner, self, per_turn=per_turn)
        self._stack.callback(self._driven.close)
        if stock is not None and not self.session.resumed:
            self._go_behind(loader, stock)
        self._driven.begin()
        self.is_in_loop = not self._driven.is_over
        if self.session.resumed:
            self._random = random_state.capture()  # what is evaluated before the loop draws, too
            is_over = self._driven.is_over or trainer.state.global_step >= self.references[0]
            self.first = (self.references[1], 0) if is_over else self._driven.place
        self._last_step = trainer.state.global_step

    def _go_behind(self, loader: Any, stock: str) -> None:
        """Go to where the Trainer's own checkpoint stands: what is saved from here on is that."""
        say(f"going on from the Trainer's {stock}, at step {self._trainer.state.global_step}")
        epoch, batches = self.first
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        self._driven.enter_epoch(epoch)
        for _ in range(batches):
            self._driven.batch()
        self._trainer._load_rng_state(stock)

    def _directory(self) -> Path:
        place = Path(self._options.get("dir") or config.load({}).dir)
        if (trial := self.references[2]) is not None:  # of a hyperparameter search
            place /= Path(self._trainer._get_output_dir(trial)).name
        if place.absolute() in _ended:
            with one_line_errors():
                raise ConfigError(
                    f"the job in {place} has ended, and train() was called again: give each call a "
                    "directory of its own, OutlastCallback(dir=…)"
                )
        self._place = place.absolute()
        return place

    def enter_epoch(self, epoch: int) -> bool:
        """An epoch begins; whether it is gone on in, in its midst."""
        self._driven.enter_epoch(epoch)
        return self.first[0] == epoch and self.first[1] > 0

    def batch(self) -> Any:
        """The next batch, behind the boundary of the step that has ended meanwhile.

        Raises:
            StopIteration: the epoch has no other.
            SystemExit: with code 75, once a drain is agreed and committed.
        """
        if self._trainer.state.global_step != self._last_step:
            self._last_step = self._trainer.state.global_step
            self._driven.boundary()
        elif self._random is not None:
            random_state.restore(self._random)
        self._random = None
        return self._driven.batch()

    def end(self) -> float:
        """The loop is over, and its end committed; seconds of training before this process."""
        self.is_in_loop = False
        self._driven.end(is_complete=self._trainer.state.global_step != self._last_step)
        self._stack.close()
        _ended.add(self._place)
        return self._before_s

    def note(self, loss: Any) -> None:
        """The loss of a batch; those of a step's batches add up to the step's."""
        loss = loss.detach() if isinstance(loss, torch.Tensor) else loss
        self._loss = loss if self._loss is None else self._loss + loss

    def log(self) -> None:
        """The step's loss is logged, and so looked at for anomalies."""
        loss, self._loss = self._loss, None
        if loss is not None and self.is_in_loop:
            self.session.log(loss=loss)

    # --- what the Trainer counts ----------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As it stands."""
        trainer = self._trainer
        state = dataclasses.asdict(trainer.state)
        losses = {name: getattr(trainer, name) for name in _LOSSES if hasattr(trainer, name)}
        if "_tr_loss" in losses:
            losses["_tr_loss"] = losses["_tr_loss"].detach().clone()
        return {
            "state": {key: value for key, value in state.items() if key not in _OF_THIS_PROCESS},
            "callbacks": [
                [type(one).__name__, one.state()["attributes"]] for one in self._exportable()
            ],
            "losses": losses,
            "flos": trainer.current_flos,
            "seconds": self._before_s + time.monotonic() - self._began_s,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Back to what :meth:`state_dict` gave; the losses once the Trainer has begun to count."""
        trainer = self._trainer
        known = {field.name for field in dataclasses.fields(TrainerState)}
        for name in known & state["state"].keys():
            setattr(trainer.state, name, state["state"][name])
        trainer.state.init_training_references(trainer, *self.references)
        saved = [*state["callbacks"]]
        for one in self._exportable():  # of several of a kind, in their order
            kind = type(one).__name__
            found = next((each for each in saved if each[0] == kind), None)
            if found is not None:
                saved.remove(found)
                for name, value in found[1].items():
                    setattr(one, name, value)
        trainer.current_flos = state["flos"]
        self._losses, self._before_s = state["losses"], float(state["seconds"])

    def _exportable(self) -> list[Any]:
        known = [*self._trainer.callback_handler.callbacks, self._trainer.control]
        return [one for one in known if isinstance(one, ExportableState)]

    def put_back_losses(self) -> None:
        """Those of the checkpoint, where the Trainer has just begun to count them from nothing."""
        for name, value in self._losses.items():
            own = getattr(self._trainer, name)
            setattr(self._trainer, name, value.to(own.device) if name == "_tr_loss" else value)
