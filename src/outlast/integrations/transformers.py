"""Transformers' ``Trainer``: ``callbacks=[OutlastCallback()]`` is all that a script needs.

    from outlast.integrations.transformers import OutlastCallback

    trainer = Trainer(model, args, train_dataset=data, callbacks=[OutlastCallback()])
    trainer.train()

The Trainer's loop stays its own. Its dataloader is put on Outlast's feed, and each of its optimizer
steps is a step of a session: saved behind the loop, gone on from at the same batch with the same
random numbers, ended with exit code 75 where a notice was agreed. ``global_step``, logs, the
scheduler, the scaler and the state of callbacks are saved with it (``trainer_run.py``).

What the Trainer would save by ``save_strategy="steps"`` or ``"epoch"`` becomes a request for a
checkpoint that nobody waits for. It still saves where it reads that again itself: with
``load_best_model_at_end``, ``save_strategy="best"`` or ``push_to_hub``; or with
``OutlastCallback(trainer_saves=True)``.

Where the job has no checkpoint of its own, ``train(resume_from_checkpoint=True)`` goes on from the
newest of the Trainer's ``checkpoint-N`` that is whole (``trainer_checkpoints.py``).

What can go wrong: the Trainer loads one batch ahead of the step, and Outlast none. So a collator
that draws random numbers draws them at another place in the stream than without Outlast (and at the
same one in each run with it). DeepSpeed and ``dispatch_batches`` are refused.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, Final

import transformers
from transformers import trainer as trainer_module

from outlast.errors import ConfigError
from outlast.integrations.trainer_checkpoints import newest_whole
from outlast.integrations.trainer_loop import DrivenTrainer, TrainerBatches
from outlast.integrations.trainer_run import TrainerRun
from outlast.ledger.narrator import one_line_errors, say

_WANTED: Final = (
    *("_inner_training_loop", "_init_training_state", "_prepare_for_training", "_run_epoch"),
    *("_load_rng_state", "_finalize_training"),
)


class OutlastCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Keeps a Trainer's run going.

    Args:
        trainer_saves: whether the Trainer goes on saving itself as its arguments say.
        **options: as of :func:`outlast.session`: ``dir``, ``every``, ``keep``, ``resume`` and
            further objects to save.

    Attributes:
        run: the call of ``train()`` that is under way, or None.
        is_asked_to_resume: the script has asked for it: that it was begun by another command (one
            without ``--resume``, say) is no mistake then.
    """

    def __init__(self, *, trainer_saves: bool = False, **options: Any) -> None:
        self._options, self._trainer_saves = options, trainer_saves
        self.run: TrainerRun | None = None
        self.is_asked_to_resume = False

    @contextlib.contextmanager
    def around(self, trainer: Any) -> Iterator[None]:
        """Within, a session drives the Trainer's loop; whatever ends the loop ends the session.

        Raises:
            ConfigError: the Trainer is of a kind that cannot be driven.
        """
        kind = type(trainer)
        with one_line_errors():
            _refuse(trainer)
        trainer.__class__ = type(
            kind.__name__,
            (DrivenTrainer, kind),
            {"__module__": kind.__module__, "outlast_callback": self},
        )
        try:
            with contextlib.ExitStack() as stack:
                resume = {"resume": True} if self.is_asked_to_resume else {}
                self.run = TrainerRun(trainer, stack, {**resume, **self._options})
                yield
        finally:
            trainer.__class__, self.run = kind, None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The Trainer begins to count its losses: they are put back to the checkpoint's."""
        if self.run is None:
            raise ConfigError(
                "OutlastCallback does not drive this Trainer: its class has a loop of its own "
                "(_inner_training_loop), which does not call the Trainer's"
            )
        self.run.put_back_losses()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A step or an epoch is complete: its loss is told, and what the Trainer would save.

        Also where the Trainer saves as well: neither checkpoint is to be older than the other.
        """
        if self.run is not None:
            self.run.log()
        if control.should_save and self.run is not None:
            is_read = args.load_best_model_at_end or args.push_to_hub
            is_read = is_read or args.save_strategy == "best"
            control.should_save = self._trainer_saves or is_read
            self.run.session.save()

    on_epoch_end = on_step_end


def _callback(trainer: Any) -> OutlastCallback | None:
    known = trainer.callback_handler.callbacks
    return next((one for one in known if isinstance(one, OutlastCallback)), None)


def _refuse(trainer: Any) -> None:
    lacking = [name for name in _WANTED if not hasattr(trainer, name)]
    if lacking:
        raise ConfigError(
            f"OutlastCallback does not know the loop of transformers {transformers.__version__}: "
            f"there is no {lacking[0]}(). Install transformers 5.24 or newer"
        )
    if trainer.is_deepspeed_enabled:
        raise ConfigError("OutlastCallback cannot save what DeepSpeed holds; use FSDP or DDP")
    every = trainer.callback_handler.callbacks
    if sum(isinstance(one, OutlastCallback) for one in every) > 1:
        raise ConfigError("the Trainer has more than one OutlastCallback; give it one")


def _looping(loop: Any) -> Any:
    @functools.wraps(loop)
    def _inner_training_loop(trainer: Any, *args: Any, **given: Any) -> Any:
        callback = _callback(trainer)
        with contextlib.nullcontext() if callback is None else callback.around(trainer):
            return loop(trainer, *args, **given)

    return _inner_training_loop


def _training(train: Any) -> Any:
    @functools.wraps(train)
    def _train(trainer: Any, resume_from_checkpoint: Any = None, *args: Any, **given: Any) -> Any:
        callback = _callback(trainer)
        if resume_from_checkpoint and callback is not None:
            callback.is_asked_to_resume = True
        if resume_from_checkpoint is True and callback is not None:
            resume_from_checkpoint = newest_whole(trainer.args.output_dir, trainer.args.world_size)
            if resume_from_checkpoint is None:
                say(f"{trainer.args.output_dir} has no whole checkpoint of the Trainer's own")
        return train(trainer, resume_from_checkpoint, *args, **given)

    return _train


def _skipping(skip: Any) -> Any:
    @functools.wraps(skip)
    def skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
        # A session's feed stands where it is to go on.
        return loader if isinstance(loader, TrainerBatches) else skip(loader, num_batches)

    return skip_first_batches


_trainer: Any = trainer_module.Trainer
_trainer._inner_training_loop = _looping(_trainer._inner_training_loop)
_trainer.train = _training(_trainer.train)
trainer_module.skip_first_batches = _skipping(trainer_module.skip_first_batches)
