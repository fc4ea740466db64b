"""Reads the opcodes of a pickle before it is loaded, so that few bytes cannot take much memory.

Python's unpickler believes what a file says of itself. Nine bytes that put a number at place 2**27
of its memo have it reserve 2 GiB; a string or a frame may claim any length; and tuples inside of
tuples, as the key of a dict, are hashed for ever, or until the stack ends. So here is a reader of
no more than what `pickle.dump` writes of dicts, lists, strings and numbers, by protocols 2 to 5:

    lengths     end inside of the file
    the memo    is filled in order
    tuples      have one to three numbers, so a key is a string or as short as one
    integers    have at most 9 bytes

Whatever names something to import ends the scan, for the unpickler refuses it there.

One regular expression takes as many opcodes as it can in C, some millions a second. Only strings of
256 bytes or more, and places of the memo in protocols 2 and 3, are examined one by one.
"""

import re
from functools import cache
from mmap import mmap
from pickle import UnpicklingError

_MAX_INT_NBYTES = 9  # of an unsigned integer of 64 bits, with its sign
_END = (b".", b"")  # STOP, and a file without one
_IMPORTS = (b"c", b"i", b"\x93", b"P", b"Q")  # by name, or by what a program makes of a number


def _counted(longest: int) -> bytes:
    """A pattern of one byte that gives a length, and as many bytes."""
    return b"|".join(b"\\x%02x.{%d}" % (length, length) for length in range(longest + 1))


@cache
def _run() -> re.Pattern[bytes]:
    """Returns a pattern of a run of harmless opcodes."""
    number = rb"(?:K.|M..|J.{4}|[N\x88\x89]|G.{8}|\x8a(?:%b))" % _counted(_MAX_INT_NBYTES)
    opcodes = (
        rb"[\x94}\](aeus)]",  # MEMOIZE, a dict, a list, MARK, APPEND(S), SETITEM(S), ()
        rb"h.|j.{4}",  # BINGET, LONG_BINGET
        rb"\x8c(?:%b)" % _counted(255),  # SHORT_BINUNICODE
        rb"%b(?:\x85|%b(?:\x86|%b\x87)?)?" % (number, number, number),
        rb"\x95.{3}\x00{5}",  # FRAME; pickle.dump begins another one after 64 KiB
        rb"\x80[\x02-\x05]",  # PROTO
    )
    return re.compile(b"(?s)(?:%b)*+" % b"|".join(opcodes))


def scan(data: bytes | mmap) -> None:
    """Raises UnpicklingError for what could take much more memory or time than the file's size.

    What is cut off may pass, since the unpickler notices it without harm.
    """
    at, puts = 0, 0
    while True:
        run = _run().match(data, at)
        assert run is not None  # it may be empty
        at = run.end()
        opcode = data[at : at + 1]
        if opcode in _END or opcode in _IMPORTS:
            return
        if opcode == b"X":  # BINUNICODE
            at += 5 + int.from_bytes(data[at + 1 : at + 5], "little")
        elif opcode in (b"q", b"r"):  # BINPUT, LONG_BINPUT
            end = at + (2 if opcode == b"q" else 5)
            if int.from_bytes(data[at + 1 : end], "little") > puts:
                raise UnpicklingError(f"byte {at} leaves places of the memo out")
            at, puts = end, puts + 1
        else:
            raise UnpicklingError(f"byte {at}, {opcode!r}, is cut off, or none of a snapshot")
        if at > len(data):
            raise UnpicklingError(f"what ends at byte {at} is cut off")
