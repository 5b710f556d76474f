"""Held values: the servers hold them, and ranks add changes and read them under a synchronisation model."""

from __future__ import annotations

from typing import Any

import torch

from paceline.common import abi
from paceline.common.compression import codec_of, split
from paceline.common.handles import synchronize
from paceline.common.operation import Held, Options, operation
from paceline.common.operators import Average
from paceline.common.process_sets import ProcessSet, check_process_set, global_process_set, process_set_number
from paceline.common.significance import Significance
from paceline.common.sync import Model, check, model_of
from paceline.torch._memory import Lent, dtype_number, host_copy, host_view, is_direct
from paceline.torch._ops_async import Part, start_one
from paceline.torch.compression import Compression


class Value:
    """A tensor that the servers hold. `declare` makes it.

    `clock` ends a rank's iteration. Reading does not change the value. Each rank may call all methods at its own pace,
    and no rank waits for one that has left. `declaring`, `using` and `reading` are for this package.
    """

    def __init__(
        self,
        like: torch.Tensor,
        name: str,
        model: Model,
        op: int,
        process_set: ProcessSet,
        options: Options,
    ) -> None:
        self.name = name
        self.model = model
        self._like = torch.empty(0, dtype=like.dtype, device=like.device)
        self._shape = like.shape
        self._dtype = dtype_number(like, reduces=True)
        self._fields: dict[str, Any] = {
            "reduce_op": op,
            "name": name,
            "process_set": process_set_number(process_set),
            "options": options,
        }
        self._pushed: torch.Tensor | None = None  # sum of this iteration's changes
        self._in_flight: int | None = None

    def declaring(self, tensor: torch.Tensor, root: int, group: str | None = None) -> Part:
        """The operation that declares the value and stores it in every rank's `tensor`.

        group: the first value of the group that is stepped together, for models with supersteps.
        """
        return self._part(Held(abi.DECLARE, group=group), tensor, tensor, root=root)

    def using(
        self,
        difference: torch.Tensor | None,
        target: torch.Tensor | None,
        priority: int,
        significance: float,
        within: bool = False,
    ) -> Part:
        """The operation that adds `difference` and reads into `target`.

        difference: None for zeros, which are not sent but count. within: the superstep continues, so that the rank does
        not wait.
        """
        use = abi.ADD | (0 if target is None else abi.READ)
        if within:
            use = abi.ADD | abi.READ_NOW | abi.WITHIN
        empty = difference is None
        return self._part(Held(use, significance), difference, target, priority=priority, empty=empty)

    def reading(self, target: torch.Tensor) -> Part:
        """The operation that reads the current value into `target`, without coding."""
        return self._part(Held(abi.READ_NOW | abi.EXACT), None, target)

    def _part(self, held: Held, given: torch.Tensor | None, target: torch.Tensor | None, **fields: Any) -> Part:
        for tensor in (given, target):
            if tensor is not None and (tensor.shape != self._shape or tensor.dtype != self._like.dtype):
                raise ValueError(
                    f"value {self.name!r} is {self._like.dtype} of shape {tuple(self._shape)}, "
                    f"not {tensor.dtype} of shape {tuple(tensor.shape)}"
                )
        source = None if given is None else host_view(given)
        room = None
        if target is not None:
            room = target if is_direct(target) else source if given is target else host_copy(target)

        def output(_: int) -> torch.Tensor | None:
            if target is not None and room is not None and room is not target:
                target.detach().copy_(room)
            return target

        op = operation(
            abi.ACCUMULATE,
            self._dtype,
            self._shape,
            0 if source is None else source.data_ptr(),
            0 if room is None else room.data_ptr(),
            held=held,
            **self._fields,
            **fields,
        )
        return Part(op, tuple(Lent(t, t is room) for t in (source, room) if t is not None), output)

    def push(self, difference: torch.Tensor) -> None:
        """Adds to this iteration's change, which `clock` sends. Raises ValueError for another shape or type."""
        if difference.shape != self._shape or difference.dtype != self._like.dtype:
            self._part(Held(abi.ADD), difference, None)
        if self._pushed is None:
            self._pushed = difference.detach().clone(memory_format=torch.contiguous_format)
        else:
            self._pushed.add_(difference.detach())

    def clock(self, significance: float = 0.0) -> None:
        """Ends this rank's iteration: starts to send what was pushed in it. Does not wait for other ranks.

        significance: |gradient| / |weights| of the iteration, for models that use it.
        """
        self._settle()
        pushed, self._pushed = self._pushed, None
        try:
            self._in_flight = start_one(self.using(pushed, None, 0, significance))
        except ValueError:  # nothing was sent: a pull of the value may be in flight
            self._pushed = pushed
            raise

    def pull(self, wait: bool = True) -> int:
        """Starts to read the value. Returns a handle for `poll` and `synchronize`; its output is a new tensor.

        wait: until the synchronisation model lets a rank continue that has ended as many iterations. Otherwise the
        output is the current value, whatever the other ranks have done.
        """
        self._settle()
        room = torch.empty(self._shape, dtype=self._like.dtype, device=self._like.device)
        return start_one(self._part(Held(abi.READ if wait else abi.READ_NOW), None, room))

    def sync(self) -> torch.Tensor:
        """Waits as long as the synchronisation model requires, then returns the value."""
        return synchronize(self.pull())

    def _settle(self) -> None:
        """Waits for the last iteration's push: one operation per name is in flight at a time."""
        handle, self._in_flight = self._in_flight, None
        if handle is not None:
            synchronize(handle)


def declare(
    tensor: torch.Tensor,
    name: str,
    sync: Model | str | None = None,
    root_rank: int = 0,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    compression: Any = Compression.none,
    pull_gate: Significance | None = None,
) -> Value:
    """Declares a held value, initially root_rank's tensor. Every rank of the set calls it, with the same arguments.

    `tensor` is filled with root_rank's, as in `broadcast_`. sync: the synchronisation model, such as paceline.SSP(3);
    default: PACELINE_SYNC. op: Average divides what ranks push by their number, Sum does not. compression: a codec of
    the engine, such as hvd.Compression.topk(0.01), for pushes and pulls; default: PACELINE_COMPRESSION. pull_gate:
    paceline.Significance(...): a read returns the result of this rank's previous read as long as less than that share
    of the value has changed.

    Raises ValueError for a model that cannot run, a Compressor, which works on tensors, a name that is empty, no string
    or declared already, a root_rank that is no int, or a tensor that is not of floating point; HorovodInternalError if
    ranks disagree.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"name={name!r}: a value needs a name, a string that is not empty")
    check_process_set(process_set)
    model = model_of(sync)
    check(model, process_set.size(), accumulate=True)
    if model.has_supersteps:
        raise ValueError(f"sync={model.setting}: supersteps are DistributedOptimizer's; give a value SSP or another")
    codec = codec_of(compression)
    if codec is None and compression is not Compression.none:
        raise ValueError(f"compression={compression!r}: what the servers hold can be coded by the engine's codecs only")
    Significance.check("pull_gate", pull_gate)
    text = None if codec is None else split(codec)[1].codec
    value = Value(tensor, name, model, op, process_set, Options(model.declared, model.soft_park, text, pull_gate))
    synchronize(start_one(value.declaring(tensor, root_rank)))
    return value
