"""A script as people have it, in one of three frameworks: RECORDS FRAMEWORK [--ours] [options].

Without ``--ours`` it saves and goes on as the framework's documentation says; with it, by what
Outlast adds. The model has dropout, the data are shuffled. RECORDS/steps.jsonl gets a line as each
step ends, RECORDS/pid-RANK the process, RECORDS/final.json the hash of the weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

PARSER = argparse.ArgumentParser()
PARSER.add_argument("records", type=Path)
PARSER.add_argument("framework")
PARSER.add_argument("--ours", action="store_true")
PARSER.add_argument("--steps", type=int, default=60)
PARSER.add_argument("--save-every", type=int, default=5)
PARSER.add_argument("--width", type=int, default=1024)
OPTIONS = PARSER.parse_args()
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
PLACE = OPTIONS.records / "own"
PER_EPOCH, BATCH, LAYERS = 20, 8, 4


class Net(nn.Module):  # type: ignore[misc]
    """Gives a loss, and what it predicts."""

    def __init__(self) -> None:
        super().__init__()
        width = OPTIONS.width
        layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS)]
        self.net = nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Of a batch of rows."""
        out = self.net(x)
        return {"loss": (out - x).square().mean(), "out": out.detach()[:1]}


def points() -> torch.Tensor:
    """As many as an epoch has steps for."""
    return torch.randn(PER_EPOCH * BATCH * WORLD, OPTIONS.width)


def note(step: int) -> None:
    """This step has ended."""
    if RANK == 0:
        with (OPTIONS.records / "steps.jsonl").open("a") as file:
            file.write(json.dumps([time.monotonic(), step]) + "\n")


def with_transformers() -> nn.Module:
    """The Trainer; ``checkpoint-N``, and ``resume_from_checkpoint``."""
    from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
    from transformers.trainer_utils import get_last_checkpoint

    class Notes(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            note(state.global_step)

    set_seed(1)
    rows, net = points(), Net()
    args = TrainingArguments(
        PLACE,
        max_steps=OPTIONS.steps,
        save_steps=OPTIONS.save_every,
        save_total_limit=3,
        per_device_train_batch_size=BATCH,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_steps=10,
        remove_unused_columns=False,
        ddp_backend="gloo" if WORLD > 1 else None,
    )
    callbacks: list[Any] = [Notes()]
    if OPTIONS.ours:
        from outlast.integrations.transformers import OutlastCallback

        callbacks.append(OutlastCallback())
    trainer = Trainer(net, args, train_dataset=[{"x": row} for row in rows], callbacks=callbacks)
    last = get_last_checkpoint(PLACE) if PLACE.exists() and not OPTIONS.ours else None
    trainer.train(resume_from_checkpoint=bool(last))
    return net


def with_lightning() -> nn.Module:
    """Its Trainer; ModelCheckpoint with ``save_last``, and ``ckpt_path="last"``."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return self.net(batch[0])["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    class Notes(pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            note(trainer.global_step)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pl.seed_everything(1)
    data, module = TensorDataset(points()), Module()
    callbacks: list[Any] = [Notes()]
    if OPTIONS.ours:
        from outlast.integrations.lightning import LightningCallback

        callbacks.append(LightningCallback(every=f"{OPTIONS.save_every} steps"))
    else:
        callbacks.append(
            pl.callbacks.ModelCheckpoint(
                PLACE, every_n_train_steps=OPTIONS.save_every, save_last=True, save_top_k=1
            )
        )
    trainer = pl.Trainer(
        max_epochs=OPTIONS.steps // PER_EPOCH,
        accelerator="cpu",
        devices=WORLD,
        strategy="ddp" if WORLD > 1 else "auto",
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=not OPTIONS.ours,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=PLACE,
    )
    loader = DataLoader(data, BATCH, shuffle=True)
    trainer.fit(module, loader, ckpt_path=None if OPTIONS.ours else "last")
    return module.net


def with_accelerate() -> nn.Module:
    """A loop of one's own; ``save_state``, ``load_state`` and ``skip_first_batches``."""
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration, set_seed

    own = ProjectConfiguration(PLACE, automatic_checkpoint_naming=True, total_limit=3)
    accelerator = Accelerator(cpu=True, project_config=own)
    set_seed(1)
    data, net = TensorDataset(points()), Net()
    loader = DataLoader(data, BATCH, shuffle=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)

    def step(batch: Any) -> None:
        accelerator.backward(model(batch[0])["loss"])
        optimizer.step()
        optimizer.zero_grad()

    if OPTIONS.ours:
        from outlast.integrations.accelerate import session_of

        with session_of(accelerator, every=f"{OPTIONS.save_every} steps") as session:
            for _ in session.epochs(OPTIONS.steps // PER_EPOCH):
                for batch in session.steps(loader):
                    step(batch)
                    note(session.step)
        return net
    saved = sorted((PLACE / "checkpoints").glob("checkpoint_*"), key=_number)
    done = 0
    if saved:
        accelerator.load_state(str(saved[-1]))
        done = (_number(saved[-1]) + 1) * OPTIONS.save_every
        accelerator.project_configuration.iteration = _number(saved[-1]) + 1
    for epoch in range(done // PER_EPOCH, OPTIONS.steps // PER_EPOCH):
        skipped = done % PER_EPOCH if epoch == done // PER_EPOCH else 0
        batches = accelerator.skip_first_batches(loader, skipped) if skipped else loader
        for number, batch in enumerate(batches, epoch * PER_EPOCH + skipped + 1):
            step(batch)
            note(number)
            if number % OPTIONS.save_every == 0:
                accelerator.save_state()
    return net


def _number(path: Path) -> int:
    return int(path.name.rpartition("_")[2])


def main() -> None:
    """Train, and say what came of it."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    (OPTIONS.records / f"pid-{RANK}").write_text(str(os.getpid()))
    ways = {
        "transformers": with_transformers,
        "lightning": with_lightning,
        "accelerate": with_accelerate,
    }
    net = ways[OPTIONS.framework]()
    digest = hashlib.sha256()
    for _, value in sorted(net.state_dict().items()):
        digest.update(value.numpy().tobytes())
    if RANK == 0:
        (OPTIONS.records / "final.json").write_text(json.dumps({"hash": digest.hexdigest()}))


main()
