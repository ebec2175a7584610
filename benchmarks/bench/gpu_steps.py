"""A transformer on one GPU, with NCCL: RECORDS STEPS; a list of seconds from batch to batch.

150 million parameters in 12 layers, AdamW, bfloat16, 8 sequences of 512: some 50 ms a step on an
H100. The host has gone ahead of the device by then, so that what it is made to wait for is seen.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import outlast

WIDTH, LAYERS, HEADS, BATCH, LENGTH = 1024, 12, 16, 8, 512


def main() -> None:
    """Train, and write down how long each step took."""
    records, steps = Path(sys.argv[1]), int(sys.argv[2])
    device = torch.device(os.environ.get("TEST_DEVICE", "cuda:0"))
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    width = WIDTH if on_gpu else 32
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, HEADS, 4 * width, 0.0, batch_first=True)
    net = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).to(device)
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    took: list[float] = []
    x = torch.randn(BATCH, LENGTH if on_gpu else 8, width, device=device)
    with outlast.session(model=net, optimizer=optimizer, every="1h") as session:
        before_s = time.perf_counter()
        for _ in session.steps(range(steps), until=steps):
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            now_s = time.perf_counter()
            took.append(now_s - before_s)
            before_s = now_s
    (records / f"{dist.get_rank()}.json").write_text(json.dumps(took))
    dist.destroy_process_group()


main()
