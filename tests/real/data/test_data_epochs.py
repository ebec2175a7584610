"""``session.epochs()``: a resumed run is the rest of the undisturbed one, from its epoch on.

Not only the steps: what the code around the loops sees and does, too.
"""

import itertools

import drawn_loops
import pytest

import thorough

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of loaders that are put down in the midst of an epoch
]

LOADERS = {
    "stock": "DataLoader(Noise(), 3, shuffle=True)",
    "told": "DataLoader(Plain(), 3, sampler=DistributedSampler(DATA, num_replicas=1, rank=0))",
    "outlast": "outlast.data.Loader(Noise(), global_batch=3)",
    "flow": "DataLoader(MixedOwn(), batch_size=3)",
}
STEP = "optimizer.zero_grad(); model(batch).sum().backward(); optimizer.step()"
NUM_STEPS = {"two": 5, "reads the step": 5, "range inside": 6}  # of an epoch; three of any other
FORMS = {
    "one": ["for batch in s.steps(loader): step(batch)"],
    "two": [
        "for batch in s.steps(loader): step(batch)",
        "for batch in s.steps(late): step(batch)",
    ],
    "reads the step": [
        "rest = 20 - s.step",
        "for batch in s.steps(loader): step(batch)",
        "for batch in s.steps(late): step(batch)",
    ],
    "until": ["for batch in s.steps(loader, until=3 * epoch + 3): step(batch)"],
    "range inside": [
        "for _ in range(2):",
        "    for batch in s.steps(loader): step(batch)",
    ],
    "evaluated": [
        "for batch in s.steps(loader):",
        "    step(batch)",
        "    note('inside', *[x.sum().item() for x in DataLoader(DATA, 4, shuffle=True)])",
        "note(*[x.sum().item() for x in DataLoader(DATA, 4, shuffle=True)])",
    ],
    "helper": ["train(s.steps(loader))"],
}


def program(loader, body, *, save_at, outer="for epoch in s.epochs(4):"):
    made = drawn_loops.Program(0)
    made.save_at, made.dies_after = save_at, 1
    indent = "        " if outer.count(":") == 1 else "            "
    told = ["loader.sampler.set_epoch(epoch)"] if loader == "told" else []
    around = [
        "note('begin', epoch)",
        *told,
        *body,
        "note('behind', epoch, s.step, *now())",
        "scheduler.step(); tally(); note(random.random())",
    ]
    made.text = "\n".join(
        [
            drawn_loops.HEADER.format(size=9) + f"loader = {LOADERS[loader]}",
            "late = DataLoader(Plain(), 5, shuffle=True)",
            "def step(batch):",
            f"    seen(batch, now()); {STEP}",
            "def train(batches):",
            "    for batch in batches: step(batch)",
            "with session(**named) as s:",
            *["    " + line for line in outer.split("|")],
            *[indent + line for line in around],
            "    note('end', s.step, *now(), torch.rand(()).item())",
        ]
    )
    return made


def behind(notes, *begin):
    return notes[notes.index(begin) :]


SAVED_AT = [(1, 3), (4, 6), (8, 9)]  # in the midst of an epoch or at its end, of most forms
CASES = list(itertools.product(LOADERS, FORMS, itertools.chain(*SAVED_AT)))
# Each form in three epochs, both kinds of moments among them, each with another loader.
FEW = [
    (list(LOADERS)[(number + epoch) % len(LOADERS)], form, moments[(number + epoch) % 2])
    for number, form in enumerate(FORMS)
    for epoch, moments in enumerate(SAVED_AT)
]


@pytest.mark.parametrize(("loader", "form", "save_at"), CASES if thorough.ALL else FEW)
def test_the_rest_is_that_of_the_undisturbed_run(loader, form, save_at):
    made = program(loader, FORMS[form], save_at=save_at)
    with drawn_loops.on_nothing():
        calm = drawn_loops.Run(made).go()
        cut = drawn_loops.Run(made).go(dies=True)
        again = drawn_loops.Run(made, cut.saved).go()
    assert calm.error is None
    assert again.error is None, again.said
    assert again.log == {step: came for step, came in calm.log.items() if step >= save_at}
    # An epoch's last boundary is that of its loop's end, which one that ends by its step has not.
    epoch = (save_at - (form != "until")) // NUM_STEPS.get(form, 3)
    expected = behind(calm.notes, "begin", epoch)
    notes = [note for note in again.notes if note[0] != "inside"]
    assert notes == [note for note in expected if note[0] != "inside"]
    assert "going on at step" not in again.said
    assert "session.epochs" not in again.said


@pytest.mark.parametrize("folds", ["range(3)", "(1, 3, 2)"])
@pytest.mark.parametrize("save_at", [2, 6, 7, 12, 14, 18])
def test_one_after_another(folds, save_at):
    outer = f"for fold in {folds}:|    for epoch in s.epochs(2):"
    made = program("stock", FORMS["one"], save_at=save_at, outer=outer)
    with drawn_loops.on_nothing():
        calm = drawn_loops.Run(made).go()
        cut = drawn_loops.Run(made).go(dies=True)
        again = drawn_loops.Run(made, cut.saved).go()
    assert again.error is None, again.said
    assert again.log == {step: came for step, came in calm.log.items() if step >= save_at}
    epochs = (save_at - 1) // 3
    begins = [note for note in calm.notes if note[0] == "begin"]
    assert [note for note in again.notes if note[0] == "begin"] == begins[epochs:]
    assert again.notes[-1] == calm.notes[-1]
