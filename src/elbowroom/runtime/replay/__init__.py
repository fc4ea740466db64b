"""Replay of a settled forward: the action for each saved tensor is read from a script.

    learning    every op is examined (`runtime/hooks.py`); a `Tracer` (`tracer.py`) notes all
                actions (`notes.py`), and a `Writer` turns the notes into a script (`writer.py`,
                `instruction_writer.py`)
    replaying   the i-th op of a forward does what the i-th op did before (`replay.py`); a module
                that is recomputed saves its inputs alone (`module_calls.py`)
    which       `scripts.py` keeps the scripts of a plan or setting
    by hand     `saving_context.py` chooses among the scripts of its setting, `following.py` counts

A `Script` (`script.py`) is compiled to functions with all that they need bound (`compiled.py`). Its
guards run before an op does, so no action is ever applied to a tensor that another op saves.
"""
