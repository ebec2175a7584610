"""Scripts are drawn, run undisturbed, cut off and gone on with, each as a fresh program.

The session is the real one; what it stands on (keeper, ranks, disk) is not: a checkpoint is what
the session's own capture gives at a boundary, through JSON as on a disk. A program is source text,
so a draw that fails is printed as a script.
"""

import contextlib
import gc
import io
import json
import random
import tempfile
import types

import torch

from outlast import config
from outlast.checkpoint.tree import flatten, unflatten
from outlast.data import generators, open_feed, random_state, shield
from outlast.errors import OutlastError
from outlast.script.initial import Initial
from outlast.script.objects import Objects
from outlast.training import session as sessions
from outlast.training.afresh import Afresh
from outlast.training.position import Streams

STEPS_MAX = 26
LOOPS_MAX = 200
HEADER = """\
import functools, itertools, random
import numpy as np, torch
from torch.utils.data import *
import outlast
torch.manual_seed(11); random.seed(12); np.random.seed(13)
G = torch.Generator().manual_seed(1)
R = np.random.default_rng(2)
P = random.Random(3)
DATA = [torch.full((2,), float(n)) for n in range({size})]
class Plain(Dataset):
    def __len__(self): return len(DATA)
    def __getitem__(self, n): return DATA[n]
class Noise(Plain):
    def __getitem__(self, n): return DATA[n] + torch.rand(2) + random.random() + np.random.rand()
class Own(Plain):
    def __init__(self): self.rng = np.random.default_rng(5)
    def __getitem__(self, n): return DATA[n] + self.rng.random()
class OwnPy(Plain):
    def __init__(self): self.inner = {{"rng": random.Random(5)}}
    def __getitem__(self, n): return DATA[n] + self.inner["rng"].random()
class Shared(Plain):
    def __getitem__(self, n): return DATA[n] + R.random()
class Legacy(Plain):
    def __init__(self): self.transform = functools.partial(noisy, rng=np.random.RandomState(4))
    def __getitem__(self, n): return self.transform(DATA[n])
def noisy(x, rng): return x + rng.standard_normal()
class Flow(IterableDataset):
    def __iter__(self): return iter(DATA)
class Mixed(IterableDataset):
    def __iter__(self): return iter([DATA[n] for n in torch.randperm(len(DATA)).tolist()])
class MixedOwn(IterableDataset):
    def __init__(self): self.rng = np.random.default_rng(7)
    def __iter__(self): return iter([DATA[n] for n in self.rng.permutation(len(DATA))])
class Stateful(IterableDataset):
    def __init__(self): self.at = 0
    def __iter__(self):
        while self.at < len(DATA):
            self.at += 1
            yield DATA[self.at - 1]
        self.at = 0
    def state_dict(self): return {{"at": self.at}}
    def load_state_dict(self, state): self.at = state["at"]
class NpOrder(Sampler):
    def __init__(self): self.rng = np.random.default_rng(0)
    def __iter__(self): return iter(self.rng.permutation(len(DATA)).tolist())
    def __len__(self): return len(DATA)
class PyOrder(NpOrder):
    def __init__(self): self.rng = random.Random(0)
    def __iter__(self): return iter(self.rng.sample(range(len(DATA)), len(DATA)))
class Coins(NpOrder):
    def __iter__(self):
        for _ in DATA: yield int(torch.randint(len(DATA), ()))
class GCoins(NpOrder):
    def __iter__(self):
        for _ in DATA: yield int(torch.randint(len(DATA), (), generator=G))
class Told(NpOrder):
    def __init__(self): self.epoch = 0
    def set_epoch(self, epoch): self.epoch = epoch
    def __iter__(self):
        return iter(np.random.default_rng(self.epoch).permutation(len(DATA)).tolist())
def cycle(loader):
    while True: yield from loader
def once(loader):
    yield from loader
class Bar:
    def __init__(self, loader): self.loader = loader
    def __iter__(self):
        for batch in self.loader: yield batch
    def __len__(self): return len(self.loader)
class Rep:
    def __init__(self, sampler): self.sampler = sampler
    def __iter__(self):
        while True: yield from iter(self.sampler)
class Inf(DataLoader):
    def __init__(self, *a, **k):
        super().__init__(*a, **k)
        object.__setattr__(self, "batch_sampler", Rep(self.batch_sampler))
        self.iterator = super().__iter__()
    def __len__(self): return len(self.batch_sampler.sampler)
    def __iter__(self):
        for _ in range(len(self)): yield next(self.iterator)
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
class Tally:
    def __init__(self): self.count, self.sums = 0, torch.zeros(3)
    def __call__(self): self.count += 1; self.sums.data[1] += self.count
    def state_dict(self): return vars(self)
    def load_state_dict(self, state): vars(self).update(state)
tally = Tally()
named = dict(model=model, optimizer=optimizer, scheduler=scheduler, tally=tally)
def now():
    rate = optimizer.param_groups[0]["lr"]
    return model[0].weight.tolist(), rate, scheduler.last_epoch, tally.count, tally.sums.tolist()
"""

