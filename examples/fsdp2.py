"""Train a small language model of bytes on several workers, with FSDP2 (fully_shard).

outlast run --dir jobs/fsdp2 --nproc-per-node 2 examples/fsdp2.py

While it trains, kill a worker from another terminal (pgrep -f launch.worker finds it), or press
Ctrl-C and type the command again. It ends with the same fsdp2.safetensors, to the last
bit, as the script without Outlast.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

import outlast

EPOCHS, CONTEXT, WIDTH = 8, 64, 64


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, row):
        mask = nn.Transformer.generate_square_subsequent_mask(row.shape[1])
        x = self.bytes(row) + self.places.weight[: row.shape[1]]
        return self.head(self.blocks(x, mask, is_causal=True))


def loss_of(rows, model):
    logits = model(rows[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def train_step(rows, model, optimizer):
    loss = loss_of(rows, model)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def main():
    dist.init_process_group("gloo")  # "nccl" on GPUs
    torch.manual_seed(0)
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))  # any text will do
    data = text.unfold(0, CONTEXT + 1, CONTEXT)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = Decoder()
    for block in model.blocks.layers:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with outlast.session(model=model, optimizer=optimizer) as session:
        for epoch in session.epochs(EPOCHS):
            sampler.set_epoch(epoch)
            for rows in session.steps(loader):
                train_step(rows, model, optimizer)
            with torch.no_grad():
                loss = loss_of(data[:32], model)
            if dist.get_rank() == 0:
                print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        save_file(whole, "fsdp2.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
