"""A settled forward, replayed: what is done with each saved tensor is written down, not decided.

    learning    every op is looked at (`runtime/hooks.py`); a `Scribe` (`scribe.py`) notes what is
                done (`notes.py`), and a `Writer` makes a script of the notes (`writer.py`)
    replaying   the i-th op of a forward does what the i-th op did (`replay.py`)
    by hand     `saving_context.py` chooses among the scripts of its setting, `following.py` counts

A `Script` (`script.py`) is what the one writes and the other follows, once it has been made into
functions with all that they need bound (`compiled.py`). Its guards are asked before an op runs, so
nothing is ever done with a tensor that another op saves.
"""