DATASETS = ["Plain()", "Plain()", "Noise()", "Own()", "OwnPy()", "Shared()", "Legacy()", "DATA"]
FLOWS = ["Flow()", "Mixed()", "MixedOwn()", "Stateful()"]
ORDERS = [
    "",
    "shuffle=True",
    "shuffle=True",
    "shuffle=True, generator=G",
    "sampler=RandomSampler(DATA, generator=G)",
    "sampler=RandomSampler(DATA, replacement=True)",
    "sampler=WeightedRandomSampler([1.0] * len(DATA), len(DATA))",
    "sampler=NpOrder()",
    "sampler=PyOrder()",
    "sampler=Coins()",
    "sampler=GCoins()",
    "sampler=Told()",
    "sampler=DistributedSampler(DATA, num_replicas=1, rank=0)",
]
DRAWS = ["", "", "torch.rand(())", "random.random()", "np.random.rand()"]
CHANGES = [
    "model[0].weight.data.mul_(0.5)",
    "with torch.no_grad(): model[0].bias[1] += 1.0",
    "model[0].weight.detach().numpy()[0, 1] = 0.25",
    "model[0].reset_parameters()",
    "optimizer.param_groups[0]['lr'] *= 0.5",
    "optimizer.state.clear()",
    "scheduler.step()",
    "scheduler.step()",
    "tally()",
]
OWN_DRAWS = ["torch.rand((), generator=G)", "R.random()", "P.random()"]


