"""How much the tests check: a share of the examples and seeds, and all with OUTLAST_TEST_ALL=1.

Which examples Hypothesis tries differs from run to run, so many short runs see what a long one
sees. Where cases are numbered by seeds, the first ones are taken.
"""

import os

from hypothesis import settings

ALL = bool(os.environ.get("OUTLAST_TEST_ALL"))
SHARE = 5
LEAST = 10  # fewer examples say too little


def examples(num):
    """A property test's settings: ``num`` examples, or that share of them."""
    return settings(max_examples=num if ALL else max(num // SHARE, min(num, LEAST)))
