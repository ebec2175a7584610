"""torchtitan: its checkpoint manager, replaced by its configuration; no line of it is changed.

    outlast run --nproc-per-node 8 -m torchtitan.train --module llama3 --config llama3_8b
        --override.imports outlast.integrations.torchtitan.checkpoints

With settings: ``'outlast.integrations.torchtitan.checkpoints={"every": "5 min", "keep": 3}'``. A
configuration of one's own says ``checkpoint=OutlastCheckpoints.Config(options={…})`` instead.

The trainer's loop stays its own. What it gives to a checkpoint manager (model parts, optimizers,
schedulers, what it counts) is a session's; its dataloader is put on Outlast's feed, and each of its
steps is a step of the session: saved behind the loop, gone on from at the same batch with the same
random numbers, ended with exit code 75 where a notice was agreed. A boundary stands in front of a
step's first batch, where the one before it was validated.

``checkpoint.interval`` asks for a checkpoint that nobody waits for. torchtitan's own are read where
the job has none as new (``step-N``, ``initial_load_path``, ``load_step``), and written at the last
step alone, as its settings say: in another type, for Hugging Face. ``load_only`` leaves all of it
to torchtitan.

What can go wrong: a resume needs the same number of workers, as torchtitan's own does for its data.
Pipeline parallelism, and checkpoint managers of other kinds, are refused.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components import checkpointer as own
from torchtitan.config.override import derive, override

from outlast.errors import ConfigError
from outlast.ledger.narrator import one_line_errors
from outlast.training.driven import Driven, numbered, open_session
from outlast.training.session import Session


class OutlastCheckpoints(own.CheckpointManager):  # type: ignore[misc]
    """What the trainer has for its checkpoint manager.

    Args:
        config: torchtitan's, with ``options`` as of :func:`outlast.session`: ``dir``, ``every``,
            ``keep``, ``resume``.
        **given: what torchtitan's manager is given.

    Attributes:
        session: is there once the trainer has asked for its checkpoint.
    """

    session: Session
    _driven: Driven | None

    @dataclass(kw_only=True, slots=True)
    class Config(own.CheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's settings, and a session's."""

        enable: bool = True
        options: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Any, **given: Any) -> None:
        states = given["states"]
        self._options, self._trainer = config.options, states[own.TRAIN_STATE]
        self._stack, self._driven = contextlib.ExitStack(), None
        self._completed, self._is_complete = 0, False
        if self._trainer.parallel_dims.pp_enabled:
            with one_line_errors():
                raise ConfigError(
                    "Outlast cannot save a model whose parts are on different workers (pipeline "
                    "parallelism); set --parallelism.pipeline_parallel_degree 1"
                )
        self._objects = {
            **numbered("model", given["model_parts"]),
            **numbered("optimizer", given["optimizers"]),
            **numbered("scheduler", given["lr_schedulers"].schedulers),
            **{name: one for name, one in states.items() if name != own.TRAIN_STATE},
        }
        super().__init__(config, **{**given, "dataloader": _InItsFormat(given["dataloader"])})

    def __del__(self) -> None:
        """A loop that was left in another way than by its end has not ended."""
        self._driven = None
        super().__del__()

    def _load(self, step: int = -1) -> bool:
        """The trainer is about to enter its loop: go on from the job's own, or from its own."""
        trainer = self._trainer
        if self.load_only:
            return bool(super()._load(step))
        begins_at = max(self._find_load_step() if step == -1 else step, 0)
        session = open_session(at_step=begins_at, **{**self._options, **self._objects})
        self.session = self._stack.enter_context(session)
        is_own = not session.resumed and bool(super()._load(step))
        batches = trainer.gradient_accumulation_steps * trainer.num_pipeline_parallel_microbatches
        loader = trainer.dataloader
        self._driven = Driven(session, _with_plain_state(loader), self, per_turn=batches)
        self._stack.callback(self._driven.close)
        self._completed = trainer.step
        self._driven.begin()
        self._driven.enter_epoch(0)
        trainer.dataloader = iter(self._batch, None)  # to the end of the data
        trainer.metrics_processor.log = self._noting(trainer.metrics_processor.log)
        return session.resumed or is_own

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """A step is complete; torchtitan's last checkpoint is what is used behind the training."""
        if self._driven is None:  # of a seed
            return bool(super()._save(curr_step, last_step))
        self._completed, self._is_complete = curr_step, True
        if last_step:
            return bool(super()._save(curr_step, last_step))
        is_wanted = bool(self._should_save(curr_step))
        if is_wanted:
            self.session.save()
        return is_wanted

    def _batch(self) -> Any:
        assert self._driven is not None  # noqa: S101 - the loop is under way
        if self._is_complete:
            self._is_complete = False
            with self._stack.pop_all() as left_by_errors:
                self._driven.boundary()
                self._stack = left_by_errors.pop_all()
        return self._driven.batch()

    def _close(self) -> None:
        """The loop is over, or has failed: the trainer is being closed."""
        driven, self._driven = self._driven, None
        if sys.exception() is not None:
            self._stack.__exit__(*sys.exc_info())
        elif driven is not None:
            with self._stack:
                driven.end(is_complete=self._is_complete)
        super()._close()

    def _noting(self, log: Callable[..., Any]) -> Callable[..., Any]:
        def noted(step: int, global_avg_loss: float, *args: Any, **given: Any) -> Any:
            self.session.log(loss=global_avg_loss)
            return log(step, global_avg_loss, *args, **given)

        return noted

    # --- what the trainer counts ----------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """At this boundary; the trainer has begun to count the step behind it."""
        return {**self._trainer.state_dict(), "step": self._completed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Back to what :meth:`state_dict` gave."""
        self._trainer.load_state_dict(dict(state))
        self._completed = self._trainer.step


@override(target=own.BaseCheckpointManager.Config, description="Outlast's checkpoints")  # type: ignore[untyped-decorator]
def checkpoints(config: Any, **options: Any) -> Any:
    """For ``--override.imports``: Outlast in place of torchtitan's checkpoint manager.

    Args:
        config: torchtitan's settings, which stay; ``enable`` and ``async_mode`` mean nothing then.
        **options: as of :func:`outlast.session`.

    Raises:
        ConfigError: the manager is of another kind.
    """
    if type(config) is not own.CheckpointManager.Config:
        with one_line_errors():
            raise ConfigError(
                f"Outlast takes the place of torchtitan's CheckpointManager, not of "
                f"{type(config).__qualname__}; configure that, or leave the override out"
            )
    deltas = {"enable": True, "async_mode": "disabled", "options": options}
    return derive(config, OutlastCheckpoints.Config, **deltas)


def _with_plain_state(loader: Any) -> Any:
    """With torchdata's own state, which torchtitan's dataloader would pickle."""
    if isinstance(loader, StatefulDataLoader):
        for name in ("state_dict", "load_state_dict"):
            vars(loader)[name] = functools.partial(getattr(StatefulDataLoader, name), loader)
    return loader


class _InItsFormat:
    """A dataloader's state for torchtitan's own checkpoints."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state_dict(self) -> Any:
        return type(self._loader).state_dict(self._loader)

    def load_state_dict(self, state: Any) -> None:
        type(self._loader).load_state_dict(self._loader, state)
