"""To give its state an object may need all ranks: none of them is asked by one rank alone."""

from floor import SCRIPTS


def test_what_is_in_no_checkpoint_is_said_without_a_hang(floor, tmp_path):
    job = tmp_path / "job"
    ranks = floor.ranks(2, SCRIPTS / "gathers.py", tmp_path, env={"OUTLAST_DIR": job})
    for one in ranks:
        assert one.wait() == 0, one.text
    said = ranks[0].err
    assert "the SGD that steps changes parameters that are in no checkpoint" in said
    assert "plain.0.seen is changed by training and in no checkpoint" in said
