"""Where a step's checkpoint lies on disk."""

import contextlib

from outlast.checkpoint.manifest import ABANDONED, MANIFEST, SaveName, parse


def saves_in(directory):
    """The saves in a directory, oldest first."""
    names = [place.name for place in directory.iterdir()] if directory.is_dir() else []
    return sorted(filter(None, map(parse, names)))


def is_committed(storage, save):
    """Whether a save has its manifest; what is put in its place before it is removed is none."""
    with contextlib.suppress(FileNotFoundError):
        return storage.read(f"{save}/{MANIFEST}") != ABANDONED
    return False


def saved(directory, step):
    """The directory of a step's newest save; where there is none, one that is not there."""
    found = [save for save in saves_in(directory) if save.step == step]
    return directory / str(max(found, default=SaveName(step)))


def unlike(directory, step):
    """The name that a save would have as one of another step."""
    return str(max(saves_in(directory))._replace(step=step))


def name_in(storage, step):
    """What a storage calls the newest save of a step."""
    return str(max(save for save in map(parse, storage.children()) if save and save.step == step))
