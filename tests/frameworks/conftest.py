"""The frameworks of elbowroom's users, as their quick starts use them, with one line added.

They need the extra `frameworks`, and run with `./scripts/test --frameworks`. Each test is skipped
where its library is not installed.
"""

import sys

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What libraries warn of among themselves is not ours."""
    here = __file__.rpartition("/")[0]
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(autouse=True)
def nothing_stays_chosen():
    """Accelerate chooses a precision once a process; each test may have its own."""
    yield
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
