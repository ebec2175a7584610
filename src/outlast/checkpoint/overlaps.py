"""Elements that do not lie where their tensor says, one by one: how they are given values.

``expand`` gives all elements along an axis one place, and windows over a row (``as_strided``,
``unfold``) overlap. torch refuses to write to the former; a write to the latter in pieces would
leave what came last. Here the values are laid where the elements lie, and then compared: such a
tensor holds them only if those that share a place are equal.

And of some tensors torch keeps ``-x`` or ``conj(x)`` as a bit beside the memory of ``x``: their
bytes are not their values.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import torch

_RAW: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements of a plain tensor may share memory."""
    if tensor.is_contiguous() or not tensor.numel():
        return False
    axes = sorted((n, size) for n, size in zip(tensor.stride(), tensor.shape, strict=True))
    axes = [(stride, size) for stride, size in axes if size > 1]
    ends = itertools.accumulate(((size - 1) * stride for stride, size in axes), initial=0)
    return any(stride <= end for (stride, _), end in zip(axes, ends, strict=False))


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """From the first of a tensor's elements to its last as they lie, in elements; 0 without any."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def is_deferred(tensor: torch.Tensor) -> bool:
    """Whether its bytes are not its values: they are to be negated or conjugated."""
    return bool(tensor.is_neg() or tensor.is_conj())


def lay(values: torch.Tensor, target: torch.Tensor) -> bool:
    """Give ``target`` these values; whether it holds them then, to the bit.

    Args:
        values: of the shape and dtype of ``target``.
        target: a plain tensor whose elements may share memory.
    """
    if not target.numel():
        return True
    with torch.no_grad():
        values = values.detach().to(target.device)
        places, stored = target.detach(), values
        if places.is_neg():
            places, stored = torch._neg_view(places), -stored
        if places.is_conj():
            places, stored = places.conj(), stored.conj()
        stored = stored.resolve_conj().resolve_neg()
        for axis, stride in enumerate(target.stride()):
            if not stride:
                places, stored = places.narrow(axis, 0, 1), stored.narrow(axis, 0, 1)
        size = span(places.shape, places.stride())
        memory = raw(places.as_strided((size,), (1,)))
        index = torch.arange(size, device=memory.device).as_strided(
            places.shape, places.stride(), 0
        )
        memory.index_put_((index,), raw(stored.contiguous()))
        return holds(target, values)


def holds(target: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype have the same elements, to the bit."""
    one, other = (
        raw(tensor.detach().resolve_conj().resolve_neg().contiguous())
        for tensor in (target, values)
    )
    if one.is_complex():  # its parts are compared as they are: NaN is NaN
        one, other = (raw(torch.view_as_real(tensor).reshape(-1)) for tensor in (one, other))
    return bool(torch.equal(one, other.to(one.device)))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as integers: there is no operation that all dtypes have."""
    kind = _RAW.get(tensor.element_size())
    return tensor if kind is None else tensor.view(kind)
