"""Where stock DDP is not the same after a resume, and the setting with which it is."""

import pytest
from floor import SCRIPTS


@pytest.mark.parametrize(("world", "as_it_comes"), [(2, "same"), (4, "other")])
def test_ddp_after_a_resume(floor, world, as_it_comes):
    ranks = floor.ranks(world, SCRIPTS / "ddp_resume.py")
    assert [rank.wait() for rank in ranks] == [0] * world, ranks[0].text
    for rank in ranks:
        assert f"as it comes: {as_it_comes} bits" in rank.out
        assert "{'find_unused_parameters': True}: same bits" in rank.out
        assert f"'static_graph': True}}: {as_it_comes} bits" in rank.out
    for words in ("find_unused_parameters=True, or", "find_unused_parameters=True and no static"):
        told = [rank.err.count(words) for rank in ranks]
        assert told == ([0, 0] if world == 2 else [1, 0, 0, 0])
