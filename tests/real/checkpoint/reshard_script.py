"""One worker of a resharding test: builds a model spread in one of several ways, saves or resumes.

    reshard_script.py save|load|refuse LAYOUT DIRECTORY

Every tensor of the job has values made from its name, so that each worker can tell by itself what
its own part must hold, to the bit, whoever saved it and however it was spread then.
"""

import hashlib
import json
import sys
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from outlast.attempt.link import open_link
from outlast.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    Chunk,
    FileEntry,
    Manifest,
    Place,
    SaveName,
    TensorEntry,
    encode,
    own_name,
    shard_file,
    state_file,
    write_hashed,
)
from outlast.checkpoint.tensors import local_chunks, place
from outlast.checkpoint.tree import flatten
from outlast.errors import StateMismatch
from outlast.keeper.wire import NO_NONCE
from outlast.script.objects import Objects
from outlast.storage import Directory
from outlast.training import resume

STEP = 8
SAVE = SaveName(STEP, 1, 1, NO_NONCE)
WIDTH, LAYERS = 6, 4


class Written(msgspec.Struct):
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]


# --- what the workers hold -----------------------------------------------------------------------


def expected(name, shape, dtype):
    """The whole tensor that goes by this name."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype)


def part_of(name, tensor):
    """What this worker's part of a tensor must hold, cut as torch's own DTensor is."""
    whole = expected(name, tensor.shape, tensor.dtype)
    if not isinstance(tensor, DTensor):
        return whole
    found = torch.full_like(tensor.to_local(), float("nan"))
    taken = 0
    for offsets, shape, view in local_chunks(tensor):
        where = tuple(slice(o, o + s) for o, s in zip(offsets, shape, strict=True))
        at = view.storage_offset() - tensor.to_local().storage_offset()
        found.as_strided(view.shape, view.stride(), at).copy_(whole[where])
        taken += view.numel()
    assert taken == found.numel()
    return found


class Layer(torch.nn.Module):
    """5 rows are uneven for two, three and four workers; 1 row leaves some with nothing."""

    def __init__(self, width):
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, width)
        self.down = torch.nn.Linear(width, WIDTH)
        self.odd = torch.nn.Linear(WIDTH, 5)
        self.one = torch.nn.Linear(5, 1)

    def forward(self, x):
        x = self.down(self.up(x).relu())
        return x + self.one(self.odd(x))


class Stage(torch.nn.Module):
    """Some of the layers of one model, under the names they have in the whole."""

    def __init__(self, numbers, width=2 * WIDTH):
        super().__init__()
        self.layers = torch.nn.ModuleDict({str(number): Layer(width) for number in numbers})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def build(layout):
    """A model spread as ``layout`` says, its optimizer with state, and what else is saved."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    layers = LAYERS - ("shorter" in layout)
    if "pipeline" in layout:
        model = Stage(range(rank * layers // size, (rank + 1) * layers // size))
    else:
        model = Stage(range(layers), 13 if layout == "wider" else 2 * WIDTH)
    if layout in ("fsdp", "fsdp_shorter"):
        spread(model, init_device_mesh("cpu", (size,)))
    elif layout == "hsdp":
        spread(model, init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("copy", "dp")))
    elif layout == "tp_fsdp":
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
        for layer in model.layers.values():
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(layer, mesh["tp"], plan)
        spread(model, mesh["dp"])
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW([{"params": [p for _, p in named]}], lr=0.1 + rank)
    for _, parameter in named:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return model, optimizer, Own(rank)


def spread(model, mesh):
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


class Own:
    """Something that differs on every worker."""

    def __init__(self, rank):
        self.rank, self.noise = rank, torch.full((3,), float(rank))

    def state_dict(self):
        return {"rank": self.rank, "noise": self.noise}

    def load_state_dict(self, state):
        self.rank, self.noise = state["rank"], state["noise"]


def tensors_of(objects):
    found = {}
    for key in ("model", "optimizer"):
        found |= flatten(objects.capture()[key], key)[1]
    return {name: tensor.detach() for name, tensor in found.items()}


# --- saving as the format says, in the simplest way ----------------------------------------------


def save(objects, storage, link):
    rank, directory = link.rank, SAVE
    data, tensors = {}, {}
    for key, value in objects.capture().items():
        data[key], found = flatten(value, key)
        tensors |= found
    own = [name for name in tensors if name.startswith("own.")]
    pieces, entries, position = [], {}, 0
    for name, tensor in tensors.items():
        chunks = []
        for offsets, shape, view in local_chunks(tensor.detach()):
            raw = bytes(view.contiguous().view(-1).view(torch.uint8).numpy())
            end = position + len(raw)
            where = {"file": shard_file(rank), "start": position, "end": end}
            chunks.append(Chunk(offsets=offsets, shape=shape, **where))
            pieces.append(raw)
            position = end
        kind = place({name: torch.empty(0, dtype=tensor.dtype)})[name].dtype
        stored = own_name(name, rank) if name in own else name
        entries[stored] = TensorEntry(dtype=kind, shape=tuple(tensor.shape), chunks=tuple(chunks))
    files = {}
    if position:
        files[shard_file(rank)] = write_hashed(storage, f"{directory}/{shard_file(rank)}", pieces)
    small = json.dumps({"state": data, "own": own}).encode()
    files[state_file(rank)] = write_hashed(storage, f"{directory}/{state_file(rank)}", [small])
    link.publish(f"part/{rank}", msgspec.json.encode(Written(files, entries)))
    if rank == 0:
        commit(storage, link)
    link.fetch("done", 60)


def commit(storage, link):
    files, tensors = {}, {}
    for rank in range(link.world_size):
        part = msgspec.json.decode(link.fetch(f"part/{rank}", 60), type=Written)
        files |= part.files
        for name, entry in part.tensors.items():
            known = tensors.setdefault(name, entry)
            there = {chunk.offsets for chunk in known.chunks}
            more = tuple(chunk for chunk in entry.chunks if chunk.offsets not in there)
            tensors[name] = msgspec.structs.replace(known, chunks=known.chunks + more)
    manifest = Manifest(
        format=FORMAT,
        job="job",
        step=STEP,
        attempt=1,
        serial=1,
        nonce=NO_NONCE,
        world_size=link.world_size,
        layout={},
        created_t=0.0,
        files=files,
        tensors=tensors,
    )
    storage.put(f"{SAVE}/{MANIFEST}", encode(manifest))
    link.publish("done", b"")


# --- the parts of a test -------------------------------------------------------------------------


def main(act, layout, directory):
    dist.init_process_group("gloo")
    link, storage = open_link(), Directory(Path(directory))
    model, optimizer, own = build(layout)
    objects = Objects({"model": model, "optimizer": optimizer, "own": own})
    if act == "save":
        for name, tensor in tensors_of(objects).items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.copy_(part_of(name, tensor))
        save(objects, storage, link)
    elif act == "refuse":
        before = {name: local_bytes(t) for name, t in tensors_of(objects).items()}
        try:
            resume.find([Place("local", storage)], link, (), objects.check)
        except StateMismatch as error:
            print(f"refused: {error}")
        else:
            raise AssertionError("it was not refused")
        assert before == {name: local_bytes(t) for name, t in tensors_of(objects).items()}
    else:
        load(objects, model, storage, link, own)
    dist.barrier()
    dist.destroy_process_group()


def load(objects, model, storage, link, own):
    before = {name: address(tensor) for name, tensor in model.state_dict().items()}
    outcome = resume.find([Place("local", storage)], link, (SAVE,), objects.check)
    objects.apply(outcome.loaded)
    assert outcome.step == STEP
    now = tensors_of(objects)
    for name, tensor in now.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(local, part_of(name, tensor)), f"{name} on rank {link.rank}"
    assert len(now) == 4 * len(list(model.parameters()))
    assert before == {name: address(tensor) for name, tensor in model.state_dict().items()}
    source = link.rank % outcome.loaded.manifest.world_size
    assert own.rank == source
    assert own.noise.tolist() == [float(source)] * 3
    group = objects.capture()["optimizer"]["param_groups"][0]
    assert group["lr"] == 0.1 + source
    for (_, parameter), state in zip(
        model.named_parameters(), objects.capture()["optimizer"]["state"].values(), strict=True
    ):
        assert isinstance(state["exp_avg"], DTensor) == isinstance(parameter, DTensor)
    out = model(torch.ones(2, WIDTH)).sum()  # what was loaded can be trained on
    out.backward()
    print(f"loaded: {len(now)} tensors, {outcome.origin}")


def local_bytes(tensor):
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return bytes(local.contiguous().view(-1).view(torch.uint8).numpy())


def address(tensor):
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.data_ptr()


if __name__ == "__main__":
    main(*sys.argv[1:])
