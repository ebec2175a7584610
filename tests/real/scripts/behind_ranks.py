"""Behind the loop of two ranks: WHO [WRONG | INSIDE]; rank WHO prints a loss, and then all meet.

WRONG has it make a mistake before, INSIDE has all of that in the session.
"""

import sys

import torch
import torch.distributed as dist

import outlast

WHO, WORDS = int(sys.argv[1]), sys.argv[2:]


def main():
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.randn(64, 4))
    loader = outlast.data.Loader(data, global_batch=4)
    is_whose = dist.get_rank() == WHO
    with outlast.session(model=model, optimizer=optimizer) as session:
        for (x,) in session.steps(loader, until=4):
            loss = model(x).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if "INSIDE" in WORDS:
            if is_whose:
                print("loss", loss.item())
            dist.barrier()
    if is_whose and "WRONG" in WORDS:
        print({"loss": 0.0}["lsos"])
    if is_whose:
        print("loss", loss.item())
    dist.barrier()
    print("past the barrier")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
