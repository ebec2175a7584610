"""What bits depend on besides the order of sums, in words."""

import torch

from outlast.reduce.same_bits import among, difference, facts_of


def test_a_process_is_like_itself():
    facts = facts_of(torch.device("cpu"))
    assert difference(facts, dict(facts)) == ""
    assert facts["threads"] == str(torch.get_num_threads())
    assert facts["processor"]
    assert among([facts, facts]) == ""


def test_the_first_difference_is_named_and_the_rest_counted():
    one = {"torch": "2.13", "threads": "1", "GPU": "H100"}
    assert difference(one, {**one, "threads": "4"}) == "threads: 1 and 4"
    assert difference(one, {"torch": "2.13"}) == "threads: 1 and unknown (and 1 more)"
    assert (
        among([one, one, {**one, "GPU": "A100"}])
        == "rank 0 and rank 2 differ in GPU: H100 and A100"
    )
