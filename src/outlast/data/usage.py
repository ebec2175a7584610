"""Wrong uses of loaders, each answered in one line that shows the right form.

What is not wrong is left to Python and to whoever takes the argument.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, ParamSpec

import torch

from outlast.errors import ConfigError, nearest
from outlast.ledger.narrator import one_line_errors

P = ParamSpec("P")

# Arguments of torch's DataLoader that ours do not have, and what there is in their place.
INSTEAD: Final = {
    "batch_size": "global_batch= says how many samples a step has over all workers",
    "drop_last": "no sample is dropped: a batch may reach from one epoch into the next",
    "generator": "seed= is what the order and each sample's random numbers follow from",
    "in_order": "batches always come in order, as a resume needs it",
    "pin_memory_device": "pin_memory=True pins for the device that is there",
}


def answered(call: str, form: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Have a constructor answer arguments that it does not have, and say each of its errors.

    Args:
        call: what is called.
        form: how to call it.
    """

    def around(init: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(init)
        def checked(*given: P.args, **named: P.kwargs) -> None:
            with one_line_errors():
                _check(call, form, init, given[1:], named)
                init(*given, **named)

        return checked

    return around


def _check(
    call: str, form: str, init: Callable[..., None], given: Sequence[Any], named: Mapping[str, Any]
) -> None:
    parameters = [*inspect.signature(init).parameters.values()][1:]
    known = [one.name for one in parameters]
    by_place = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    if len(given) > len(by_place):
        raise ConfigError(f"{call} takes all but {' and '.join(by_place)} by name: {form}")
    for name in named:
        if name in INSTEAD:
            raise ConfigError(f"{call} has no {name}=: {INSTEAD[name]}. Write {form}")
        if name not in known:
            raise ConfigError(f"{call} has no {name}=. Write {form};{nearest(name, known)}")
    for one in parameters[len(given) :]:
        if one.default is one.empty and one.name not in named:
            raise ConfigError(f"{call} is given no {one.name}. Write {form}")


def only_one(values: Mapping[str, Any], what: str) -> str | None:
    """The name of the one value that is there, None for none.

    Raises:
        ConfigError: two are.
    """
    there = [name for name, value in values.items() if value is not None]
    if len(there) > 1:
        raise ConfigError(
            f"{there[0]}= and {there[1]}= of outlast.data.Loader both say {what}; leave one out"
        )
    return there[0] if there else None


def checked_size(dataset: Any) -> int:
    """How many samples a map-style data set has.

    Raises:
        ConfigError: it is empty, or none.
    """
    is_stream = isinstance(dataset, torch.utils.data.IterableDataset)
    if not is_stream and hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        size = len(dataset)
        if size < 1:
            raise ConfigError(f"the data set ({type(dataset).__name__}) is empty")
        return size
    name = type(dataset).__name__
    instead = (
        "for a stream that can be cut into shards use outlast.data.Stream, for any other give a "
        "torch DataLoader of it to the session"
    )
    if isinstance(dataset, torch.utils.data.DataLoader):
        instead = "it makes batches itself: outlast.data.Loader(loader.dataset, global_batch=B)"
    elif isinstance(dataset, type):
        name = f"the class {dataset.__name__}"
        instead = f"make one: outlast.data.Loader({dataset.__name__}(…), global_batch=B)"
    elif inspect.isgenerator(dataset):
        instead = (
            "what it gives comes once only: outlast.data.Loader(list(generator), global_batch=B) "
            "if it fits into memory, else outlast.data.Stream(read, num_shards=N, global_batch=B) "
            "with the function that reads a shard"
        )
    raise ConfigError(
        "outlast.data.Loader needs a data set with __len__ and __getitem__, and "
        f"{name} is not one; {instead}"
    )


def check_iterable(loader: Any) -> None:
    """Answer what is no loader.

    Raises:
        ConfigError: it cannot be iterated, or gives samples and no batches.
    """
    name = type(loader).__name__
    right = ""
    if isinstance(loader, type):
        name, right = f"the class {loader.__name__}", f"steps({loader.__name__}(…))"
    elif inspect.isroutine(loader):
        right = f"steps({loader.__name__}(…))"
    elif isinstance(loader, int):
        right = f"steps(loader, until={loader})"
    elif _is_single(loader):
        raise ConfigError(
            f"steps() takes a loader, and {name} is a data set, which has no batches. Write "
            "steps(outlast.data.Loader(dataset, global_batch=B)), or give it a torch DataLoader"
        )
    elif hasattr(loader, "__iter__") or hasattr(loader, "__getitem__"):
        return
    right = right or "steps(outlast.data.Loader(dataset, global_batch=B))"
    raise ConfigError(f"the loader, {name}, cannot be iterated. Write {right}")


def _is_single(loader: Any) -> bool:
    """Whether it is a torch data set that can be indexed only: it may have no end when iterated."""
    return isinstance(loader, torch.utils.data.Dataset) and not hasattr(loader, "__iter__")
