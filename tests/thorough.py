"""How much the tests check: a share of examples, seeds and cases; all of them in ``make test-all``.

What is drawn is the same in every run, so that a change is judged by what it changed. Others are
drawn where OUTLAST_TEST_SEED is a number (the same one, the same draws), and always new ones where
everything is tried (OUTLAST_TEST_ALL): what is found there is a fault of ours, and becomes a test
of its own.
"""

import os
import random

from hypothesis import settings

ALL = bool(os.environ.get("OUTLAST_TEST_ALL"))
SEED = "OUTLAST_TEST_SEED"
SHARE = 5
LEAST = 10  # fewer examples say too little


def examples(num):
    """A property test's settings: ``num`` examples, or that share of them."""
    count = num if ALL else max(num // SHARE, min(num, LEAST))
    return settings(max_examples=count, derandomize=not ALL and SEED not in os.environ)


def seed():
    """What draws begin with; it is printed, so that a failing test shows it."""
    if ALL:
        os.environ.setdefault(SEED, str(random.SystemRandom().randrange(10**6)))
    number = int(os.environ.get(SEED) or 0)
    print(f"{SEED}={number}")
    return number


def some(cases, num):
    """``num`` of the cases, in their order."""
    cases = list(cases)
    chosen = random.Random(os.environ.get(SEED, "")).sample(range(len(cases)), num)
    return cases if ALL else [cases[number] for number in sorted(chosen)]
