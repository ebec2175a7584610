"""The contract is asserted in a module of its own."""

import pytest

pytest.register_assert_rewrite("storage_contract")
