"""Lightning's Trainer with a small net: RECORDS [--plain] [--io] [--die STEP …] [KEY=VALUE …].

With Outlast's callback, or without; with --io Lightning's own checkpoints are written by Outlast.
Its last rank dies, once, behind each STEP (a batch). What is logged is appended to
RECORDS/logs.jsonl; RECORDS/final.json has the weights' hash.
"""

import argparse
import hashlib
import json
import logging
import os
import signal
import sys
import warnings
from pathlib import Path

if "--alone" in sys.argv:
    sys.modules["outlast"] = None  # it cannot be imported

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn

PARSER = argparse.ArgumentParser()
PARSER.add_argument("records", type=Path)
PARSER.add_argument("--plain", action="store_true")
PARSER.add_argument("--alone", action="store_true", help="plain, where there is no outlast")
PARSER.add_argument("--io", action="store_true")
PARSER.add_argument("--from", dest="ckpt_path", help="Lightning's own checkpoint")
PARSER.add_argument("--die", type=int, action="append", default=[])
PARSER.add_argument("--early", action="store_true", help="SIGTERM to rank 0, ahead of the loop")
PARSER.add_argument("arguments", nargs="*", help="of Trainer, as JSON")
OPTIONS = PARSER.parse_intermixed_args()


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        layers = [nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1)]
        self.net = nn.Sequential(*layers, nn.Linear(32, 8))

    def training_step(self, batch, index):
        loss = (self.net(batch[0]) - batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val", (self.net(batch[0]) - batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "val"},
        }

    def on_save_checkpoint(self, checkpoint):
        checkpoint["own"] = {"step": self.global_step}

    def on_load_checkpoint(self, checkpoint):
        # Lightning alone asks this before its loops have their place back.
        assert OPTIONS.ckpt_path or checkpoint["own"]["step"] == self.global_step


class Notes(pl.Callback):
    def on_sanity_check_start(self, trainer, module):
        if OPTIONS.early and trainer.is_global_zero and not (OPTIONS.records / "early").exists():
            (OPTIONS.records / "early").touch()
            os.kill(os.getpid(), signal.SIGTERM)

    def on_validation_end(self, trainer, module):
        if trainer.is_global_zero and not trainer.sanity_checking:
            kept = {key: value.item() for key, value in trainer.callback_metrics.items()}
            with (OPTIONS.records / "logs.jsonl").open("a") as file:
                file.write(json.dumps([trainer.global_step, kept]) + "\n")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        step = trainer.fit_loop.epoch_loop.batch_progress.total.processed
        mark = OPTIONS.records / f"died-{step}"
        is_last = trainer.global_rank == trainer.world_size - 1
        if step in OPTIONS.die and is_last and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pl.seed_everything(1)
    data = torch.utils.data.TensorDataset(torch.randn(52, 8))
    loader = torch.utils.data.DataLoader(data, 4, shuffle=True)
    checked = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 8)), 4)
    given = {
        "max_epochs": 3,
        "accumulate_grad_batches": 2,
        "accelerator": "cpu",
        "devices": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "strategy": "ddp" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else "auto",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    given |= {
        key: json.loads(value) for key, value in (one.split("=") for one in OPTIONS.arguments)
    }
    callbacks = [Notes(), EarlyStopping("val", patience=5)]
    plugins = []
    if OPTIONS.io:
        from outlast.integrations.lightning_checkpoints import OutlastCheckpointIO

        plugins.append(OutlastCheckpointIO())
        place = OPTIONS.records / "checkpoints"
        callbacks.append(ModelCheckpoint(place, every_n_train_steps=4, save_top_k=-1))
        given["enable_checkpointing"] = True
    if not (OPTIONS.plain or OPTIONS.alone):
        from outlast.integrations.lightning import LightningCallback

        callbacks.append(LightningCallback(every="3 steps"))
    net = Net()
    given |= {"callbacks": callbacks, "default_root_dir": OPTIONS.records}
    trainer = pl.Trainer(**given, plugins=plugins)
    trainer.fit(net, loader, checked, ckpt_path=OPTIONS.ckpt_path)
    if trainer.is_global_zero:
        digest = hashlib.sha256()
        for _, value in sorted(net.state_dict().items()):
            digest.update(value.numpy().tobytes())
        found = {"hash": digest.hexdigest(), "step": trainer.global_step}
        found["epoch"] = trainer.current_epoch
        (OPTIONS.records / "final.json").write_text(json.dumps(found))


main()
