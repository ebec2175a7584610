"""What torch says is kept from the log only where nobody has chosen what it says."""

import logging
import sys

import pytest

from outlast.attempt.early import QUIET_VARIABLE
from outlast.launch.first_look import level_to_set, quieten_loggers


def test_torchs_warnings_of_its_own_are_off_unless_chosen():
    assert level_to_set({"HOME": "/root"})["TORCH_CPP_LOG_LEVEL"] == "ERROR"


def test_a_level_counts_only_where_torch_has_yet_to_read_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", object())
    assert QUIET_VARIABLE not in level_to_set({})
    monkeypatch.delitem(sys.modules, "torch")
    assert level_to_set({})[QUIET_VARIABLE] == "1"


@pytest.mark.parametrize(
    "chosen",
    [
        {"TORCH_CPP_LOG_LEVEL": "INFO"},
        {"TORCH_CPP_LOG_LEVEL": ""},
        {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    ],
)
def test_what_the_owner_has_chosen_stands(chosen):
    assert level_to_set(chosen) == {}


def test_torchs_own_loggers_are_silent_unless_a_level_was_chosen():
    agents = logging.getLogger("torch.distributed.elastic.of_this_test")
    users = logging.getLogger("of_this_test")
    quieten_loggers({"LOGLEVEL": "INFO"})
    assert agents.level == logging.NOTSET
    quieten_loggers({})
    assert agents.level == logging.CRITICAL
    assert users.level == logging.NOTSET
