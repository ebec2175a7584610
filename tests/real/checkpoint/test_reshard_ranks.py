"""A checkpoint of one number and kind of workers, resumed by another: real groups, to the bit."""

from pathlib import Path

import pytest

from thorough import ALL

SCRIPT = Path(__file__).with_name("reshard_script.py")


def run(floor, act, layout, count, directory):
    ranks = floor.ranks(count, SCRIPT, act, layout, directory)
    codes = [rank.wait() for rank in ranks]
    assert codes == [0] * count, "\n".join(rank.text for rank in ranks)
    return ranks


@pytest.fixture(name="both")
def _both(floor, tmp_path):
    def act(saved, *loaded):
        run(floor, "save", *saved, tmp_path / "job")
        for layout, count in loaded:
            for rank in run(floor, "load", layout, count, tmp_path / "job"):
                assert "loaded: " in rank.out

    return act


SAVED_AND_LOADED = [
    (("plain", 1), [("plain", 1), ("plain", 2), ("fsdp", 2), ("fsdp", 3), ("tp_fsdp", 4)]),
    (("plain", 2), [("plain", 1), ("fsdp", 4), ("plain", 3)]),
    (("fsdp", 2), [("plain", 1), ("fsdp", 1), ("fsdp", 2), ("fsdp", 4), ("hsdp", 4)]),
    (("fsdp", 4), [("fsdp", 3), ("fsdp", 1), ("tp_fsdp", 4), ("plain", 2)]),
    (("fsdp", 3), [("fsdp", 2), ("fsdp", 4), ("pipeline", 2)]),
    (("tp_fsdp", 4), [("tp_fsdp", 4), ("tp_fsdp", 2), ("fsdp", 3), ("plain", 1)]),
    (("tp_fsdp", 2), [("tp_fsdp", 4), ("plain", 1)]),
    (("hsdp", 4), [("hsdp", 4), ("fsdp", 2), ("plain", 1)]),
    (("pipeline", 2), [("pipeline", 2), ("pipeline", 4), ("plain", 1), ("fsdp", 2)]),
    (("pipeline", 4), [("pipeline", 2), ("pipeline", 3), ("plain", 2)]),
]
# Each layout is saved and is loaded once, by more workers or by fewer; which parts go where for all
# other pairs is shown by tests/unit/checkpoint/test_spreads.py.
FEW = [
    (("plain", 1), [("tp_fsdp", 4)]),
    (("fsdp", 2), [("hsdp", 4), ("plain", 1)]),
    (("tp_fsdp", 4), [("fsdp", 3)]),
    (("hsdp", 4), [("fsdp", 2)]),
    (("pipeline", 2), [("pipeline", 4), ("plain", 1)]),
    (("pipeline", 4), [("pipeline", 3)]),
]


@pytest.mark.parametrize(("saved", "loaded"), SAVED_AND_LOADED if ALL else FEW, ids=str)
def test_every_worker_gets_its_part_of_what_others_saved(both, saved, loaded):
    both(saved, *loaded)


@pytest.mark.parametrize(
    ("saved", "layout", "count"),
    [("plain", "wider", 1), ("fsdp", "fsdp_shorter", 2), ("pipeline", "shorter_pipeline", 2)],
)
def test_what_does_not_fit_is_refused_by_all_and_changes_nothing(
    floor, tmp_path, saved, layout, count
):
    run(floor, "save", saved, 2, tmp_path / "job")
    for rank in run(floor, "refuse", layout, count, tmp_path / "job"):
        assert "refused: model.layers" in rank.out
        assert ("only in step 8" if "shorter" in layout else "has shape") in rank.out
