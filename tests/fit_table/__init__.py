"""The table of a fit's transitions: `tests/unit/test_fit_transitions.py` runs it."""
