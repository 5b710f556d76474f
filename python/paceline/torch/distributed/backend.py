"""The backend: every operation of torch.distributed's interface of backends, on the engine's.

Common rules: roots and peers are ranks of the group, tensors of all ranks have the same size and type unless an
operation says otherwise, and an operation that ranks call differently fails on all of them. What is not in contiguous
host memory is copied.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Backend, ErrorType, Store
from torch.distributed.distributed_c10d import GroupName

from paceline.common import abi, operators
from paceline.common.engine import engine
from paceline.torch.distributed import latest
from paceline.torch.distributed.group import Group
from paceline.torch.distributed.job import World
from paceline.torch.distributed.memory import Memory, flat, kind_of, summand_of
from paceline.torch.distributed.monitored import monitored_barrier
from paceline.torch.distributed.reductions import BITWISE, Reduction, reduction_of
from paceline.torch.distributed.work import PacelineWork

Tensors = Sequence[torch.Tensor]


# PyTorch keeps the part of a backend that is in C++, and finds nothing when the part in Python is gone.
_alive: set[PacelineBackend] = set()


class PacelineBackend(Backend):
    """The backend of one process group."""

    # PyTorch asks a subclass for each of these.
    supports_splitting = True  # the members of a new group need no other ranks to make it
    supports_coalescing = supports_shrinking = supports_reconfigure = supports_window = False
    _supports_time_estimate = False

    def __init__(self, title: str, store: Store, world: World | None, group: Group, timeout: timedelta) -> None:
        super().__init__(group.rank, group.size)
        self._title, self._store, self._world, self._group, self._timeout = title, store, world, group, timeout
        self._options: Backend.Options | None = None
        _alive.add(self)

    @classmethod
    def join(
        cls, title: str, store: Store, rank: int, size: int, ranks: Sequence[int], name: str, timeout: timedelta
    ) -> PacelineBackend:
        """The backend of a new group. ranks: of the default group, in any order; empty: it is the default one."""
        latest.install()
        world = None if ranks else World(store, rank, size)
        if world is not None and engine.setting("compression"):
            from paceline.torch.distributed import ddp  # only where it is used: it imports DistributedDataParallel

            ddp.install()
        return cls(title, store, world, Group(name, title, ranks or range(size), timeout), timeout)

    # The group

    @property
    def group(self) -> Group:
        """The group's ranks and operations."""
        return self._group

    def getBackendName(self) -> str:
        """The name under which it was registered."""
        return self._title

    @property
    def options(self) -> Backend.Options:
        """The options that a group which is split off begins with."""
        if self._options is None:
            self._options = Backend.Options(self._title, self._timeout)
            self._options.group_name = GroupName(self._group.name)
            self._options.global_ranks_in_group = self._group.ranks
        return self._options

    def split(self, store: Store, ranks: Sequence[int], options: Backend.Options) -> PacelineBackend | None:
        """A group of some of this group's ranks."""
        if self._group.rank not in ranks:
            return None
        members = [self._group.ranks[r] for r in ranks]
        timeout = options._timeout
        group = Group(options.group_name, self._title, members, timeout)
        return PacelineBackend(self._title, store, None, group, timeout)

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Nothing: all ranks are connected."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the time after which operations that are called from now on fail."""
        self._timeout, self._group.timeout_s = timeout, timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _get_sequence_number_for_group(self) -> int:
        return self._group.count

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: every group counts from 0."""

    def get_error(self) -> ErrorType:
        """Success: an operation says itself what is wrong."""
        return ErrorType.SUCCESS

    def shutdown(self) -> None:
        """Ends the group; the default one leaves the job."""
        self._group.close()
        _alive.discard(self)
        if self._world is not None:
            self._world.leave()

    def abort(self) -> None:
        """Ends the group, and its works in flight with an error."""
        self.shutdown()

    # Reductions

    def allreduce(self, tensors: Tensors, options: Any) -> PacelineWork:
        """Reduces a tensor of every rank into it."""
        if tensors[0].is_sparse:
            return self._sparse(tensors, options)
        return self._reduce("all_reduce", tensors, options)

    def allreduce_coalesced(self, tensors: Tensors, options: Any) -> PacelineWork:
        """Reduces several tensors."""
        return self._reduce("all_reduce", tensors, options, coalesced=True)

    def allreduce_sparse(self, tensors: Tensors, options: Any) -> PacelineWork:
        """Sums sparse tensors, whose elements are gathered."""
        return self._sparse(tensors, options)

    def reduce(self, tensors: Tensors, options: Any) -> PacelineWork:
        """Reduces a tensor of every rank into that of the root; the others' stay as they are."""
        return self._reduce("reduce", tensors, options, root=options.rootRank)

    def _reduce(
        self, what: str, tensors: Tensors, options: Any, root: int | None = None, coalesced: bool = False
    ) -> PacelineWork:
        if not coalesced:
            _one(what, tensors)
        group, how = self._group, reduction_of(options.reduceOp, tensors[0])
        if how.bitwise is not None:
            return self._bitwise(what, tensors, how, options, root)
        memory = [Memory(t) for t in tensors]
        mine = root is None or root == group.rank
        outputs = [m.host if mine else torch.empty_like(m.host) for m in memory]

        def one(m: Memory, output: torch.Tensor) -> abi.Op:
            dtype, count = summand_of(m.tensor)
            where = m.address(), output.data_ptr()
            return group.op(abi.ALLREDUCE, (count,), dtype, *where, reduce_op=how.op, prescale=how.prescale)

        def make() -> abi.Op | list[abi.Op]:
            if not coalesced:
                return one(memory[0], outputs[0])
            return [_copied(one(m, o)) for m, o in zip(memory, outputs, strict=True)]

        return self._run(what, make, [*memory, *outputs], _storing(memory if mine else ()), list(tensors), options)

    def _bitwise(self, what: str, tensors: Tensors, how: Reduction, options: Any, root: int | None) -> PacelineWork:
        memory = [Memory(t) for t in tensors]
        assert how.bitwise is not None
        combine = BITWISE[how.bitwise]

        def finish(handles: Any) -> None:
            for m, handle in zip(memory, handles, strict=True):
                parts = self._gathered(handle, m.host)
                total = parts[0].clone()
                for part in parts[1:]:
                    combine(total, part, out=total)
                if root is None or root == self._group.rank:
                    m.tensor.detach().copy_(total.view(m.tensor.shape))

        def make() -> list[abi.Op]:
            return [_copied(self._gather_op(m)) for m in memory]

        return self._run(what, make, memory, finish, list(tensors), options)

    def _sparse(self, tensors: Tensors, options: Any) -> PacelineWork:
        _one("all_reduce", tensors)
        tensor = tensors[0]
        if reduction_of(options.reduceOp, tensor).op != operators.Sum:
            raise ValueError("sparse tensors are reduced by ReduceOp.SUM only")
        part = tensor.detach().coalesce()
        indices, values = Memory(part.indices().t().contiguous()), Memory(part.values())

        def finish(handles: Any) -> None:
            all_indices = self._rows(handles[0], indices.host)
            all_values = self._rows(handles[1], values.host)
            parts = (
                torch.sparse_coo_tensor(i.t(), v, tensor.shape, check_invariants=False)
                for i, v in zip(all_indices, all_values, strict=True)
            )
            with torch.no_grad():  # a detached sparse tensor would keep its own elements
                tensor.copy_(functools.reduce(torch.add, parts))

        def make() -> list[abi.Op]:
            return [_copied(self._gather_op(m)) for m in (indices, values)]

        return self._run("all_reduce", make, [indices, values], finish, list(tensors), options)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], options: Any) -> PacelineWork:
        """Reduces a list of tensors, one for each rank, of which this rank gets its own."""
        _one("reduce_scatter", outputs)
        parts = _list_for_all("reduce_scatter", inputs[0], self._group)
        sizes = [t.numel() for t in parts]
        if sizes[self._group.rank] != outputs[0].numel():
            raise ValueError(
                f"reduce_scatter: an output of {outputs[0].numel()} elements for {sizes[self._group.rank]}"
            )
        if len(set(sizes)) > 1:  # the engine shares rows out evenly
            whole = torch.cat([t.reshape(-1) for t in parts])
            return self._scatter_slice(whole, sizes, outputs[0], options)
        return self._reduce_scatter(
            "reduce_scatter", [(outputs[0], torch.stack([t.reshape(-1) for t in parts]))], options
        )

    def _scatter_slice(self, whole: torch.Tensor, sizes: list[int], output: torch.Tensor, options: Any) -> PacelineWork:
        group, how = self._group, reduction_of(options.reduceOp, whole)
        if how.bitwise is not None:
            raise ValueError("reduce_scatter of parts of different sizes takes no bitwise operator")
        dtype, count = summand_of(whole)
        begin = sum(sizes[: group.rank])

        def finish(_: Any) -> None:
            output.detach().copy_(whole[begin : begin + sizes[group.rank]].view(output.shape))

        def make() -> abi.Op:
            at = whole.data_ptr()
            return group.op(abi.ALLREDUCE, (count,), dtype, at, at, reduce_op=how.op, prescale=how.prescale)

        return self._run("reduce_scatter", make, [whole], finish, [output], options)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, options: Any) -> PacelineWork:
        """Reduces a tensor of as many equal parts as there are ranks, of which this rank gets its own."""
        return self._reduce_scatter("reduce_scatter_tensor", [(output, input)], options)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, options: Any) -> PacelineWork:
        """Several at once."""
        return self._reduce_scatter("reduce_scatter_tensor", list(zip(outputs, inputs, strict=True)), options)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, what: str, pairs: list[tuple[torch.Tensor, torch.Tensor]], options: Any) -> PacelineWork:
        group = self._group
        how = reduction_of(options.reduceOp, pairs[0][1])
        if how.bitwise is not None:
            raise ValueError(f"{what} takes no bitwise operator: use all_reduce")
        memory = []
        for output, input in pairs:
            if input.numel() != group.size * output.numel() or input.dtype != output.dtype:
                raise ValueError(
                    f"{what}: input of {input.numel()} elements of {input.dtype} for {group.size} outputs of "
                    f"{output.numel()} elements of {output.dtype}"
                )
            memory.append((Memory(output, filled=False), Memory(self._ascending(input))))

        def make() -> list[abi.Op]:
            ops = []
            for output, input in memory:
                dtype, count = summand_of(input.tensor)
                where = input.address(), output.address()
                shape = (group.size, count // group.size)
                ops.append(_copied(group.op(abi.REDUCESCATTER, shape, dtype, *where, how.op, prescale=how.prescale)))
            return ops

        keep = list(itertools.chain.from_iterable(memory))
        return self._run(what, make, keep, _storing([o for o, _ in memory]), [o for o, _ in pairs], options)

    # Transfers

    def broadcast(self, tensors: Tensors, options: Any) -> PacelineWork:
        """Sends the root's tensor to all."""
        _one("broadcast", tensors)
        group, root, m = self._group, options.rootRank, Memory(tensors[0])
        dtype, count = kind_of(m.host)

        def make() -> abi.Op:
            return group.op(abi.BROADCAST, (count,), dtype, m.address(), m.address(), root=root)

        finish = _storing(() if root == group.rank else [m])
        return self._run("broadcast", make, [m], finish, list(tensors), options)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, options: Any) -> PacelineWork:
        """Gives every rank the tensors of all."""
        _one("all_gather", inputs)
        return self._all_gather(
            "all_gather", [(_list_for_all("all_gather", outputs[0], self._group), inputs[0])], options
        )

    def allgather_coalesced(self, output_lists: Sequence[Tensors], inputs: Tensors, options: Any) -> PacelineWork:
        """Several at once; each list of outputs is one rank's."""
        pairs = [([outputs[i] for outputs in output_lists], t) for i, t in enumerate(inputs)]
        return self._all_gather("all_gather_coalesced", pairs, options)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, options: Any) -> PacelineWork:
        """Gives every rank the tensors of all, one after the other in one tensor."""
        return self._all_gather("all_gather_into_tensor", [(output, input)], options)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, options: Any) -> PacelineWork:
        """Several at once."""
        return self._all_gather("all_gather_into_tensor", list(zip(outputs, inputs, strict=True)), options)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather(self, what: str, pairs: list[tuple[Any, torch.Tensor]], options: Any) -> PacelineWork:
        memory = []
        for output, input in pairs:
            count = sum(t.numel() for t in output) if isinstance(output, list) else output.numel()
            if count != self._group.size * input.numel():
                raise ValueError(f"{what}: outputs of {count} elements for {self._group.size} of {input.numel()}")
            memory.append(Memory(input))

        def finish(handles: Any) -> None:
            for (output, _), m, handle in zip(pairs, memory, handles, strict=True):
                parts = self._gathered(handle, m.host)
                outputs = output if isinstance(output, list) else output.detach().view(self._group.size, -1)
                for part, into in zip(parts, outputs, strict=True):
                    into.detach().copy_(part.view(into.shape))

        def make() -> list[abi.Op]:
            return [_copied(self._gather_op(m)) for m in memory]

        outputs = [[o] if isinstance(o, torch.Tensor) else o for o, _ in pairs]
        return self._run(what, make, memory, finish, outputs[0] if len(outputs) == 1 else outputs, options)

    def _gather_op(self, m: Memory) -> abi.Op:
        dtype, count = kind_of(m.host)
        return self._group.op(abi.ALLGATHER, (count,), dtype, m.address(), 0)

    def _gathered(self, handle: int, like: torch.Tensor) -> list[torch.Tensor]:
        """The elements from each rank of the group, which brings as many as all others."""
        memory, rows, _ = engine.result(handle)
        if len(set(rows)) > 1:
            raise RuntimeError(f"the ranks of the group gave tensors of different sizes: {rows} elements or bytes")
        parts = flat(memory, like).chunk(self._group.size) if memory is not None else [like.new_empty(0)] * len(rows)
        return [parts[place] for place in self._group.places]

    def _rows(self, handle: int, like: torch.Tensor) -> list[torch.Tensor]:
        """The rows from each rank of the group; numbers of rows may differ."""
        memory, counts, _ = engine.result(handle)
        _, elements = kind_of(like)
        per = (elements * like.element_size()) // like.nbytes if like.nbytes else 1
        sizes = [c * (1 if per else like.element_size()) for c in counts]
        parts = flat(memory, like).split_with_sizes(sizes)
        return [parts[place].view(-1, *like.shape[1:]) for place in self._group.places]

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, options: Any) -> PacelineWork:
        """Gives the root the tensors of all."""
        _one("gather", inputs)
        group, root, m = self._group, options.rootRank, Memory(inputs[0])
        into = _list_for_all("gather", outputs[0], group) if root == group.rank else []
        if any(t.numel() != inputs[0].numel() for t in into):
            raise ValueError("gather: outputs of other sizes than the input")
        dtype, count = kind_of(m.host)
        splits = [count if r == root else 0 for r in range(group.size)]

        def finish(handles: Any) -> None:
            self._receive(handles[0], m.host, into)

        return self._exchange("gather", m, dtype, count, splits, finish, [list(into)] if into else [], options)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], options: Any) -> PacelineWork:
        """Gives each rank its own of the root's tensors."""
        _one("scatter", outputs)
        group, root = self._group, options.rootRank
        output = outputs[0]
        if root == group.rank:
            parts = _list_for_all("scatter", inputs[0], group)
            if any(t.numel() != output.numel() for t in parts):
                raise ValueError("scatter: inputs of other sizes than the output")
            m = Memory(torch.cat([t.detach().reshape(-1) for t in parts]))
        else:
            m = Memory(output.new_empty(0))
        dtype, count = kind_of(m.host)
        splits = [count // group.size] * group.size

        def finish(handles: Any) -> None:
            self._receive(handles[0], m.host, [output if r == root else output.new_empty(0) for r in range(group.size)])

        return self._exchange("scatter", m, dtype, count, splits, finish, list(outputs), options)

    def alltoall(self, outputs: Tensors, inputs: Tensors, options: Any) -> PacelineWork:
        """Gives each rank its own tensor of this rank's, and gets one of each. Sizes may differ."""
        for tensors in (outputs, inputs):
            if len(tensors) != self._group.size:
                raise ValueError(f"all_to_all: {len(tensors)} tensors for {self._group.size} ranks")
        m = Memory(torch.cat([t.detach().reshape(-1) for t in inputs]))
        dtype, count = kind_of(m.host)
        splits = [kind_of(t)[1] for t in inputs]

        def finish(handles: Any) -> None:
            self._receive(handles[0], m.host, outputs)

        return self._exchange("all_to_all", m, dtype, count, splits, finish, list(outputs), options)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        options: Any,
    ) -> PacelineWork:
        """Gives each rank its rows of this rank's, and gets rows of each. Without splits they are shared evenly."""
        gives = _elements("all_to_all_single", input, input_splits, self._group.size)
        gets = _elements("all_to_all_single", output, output_splits, self._group.size)
        m = Memory(input)
        dtype, count = kind_of(m.host)
        unit = count // input.numel() if input.numel() else 1

        def finish(handles: Any) -> None:
            if output.is_contiguous():
                self._receive(handles[0], m.host, output.detach().view(-1).split_with_sizes(gets))
            else:
                into = torch.empty(output.numel(), dtype=output.dtype)
                self._receive(handles[0], m.host, into.split_with_sizes(gets))
                output.detach().copy_(into.view(output.shape))

        splits = [unit * n for n in gives]
        return self._exchange("all_to_all", m, dtype, count, splits, finish, [output], options)

    alltoall_base = all_to_all_single

    def _exchange(
        self, what: str, m: Memory, dtype: int, count: int, splits: list[int], finish: Any, outputs: Any, options: Any
    ) -> PacelineWork:
        """An alltoall: splits has how many elements go to each rank of the group."""
        group = self._group
        if not group.ordered:
            parts = m.host.view(-1).split_with_sizes([m.host.numel() * n // max(count, 1) for n in splits])
            m = Memory(torch.cat([parts[group.places.index(i)] for i in range(group.size)]))
            splits = [splits[group.places.index(i)] for i in range(group.size)]

        def make() -> abi.Op:
            return group.op(abi.ALLTOALL, (count,), dtype, m.address(), 0, splits=splits)

        return self._run(what, make, [m], finish, outputs, options)

    def _receive(self, handle: int, like: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
        """Stores what came from each rank of the group. Raises RuntimeError where it is not as much as expected."""
        memory, rows, _ = engine.result(handle)
        whole = flat(memory, like)
        total = max(sum(rows), 1)
        sizes = [whole.numel() * n // total for n in rows]
        parts = whole.split_with_sizes(sizes)
        for r, output in enumerate(outputs):
            part = parts[self._group.places[r]]
            if part.numel() != output.numel():
                raise RuntimeError(
                    f"rank {r} of the group sent {part.numel()} elements, and {output.numel()} were expected"
                )
            output.detach().copy_(part.view(output.shape))

    def _ascending(self, whole: torch.Tensor) -> torch.Tensor:
        """Equal parts of a tensor, one for each rank of the group, in the engine's order."""
        if self._group.ordered:
            return whole
        parts = whole.detach().reshape(self._group.size, -1)
        return parts[[self._group.places.index(i) for i in range(self._group.size)]]

    # Messages

    def send(self, tensors: Tensors, to: int, tag: int) -> PacelineWork:
        """Sends a tensor to one rank, which receives it with the same tag."""
        _one("send", tensors)
        m = Memory(tensors[0])
        dtype, count = kind_of(m.host)

        def make() -> abi.Op:
            return self._group.op(abi.SEND, (count,), dtype, m.address(), 0, root=to, tag=tag)

        return self._run("send", make, [m], None, list(tensors), None)

    def recv(self, tensors: Tensors, source: int, tag: int) -> PacelineWork:
        """Receives the next tensor of a rank that has the tag."""
        return self._receive_message("recv", tensors, source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> PacelineWork:
        """Receives the next tensor of any rank that has the tag; the work has the sender."""
        return self._receive_message("recvAnySource", tensors, abi.ANY_RANK, tag)

    def _receive_message(self, what: str, tensors: Tensors, source: int, tag: int) -> PacelineWork:
        _one(what, tensors)
        m, sender = Memory(tensors[0], filled=False), [source]
        dtype, count = kind_of(m.host)

        def finish(handles: Any) -> None:
            m.store()
            sender[0] = self._group.ranks.index(engine.result(handles[0])[2])

        def make() -> abi.Op:
            return self._group.op(abi.RECEIVE, (count,), dtype, 0, m.address(), root=source, tag=tag)

        work = self._run(what, make, [m], finish, list(tensors), None)
        work.sender = sender
        return work

    # Barriers

    def barrier(self, options: Any) -> PacelineWork:
        """Ends when every rank of the group has called it."""
        return self._run("barrier", lambda: self._group.op(abi.BARRIER, (), abi.UINT8, 0, 0), [], None, [], options)

    def monitored_barrier(self, options: Any, wait_all_ranks: bool = False) -> None:
        """A barrier that names the ranks which do not come in time."""
        self._group.count += 1
        timeout = options.timeout if options.timeout >= timedelta(0) else self._timeout
        monitored_barrier(self._store, self._group, timeout, wait_all_ranks)

    def _run(self, what: str, make: Any, memory: Any, finish: Any, outputs: Any, options: Any) -> PacelineWork:
        return latest.started(self._group.run(what, make, memory, finish, outputs, options))


def _one(what: str, tensors: Tensors) -> None:
    if len(tensors) != 1:
        raise ValueError(f"{what} takes one tensor on each rank, not {len(tensors)}")


def _list_for_all(what: str, tensors: Tensors, group: Group) -> list[torch.Tensor]:
    if len(tensors) != group.size:
        raise ValueError(f"{what}: a list of {len(tensors)} tensors for {group.size} ranks")
    return list(tensors)


def _elements(what: str, tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
    """How many elements go to each rank, or come from it."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if not splits:
        if rows % size:
            raise ValueError(
                f"{what}: Tensor's dim 0 does not divide equally across group size: {rows} rows, {size} ranks"
            )
        return [tensor.numel() // size] * size
    if len(splits) != size or sum(splits) != rows:
        raise ValueError(
            f"{what}: Split sizes doesn't match total dim 0 size: {list(splits)} of {rows} rows, {size} ranks"
        )
    row = tensor.numel() // rows if rows else 0
    return [n * row for n in splits]


def _storing(memory: Sequence[Memory]) -> Any:
    """What gives tensors that are copied their results; None where none is."""
    copied = [m for m in memory if m.host is not m.tensor]
    if not copied:
        return None

    def finish(_: Any) -> None:
        for m in copied:
            m.store()

    return finish


def _copied(op: abi.Op) -> abi.Op:
    return abi.Op.from_buffer_copy(op)
