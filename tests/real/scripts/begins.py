"""Workers that start a job from somebody's weights: SOURCE SPREAD [WIDTH].

SPREAD is plain, ddp or fsdp. Each says whether it has the weights that seed 77 makes.
"""

import sys

import torch
import torch.distributed as dist

import outlast
from outlast.errors import OutlastError


def build(seed, width=5):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Linear(width, 2))


def main(source, spread, width="5"):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = build(rank, int(width))
    if spread == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    elif spread == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [one.detach().clone() for one in model.parameters()]
    try:
        with outlast.session(model=model, optimizer=optimizer, init_from=source, every="1 h") as s:
            state = getattr(model, "module", model).state_dict()
            whole = {
                name: one.full_tensor() if spread == "fsdp" else one for name, one in state.items()
            }
            same = all(torch.equal(whole[n], one) for n, one in build(77).state_dict().items())
            print(f"began: {same} at {s.step} {s.resumed}", flush=True)
            for _ in s.steps([0] * 4, until=2):
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
    except OutlastError as error:
        local = zip(model.parameters(), before, strict=True)
        kept = all(torch.equal(now, then) for now, then in local)
        print(f"refused: {kept} {error}", flush=True)
        sys.exit(2)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
