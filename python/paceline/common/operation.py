"""Operations for the C ABI, with their options in structures of their own."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from paceline.common import abi
from paceline.common.engine import engine
from paceline.common.process_sets import ProcessSet, global_process_set, process_set_number
from paceline.common.significance import Significance


@dataclasses.dataclass(frozen=True)
class Options:
    """The options that a tensor is declared with: the same on every rank, and in every use of a held value."""

    sync: str | None = None  # synchronisation model; None: BSP
    soft_park: bool = False  # held values: delayed pulls wait in the soft-barrier order
    codec: str | None = None  # None: the job's
    pull_gate: Significance | None = None  # held values
    authenticated: bool = False  # on every connection: for bytes that receivers unpickle

    def of_gradient(self) -> Options:
        """Those of the gradient of an operation with these: what is exact stays so on the way back."""
        return PLAIN if self.codec == PLAIN.codec else DEFAULTS

    @functools.cached_property
    def pointers(self) -> tuple[Any, Any, Any]:
        """The structures of options in the order of pl_op, which operations share; None for the defaults."""
        sync = codec = gate = None
        if self.sync is not None or self.soft_park:
            sync = _pointer(abi.Sync, self.soft_park, _bytes(self.sync))
        if self.codec is not None:
            codec = _pointer(abi.Codec, 0, _bytes(self.codec))
        if self.pull_gate is not None:
            gate = _pointer(abi.Gate, 0, self.pull_gate.threshold, self.pull_gate.decay)
        return sync, codec, gate


DEFAULTS = Options()
PLAIN = Options(codec="none")  # also where the job has a codec: for what is no gradient


@dataclasses.dataclass(frozen=True)
class Held:
    """An operation's options on a value that the servers hold."""

    use: int
    significance: float = 0.0
    group: str | None = None

    def pointer(self) -> Any:
        """The structure of options."""
        return _pointer(abi.Held, self.use, self.significance, 0, _bytes(self.group))


class How(NamedTuple):
    """How tensors are reduced, and by which ranks."""

    op: int
    prescale: float = 1.0
    postscale: float = 1.0
    process_set: ProcessSet = global_process_set
    options: Options = DEFAULTS

    def fields(self) -> dict[str, Any]:
        """The same as fields of an operation. Raises ValueError if the set is not registered."""
        op, prescale, postscale, process_set, options = self
        scales = {"prescale": prescale, "postscale": postscale}
        return {"reduce_op": op, **scales, "process_set": process_set_number(process_set), "options": options}


class Repeat:
    """An allreduce that has ended well, and may be started again under its name with little work.

    It is submitted as pl_op.later, since nothing is wrong with it.
    """

    __slots__ = ("handles", "known_by", "memory", "op", "ops", "output", "round", "what")

    round: int
    handles: Sequence[int]
    memory: Any
    output: Any

    def __init__(self, op: abi.Op) -> None:
        assert op.again is not None
        self.op, self.ops = op, (op,)
        self.known_by, self.what = op.again
        op.later = True

    def begin(self, input: int, output: int, memory: Any, result: Any, at_once: bool) -> None:
        """Prepares it with other memory at these addresses, to be submitted. at_once: the caller waits for it next.

        memory: lives until it has ended, and has `check`, which raises RuntimeError if the program took it away.
        result: what `finish` returns.
        """
        op = self.op
        op.input, op.output, op.at_once = input, output, at_once
        self.handles, self.round = abi.no_handles(1), engine.round
        self.memory, self.output = memory, result

    def finish(self) -> Any:
        """Gives the output of one that has ended well, which may come again. Raises RuntimeError as the memory does."""
        output, memory, self.output, self.memory = self.output, self.memory, None, None
        _keep(self)
        memory.check()
        return output


# By process set and name. One that is in flight is not here: using its name twice is an error which the second caller
# gets at once.
_repeats: dict[tuple[int, str], Repeat] = {}

_MAX_REPEATS = 1 << 16


def repeated(process_set: int, name: str, what: tuple[Any, ...]) -> Repeat | None:
    """The one of that name, which is to be started now, if it is what it was: see `operation`."""
    repeat = _repeats.pop((process_set, name), None)
    return repeat if repeat is not None and repeat.what == what else None


def ended_well(op: abi.Op) -> None:
    """Notes that an operation has ended without an error, and may come again."""
    if op.again is not None:
        _keep(Repeat(op))


def _keep(repeat: Repeat) -> None:
    if len(_repeats) >= _MAX_REPEATS:
        _repeats.clear()
    _repeats[repeat.known_by] = repeat


def operation(
    kind: int,
    dtype: int,
    shape: Sequence[int],
    input: int,
    output: int,
    *,
    reduce_op: int = 0,
    process_set: int = 0,
    root: int = 0,
    priority: int = 0,
    splits: Sequence[int] | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    name: str | None = None,
    unnamed: bool = False,
    options: Options = DEFAULTS,
    held: Held | None = None,
    empty: bool = False,
) -> abi.Op:
    """A pl_op. input and output are addresses (0 where there are no bytes); shape is that of the input.

    unnamed: the name is not the program's: codecs keep nothing by it.
    """
    op = abi.Op(
        ctypes.sizeof(abi.Op),
        kind,
        dtype,
        reduce_op,
        process_set,
        abi.int32(root, "root rank"),
        priority and abi.int32(priority, "priority"),
        len(shape),
        _dimensions(tuple(shape)),
        input or None,
        output or None,
        None,
        0,
        prescale,
        postscale,
        _bytes(name),
        *options.pointers,
        None if held is None else held.pointer(),
        empty,
    )
    op.authenticated, op.unnamed = options.authenticated, unnamed
    if name is not None:
        # A join, too, begins a generation: it ends what is known of tensors, and refuses them while it waits.
        what = engine.generation, dtype, tuple(shape), reduce_op, prescale, postscale, priority, empty
        before = repeated(process_set, name, what)
        if kind == abi.ALLREDUCE and options is DEFAULTS:
            op.later = before is not None
            op.again = (process_set, name), what
    if splits is not None:
        op.splits, op.nsplits = _dimensions(tuple(splits)), len(splits)
    return op


@functools.lru_cache(maxsize=4096)
def _dimensions(shape: tuple[int, ...]) -> Any:
    return (ctypes.c_int64 * len(shape))(*shape)


def _pointer(structure: type[ctypes.Structure], *fields: Any) -> Any:
    return ctypes.pointer(structure(ctypes.sizeof(structure), *fields))


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else c_text(text)


def c_text(text: str) -> bytes:
    """The text for C, where a NUL would end it. Raises ValueError for what is none, has a NUL or is not Unicode."""
    if not isinstance(text, str):
        raise ValueError(f"name={text!r}: a name is a string, not {type(text).__name__}")
    if "\0" in text:
        raise ValueError(f"{text!r} has a NUL character, where a name would end for the engine")
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{text!r} is not Unicode text: it has half a surrogate pair") from None
