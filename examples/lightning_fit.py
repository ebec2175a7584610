"""Train a small classifier with Lightning.

outlast run --dir jobs/lightning_fit examples/lightning_fit.py

While it trains, kill a worker from another terminal (pgrep -f launch.worker finds it), or press
Ctrl-C and type the command again. It ends with the same lightning.safetensors, to the last
bit, as the script without Outlast.
"""

import lightning.pytorch as pl
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from outlast.integrations.lightning import LightningCallback

EPOCHS = 60


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        layers = [nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.Linear(64, 3))

    def training_step(self, batch, index):
        x, arm = batch
        loss = nn.functional.cross_entropy(self.net(x), arm)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def spirals(num):
    """Points of three spiral arms (num, 2), and the arm of each (num,)."""
    arm, radius = torch.arange(num) % 3, torch.rand(num)
    angle = 5 * radius + 2.1 * arm + 0.1 * torch.randn(num)
    return TensorDataset(torch.stack([angle.cos(), angle.sin()], 1) * radius[:, None], arm)


def main():
    pl.seed_everything(0)
    loader = DataLoader(spirals(3000), batch_size=100, shuffle=True)
    model = Classifier()
    quiet = {"logger": False, "enable_checkpointing": False}
    trainer = pl.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", callbacks=[LightningCallback()], **quiet
    )
    trainer.fit(model, loader)
    save_file(model.state_dict(), "lightning.safetensors")


if __name__ == "__main__":
    main()
