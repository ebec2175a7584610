"""What "the same, bit for bit" means for a state, and what a session's checkpoint holds of it."""

import collections
import copy

import torch


def bits(tensor):
    """A tensor's bytes: -0.0 is not 0.0, and NaN is NaN."""
    whole = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return whole.reshape(-1).view(torch.uint8) if whole.numel() else torch.empty(0)


def difference(one, other, where="state"):
    """Where two states differ first, in words; "" if they do not."""
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor):
            return f"{where}: a tensor and {other!r}"
        if hasattr(one, "__tensor_flatten__"):
            if type(one) is not type(other):
                return f"{where}: a {type(one)} and a {type(other)}"
            (names, settings), (_, others) = one.__tensor_flatten__(), other.__tensor_flatten__()
            pairs = [
                ({n: getattr(x, n) for n in names}, c)
                for x, c in ((one, settings), (other, others))
            ]
            return difference(*pairs, where)
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return f"{where}: {one.dtype} {one.shape} and {other.dtype} {other.shape}"
        return "" if torch.equal(bits(one), bits(other)) else f"{where}: other bits"
    if isinstance(one, dict):
        if list(one) != list(other):
            return f"{where}: keys {list(one)} and {list(other)}"
        found = (difference(one[key], other[key], f"{where}.{key}") for key in one)
        return next(filter(None, found), "")
    if isinstance(one, list | tuple | collections.deque):
        if len(one) != len(other):
            return f"{where}: {len(one)} and {len(other)} items"
        pairs = enumerate(zip(one, other, strict=True))
        return next(filter(None, (difference(a, b, f"{where}.{i}") for i, (a, b) in pairs)), "")
    return "" if repr(one) == repr(other) else f"{where}: {one!r} and {other!r}"


def copy_of(named):
    """The state of each named object, as deep copies."""
    return {name: copy.deepcopy(value.state_dict()) for name, value in named.items()}


def held(checkpoint, named):
    """What a checkpoint holds of the same objects, as their own state_dict would say it."""
    found = {}
    for name, value in named.items():
        state = checkpoint.state(name)
        if isinstance(value, torch.optim.Optimizer):
            state = _numbered(state, value.state_dict())
        found[name] = state
    return found


def _numbered(state, like):
    """An optimizer's state by numbers again instead of names."""
    state = dict(state)
    state.pop("optimizer_class")
    names = [name for group in state["param_groups"] for name in group["params"]]
    assert len(set(names)) == len(names)
    number = {name: index for index, name in enumerate(names)}
    state["state"] = {number[name]: inner for name, inner in state["state"].items()}
    state["param_groups"] = [
        {**group, "params": [number[name] for name in group["params"]]}
        for group in state["param_groups"]
    ]
    return {key: state[key] for key in like}
