"""``outlast.session``: from what a script names to a running session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Never

from outlast import config
from outlast.health import pulse
from outlast.ledger.narrator import one_line_errors
from outlast.notice.desk import checked
from outlast.script.initial import Initial
from outlast.script.objects import Objects, refuse_misspelt, refuse_unnamed
from outlast.training.session import Session


def session(
    *unnamed: Never,
    dir: str | Path | None = None,  # noqa: A002 - the word of outlast.toml and of --dir
    every: str | int | None = None,
    keep: int | None = None,
    resume: bool | None = None,
    init_from: str | PathLike[str] | Mapping[str, str | PathLike[str]] | None = None,
    init_except: str | Sequence[str] = (),
    keep_new: str | Sequence[str] = (),
    **named: Any,
) -> Session:
    """Open a session for a training loop.

    Args:
        dir: the job's directory; by default as set by OUTLAST_DIR or outlast.toml.
        every: how often to save: "auto", "200 steps", 200, "5 min".
        keep: how many committed checkpoints to keep.
        resume: True to go on with the job in that directory although it was begun with another
            script or other arguments, which are refused otherwise. The same command needs no word.
        init_from: where a job without a checkpoint of its own takes its models' weights from: a
            job's directory (``runs/a``, or ``runs/a@1200`` for that step), one checkpoint's, a
            file of torch.save, safetensors (a file, or a directory with an index), or a DCP
            directory. As a mapping, which objects take their state, and from where:
            ``{"model": "runs/a", "optimizer": "runs/a"}``.
        init_except: names in the models that stay as the script has made them; patterns, or
            beginnings up to a dot (``"head"``).
        keep_new: hyperparameters, as in ``"optimizer.lr"``, of which a resume takes the script's
            value and not the checkpoint's.
        *unnamed: refused, with how it is written: objects are given by name.
        **named: what to save: anything with state_dict and load_state_dict. The names are the
            checkpoint's keys. A loader may be among them. Random-number states, the step and the
            position in the data are kept without being named.

    Returns:
        A session, to be used as a context manager.

    Raises:
        ConfigError: a setting that cannot be used, or nothing to save.
    """
    arguments = {
        "dir": dir,
        "resume": resume,
        "checkpoint.every": every,
        "checkpoint.keep": keep,
    }
    with one_line_errors():
        refuse_unnamed(unnamed)
        refuse_misspelt(named)
        objects = Objects(named)
        initial = Initial(objects, init_from, init_except)
        pulse.watch_model(objects.model)
        return Session(checked(config.load(arguments)), objects, initial, keep_new)
