"""Lightning's own checkpoints, written by Outlast: killed, damaged, read again, and left again."""

import shutil
import signal
from collections import UserDict, UserList

import lightning.pytorch as pl
import pytest
import torch
from floor import SCRIPTS
from frameworks import ENV, result
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import nn

from outlast.errors import ConfigError
from outlast.integrations import state_file
from outlast.integrations.lightning_checkpoints import OutlastCheckpointIO
from outlast.integrations.state_file import FileDamagedError
from thorough import ALL

SCRIPT = SCRIPTS / "lightning_trainer.py"
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice


@pytest.mark.skipif(not ALL, reason="the long tail: make test-all")
def test_from_the_newest_whole_one_lightning_alone_ends_with_the_same_weights(floor, tmp_path):
    killed = floor.warm(SCRIPT, tmp_path, "--plain", "--io", "--die", 27, env=ENV)
    assert killed.wait() == -signal.SIGKILL, killed.text
    places = sorted((tmp_path / "checkpoints").iterdir(), key=lambda one: one.stat().st_mtime)
    newest, whole = places[-1], places[-2]
    assert newest.name == "epoch=1-step=12.ckpt"
    with newest.open("r+b") as file:
        file.truncate(newest.stat().st_size - 1)
    stock = tmp_path / "stock.ckpt"
    state_file.to_torch(whole, stock)

    found = {}
    for name, given in {
        "ours": ("--plain", "--io", "--from", newest),
        "alone": ("--alone", "--from", stock),
    }.items():
        records = tmp_path / name
        records.mkdir()
        shutil.copytree(tmp_path / "checkpoints", records / "checkpoints")
        going_on = floor.cold(SCRIPT, records, *given, env=ENV)
        assert going_on.wait() == 0, going_on.text
        found[name] = result(records)
        if name == "ours":
            assert f"{whole} is loaded, the newest whole one beside it" in going_on.err
    assert found["ours"] == found["alone"]


class Net(pl.LightningModule):
    def __init__(self, width, made_by=nn.Linear, named=("a", 1)):
        super().__init__()
        self.save_hyperparameters()
        self.net = made_by(width, width)

    def training_step(self, batch, _):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class Holding(pl.Callback):
    """Its state is what it is given."""

    def __init__(self, held):
        self.held = held

    def state_dict(self):
        return {"held": self.held}


def fitted(io, *callbacks):
    net = Net(4)
    given = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    given |= {"enable_checkpointing": False, "accelerator": "cpu", "max_steps": 2}
    trainer = pl.Trainer(**given, callbacks=[*callbacks], plugins=[io])
    trainer.fit(net, torch.utils.data.DataLoader(torch.ones(4, 4), 2))
    return net, trainer


def same_weights(one, other):
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


def test_a_module_is_loaded_from_it_without_a_trainer(tmp_path, capfd):
    net, trainer = fitted(OutlastCheckpointIO())
    for name in ("a", "b"):
        trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
    said = capfd.readouterr().err
    assert said.count("left out of the hyperparameters") == 1
    assert "made_by is a builtins.type" in said
    again = Net.load_from_checkpoint(tmp_path / "a.ckpt")
    assert same_weights(net, again)
    assert (again.hparams.width, again.hparams.named) == (4, ("a", 1))
    state_file.to_torch(tmp_path / "a.ckpt", tmp_path / "c.ckpt")
    assert same_weights(net, Net.load_from_checkpoint(tmp_path / "c.ckpt"))


def test_hyperparameters_in_containers_of_another_library_come_back_plain(tmp_path):
    """As OmegaConf's do; beside them Lightning keeps their class."""
    given = UserDict(a=UserList([1, UserDict(b=2)]), c=(3, "d"))
    checkpoint = {"epoch": 1, "hyper_parameters": given, "hparams_type": UserDict}
    OutlastCheckpointIO().save_checkpoint(checkpoint, tmp_path / "a.ckpt")
    found = OutlastCheckpointIO().load_checkpoint(tmp_path / "a.ckpt")
    assert found == {"epoch": 1, "hyper_parameters": {"a": [1, {"b": 2}], "c": (3, "d")}}


def test_lightnings_threads_write_it_behind_the_loop(tmp_path):
    net, trainer = fitted(AsyncCheckpointIO(OutlastCheckpointIO()))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer.strategy.teardown()
    assert same_weights(net, Net.load_from_checkpoint(tmp_path / "a.ckpt"))


def test_a_state_that_is_no_data_is_named(tmp_path):
    _, trainer = fitted(OutlastCheckpointIO(), Holding(open))
    with pytest.raises(ConfigError, match=r"callbacks\.Holding\.held is a builtins\.builtin"):
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert not [*tmp_path.iterdir()]


def test_without_falling_back_damage_is_an_error(tmp_path):
    _, trainer = fitted(OutlastCheckpointIO(falls_back=False))
    for name in ("a", "b"):
        trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
    (tmp_path / "b.ckpt").write_bytes((tmp_path / "b.ckpt").read_bytes()[:-9])
    with pytest.raises(FileDamagedError, match=r"b\.ckpt is damaged"):
        trainer.strategy.load_checkpoint(tmp_path / "b.ckpt")
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found"):  # its words
        OutlastCheckpointIO().load_checkpoint(tmp_path / "d.ckpt")
    OutlastCheckpointIO().remove_checkpoint(tmp_path / "b.ckpt")
    assert [one.name for one in tmp_path.iterdir()] == ["a.ckpt"]
