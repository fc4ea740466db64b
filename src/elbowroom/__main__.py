"""The command `elbowroom`, which is also `python -m elbowroom`.

The garbage collector is paused while the commands and torch are imported, which makes nearly half a
million objects and no garbage. Later collections leave these objects alone: a pass over them takes
0.2 s, and the imports of a training, such as that of torch.compile, cause several.
"""

import gc


def main() -> None:
    """Runs the command of this process's arguments."""
    enabled = gc.isenabled()
    gc.disable()
    from elbowroom.cli import main as run_command

    gc.freeze()
    if enabled:
        gc.enable()
    run_command()


if __name__ == "__main__":
    main()
