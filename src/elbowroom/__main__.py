"""`python -m elbowroom` is the command `elbowroom`."""

from elbowroom.cli import main

main()
