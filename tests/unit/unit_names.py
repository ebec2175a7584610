"""Names of saves, as the helpers here give them: the first save of the first attempt."""

from outlast.checkpoint.catalog import find_saves
from outlast.checkpoint.manifest import SaveName
from outlast.keeper.wire import NO_NONCE


def save_of(step, attempt=1, serial=1):
    return SaveName(step, attempt, serial, NO_NONCE)


def save_name(step, attempt=1, serial=1):
    return str(save_of(step, attempt, serial))


def names(*steps):
    """What helpers' saves of these steps are called."""
    return [save_of(step) for step in steps]


def committed(storage):
    """The steps of which a storage has a save with a manifest, oldest first."""
    return sorted({save.step for save in find_saves(storage).committed})


def unfinished(storage):
    """The steps of which it has a save without one."""
    return sorted({save.step for save in find_saves(storage).unfinished})


def newest(storage, step):
    """The name of the newest save of a step that has a manifest."""
    return str(max(save for save in find_saves(storage).committed if save.step == step))
