"""What an ``OutlastCallback`` puts in front of a Trainer and of its dataloader, for one loop.

The Trainer's class stays beneath: ``DrivenTrainer`` is a mixin, which asks the run of this call of
``train()`` (``trainer_run.py``) where the Trainer would look at its own checkpoint.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any, Final

from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils import send_to_device, synchronize_rng_states

from outlast.errors import ConfigError
from outlast.integrations.trainer_run import TrainerRun
from outlast.ledger.narrator import one_line_errors

_RESUMED: Final = "outlast"  # in place of a directory that the Trainer would read


class DrivenTrainer:
    """What is put in front of a Trainer's own class while it is in its loop."""

    outlast_callback: Any  # OutlastCallback

    @property
    def _run(self) -> TrainerRun:
        run: TrainerRun = self.outlast_callback.run
        return run

    def _init_training_state(
        self, max_steps: int, per_epoch: int, num_epochs: int, resume: Any, trial: Any
    ) -> tuple[Any, int]:
        self._run.references = (max_steps, num_epochs, trial)
        kept: Any = super()
        first = kept._init_training_state(max_steps, per_epoch, num_epochs, resume, trial)
        self._run.first = first
        return _LateNumber(lambda: self._run.first[0]), first[1]

    def _prepare_for_training(self, max_steps: int, loader: Any, resume: Any) -> tuple[Any, Any]:
        kept: Any = super()
        model, loader = kept._prepare_for_training(max_steps, loader, resume)
        if isinstance(loader, DataLoaderDispatcher):
            with one_line_errors():
                raise ConfigError(
                    "the Trainer's batches come from rank 0; in TrainingArguments, say "
                    'accelerator_config={"dispatch_batches": False}'
                )
        self._run.open(loader, resume)
        return model, TrainerBatches(loader, self._run)

    def _run_epoch(self, **given: Any) -> None:
        given["epochs_trained"] = operator.index(given["epochs_trained"])
        if self._run.session.resumed:
            given["steps_trained_in_current_epoch"] = self._run.first[1]
            given["resume_from_checkpoint"] = _RESUMED
        kept: Any = super()
        kept._run_epoch(**given)

    def training_step(self, *args: Any, **given: Any) -> Any:
        """A batch's loss is looked at: the Trainer leaves one that is no number out of its logs."""
        kept: Any = super()
        loss = kept.training_step(*args, **given)
        self._run.note(loss)
        return loss

    def _load_rng_state(self, checkpoint: Any) -> None:
        if checkpoint != _RESUMED:  # else the session has put them back
            kept: Any = super()
            kept._load_rng_state(checkpoint)

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> Any:
        before_s = self._run.end()
        kept: Any = super()
        return kept._finalize_training(trial, num_train_samples, start_time - before_s)


class _LateNumber:
    """A number that is known once the session is open; the Trainer's ``range`` asks for it then."""

    def __init__(self, number: Callable[[], int]) -> None:
        self._number = number

    def __index__(self) -> int:
        return self._number()


class TrainerBatches:
    """What the Trainer iterates in place of its prepared dataloader, once for each epoch.

    Args:
        loader: the dataloader; all but its batches is its own.
        run: gives the batches.
    """

    def __init__(self, loader: Any, run: TrainerRun) -> None:
        self._loader, self._run = loader, run
        self._epoch = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Batches are those of this epoch from here on."""
        self._epoch = epoch
        if hasattr(self._loader, "set_epoch"):
            self._loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        loader = self._loader
        is_inside = self._run.enter_epoch(self._epoch)
        if not is_inside and getattr(loader, "rng_types", None) is not None:
            synchronize_rng_states(loader.rng_types, loader.synchronized_generator)
        device = getattr(loader, "device", None)
        with contextlib.suppress(StopIteration):
            while True:
                batch = self._run.batch()
                yield batch if device is None else send_to_device(batch, device)
