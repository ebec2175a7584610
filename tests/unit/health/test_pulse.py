"""A worker's pulse, and what it says besides."""

import sys
from types import SimpleNamespace

import pytest
from torch import nn

from outlast.attempt.beat import BeatReader
from outlast.health import pulse


@pytest.fixture
def beating(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTLAST_BEATS", str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "0")
    one = pulse._Pulse(tmp_path)

    def once():
        one._once()
        heard = BeatReader(tmp_path, 0)
        try:
            return heard.pulse
        finally:
            heard.close()

    yield once
    pulse.watch_model(None)


def test_without_groups_and_models_it_just_beats(beating):
    found = beating()
    assert found.begun == -1
    assert not found.is_evaluating


def test_a_model_in_evaluation_mode(beating):
    model = nn.Linear(2, 2)
    pulse.watch_model(model)
    assert not beating().is_evaluating
    model.eval()
    assert beating().is_evaluating
    del model
    assert not beating().is_evaluating


def test_a_model_that_never_trains_does_not_evaluate(beating):
    model = nn.Linear(2, 2).eval()
    pulse.watch_model(model)
    assert not beating().is_evaluating
    model.train()
    beating()
    model.eval()
    assert beating().is_evaluating


def test_collectives_of_all_groups_are_counted(beating, monkeypatch):
    groups = [SimpleNamespace(_get_sequence_number_for_group=lambda n=n: n) for n in (3, 4)]

    class Silent:
        def _get_sequence_number_for_group(self):
            raise RuntimeError("does not count")

    world = SimpleNamespace(pg_map=dict.fromkeys(range(3)))
    world.pg_map = [*groups, Silent()]
    name = "torch.distributed.distributed_c10d"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(_world=world))
    assert beating().begun == 7


def test_another_attempt_in_the_same_process_has_another_file(beating, tmp_path):
    beating()
    (tmp_path / "beat-0").unlink()
    assert beating() is not None


def test_the_flight_recorder_is_written_down_when_asked(beating, tmp_path, monkeypatch):
    dump = lambda **_: b'{"entries":[]}'  # noqa: E731
    recorder = SimpleNamespace(_dump_fr_trace_json=dump)
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", recorder)
    path = pulse.recorder_path(tmp_path, 0)
    beating()
    assert not path.exists()
    pulse.ask_path(tmp_path).touch()
    beating()
    assert path.read_bytes() == dump()


def test_a_time_out_of_ours_is_torchs_default_and_nobodys_own(monkeypatch):
    from datetime import timedelta

    torchs = SimpleNamespace(
        default_pg_timeout=timedelta(minutes=30),
        default_pg_nccl_timeout=None,
        _get_default_timeout=None,
    )
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", torchs)
    monkeypatch.setenv(pulse.TIMEOUT_VARIABLE, "960")
    assert pulse._give_torch_our_timeout()
    assert torchs.default_pg_timeout == timedelta(minutes=30)  # never made shorter
    assert torchs.default_pg_nccl_timeout is None
    torchs.default_pg_nccl_timeout = timedelta(minutes=10)
    assert pulse._give_torch_our_timeout()
    assert torchs.default_pg_nccl_timeout == timedelta(seconds=960)
