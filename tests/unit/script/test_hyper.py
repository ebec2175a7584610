"""Which hyperparameters count after a resume, and what is said of those that differ."""

import copy

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

from outlast.checkpoint.tree import flatten, unflatten
from outlast.errors import ConfigError
from outlast.script.hyper import Hyperparameters


class Script:
    """What a script makes; ``run`` is a job's attempt from somebody's checkpoint."""

    def __init__(self, *, groups=1, kind=torch.optim.SGD, schedule=None, **how):
        parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(groups)]
        self.optimizer = kind([{"params": [one]} for one in parameters], **how)
        self.named = {"optimizer": self.optimizer}
        if schedule is not None:
            self.named["scheduler"] = schedule(self.optimizer)

    def run(self, steps, saved=None, keep_new=()):
        """The lines that are said, and what is saved after so many steps."""
        hyper = Hyperparameters(self.named, keep_new)
        said = []
        if saved is not None:
            for name, one in self.named.items():
                one.load_state_dict(copy.deepcopy(saved["objects"][name]))
            said = hyper.resumed(saved["settings"])
        self.rates = []
        for _ in range(steps):
            self.rates.append([float(group["lr"]) for group in self.optimizer.param_groups])
            self.optimizer.step()
            if "scheduler" in self.named:
                self.named["scheduler"].step()
        objects = {name: one.state_dict() for name, one in self.named.items()}
        settings = unflatten(*flatten(hyper.state(), "settings"))  # as a checkpoint keeps it
        return said, {"objects": copy.deepcopy(objects), "settings": settings}


def step_lr(optimizer, **how):
    return schedulers.StepLR(optimizer, **{"step_size": 2, "gamma": 0.5, **how})


def warm_cosine(optimizer, t_max=20):
    warm = schedulers.LinearLR(optimizer, start_factor=0.1, total_iters=3)
    cosine = schedulers.CosineAnnealingLR(optimizer, T_max=t_max)
    return schedulers.SequentialLR(optimizer, [warm, cosine], milestones=[3])


SCHEDULES = {
    "none": None,
    "step": step_lr,
    "exponential": lambda it: schedulers.ExponentialLR(it, 0.9),
    "lambda": lambda it: schedulers.LambdaLR(it, lambda step: min(1.0, step / 4)),
    "multi": lambda it: schedulers.MultiStepLR(it, [2, 5]),
    "cosine": lambda it: schedulers.CosineAnnealingLR(it, 20),
    "warm": warm_cosine,
    "restarts": lambda it: schedulers.CosineAnnealingWarmRestarts(it, 3),
    "one cycle": lambda it: schedulers.OneCycleLR(it, 0.8, total_steps=30),
    "cyclic": lambda it: schedulers.CyclicLR(it, 0.01, 0.1),
    "polynomial": lambda it: schedulers.PolynomialLR(it, 20),
}


# --- what is no difference -----------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("is_tensor", [False, True])
def test_what_a_scheduler_makes_of_the_rate_is_no_difference(schedule, is_tensor):
    def script():
        lr = torch.tensor(0.1) if is_tensor else 0.1
        return Script(groups=2, lr=lr, momentum=0.9, schedule=schedule)

    saved = None
    for _ in range(3):
        said, saved = script().run(3, saved)
        assert not said


def test_a_rate_that_the_loop_itself_changes_is_no_difference():
    script = Script(lr=0.1)
    _, saved = script.run(1)
    saved["objects"]["optimizer"]["param_groups"][0]["lr"] = 0.001
    assert not Script(lr=0.1).run(1, saved)[0]


def test_objects_that_a_session_before_has_trained():
    script = Script(lr=0.1, schedule=step_lr)
    _, saved = script.run(3)
    assert not script.run(3, saved)[0]


# --- what is said --------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [None, step_lr, warm_cosine])
def test_another_rate_is_said_once_with_what_takes_it(schedule):
    _, saved = Script(lr=0.1, schedule=schedule).run(5)
    for _ in range(2):  # and again by the next attempt: it is still so
        said, saved = Script(lr=0.5, schedule=schedule).run(2, saved)
        (line,) = said
        assert line == (
            "optimizer.lr is 0.1 in the checkpoint and 0.5 in the script: the checkpoint's is "
            'used; outlast.session(…, keep_new=("optimizer.lr",)) takes the script\'s'
        )