class Program:
    """One drawn script: ``text``, and what was drawn for it."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        pick = self.rng.choice
        self.size = pick([8, 9, 12])
        self.workers = pick([0] * 14 + [1, 2])
        loader = self._loader()
        body = self._body()
        loops = pick([self._one, self._epochs, self._epochs, self._start, self._while, self._two])
        lines = loops(*self._wrapped(loader))
        second = self.rng.random() < 0.07
        text = HEADER.format(size=self.size) + self.made_of
        if second:
            text += (
                "other = DataLoader(Noise(), batch_size=2, shuffle=True)\nbesides = iter(other)\n"
            )
            body += [
                "try: extra = next(besides)",
                "except StopIteration: besides = iter(other); extra = next(besides)",
                "seen(extra)",
            ]
        step = ["def step(batch):", *["    " + line for line in body]]
        if second:
            step.insert(1, "    global besides")
        text += "\n".join(step) + "\nwith session(**named) as s:\n"
        if self.rng.random() < 0.15:  # in front of the first loop
            lines.insert(0, pick(CHANGES))
        self.text = text + "\n".join("    " + line for line in lines) + "\n"
        self.save_at = self.rng.randrange(1, STEPS_MAX)
        self.dies_after = self.rng.choice([0, 1, 2])

    def _loader(self):
        pick = self.rng.choice
        self.takes_len = True
        batch = pick([2, 3, 4])
        kind = pick(["stock"] * 9 + ["flow"] * 3 + ["outlast", "list", "inf", "stateful"])
        more = f", num_workers={self.workers}" if self.workers else ""
        if self.workers and self.rng.random() < 0.4:
            more += ", persistent_workers=True"
        dataset, order = pick(DATASETS), pick(ORDERS)
        order = f", {order}" if order else ""
        if self.rng.random() < 0.2:
            more += ", drop_last=True"
        if kind == "stock":
            made_of = f"DataLoader({dataset}, batch_size={batch}{order}{more})"
            if self.rng.random() < 0.1:
                made_of = (
                    f"DataLoader({dataset}, batch_sampler=BatchSampler(NpOrder(), {batch}, False))"
                )
        elif kind == "inf":
            made_of = f"Inf({dataset}, batch_size={batch}{order}{more})"
        elif kind == "flow":
            self.takes_len = False
            made_of = f"DataLoader({pick(FLOWS)}, batch_size={batch}{more})"
        elif kind == "outlast":
            self.takes_len = False
            more = f", num_workers={self.workers}" if self.workers else ""
            made_of = f"outlast.data.Loader({dataset}, global_batch={batch}{more})"
        elif kind == "stateful":
            made_of = f"StatefulDataLoader(Plain(), batch_size={batch}, shuffle=True)"
        else:
            made_of = "[torch.full((2,), float(n)) for n in range(6)]"
        self.kind = kind
        self.made_of = f"loader = {made_of}\n"
        if kind == "stateful":
            self.made_of = (
                "from torchdata.stateful_dataloader import StatefulDataLoader\n" + self.made_of
            )
        self.has_epochs = "Told()" in order or "Distributed" in order
        self.has_epochs = self.has_epochs and kind == "stock" and ", sampler=" in made_of
        return "loader"

    def _wrapped(self, loader):
        """(expression, whether it is one iterator that is used up, how a batch is unpacked)."""
        if self.kind == "outlast":
            return loader, False, "batch"
        wrapped = self.rng.choice(
            ["{}"] * 6
            + ["cycle({})", "enumerate({})", "zip({}, itertools.count())", "Bar({})"]
            + ["map(torch.neg, {})", "once({})", "iter({})", "itertools.islice({}, 99)"]
        )
        one_shot = wrapped not in ("{}", "Bar({})")
        unpacked = {"e": "_, batch", "z": "batch, _"}.get(wrapped[0], "batch")
        if "iter(" in wrapped and wrapped[0] == "i":
            unpacked = "batch"
        return wrapped.format(loader), one_shot, unpacked

    def _body(self):
        pick = self.rng.choice
        lines = ["seen(batch)", "seen(now())"]
        draws = [pick(DRAWS)]
        if self.rng.random() < 0.3:
            draws.append(pick(OWN_DRAWS))
        lines += [f"seen({draw})" for draw in draws if draw]
        lines += ["optimizer.zero_grad(); model(batch).sum().backward(); optimizer.step()"]
        return lines

    def _pass(self, given, unpacked, limits=""):
        lines = [f"for {unpacked} in s.steps({given}{limits}):", "    step(batch)"]
        if self.rng.random() < 0.2:  # an evaluation behind the pass
            lines.append("seen(*DataLoader(DATA, batch_size=4, shuffle=True))")
        if self.rng.random() < 0.5:
            lines += self.rng.sample(CHANGES, self.rng.choice([1, 1, 2]))
        return lines

    def _one(self, given, one_shot, unpacked):
        endless = given.startswith("cycle")
        until = self.rng.randrange(6, STEPS_MAX)
        choices = [f", until={until}"]
        if not endless and not one_shot:
            choices.append(f", epochs={self.rng.randrange(2, 5)}")
        return self._pass(given, unpacked, self.rng.choice(choices))

    def _epochs(self, given, one_shot, unpacked):
        number = self.rng.randrange(2, 5)
        inner = []
        if self.has_epochs:
            inner.append("loader.sampler.set_epoch(epoch)")
        limits = ", until=5 * epoch + 5" if given.startswith("cycle") else ""
        if given.startswith("cycle") and self.rng.random() < 0.5:
            inner_given, before = "flow", [f"flow = {given}"]
        else:
            inner_given, before = given, []
        if self.rng.random() < 0.15:  # at an epoch's beginning
            inner.append(self.rng.choice(CHANGES))
        inner += self._pass(inner_given, unpacked, limits)
        if self.rng.random() < 0.15:
            inner.append(f"if s.step >= {self.rng.randrange(4, 12)}: break")
        lines = [f"for epoch in {self._range(number)}:", *["    " + line for line in inner]]
        if self.rng.random() < 0.2:  # nested
            lines = ["for fold in range(2):", *["    " + line for line in lines]]
            if limits:
                lines = [
                    line.replace("5 * epoch + 5", f"{5 * number} * fold + 5 * epoch + 5")
                    for line in lines
                ]
        return [*before, *lines]

    def _range(self, number):
        return self.rng.choice([f"range({number})", f"s.epochs({number})"])

    def _start(self, given, one_shot, unpacked):
        if not self.takes_len or given.startswith("cycle"):
            return self._epochs(given, one_shot, unpacked)
        number = self.rng.randrange(3, 6)
        loop = self.rng.choice(
            [
                "for epoch in range(s.step // len(loader), {n}):",
                "for epoch in range(s.step // len(loader), {n}):",
                "for _ in itertools.repeat(0, {n} - s.step // len(loader)):",
            ]
        ).format(n=number)
        inner = self._pass(given, unpacked)
        if self.has_epochs and "epoch" in loop:
            inner.insert(0, "loader.sampler.set_epoch(epoch)")
        return [loop, *["    " + line for line in inner]]

    def _while(self, given, one_shot, unpacked):
        if given.startswith("cycle"):
            return self._one(given, one_shot, unpacked)
        start = "s.step // len(loader)" if self.takes_len and self.rng.random() < 0.6 else "0"
        inner = self._pass(given, unpacked)
        if self.has_epochs:
            inner.insert(0, "loader.sampler.set_epoch(epoch)")
        lines = [f"epoch = {start}", "while s.step < 12:", *["    " + one for one in inner]]
        return [*lines, "    epoch += 1"]

    def _two(self, given, one_shot, unpacked):
        if given.startswith("cycle"):
            return self._one(given, one_shot, unpacked)
        first = self._pass(given, unpacked)
        second = self._pass("late", "batch")
        late = "late = DataLoader(Noise(), batch_size=4, shuffle=True)"
        if self.rng.random() < 0.5:
            inner = [*first, *second]
            return [late, f"for epoch in {self._range(2)}:", *["    " + one for one in inner]]
        lines = [f"for epoch in {self._range(2)}:", *["    " + one for one in first]]
        second = [f"for epoch in {self._range(2)}:", *["    " + one for one in second]]
        return [late, *lines, *second]


class Died(BaseException):
    """The process is killed."""


class Nothing:
    """Stands for what a session tells and nobody hears."""

    def __getattr__(self, name):
        return Nothing()

    def __call__(self, *args, **kwargs):
        return None

    def __bool__(self):
        return False

    def __iter__(self):
        return iter(())


class Footing(Nothing):
    """In place of ``outlast.training.footing.Footing``: one rank, checkpoints in memory."""

    run = None  # the Run that is going on

    def __init__(self, settings, objects, *args, **kwargs):
        self.link = types.SimpleNamespace(rank=0, world_size=1)
        self.books = Books(self.run, self.link)
        self.engine = Engine()
        self.agreement = Agreement(self.run)
        self.snapshots = Snapshots(self.agreement)
        self.sources = Sources(self.run)
        self.judging = types.SimpleNamespace(rollbacks=(), hasten=lambda: None)
        self.streams = Streams(self.link)
        self.afresh = Afresh(objects, self.link)
        self.ending = Ending()
        self.late = types.SimpleNamespace(loop=lambda *_: contextlib.nullcontext())


class Books(Nothing):
    listens = False

    def __init__(self, run, link):
        self.run, self.link = run, link
        self.samples = Samples()

    def open_feed(self, loader, trail, step):
        self.run.num_loops += 1
        assert self.run.num_loops < LOOPS_MAX, "its loops give no batch, and it has no end"
        return open_feed(loader, rank=0, world_size=1, trail=trail, step=step)


class Samples(Nothing):
    def all_stalled(self):
        return contextlib.nullcontext()

    catching_up = all_stalled


class Sources(Nothing):
    def __init__(self, run):
        self.run = run

    def regain(self, *_, **__):
        return self.run.regained

    def resume(self, check, begins_at=0):
        return types.SimpleNamespace(loaded=None)


class Snapshots(Nothing):
    num_waited = 0

    def __init__(self, begun):
        self.begun = begun

    def due(self, step):
        return None


class Engine(Nothing):
    committed_step = 0
    is_copying = False


class Agreement(Nothing):
    """At each boundary: is this the step that is saved?"""

    def __init__(self, run):
        self.run = run

    def boundary(self, step):
        self.run.boundary(step)
        return []


class Ending(Nothing):
    def is_due(self, *args):
        return False


class Run:
    """One run of a program, from ``checkpoint`` on if there is one."""

    def __init__(self, program, checkpoint=None):
        self.program = program
        self.checkpoint = checkpoint
        self.log, self.said, self.saved, self.error = {}, "", None, None
        self.notes = []  # of the code around the loops
        self._session = None
        self.dies = False
        self.num_loops = 0
        self.regained = None
        if checkpoint is not None:
            data, tensors = json.loads(checkpoint[0]), checkpoint[1]
            state = {key: unflatten(one, tensors) for key, one in data.items()}
            own = state.pop(sessions.OWN)
            self.regained = types.SimpleNamespace(
                state=state, own_of=lambda rank: own, world_size=1
            )

    def boundary(self, step):
        if self.dies and step >= self.program.save_at and self.saved is None:
            data, tensors = {}, {}
            for key, value in self._session._saving.state(step).items():
                data[key], found = flatten(value, key)
                tensors |= {name: tensor.detach().clone() for name, tensor in found.items()}
            self.saved = json.dumps(data), tensors

    def seen(self, *values):
        if self._session._void_steps.is_running:
            return  # the code behind a loop that had ended gets its variables
        step = self._session.step
        words = [value.tolist() if isinstance(value, torch.Tensor) else value for value in values]
        self.log.setdefault(step, []).append(words)

    def go(self, *, dies=False):
        self.dies = dies
        generators.forget()
        names = {
            "session": self.session,
            "seen": self._seen,
            "note": self._note,
            "__name__": "__main__",
        }
        err = io.StringIO()
        Footing.run = self
        with tempfile.TemporaryDirectory() as at, contextlib.redirect_stderr(err):
            self._directory = at
            try:
                code = compile(self.program.text, "/drawn/train.py", "exec")
                exec(code, names)
            except Died:
                pass
            except OutlastError as error:
                self.error = error
        for iterator in list(generators._known.made):  # as garbage it would wait for processes
            shield.shut_down(iterator)
        names.clear()
        self.said = err.getvalue() + (str(self.error) if self.error else "")
        gc.collect(0)
        return self

    def session(self, **named):
        settings = config.load({"dir": self._directory})
        objects = Objects(named)
        self._session = sessions.Session(settings, objects, Initial(objects))
        return self._session

    def _note(self, *values):
        self.notes.append(values)

    def _seen(self, *values):
        if self._session is None or not self._session._in_loop:
            return  # behind the loop: it is run again for finished loops, as always
        if (
            self.saved is not None
            and self._session.step >= self.program.save_at + self.program.dies_after
        ):
            raise Died
        self.seen(*values)


@contextlib.contextmanager
def on_nothing():
    """Sessions stand on :class:`Footing` meanwhile; random streams are put back behind."""
    before = sessions.Footing
    state = random_state.capture()
    sessions.Footing = Footing
    try:
        yield
    finally:
        sessions.Footing = before
        random_state.restore(state)


SAID = ("going on at step", "Build it as it was", "not finished", "has consumed", "had consumed")


def outcome_of(seed):
    """("equal" | "said" | "skipped" | "WRONG", program, what was said or differs)."""
    program = Program(seed)
    calm = Run(program).go()
    last = max(calm.log, default=-1)
    if calm.error is not None or last > 200:
        return "skipped", program, calm.said
    program.save_at = 1 + program.save_at % max(last, 1)
    cut = Run(program).go(dies=True)
    if cut.saved is None:
        return "skipped", program, ""
    again = Run(program, cut.saved).go()
    wanted = {step: came for step, came in calm.log.items() if step >= program.save_at}
    differs = [
        step for step in sorted(wanted | again.log) if wanted.get(step) != again.log.get(step)
    ]
    is_said = any(word in again.said for word in SAID)
    if not differs and again.error is None:
        return ("equal, and said" if is_said else "equal"), program, again.said
    if is_said:
        return "said", program, again.said
    return "WRONG", program, f"steps {differs[:5]} (saved at {program.save_at})\n{again.said}"


if __name__ == "__main__":
    import collections
    import sys
    import time
    import traceback

    first, count = int(sys.argv[1]), int(sys.argv[2])
    counts, since = collections.Counter(), time.process_time()
    with on_nothing():
        for seed in range(first, first + count):
            try:
                outcome, program, text = outcome_of(seed)
            except Exception:
                outcome, program, text = "CRASH", Program(seed), traceback.format_exc()
            counts[outcome] += 1
            if outcome.isupper() or (outcome != "equal" and count < 4):
                print(f"=== seed {seed}: {outcome}")
                print(program.text.split("optimizer = ")[1], text)
    print(dict(counts), f"{time.process_time() - since:.1f} s of a core")
