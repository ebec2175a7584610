"""One rank of a DCP job: ``dcp_script.py ACTIONS``, a JSON list of [ACTION, ARGUMENT…]."""

import hashlib
import json
import os
import resource
import signal
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import outlast
from outlast.checkpoint import export as export_room
from outlast.checkpoint.dcp import StorageWriter
from outlast.storage import Directory

warnings.filterwarnings("ignore")


def built(sharded, seed=0, steps=3):
    """A model with uneven shards, and its optimizer, some steps on."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 7), torch.nn.ReLU(), torch.nn.Linear(7, 5), torch.nn.Linear(5, 1)
    )
    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model:
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        model(torch.full((2, 6), float(step + 1))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def digest(state):
    """One word for the bits of a state, however it is spread."""
    hasher = hashlib.sha256()

    def add(name, value):
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                add(f"{name}.{key}", value[key])
        elif isinstance(value, torch.Tensor):
            hasher.update(name.encode())
            hasher.update(whole(value).detach().contiguous().reshape(-1).view(torch.uint8).numpy())
        else:
            hasher.update(f"{name}={value!r}".encode())

    add("", state)
    return hasher.hexdigest()


def state_of(model, optimizer, rank=0):
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "mine": {"rank": rank, "n": [rank, 3.0]}}


def save(writer, sharded, **more):
    state = state_of(*built(sharded), rank=rank_now())
    dcp.save(state, storage_writer=writer, **more)
    return digest({"model": state["model"], "optimizer": state["optimizer"]})


def load(reader, sharded):
    model, optimizer = built(sharded, seed=99, steps=1)
    state = state_of(model, optimizer, rank=-1)
    dcp.load(state, storage_reader=reader)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    weights, moments = get_state_dict(model, optimizer)
    return {"digest": digest({"model": weights, "optimizer": moments}), "mine": state["mine"]}


def rank_now():
    return dist.get_rank() if dist.is_initialized() else 0


def act(action, arguments):
    path, *rest = arguments
    if action == "save":
        sharded, step = rest[0] == "sharded", int(rest[1])
        return save(outlast.dcp_writer(path, step), sharded)
    if action == "load":
        step = int(rest[1]) if len(rest) > 1 else None
        return load(outlast.dcp_reader(path, step=step), rest[0] == "sharded")
    if action == "load-stock":
        return load(dcp.FileSystemReader(path), rest[0] == "sharded")
    if action == "load-different":
        return load(outlast.dcp_reader(path, step=1 + rank_now()), True)
    if action == "async":
        return saved_meanwhile(path, int(rest[0]))
    if action == "fail":
        return save(StorageWriter(Failing(path, int(rest[0])), int(rest[1])), True)
    if action == "die":
        return save(StorageWriter(Dying(path, rest[0]), int(rest[1])), True)
    if action == "export":
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        export_room.export(Directory(Path(path)), int(rest[0]), rest[1], rest[2])
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    raise SystemExit(f"no action {action}")


def saved_meanwhile(path, step):
    model, optimizer = built(True)
    state = state_of(model, optimizer, rank=rank_now())
    expected = digest({key: state[key] for key in ("model", "optimizer")})
    future = dcp.async_save(state, storage_writer=outlast.dcp_writer(path, step))
    with torch.no_grad():
        for parameter in model.parameters():
            whole_local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            whole_local.zero_()
    future.result(timeout=100)
    return expected


class Failing(Directory):
    """A disk that is full on one rank."""

    def __init__(self, path, rank):
        super().__init__(Path(path))
        self.is_full = rank_now() == rank

    def create(self, name, size=None):
        if self.is_full:
            raise OSError(28, "No space left on device", name)
        return super().create(name) if size is None else super().create(name, size)


class Dying(Directory):
    """A machine that goes at a moment of the coordinator's save."""

    def __init__(self, path, moment):
        super().__init__(Path(path))
        self.moment = moment

    def create(self, name, size=None):
        if self.moment == "before-data" and rank_now() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().create(name) if size is None else super().create(name, size)

    def put_new(self, name, data):
        if self.moment == "before-manifest":
            os.kill(os.getpid(), signal.SIGKILL)
        done = super().put_new(name, data)
        if self.moment == "after-manifest":
            os.kill(os.getpid(), signal.SIGKILL)
        return done


def answer_to(action, arguments):
    try:
        return {"answer": act(action, arguments)}
    except dcp.CheckpointException as error:
        failures = {
            number: {"kind": type(one).__name__, "text": str(one)}
            for number, (one, _) in error.failures.items()
        }
        return {"failures": failures}


def main():
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("cpu:gloo")
    for action, *arguments in json.loads(sys.argv[1]):
        print(json.dumps(answer_to(action, arguments)), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
