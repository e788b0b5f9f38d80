"""The pickles of CIFAR, read as data: no object is made, nothing is imported, nothing is called.

A pickle is a program for a stack machine. Of its instructions only those are understood that build plain values (protocol 2, by
Python 2 or 3); the few names that NumPy's arrays mention are kept as words, and a "call" of one is a note of its arguments. The
array is then put together here, from its shape and its bytes. Every other instruction or name is refused.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from dpfed.errors import InputError

RECONSTRUCT = {"numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct"}
NAMES = RECONSTRUCT | {"numpy ndarray", "numpy dtype", "_codecs encode"}
PLAIN = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
VALUES = {"BININT", "BININT1", "BININT2", "SHORT_BINSTRING", "BINSTRING", "BINUNICODE"}
MOST_INSTRUCTIONS = 1_000_000  # CIFAR-100 has some 200,000


@dataclass(frozen=True)
class Name:
    """A name that the pickle mentions; only a word here."""

    words: str


@dataclass
class Call:
    """What the pickle would call, and with what; it is not called."""

    name: str
    arguments: Any
    state: Any = None


def read_pickled(data: bytes, path: Path) -> dict[str, Any]:
    """The dict in a pickle: texts, numbers, lists, tuples, and uint8 arrays."""
    try:
        found = _value(data)
        if not isinstance(found, dict):
            raise ValueError(f"it holds a {type(found).__name__}, not a dict")
        return {_text(name): value for name, value in cast(dict[Any, Any], found).items()}
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise InputError(
            f"{path}: is not a pickle of plain data and arrays in protocol 2 ({error}); nothing in it was run. Get the "
            "original file again."
        ) from error


def array(value: Any) -> np.ndarray:
    """The uint8 array that a value describes."""
    if not isinstance(value, Call) or value.name not in RECONSTRUCT or not isinstance(value.state, tuple):
        raise ValueError("no NumPy array where one was expected")
    _, shape, dtype, fortran, content = cast(tuple[Any, ...], value.state)
    if not isinstance(dtype, Call) or dtype.name != "numpy dtype" or _text(dtype.arguments[0]) != "u1" or fortran is not False:
        raise ValueError("the array does not hold uint8 numbers in C order")
    raw = content.encode("latin-1") if isinstance(content, str) else _encoded(content)
    if not all(type(length) is int and length >= 0 for length in shape) or np.prod(shape, dtype=object) != len(raw):
        raise ValueError(f"an array of shape {shape} cannot have {len(raw)} bytes")
    return np.frombuffer(raw, np.uint8).reshape(shape)


def _value(data: bytes) -> Any:
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}
    for count, (instruction, argument, position) in enumerate(pickletools.genops(data)):
        name = instruction.name
        if count > MOST_INSTRUCTIONS:
            raise ValueError("it has far too many instructions")
        if name == "PROTO" and count == 0 and argument == 2:
            continue
        if name == "STOP":
            if len(stack) != 1 or marks or (position or 0) + 1 != len(data):
                raise ValueError("it does not end where its value ends")
            return stack[0]
        if name in VALUES:
            stack.append(argument)
        elif name in PLAIN:
            stack.append(PLAIN[name])
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "EMPTY_DICT":
            stack.append(dict[Any, Any]())
        elif name == "EMPTY_LIST":
            stack.append(list[Any]())
        elif name in TUPLES:
            stack.append(tuple(_taken(stack, len(stack) - TUPLES[name])))
        elif name == "TUPLE":
            stack.append(tuple(_taken(stack, marks.pop())))
        elif name in ("APPEND", "APPENDS"):
            items = _taken(stack, marks.pop() if name == "APPENDS" else len(stack) - 1)
            _of(list, stack[-1]).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = _taken(stack, marks.pop() if name == "SETITEMS" else len(stack) - 2)
            _of(dict, stack[-1]).update(zip((_text(key) for key in items[::2]), items[1::2], strict=True))
        elif name == "GLOBAL" and argument in NAMES:
            stack.append(Name(argument))
        elif name == "REDUCE":
            function, arguments = _taken(stack, len(stack) - 2)
            stack.append(Call(_of(Name, function).words, _of(tuple, arguments)))
        elif name == "BUILD":
            (state,) = _taken(stack, len(stack) - 1)
            _of(Call, stack[-1]).state = state
        else:
            raise ValueError(f"byte {position}: {name} {argument if argument is not None else ''}".rstrip() + " is not allowed")
    raise ValueError("it has no end")


def _taken(stack: list[Any], start: int) -> list[Any]:
    """Everything above a height of the stack, taken off."""
    if not 0 <= start <= len(stack):
        raise IndexError("it takes more than there is")
    items = stack[start:]
    del stack[start:]
    return items


def _of(kind: type[Any], value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"a {type(value).__name__} where a {kind.__name__} was expected")
    return value


def _encoded(value: Any) -> bytes:
    """Bytes as Python 3 writes them in protocol 2: _codecs.encode(text, "latin1")."""
    if not isinstance(value, Call) or value.name != "_codecs encode" or value.arguments[1:] != ("latin1",):
        raise TypeError(f"a {type(value).__name__} where bytes were expected")
    return cast(str, value.arguments[0]).encode("latin-1")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _encoded(value).decode()
