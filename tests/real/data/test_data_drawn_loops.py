"""Loops as people write them: after a resume the run is the undisturbed one, or it says that not.

``OUTLAST_TEST_SEED`` gives the first seed; ``drawn_loops.py FIRST COUNT`` runs them as a program.
"""

import collections

import drawn_loops
import pytest

import thorough


def undisturbed_and_resumed(*lines, size, save_at, dies_after=1, cuts=(drawn_loops.Run,)):
    """A program's undisturbed run, and the last one of those that go on from each other.

    Args:
        lines: behind the header, which makes ``size`` samples.
        size: see above.
        save_at: the step at which a run that is cut is saved.
        dies_after: so many steps later it dies.
        cuts: what the runs are that are cut, one after the other.
    """
    program = drawn_loops.Program(0)
    program.save_at, program.dies_after = save_at, dies_after
    program.text = "\n".join([drawn_loops.HEADER.format(size=size), *lines])
    saved = None
    with drawn_loops.on_nothing():
        calm = drawn_loops.Run(program).go()
        for cut in cuts:
            saved = cut(program, saved).go(dies=True).saved
        return calm, drawn_loops.Run(program, saved).go()


def assert_exact(calm, again, save_at):
    assert again.error is None, again.said
    assert again.log == {step: came for step, came in calm.log.items() if step >= save_at}


COUNT = 1000 if thorough.ALL else 32
PARTS = 4

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of loaders that are put down in the midst of an epoch
]


@pytest.fixture(scope="module")
def first():
    return thorough.seed()


@pytest.mark.parametrize("part", range(PARTS))
def test_equal_or_said(first, part):
    counts, wrong = collections.Counter(), []
    with drawn_loops.on_nothing():
        for seed in range(first + part, first + COUNT, PARTS):
            outcome, program, text = drawn_loops.outcome_of(seed)
            counts[outcome] += 1
            if outcome == "WRONG":
                wrong.append(f"seed {seed}: {text}\n{program.text}")
    assert not wrong, wrong[0]
    # Saying is no way out: most of what people write goes on exactly.
    if thorough.ALL:
        assert counts["equal"] >= 0.7 * sum(counts.values()), counts


HELD = {
    "weighted": "DataLoader(Noise(), 3, sampler=WeightedRandomSampler([1.0] * 8, 8))",
    "batch sampler": "DataLoader(Own(), batch_sampler=BatchSampler(NpOrder(), 3, False))",
    "processes": "DataLoader(Plain(), 3, shuffle=True, num_workers=1, persistent_workers=True)",
    "outlast, processes": "outlast.data.Loader(Noise(), global_batch=3, num_workers=1)",
    "generator of body and loader": "DataLoader(Plain(), 3, shuffle=True, generator=G)",
    "kept iterator": "Inf(Plain(), batch_size=3, shuffle=True)",
    "kept iterator, persistent": "Inf(Plain(), 3, num_workers=1, persistent_workers=True)",
    "state of its own": "DataLoader(Stateful(), 3)",
}
LOOPS = {
    "epochs": ["for batch in s.steps(loader, epochs=4): step(batch)"],
    "a loop for each": ["for ep in range(4):", "    for batch in s.steps(loader): step(batch)"],
    "computed start": [
        "for ep in range(s.step // 3, 4):",
        "    for batch in s.steps(loader): step(batch)",
    ],
    "another loader between": [
        "late = DataLoader(Plain(), 4, shuffle=True)",
        "for ep in range(2):",
        "    for batch in s.steps(loader): step(batch)",
        "    for batch in s.steps(late): step(batch)",
    ],
    "until": ["for batch in s.steps(cycle(loader), until=11): step(batch)"],
}


