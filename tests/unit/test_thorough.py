"""What is drawn is the same in every run, whatever else is loaded."""

import subprocess
import sys
from pathlib import Path

PROPERTY = """
import ours
from hypothesis import given, settings, strategies as st

seen = []

@settings(max_examples=300)
@given(st.integers(), st.text())
def test_drawn(number, text):
    seen.append((number, text))

def test_shown():
    print("drawn:", hash_of(repr(seen)))

def hash_of(text):
    import hashlib
    return hashlib.sha256(text.encode()).hexdigest()
"""
TESTS = Path(__file__).parents[1]


def drawn(place, more):
    """The digest of what a property test draws beside a module of ours with these lines."""
    place.mkdir()
    (place / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (place / "test_one.py").write_text(PROPERTY)
    (place / "ours.py").write_text(f"{more}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", str(place)]
    env = {"PYTHONPATH": str(TESTS), "PATH": ""}
    done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [one for one in done.stdout.splitlines() if "drawn:" in one]
    return line


def test_other_constants_change_nothing(tmp_path):
    one = drawn(tmp_path / "one", "A, B = 123456789, 'some words of ours'")
    assert drawn(tmp_path / "other", "A, B = 987654321, 'other words of ours'") == one