def test_every_other_hyperparameter():
    def script(decay, gamma, betas):
        return Script(
            kind=torch.optim.AdamW,
            lr=0.1,
            weight_decay=decay,
            betas=betas,
            schedule=lambda it: step_lr(it, gamma=gamma),
        )

    _, saved = script(0.1, 0.5, (0.9, 0.95)).run(3)
    said, _ = script(0.0, 0.25, (0.9, 0.999)).run(1, saved)
    lines = "\n".join(said)
    assert lines == (
        "optimizer.betas is (0.9, 0.95) in the checkpoint and (0.9, 0.999) in the script: the "
        "checkpoint's is used\n"
        "optimizer.weight_decay is 0.1 in the checkpoint and 0.0 in the script: the checkpoint's "
        "is used\n"
        "scheduler.gamma is 0.5 in the checkpoint and 0.25 in the script: the checkpoint's is "
        "used\n"
        'outlast.session(…, keep_new=("optimizer.betas", "optimizer.weight_decay", '
        '"scheduler.gamma",)) takes the script\'s'
    )


def test_a_scheduler_inside_another():
    _, saved = Script(lr=0.1, schedule=warm_cosine).run(2)
    said, _ = Script(lr=0.1, schedule=lambda it: warm_cosine(it, 40)).run(1, saved)
    assert len(said) == 1
    assert said[0].startswith("scheduler._schedulers.1.T_max is 20 in the checkpoint and 40 in")


def test_many_groups_are_one_line():
    _, saved = Script(groups=3, lr=0.1).run(1)
    (said,) = Script(groups=3, lr=0.5).run(1, saved)[0]
    assert "is 0.1 in the checkpoint and 0.5 in the script in all 3 groups:" in said
    other = Script(groups=3, lr=0.1)
    other.optimizer.param_groups[1]["lr"] = 0.2
    (said,) = other.run(1, saved)[0]
    assert (
        "optimizer.lr of the 3 groups is 0.1, 0.1, 0.1 in the checkpoint and 0.1, 0.2, 0.1 in the "
        "script:"
    ) in said


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            [4],
            "optimizer.lr of group 4 is 0.1 in the checkpoint and 0.2 in the script (of 9 groups):",
        ),
        ([4, 5, 7], " and 0.2 in the script, and it differs in 2 more (of 9 groups):"),
    ],
)
def test_of_very_many_groups_the_first_that_differs_is_shown(changed, words):
    _, saved = Script(groups=9, lr=0.1).run(1)
    other = Script(groups=9, lr=0.1)
    for number in changed:
        other.optimizer.param_groups[number]["lr"] = 0.2
    (said,) = other.run(1, saved)[0]
    assert words in said


def test_of_long_values_the_part_that_differs_is_shown():
    class Phased(schedulers.LRScheduler):
        def __init__(self, optimizer, end):
            names = [
                {"phase": f"phase number {number}", "end": 10.0 * number} for number in range(4)
            ]
            self.phases = [*names, {"phase": "the last one", "end": end}]
            super().__init__(optimizer)

        def get_lr(self):
            return self.base_lrs

    _, saved = Script(lr=0.1, schedule=lambda it: Phased(it, 40.0)).run(1)
    (said,) = Script(lr=0.1, schedule=lambda it: Phased(it, 50.0)).run(1, saved)[0]
    assert said.startswith(
        "scheduler.phases[4].end is 40.0 in the checkpoint and 50.0 in the script: the checkpoint's"
    )


