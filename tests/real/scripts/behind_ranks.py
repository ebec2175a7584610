"""Behind the loop of two ranks: WHO [WRONG]; rank WHO prints a loss, or is wrong; then all meet."""

import sys

import torch
import torch.distributed as dist

import outlast

WHO, IS_WRONG = int(sys.argv[1]), "WRONG" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.randn(64, 4))
    loader = outlast.data.Loader(data, global_batch=4)
    with outlast.session(model=model, optimizer=optimizer) as session:
        for (x,) in session.steps(loader, until=4):
            loss = model(x).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if rank == WHO and IS_WRONG:
        print({"loss": 0.0}["lsos"])
    if rank == WHO:
        print("loss", loss.item())
    dist.barrier()
    print("past the barrier")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
