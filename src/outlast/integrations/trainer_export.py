"""A job's checkpoint as a ``checkpoint-N`` of Transformers' Trainer, which goes on without Outlast.

    outlast checkpoints export --to trainer --out trainer/checkpoint-400

What is written is what the Trainer itself would have written at that step: the model (safetensors),
``optimizer.pt``, ``scheduler.pt``, ``scaler.pt``, ``trainer_state.json`` with the state of
callbacks, and a file of random-number states for each rank. The Trainer goes on from there as from
one of its own, and ends with the weights of the job, where it does so with its own.

What can go wrong: the checkpoint is of no job of ``OutlastCallback``'s, or of an adapter's (PEFT),
which the Trainer saves in another form. Random numbers of GPUs are not in it. The Trainer keeps no
losses that it has not logged yet: the first line of its log behind the resume is a mean over fewer
steps. Transformers itself is not needed here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from outlast.checkpoint.export import SPLIT_BYTES, TensorFeed, write_safetensors, write_torch
from outlast.checkpoint.plan import OWN
from outlast.errors import ConfigError
from outlast.integrations.trainer_checkpoints import STATE

_ADAPTER: Final = "base_model.model."


def write_trainer(feed: TensorFeed, directory: Path) -> None:
    """Write the files of a ``checkpoint-N``.

    Args:
        feed: a checkpoint of a job with ``OutlastCallback``.
        directory: where to; it is empty.

    Raises:
        ConfigError: it is of another kind of job.
        CheckpointInvalid, OSError: it cannot be read, or written.
    """
    data = feed.state.data
    ranks = range(feed.source.manifest.world_size)
    owns = [feed.source.state(OWN, rank) for rank in ranks]
    trainers = [_of_trainer(own) for own in owns]
    if not {"model", "optimizer", "scheduler"} <= set(data) or None in trainers:
        raise ConfigError(
            "this checkpoint is of no job with OutlastCallback, so that there is nothing for a "
            "Trainer to go on from; export it as safetensors, dcp or torch"
        )
    if any(_ADAPTER in name for name in feed.state.entries):
        raise ConfigError(
            "this checkpoint is of an adapter (PEFT), which the Trainer saves in a form of PEFT's; "
            "export it as safetensors"
        )
    write_safetensors(feed, "model", data["model"], directory / "model", SPLIT_BYTES)
    for key in ("optimizer", "scheduler", "scaler"):
        if key in data:
            write_torch(feed, directory / f"{key}.pt", key)
    text = json.dumps(_state_of(trainers), indent=2, sort_keys=True)
    (directory / STATE).write_text(text + "\n")
    for rank, own in enumerate(owns):
        name = f"rng_state_{rank}.pth" if len(owns) > 1 else "rng_state.pth"
        torch.save(_random_of(own["random"]), directory / name)


def _of_trainer(own: Mapping[str, Any]) -> Any:
    """What a rank's Trainer has counted, as ``TrainerRun.state_dict()`` has it, or None."""
    found: Any = own
    for name in ("data", "position", "loader", "framework"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) and "flos" in found else None


def _state_of(trainers: list[Any]) -> dict[str, Any]:
    """Its ``TrainerState``, as of rank 0."""
    first = trainers[0]
    state = {**first["state"], "is_hyper_param_search": False}
    state |= {"is_local_process_zero": True, "is_world_process_zero": True}
    state["total_flos"] = state["total_flos"] + sum(one["flos"] for one in trainers)
    callbacks = state["stateful_callbacks"]
    taken: dict[str, int] = {}
    for name, attributes in first["callbacks"]:
        known = callbacks.get(name)
        if isinstance(known, list):  # of several of a kind, in their order
            number = taken[name] = taken.get(name, -1) + 1
            known = known[number] if number < len(known) else None
        if known is not None:
            known["attributes"] = attributes
    return state


def _random_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Random-number states in the form in which the Trainer keeps them, in plain containers."""
    python, numpy = state["python"], state["numpy"]
    words = numpy["words"].tolist()
    return {
        "python": (python["version"], tuple(python["words"].tolist()), python["gauss"]),
        "numpy": ("MT19937", words, numpy["pos"], numpy["has_gauss"], numpy["gauss"]),
        "cpu": state["torch"],
    }