@pytest.mark.parametrize("save_at", [1, 3, 5, 6, 8])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("loader", thorough.some(HELD, 3))
def test_what_is_exact_stays_exact(loader, loop, save_at):
    if loader == "outlast, processes" and (loop == "until" or "start" in loop):
        pytest.skip("it has no end, and its passes are no 3 steps")
    calm, again = undisturbed_and_resumed(
        f"loader = {HELD[loader]}",
        "def step(batch):",
        "    seen(batch, torch.rand(()), torch.rand((), generator=G), R.random())",
        "with session(model=model, optimizer=optimizer) as s:",
        *["    " + line for line in LOOPS[loop]],
        size=8,
        save_at=save_at,
    )
    assert_exact(calm, again, save_at)


@pytest.mark.parametrize(
    "given", ["itertools.islice(loader, 9)", "iter(loader)", "map(abs, loader)"]
)
@pytest.mark.parametrize("save_at", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("processes", ["", ", num_workers=1, persistent_workers=True"])
def test_an_iterator_made_for_its_loop_ends_with_it(given, save_at, processes):
    loader = f"{'Plain' if processes else 'Noise'}(), 3, shuffle=True{processes}"
    calm, again = undisturbed_and_resumed(
        f"loader = DataLoader({loader})",
        "late = DataLoader(Plain(), 4, shuffle=True)",
        "with session(model=model, optimizer=optimizer) as s:",
        "    for epoch in range(3):",
        f"        for batch in s.steps({given}): seen(batch, torch.rand(()))",
        "        for batch in s.steps(late): seen(batch, torch.rand(()))",
        size=8,
        save_at=save_at,
    )
    assert list(calm.log) == list(range(15))
    if processes and any(word in again.said for word in drawn_loops.SAID):
        return  # processes that persist begin anew
    assert_exact(calm, again, save_at)


@pytest.mark.parametrize("save_at", [2, 3, 6])
def test_what_a_sampler_draws_as_it_ends_is_drawn(save_at):
    calm, again = undisturbed_and_resumed(
        "loader = DataLoader(Plain(), 3, shuffle=True, generator=G)",
        "with session(model=model, optimizer=optimizer) as s:",
        "    for epoch in range(s.step // 3, 4):",
        "        for batch in s.steps(loader): seen(batch)",
        size=9,
        save_at=save_at,
    )
    assert list(calm.log) == list(range(12))
    assert_exact(calm, again, save_at)


def test_an_order_that_was_drawn_ahead_and_is_another_now_is_said():
    calm, again = undisturbed_and_resumed(
        "loader = DataLoader(Plain(), 2, sampler=Coins(), num_workers=1)",
        "with session(model=model, optimizer=optimizer) as s:",
        "    for batch in s.steps(loader): seen(batch, torch.rand(()))",
        size=9,
        save_at=2,
    )
    assert again.log[3] != calm.log[3]  # loaded ahead, from between the draws of the body
    assert "the sampler's order of epoch 0 is another one" in again.said


class SavedBehind(drawn_loops.Run):
    """Is saved at its second boundary: at the same step, where the next loop begins."""

    def boundary(self, step):
        self.num_boundaries = getattr(self, "num_boundaries", 0) + 1
        if self.num_boundaries == 2:
            super().boundary(step)


@pytest.mark.parametrize("change", ["tally()", "model[0].weight.data.mul_(0.5)"])
def test_what_is_saved_as_a_loop_begins_has_what_was_done_before_it(change):
    """Also where the loop before was gone on with at its very end."""
    calm, again = undisturbed_and_resumed(
        "loader = DataLoader(Plain(), 2, shuffle=True)",
        "def step(batch):",
        "    seen(now())",
        "    optimizer.zero_grad(); model(batch).sum().backward(); optimizer.step()",
        "with session(**named) as s:",
        "    for epoch in range(3):",
        "        for batch in s.steps(loader): step(batch)",
        "        " + change,
        size=6,
        save_at=3,
        dies_after=0,
        cuts=(drawn_loops.Run, SavedBehind),
    )
    assert "going on in loop 2, at step 3" in again.said
    assert_exact(calm, again, 3)