# --- what is kept new ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["none", "step", "exponential", "lambda", "multi", "cosine"])
@pytest.mark.parametrize("is_tensor", [False, True])
def test_a_rate_kept_new_goes_on_as_if_the_run_had_begun_with_it(name, is_tensor):
    def script(lr):
        lr = torch.tensor(lr, dtype=torch.float64) if is_tensor else lr
        return Script(groups=2, lr=lr, schedule=SCHEDULES[name])

    (whole := script(0.5)).run(12)
    _, saved = script(0.1).run(5)
    said, saved = (second := script(0.5)).run(3, saved, keep_new=("optimizer.lr",))
    assert "the script's is used (keep_new)" in said[0]
    # A later resume does not fall back, whether keep_new is there or not.
    for keep_new in ("optimizer.lr", ()):
        said, _ = (third := script(0.5)).run(4, saved, keep_new=keep_new)
        assert not said
        rates = torch.tensor(second.rates + third.rates)
        torch.testing.assert_close(rates, torch.tensor(whole.rates[5:]))


CYCLES = {
    "one cycle": lambda it, top: schedulers.OneCycleLR(it, top, total_steps=30),
    "of groups": lambda it, top: schedulers.OneCycleLR(it, [top, 2 * top], total_steps=30),
    "other ends": lambda it, top: schedulers.OneCycleLR(
        *(it, top), total_steps=30, div_factor=10 + top, final_div_factor=1e3 / top
    ),
    "cyclic": lambda it, top: schedulers.CyclicLR(it, 0.01, top, step_size_up=4),
    "both ends": lambda it, top: schedulers.CyclicLR(it, top / 5, top, step_size_up=4),
}


@pytest.mark.parametrize("cycle", CYCLES.values(), ids=CYCLES)
@pytest.mark.parametrize("is_tensor", [False, True])
@pytest.mark.parametrize("names", [("optimizer", "scheduler"), ("scheduler", "optimizer")])
def test_a_cycle_kept_new_goes_on_as_if_the_run_had_begun_with_it(cycle, is_tensor, names):
    def script(top):
        lr = torch.tensor(0.1, dtype=torch.float64) if is_tensor else 0.1
        made = Script(groups=2, lr=lr, momentum=0.9, schedule=lambda it: cycle(it, top))
        made.named = {name: made.named[name] for name in names}
        return made

    (whole := script(0.8)).run(20)
    _, saved = script(0.2).run(9)
    (said,), saved = (second := script(0.8)).run(4, saved, keep_new=("optimizer.lr",))
    assert said.endswith("the script's is used (keep_new)")
    said, _ = (third := script(0.8)).run(7, saved)
    assert not said
    rates = torch.tensor(second.rates + third.rates)
    torch.testing.assert_close(rates, torch.tensor(whole.rates[9:]))


def test_a_cycle_is_one_line_with_one_name():
    def script(top, total_steps=30):
        return Script(
            lr=0.1,
            momentum=0.9,
            schedule=lambda it: schedulers.OneCycleLR(it, top, total_steps=total_steps),
        )

    _, saved = script(0.25).run(4)
    (said,) = script(0.5).run(1, saved)[0]
    assert said == (
        "optimizer.lr is 0.01 in the checkpoint and 0.02 in the script (optimizer.max_lr and "
        "optimizer.min_lr go with it): the checkpoint's is used; "
        'outlast.session(…, keep_new=("optimizer.lr",)) takes the script\'s'
    )
    (said,) = script(0.25, 40).run(1, saved)[0]
    assert said.startswith(
        "scheduler.total_steps is 30 in the checkpoint and 40 in the script "
        "(scheduler._schedule_phases goes with it): the checkpoint's is used"
    )
    (whole := script(0.25, 40)).run(40)
    (second := script(0.25, 40)).run(30, script(0.25).run(10)[1], keep_new="scheduler.total_steps")
    torch.testing.assert_close(second.rates[1:], whole.rates[11:])


def test_the_highest_rate_alone_may_be_kept():
    def script(top):
        return Script(
            lr=0.1, momentum=0.9, schedule=lambda it: schedulers.OneCycleLR(it, top, total_steps=30)
        )

    _, saved = script(0.25).run(4)
    said, saved = script(0.5).run(1, saved, keep_new="optimizer.max_lr")
    assert said[0].startswith(
        "optimizer.max_lr is 0.25 in the checkpoint and 0.5 in the script: the"
    )
    assert said[1].startswith("optimizer.lr is 0.01 in the checkpoint and 0.02 in the script (")
    groups = saved["objects"]["optimizer"]["param_groups"]
    assert [(one["initial_lr"], one["max_lr"]) for one in groups] == [(0.01, 0.5)]


