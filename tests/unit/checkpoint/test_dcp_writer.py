"""DCP's saves into Outlast's checkpoints: what is refused, and what is durable when."""

import copy
import pickle
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_state import SHARD, STEP, loaded_state, refused, saved_state, state_of
from unit_fakes import WatchedStorage, same
from unit_names import save_name

import outlast
from outlast.checkpoint.dcp import StorageWriter
from outlast.checkpoint.load import verify
from outlast.errors import ConfigError, StorageError
from outlast.storage import Directory

pytestmark = pytest.mark.filterwarnings("ignore:.*single process.*")  # DCP says so each time


# --- what is refused -----------------------------------------------------------------------------


REFUSED = {
    "an object": ({"m": {"f": threading.Lock()}}, "m.f is a _thread.lock, which cannot be saved"),
    "a dtype": ({"m": torch.ones(2, dtype=torch.complex128)}, "m has dtype torch.complex128"),
    "a sparse tensor": ({"m": torch.ones(2, 2).to_sparse()}, "m is a torch.sparse_coo tensor"),
    "a name": ({"m@rank-00001": torch.ones(2)}, "kept for a rank's own"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_saved_is_refused_in_a_line(tmp_path, what):
    state, message = REFUSED[what]
    error = refused(lambda: dcp.save(state, storage_writer=outlast.dcp_writer(tmp_path, 7)))
    assert isinstance(error, ConfigError)
    assert message in str(error)
    assert "\n" not in str(error)
    assert not (tmp_path / STEP / "manifest.json").exists()


@pytest.mark.parametrize("step", [-1, True, 1.0, 10**12])
def test_what_is_not_a_step(tmp_path, step):
    with pytest.raises(ConfigError, match="is not the number of a step"):
        outlast.dcp_writer(tmp_path, step)


def test_a_committed_step_is_not_saved_over_unless_asked(tmp_path):
    state = saved_state(tmp_path)
    error = refused(lambda: saved_state(tmp_path, seed=1))
    assert isinstance(error, ConfigError)
    assert "is committed already" in str(error)
    assert same(state, loaded_state(tmp_path))
    other = saved_state(tmp_path, seed=1, overwrite=True)
    assert same(other, loaded_state(tmp_path))


def test_what_a_writer_does_not_do(tmp_path):
    state = {"m": torch.ones(1)}
    writer = outlast.dcp_writer(tmp_path, 7)
    with pytest.raises(ConfigError, match="leave checkpoint_id out"):
        dcp.save(state, storage_writer=writer, checkpoint_id="elsewhere")
    with pytest.raises(ConfigError, match="use_collectives=False"):
        dcp.save(state, storage_writer=writer, use_collectives=False)
    assert not StorageWriter.validate_checkpoint_id(tmp_path)


def test_a_planner_that_keeps_its_state_to_itself(tmp_path):
    class Closed(dcp.DefaultSavePlanner):
        lookup_object = None

    error = refused(
        lambda: dcp.save({"n": 1}, storage_writer=outlast.dcp_writer(tmp_path, 7), planner=Closed())
    )
    assert "Closed does not tell what it saves" in str(error)


def test_a_planner_that_changes_tensors_is_obeyed(tmp_path):
    class Doubling(dcp.DefaultSavePlanner):
        def transform_object(self, write_item, item):
            return item * 2 if isinstance(item, torch.Tensor) else item

    state = {"m": torch.arange(3.0), "n": 3}
    writer = outlast.dcp_writer(tmp_path, 7)
    dcp.save(state, storage_writer=writer, planner=Doubling())
    found = {"m": torch.zeros(3), "n": 0}
    dcp.load(found, storage_reader=outlast.dcp_reader(tmp_path))
    assert found["m"].tolist() == [0.0, 2.0, 4.0]
    assert found["n"] == 3


def test_a_planner_that_does_not_flatten(tmp_path):
    state = state_of()
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, storage_writer=outlast.dcp_writer(tmp_path, 7), planner=planner)
    assert same(state, loaded_state(tmp_path))


# --- the order of things -------------------------------------------------------------------------


def watched_save(storage, state, step=7, **more):
    dcp.save(state, storage_writer=StorageWriter(storage, step, **more))


def test_the_manifest_comes_last_and_all_else_is_durable_before(tmp_path):
    storage = WatchedStorage(Directory(tmp_path))
    watched_save(storage, state_of())
    done = [(op, name) for op, name in storage.log if op in ("finish", "put_new", "put")]
    assert done[-1] == ("put_new", f"{STEP}/manifest.json")
    assert done[0] == ("put", f"{STEP}/save.json")
    assert {name for _, name in done[1:-1]} == {SHARD, f"{STEP}/rank-00000.json"}


def test_what_is_overwritten_stands_until_the_new_one_does_and_goes_then(tmp_path):
    saved_state(tmp_path)
    storage = WatchedStorage(Directory(tmp_path))
    watched_save(storage, state_of(1), overwrite=True)
    new = save_name(7, attempt=0, serial=2)
    changes = [one for one in storage.log if one[0] in ("put", "create", "put_new", "remove")]
    assert changes.index(("put_new", f"{new}/manifest.json")) == len(changes) - 2
    assert changes[-1] == ("remove", f"{STEP}/manifest.json")
    assert Directory(tmp_path).children() == [new]
    assert same(state_of(1), loaded_state(tmp_path))


@pytest.mark.parametrize("what", ["create", "write", "finish", "put_new"])
def test_an_overwrite_that_fails_leaves_what_it_was_to_replace(tmp_path, what):
    state = saved_state(tmp_path)
    before = {path: path.read_bytes() for path in (tmp_path / STEP).iterdir()}
    trouble = OSError(28, "No space left on device")
    storage = WatchedStorage(Directory(tmp_path), lambda did, _: trouble if did == what else None)
    assert refused(lambda: watched_save(storage, state_of(1), overwrite=True)) is trouble
    assert before == {path: path.read_bytes() for path in (tmp_path / STEP).iterdir()}
    assert same(state, loaded_state(tmp_path))
    saved_state(tmp_path, seed=2, overwrite=True)
    assert same(state_of(2), loaded_state(tmp_path))
    assert len(Directory(tmp_path).children()) == 1, "what the failed one left is gone as well"


@pytest.mark.parametrize("what", ["create", "write", "finish", "put_new"])
def test_a_save_that_fails_leaves_the_older_commit_in_force(tmp_path, what):
    state = saved_state(tmp_path, step=3)
    trouble = OSError(28, "No space left on device")
    storage = WatchedStorage(Directory(tmp_path), lambda did, _: trouble if did == what else None)
    assert refused(lambda: watched_save(storage, state_of(1))) is trouble
    assert same(state, loaded_state(tmp_path))
    watched_save(Directory(tmp_path), state_of(1))  # what was left behind is in nobody's way
    assert same(state_of(1), loaded_state(tmp_path))


def test_whoever_takes_the_manifests_name_first_is_not_undone(tmp_path):
    class Late(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item):
            (tmp_path / STEP / "manifest.json").write_text("{}")
            return super().resolve_data(write_item)

    writer = outlast.dcp_writer(tmp_path, 7)
    error = refused(lambda: dcp.save({"m": torch.ones(1)}, storage_writer=writer, planner=Late()))
    assert isinstance(error, StorageError)
    assert "taken for an unfinished save" in str(error)


def test_a_plan_that_nobody_carried_out_is_not_committed(tmp_path):
    class Forgetful(dcp.DefaultSavePlanner):
        def finish_plan(self, new_plan):
            import dataclasses

            return dataclasses.replace(new_plan, items=new_plan.items[1:])

    writer = outlast.dcp_writer(tmp_path, 7)
    state = {"a": torch.ones(1), "b": torch.ones(1)}
    error = refused(lambda: dcp.save(state, storage_writer=writer, planner=Forgetful()))
    assert "no rank wrote a" in str(error)
    assert not (tmp_path / STEP / "manifest.json").exists()


@pytest.mark.parametrize(
    ("change", "now"),
    [
        (lambda item: item[:1], r"torch.float32 of shape (1, 3) now"),
        (lambda item: item.t(), r"torch.float32 of shape (3, 2) now"),
        (lambda item: item.int(), r"torch.int32 of shape (2, 3) now"),
    ],
)
def test_a_tensor_that_changes_after_the_plan(tmp_path, change, now):
    class Changing(dcp.DefaultSavePlanner):
        def transform_object(self, write_item, item):
            return change(item)

    writer = outlast.dcp_writer(tmp_path, 7)
    error = refused(
        lambda: dcp.save({"a": torch.ones(2, 3)}, storage_writer=writer, planner=Changing())
    )
    assert f"a was planned as torch.float32 of shape (2, 3) and is {now}" in str(error)


def test_saving_while_training_goes_on(tmp_path):
    state = state_of()
    del state["model"]["conjugate"]  # torch's own staging loses that bit
    expected = copy.deepcopy(state)
    future = dcp.async_save(state, storage_writer=outlast.dcp_writer(tmp_path, 7), no_dist=True)
    state["model"]["w"].zero_()
    future.result(timeout=60)
    assert same(expected, loaded_state(tmp_path, like=expected))


def test_a_writer_can_be_sent_to_another_process(tmp_path):
    writer = outlast.dcp_writer(tmp_path, 7)
    assert "step-000000000007" in writer.checkpoint_id
    writer = pickle.loads(pickle.dumps(writer))
    dcp.save({"m": torch.ones(1)}, storage_writer=writer)
    verify(Directory(tmp_path), 7)
