"""How much the tests check: a share of examples, seeds and cases, and all with OUTLAST_TEST_ALL=1.

Which examples Hypothesis tries differs from run to run, so many short runs see what a long one
sees. Where cases are numbered by seeds, the first ones are taken. Of rows of cases that cost
seconds each, OUTLAST_TEST_SEED chooses: one number gives the same ones in every process.
"""

import os
import random

from hypothesis import settings

ALL = bool(os.environ.get("OUTLAST_TEST_ALL"))
SHARE = 5
LEAST = 10  # fewer examples say too little


def examples(num):
    """A property test's settings: ``num`` examples, or that share of them."""
    return settings(max_examples=num if ALL else max(num // SHARE, min(num, LEAST)))


def some(cases, num):
    """``num`` of the cases, in their order."""
    cases = list(cases)
    chosen = random.Random(os.environ.get("OUTLAST_TEST_SEED", "")).sample(range(len(cases)), num)
    return cases if ALL else [cases[number] for number in sorted(chosen)]
