"""What Lightning does with its own checkpoints, loaders and callbacks, with ours among these.

All in this process. A run dies by an exception in front of a batch: nothing more is committed.
"""

import copy
import os
import pickle

import lightning.pytorch as pl
import pytest
import torch
from floor import until
from lightning.pytorch.callbacks import ModelCheckpoint

from outlast.integrations.lightning import LightningCallback
from outlast.ledger.file import read_events

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice
EPOCH = 6  # batches


class DiedError(Exception):
    pass


class Dies(pl.Callback):
    """In front of the batch behind ``step``, or later, once a save of ``ours`` is committed."""

    def __init__(self, step, ours=None):
        self.step, self.ours, self.pending = step, ours, None

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step < self.step:
            return
        if self.ours is not None:
            session = self.ours.session
            if self.pending is None:
                self.pending = session.save()
                until(lambda: self.pending.step is not None, "the decision")
            if session.step < self.pending.step:
                return
            assert self.pending.wait(60)
        raise DiedError


class Net(pl.LightningModule):
    """Notes its batches: epoch, step, and the samples with the process that has made them."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.seen = []

    def training_step(self, batch, index):
        samples, pids = batch
        place = (self.trainer.current_epoch, self.trainer.global_step)
        self.seen.append((*place, samples.flatten().tolist(), pids[0].item()))
        return self.net(samples).square().mean()

    def validation_step(self, batch, index):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-4)


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 2 * EPOCH

    def __getitem__(self, index):
        return torch.tensor([float(index)]), os.getpid()


def newest(job):
    """The newest committed step of the job's own, 0 for none."""
    commits = [one["step"] for one in read_events(job) if one.event == "commit"]
    return max(commits, default=0)


def fit(root, *callbacks, processes=0, ckpt_path=None, **given):
    """The Trainer and its module, behind three epochs or a death."""
    pl.seed_everything(1)
    given |= dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    given = {"max_epochs": 3, **given, "accelerator": "cpu", "num_sanity_val_steps": 0}
    given["enable_checkpointing"] = any(isinstance(one, ModelCheckpoint) for one in callbacks)
    trainer = pl.Trainer(callbacks=[*callbacks], default_root_dir=root, **given)
    net, lasts = Net(), {"num_workers": processes, "persistent_workers": processes > 0}
    loader = torch.utils.data.DataLoader(Data(), 2, shuffle=True, **lasts)
    checked = torch.utils.data.DataLoader(Data(), 2)
    try:
        trainer.fit(net, loader, checked, ckpt_path=ckpt_path)
    except DiedError:
        assert any(isinstance(one, Dies) for one in callbacks)
    return trainer, net


def ours(job):
    return LightningCallback(dir=job, every="1 h")


@pytest.mark.parametrize("batches", [EPOCH, EPOCH - 2])
def test_processes_that_persist_live_from_epoch_to_epoch(tmp_path, job, batches):
    """And a run that died gets the samples that it would have got."""
    given = {"processes": 1, "limit_train_batches": batches}
    _, calm = fit(tmp_path, ours(tmp_path / "calm"), **given)
    assert len({pid for *_, pid in calm.seen}) == 1
    dying = ours(job)
    fit(tmp_path, dying, Dies(batches + 1, dying), **given)
    _, resumed = fit(tmp_path, ours(job), **given)
    found = [place for *place, _ in resumed.seen]
    assert found == [place for *place, _ in calm.seen][-len(found) :]
    assert batches < len(found) < 2 * batches  # from the midst of the second epoch on


class Copies(pl.Callback):
    def on_train_batch_start(self, trainer, *_):
        self.copied = copy.deepcopy([one for one in trainer.callbacks if one is not self])


def test_callbacks_are_copied_within_a_fit_and_the_trainer_is_pickled_behind_it(tmp_path, job):
    copies, callback = Copies(), ours(job)
    trainer, _ = fit(tmp_path, copies, callback)
    assert callback.session is not None
    assert [one.session for one in copies.copied if isinstance(one, LightningCallback)] == [None]
    again = pickle.loads(pickle.dumps(trainer))  # as torch.save(trainer) does
    assert again.global_step == 3 * EPOCH


def test_the_newest_checkpoint_is_gone_on_from_whoever_has_written_it(tmp_path, job, capfd, caplog):
    """Of a run that died behind Lightning's save of step 10, and in front of ``last.ckpt``."""
    saving = {"dirpath": tmp_path, "filename": "{step}", "every_n_train_steps": 5}
    saving |= {"save_top_k": -1, "save_last": True}
    plain = {"limit_val_batches": 0}
    fit(tmp_path, ModelCheckpoint(**saving), Dies(11), **plain)
    (tmp_path / "last.ckpt").unlink()
    (tmp_path / "step=5.ckpt").rename(tmp_path / "last.ckpt")
    _, found = fit(tmp_path, ModelCheckpoint(**saving), ours(job), ckpt_path="last", **plain)
    assert found.seen[0][1] == 10
    capfd.readouterr()

    # Another run's: this job's own, of step 18, is newer; of one that has ended nothing is left.
    _, found = fit(tmp_path, ours(job), ckpt_path=tmp_path / "step=10.ckpt", **plain)
    assert not found.seen
    assert "resumed from step 18" in capfd.readouterr().err
    short = tmp_path / "short"
    dying = ours(short)
    fit(tmp_path, dying, Dies(3, dying), **plain)
    older = newest(short)
    assert 0 < older < 10
    _, found = fit(tmp_path, ours(short), ckpt_path=tmp_path / "step=10.ckpt", **plain)
    assert found.seen[0][1] == 10
    assert f"up to step {older}, are older than step 10" in caplog.text
    assert newest(short) == 18


class Stops(pl.Callback):
    """Once there is a commit of ``job``."""

    def __init__(self, job):
        self.job, self.found = job, 0

    def on_train_batch_start(self, trainer, *_):
        self.found = newest(self.job)
        trainer.should_stop = self.found > 0


def test_whenever_lightning_saves_there_is_one_of_ours(tmp_path, job):
    stops, saving = Stops(job), ModelCheckpoint(tmp_path, every_n_train_steps=5)
    fit(tmp_path, saving, ours(job), stops, max_epochs=-1, limit_val_batches=0)
    assert stops.found >= 5


def test_a_damaged_checkpoint_is_not_the_last(tmp_path, job, capfd):
    saving = {"dirpath": tmp_path, "filename": "{step}", "every_n_train_steps": 5}
    fit(tmp_path, ModelCheckpoint(**saving, save_top_k=-1, save_last=True))
    last = tmp_path / "last.ckpt"
    last.write_bytes(last.read_bytes()[:-100])
    given = {"limit_train_batches": EPOCH, "ckpt_path": "last"}
    _, found = fit(tmp_path, ModelCheckpoint(**saving), ours(job), **given)
    assert found.seen[0][1] == 15
    assert "last.ckpt is not whole" in capfd.readouterr().err


def test_from_lightnings_own_the_loops_go_on_as_without_us(tmp_path, job):
    """In the midst of an epoch, between two validations of it."""
    given = {"val_check_interval": 2}
    saving = {"dirpath": tmp_path, "filename": "{step}", "every_n_train_steps": 2}
    fit(tmp_path, ModelCheckpoint(**saving, save_top_k=-1), Dies(5), **given)
    loops = []
    for ones in ((), (ours(job),)):
        trainer, net = fit(tmp_path, *ones, ckpt_path=tmp_path / "step=4.ckpt", **given)
        state = trainer.fit_loop.state_dict()
        loops.append((state, [place for *place, _ in net.seen]))
    assert loops[0] == loops[1]