def test_a_scheduler_that_is_not_saved_keeps_its_own_bases():
    _, saved = Script(lr=0.1).run(2)
    script = Script(lr=0.5)
    script.run(2, saved, keep_new="optimizer.lr")
    assert script.rates == [[0.5], [0.5]]


def test_any_other_value_counts_from_here_on():
    def script(gamma, decay):
        return Script(lr=1.0, weight_decay=decay, schedule=lambda it: step_lr(it, gamma=gamma))

    _, saved = script(0.5, 0.1).run(4)
    names = ("scheduler.gamma", "optimizer.weight_decay")
    _, saved = (second := script(0.1, 0.2)).run(4, saved, keep_new=names)
    assert second.rates == [[0.25], [0.25], [pytest.approx(0.025)], [pytest.approx(0.025)]]
    assert second.optimizer.param_groups[0]["weight_decay"] == 0.2
    said, _ = (third := script(0.1, 0.2)).run(1, saved)
    assert not said
    assert third.named["scheduler"].gamma == 0.1


def test_what_is_put_back_between_loops_is_kept_again_and_only_that():
    _, saved = Script(lr=0.1, schedule=step_lr).run(3)
    script = Script(lr=0.5, schedule=step_lr)
    hyper = Hyperparameters(script.named, ("optimizer.lr",))
    for name, one in script.named.items():
        one.load_state_dict(copy.deepcopy(saved["objects"][name]))
    hyper.resumed(saved["settings"])
    scheduler = script.named["scheduler"]
    for keys in (["scheduler"], ["optimizer"], ["optimizer", "scheduler"]):
        for name in keys:
            script.named[name].load_state_dict(copy.deepcopy(saved["objects"][name]))
        hyper.put(keys)
        assert script.optimizer.param_groups[0]["lr"] == 0.25
        assert script.optimizer.param_groups[0]["initial_lr"] == 0.5
        assert (scheduler.base_lrs, scheduler.get_last_lr()) == ([0.5], [0.25])


def test_names_that_there_are_not():
    script = Script(lr=0.1, schedule=step_lr)
    with pytest.raises(ConfigError) as caught:
        Hyperparameters(script.named, ("optimizer.lr", "optimizer.rate"))
    said = str(caught.value)
    assert said.startswith("keep_new names 'optimizer.rate'; the hyperparameters are: optimizer.lr")
    assert "scheduler.gamma" in said
    assert "last_epoch" not in said
    with pytest.raises(ConfigError, match="the hyperparameters are: none"):
        Hyperparameters({}, "optimizer.lr")


# --- checkpoints without settings, and states from elsewhere -------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_checkpoint_without_settings_is_compared_as_far_as_training_leaves_it(schedule):
    def script(**how):
        return Script(lr=0.1, momentum=0.9, schedule=schedule, **how)

    _, saved = script().run(4)
    assert not script().run(1, {**saved, "settings": None})[0]
    (said,) = script(weight_decay=0.5).run(1, {**saved, "settings": None})[0]
    assert said.startswith("optimizer.weight_decay is 0 in the checkpoint and 0.5 in the script")
    if schedule in (None, step_lr):
        other = Script(lr=0.5, momentum=0.9, schedule=schedule)
        (said,) = other.run(1, {**saved, "settings": None})[0]
        assert said.startswith("optimizer.lr is 0.1 in the checkpoint and 0.5 in the script")


def test_an_optimizers_state_for_a_new_job():
    _, saved = Script(lr=0.1, schedule=step_lr).run(4)
    for keep_new, expected in (((), 0.025), ("optimizer.lr", 0.5)):
        script = Script(lr=0.5)
        hyper = Hyperparameters(script.named, keep_new)
        script.optimizer.load_state_dict(copy.deepcopy(saved["objects"]["optimizer"]))
        (said,) = hyper.started({"optimizer"})
        assert "optimizer.lr is 0.025 in the checkpoint and 0.5 in the script" in said
        assert script.optimizer.param_groups[0]["lr"] == expected
