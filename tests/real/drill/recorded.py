"""Trains as one kind of script does, and prints what came of it: recorded.py KIND.

What it prints is the same whether or not it is recorded, for every kind.
"""

import hashlib
import os
import random
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
random.seed(0)
rows = torch.randn(64, 8)
data = torch.utils.data.TensorDataset(rows, rows.sum(1, keepdim=True))


class Model(nn.Module):
    """Two layers with a part that is computed again within the backward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 1)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x):
        hidden = checkpoint(self.first, x, use_reentrant=False)
        return self.second(nn.functional.dropout(self.norm(hidden), 0.1, self.training))


def batches(epochs=1, num_workers=0):
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, num_workers=num_workers)
    for _ in range(epochs):
        yield from loader


def trained(model, forward=None, epochs=1, every=1, num_workers=0):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number, (x, y) in enumerate(batches(epochs, num_workers)):
        loss = nn.functional.mse_loss((model if forward is None else forward)(x), y)
        loss.backward()
        if number % every == every - 1:
            optimizer.step()
            optimizer.zero_grad()
    return model


def plain():
    return trained(Model(), epochs=2, num_workers=1)


def accumulated():
    return trained(Model(), every=4, epochs=2)


def compiled():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    return trained(model, torch.compile(model, backend="eager", fullgraph=True))


def compiled_in_place():
    class Net(nn.Sequential):
        def forward(self, x):
            return self[2](self[1](self[0](x)))

    model = Net(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    model.compile(backend="aot_eager", fullgraph=True)
    return trained(model)


def compiled_in_parts():
    """Graphs that are broken between modules, each of which is told of."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            x = torch.tanh(self.inner(x))
            torch._dynamo.graph_break()
            return self.outer(x)

    graphs = []

    def told(graph, _):
        graphs.append([node.name for node in graph.graph.nodes])
        return graph.forward

    model = nn.Sequential(Block(), Block(), nn.Linear(8, 1))
    step = torch.compile(lambda x: model(x) * 2, backend=told)
    trained(model, step)
    part = torch.compile(model[0], backend=told)
    trained(model, lambda x: part(x)[:, :1])
    hooked = nn.Linear(8, 1)
    hooked.register_forward_hook(lambda *_: None)  # its call is traced, not its forward alone
    trained(hooked, torch.compile(lambda x: hooked(x) * 2, backend=told, fullgraph=True))
    text = repr((graphs, torch._dynamo.utils.counters["frames"])).encode()
    return nn.ParameterDict(
        {"graphs": nn.Parameter(torch.tensor(list(text)).float()), "m": model[0].inner.weight}
    )


def adversarial():
    maker, judge = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    makes = torch.optim.Adam(maker.parameters())
    judges = torch.optim.Adam(judge.parameters())
    for x, _ in batches():
        made = maker(torch.randn(len(x), 4))
        loss = judge(made.detach()).mean() - judge(x).mean()
        judges.zero_grad()
        loss.backward()
        judges.step()
        loss = -judge(made).mean()
        makes.zero_grad()
        loss.backward()
        makes.step()
    return nn.ModuleList([maker, judge])


def session():
    import outlast

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    loader = outlast.data.Loader(data, global_batch=8, seed=1)
    with outlast.session(
        model=model, optimizer=optimizer, schedule=schedule, loader=loader, every=3
    ) as steps:
        for x, y in steps.steps(loader, until=8):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model


def loops():
    """Two loops over a session's steps; the schedule goes on between them."""
    import outlast

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    with outlast.session(model=model, optimizer=optimizer, schedule=schedule) as steps:
        for _ in steps.epochs(2):
            for x, y in steps.steps(list(batches())):
                loss = nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            schedule.step()
    return model


def ranks():
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    torch.manual_seed(dist.get_rank())
    trained(model, nn.parallel.DistributedDataParallel(model))
    dist.destroy_process_group()
    return model


def divided():
    """FSDP2, evaluated ahead of the first step: the model lies whole in memory as that begins."""
    from torch.distributed.fsdp import fully_shard

    import outlast

    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with outlast.session(model=model, optimizer=optimizer, every=3) as steps:
        with torch.no_grad():
            model(rows)
        for x, y in steps.steps(list(batches(2)), until=int(os.environ.get("UNTIL", "8"))):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    whole = {str(at): one.full_tensor() for at, one in enumerate(model.parameters())}
    dist.destroy_process_group()
    return nn.ParameterDict(whole)


def trainer():
    from transformers import Trainer, TrainingArguments

    class Taught(Model):
        def forward(self, x, y):
            return {"loss": nn.functional.mse_loss(super().forward(x), y)}

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return len(rows)

        def __getitem__(self, index):
            return {"x": rows[index], "y": rows[index].sum()[None]}

    model = Taught()
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=8,
        per_device_train_batch_size=8,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    Trainer(model=model, args=arguments, train_dataset=Rows()).train()
    return model


def fragile():
    class Shy(nn.Linear):
        def named_buffers(self, *_, **__):
            raise RuntimeError("ask me not")

    model = Shy(8, 1)
    trained(model)
    return nn.ParameterDict(dict(model.named_parameters()))


if __name__ == "__main__":
    state = globals()[sys.argv[1]]().state_dict()
    parts = [value.numpy().tobytes() for value in state.values()]
    parts += [torch.get_rng_state().numpy().tobytes(), repr(random.getstate()).encode()]
    print("came to", hashlib.sha256(b"".join(parts)).hexdigest())
