"""Accelerate: a script's own loop, over what ``accelerator.prepare()`` has returned.

    from outlast.integrations.accelerate import session_of

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    with session_of(accelerator) as session:
        for epoch in session.epochs(3):
            for batch in session.steps(loader):
                ...

The session saves what ``save_state()`` does: prepared models, optimizers and schedulers, the
scaler, random states, what was registered with ``register_for_checkpointing()``, and how far the
accelerator has counted. A batch is a step, also where gradients are accumulated. Prepared loaders
go on at the exact batch (``prepared_loader.py``).

``save_state()`` writes its directories as before; with ``accelerator_saves=False`` it asks for a
checkpoint instead, which nobody waits for, and writes nothing. ``load_state()`` works as before;
what it does ahead of a resumed session's first step is undone, as all that a script does there.

What can go wrong: hooks of ``register_save_state_pre_hook()`` are not asked by the session. What is
prepared while the session is open is not in it. DeepSpeed, Megatron-LM and XLA are refused.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from accelerate.data_loader import DataLoaderShard, SeedableRandomSampler
from accelerate.utils import DistributedType
from torch.utils.data import RandomSampler

from outlast.errors import ConfigError
from outlast.integrations.prepared_loader import PreparedLoader
from outlast.ledger.narrator import one_line_errors
from outlast.training.driven import numbered
from outlast.training.session import Session
from outlast.training.session import session as new_session

_REFUSED: Final = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


def session_of(accelerator: Any, *, accelerator_saves: bool = True, **options: Any) -> Session:
    """Open a session for all that an ``Accelerator`` has prepared.

    Args:
        accelerator: ``prepare()`` and ``register_for_checkpointing()`` were called.
        accelerator_saves: whether ``save_state()`` goes on writing its directories. If not, it
            returns what ``session.save()`` does.
        **options: as of :func:`outlast.session`: ``dir``, ``every``, ``keep``, ``resume`` and
            further objects to save.

    Returns:
        A session, to be used as a context manager.

    Raises:
        ConfigError: nothing is prepared, or by something that cannot be saved.
    """
    with one_line_errors():
        _refuse(accelerator)
    objects: dict[str, Any] = {"accelerator": _AcceleratorCounts(accelerator)}
    objects |= numbered("model", accelerator._models)
    objects |= numbered("optimizer", (one.optimizer for one in accelerator._optimizers))
    objects |= numbered("scheduler", (one.scheduler for one in accelerator._schedulers))
    objects |= numbered("registered", accelerator._custom_objects)
    if accelerator.scaler is not None:
        objects["scaler"] = accelerator.scaler
    session = new_session(**{**objects, **options})
    known = len(accelerator._custom_objects)

    def adapted(loader: Any) -> Any:
        if len(accelerator._custom_objects) != known:
            raise ConfigError(
                "an object was registered for checkpointing while the session was open, and is in "
                "none of its checkpoints; call register_for_checkpointing() before session_of()"
            )
        return _prepared(loader, accelerator)

    session.adapted = adapted
    _Beside(accelerator, session, accelerator_saves)
    return session


def _refuse(accelerator: Any) -> None:
    if accelerator.distributed_type in _REFUSED:
        raise ConfigError(
            f"session_of() cannot save what {accelerator.distributed_type.value} holds; use DDP"
        )
    if not accelerator._models:
        raise ConfigError(
            "the accelerator has prepared no model; call session_of() behind accelerator.prepare()"
        )


def _prepared(loader: Any, accelerator: Any) -> Any:
    """What is iterated in place of a prepared loader, the same one for each of its loops."""
    if type(loader) is not DataLoaderShard:
        return loader  # a dispatcher's batches come from rank 0: they are read again up to there
    sampler = _sampler(loader)
    draws = isinstance(sampler, RandomSampler) and not isinstance(sampler, SeedableRandomSampler)
    if loader.use_stateful_dataloader and draws:
        raise ConfigError(
            "a StatefulDataLoader inside of a prepared loader does not keep the order that its "
            "sampler has drawn; leave use_stateful_dataloader out (the place is kept without it), "
            "or say DataLoaderConfiguration(use_seedable_sampler=True, …)"
        )
    own = vars(loader)
    if "outlast_loader" not in own:
        rank, world_size = accelerator.process_index, accelerator.num_processes
        own["outlast_loader"] = PreparedLoader(loader, rank=rank, world_size=world_size)
    return own["outlast_loader"]


def _sampler(loader: Any) -> Any:
    return loader.get_sampler() if hasattr(loader, "get_sampler") else None


class _AcceleratorCounts:
    """What an accelerator counts itself."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        """As it stands: the batch of an accumulation, the loaders' epochs, directories saved."""
        accelerator = self._accelerator
        return {
            "step": accelerator.step,
            "sync_gradients": accelerator.sync_gradients,
            "saves": accelerator.project_configuration.iteration,
            "loaders": [
                [getattr(one, "iteration", 0), getattr(_sampler(one), "initial_seed", None)]
                for one in accelerator._dataloaders
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Back to what :meth:`state_dict` gave.

        Raises:
            ConfigError: other loaders were prepared.
        """
        accelerator, saved = self._accelerator, state["loaders"]
        if len(saved) != len(accelerator._dataloaders):
            raise ConfigError(
                f"the checkpoint's accelerator had prepared {len(saved)} loaders, this one has "
                f"prepared {len(accelerator._dataloaders)}; prepare the same, in the same order"
            )
        accelerator.step = int(state["step"])
        accelerator.sync_gradients = bool(state["sync_gradients"])
        accelerator.project_configuration.iteration = int(state["saves"])
        for loader, (epoch, seed) in zip(accelerator._dataloaders, saved, strict=True):
            if seed is not None:
                _sampler(loader).initial_seed = seed
            loader.iteration = epoch


class _Beside:
    """``save_state()`` while a session is open."""

    def __init__(self, accelerator: Any, session: Session, saves: bool) -> None:
        self._accelerator, self._session, self._saves = accelerator, session, saves
        self._save, accelerator.save_state = accelerator.save_state, self.save_state

    def save_state(self, *args: Any, **given: Any) -> Any:
        """Write a directory, or ask for a checkpoint."""
        if "_on" not in vars(self._session) or self._session._is_over:
            return self._save(*args, **given)
        if not self._saves:
            return self._session.save()
        if self._session._on.books.attempt.number > 1:
            self._make_room()
        return self._save(*args, **given)

    def _make_room(self) -> None:
        """A step that is done again saves again, where Accelerate refuses to write over it."""
        accelerator = self._accelerator
        if not accelerator.project_configuration.automatic_checkpoint_naming:
            return
        accelerator.wait_for_everyone()  # all have asked by now whether it is there
        name = f"checkpoint_{accelerator.save_iteration}"
        written = Path(accelerator.project_dir) / "checkpoints" / name
        if accelerator.is_main_process and written.is_dir():
            shutil.rmtree(written)
        accelerator.wait_for_everyone()
