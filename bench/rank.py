"""One rank under measurement: rank.py paceline|gloo|horovod. Its commands are the methods of Rank (commands.py).

A wrong result ends the rank with an error.
"""

import importlib
import os
import resource
import sys
import time
from pathlib import Path

import shapes
import torch
from commands import obey

PERIOD = 4093  # elements after which values repeat: a prime, so that swapped partitions give wrong sums
MODULUS = 16411  # a prime above the greatest number of ranks: none has the same sum everywhere
MIB = 1 << 20


class Horovods:
    """Sums by Horovod's API: paceline.torch or horovod.torch."""

    def __init__(self, module):
        self.hvd = hvd = importlib.import_module(module)
        hvd.init()
        self.rank, self.size, self.barrier, self.end = hvd.rank(), hvd.size(), hvd.barrier, hvd.shutdown

    def sum(self, tensor, name):
        """Sums in place and waits."""
        self.hvd.allreduce_(tensor, op=self.hvd.Sum, name=name)

    def sums(self, tensors, name):
        """Sums several in place at the same time, and waits for all."""
        handles = [self.hvd.allreduce_async_(t, op=self.hvd.Sum, name=f"{name}/{i}") for i, t in enumerate(tensors)]
        for handle in handles:
            self.hvd.synchronize(handle)

    def broadcast(self, tensor, name):
        """Rank 0's tensor, in place."""
        return self.hvd.broadcast_(tensor, 0, name=name)

    def allgather(self, tensor, name):
        """All ranks' tensors in a new one."""
        return self.hvd.allgather(tensor, name=name)

    def alltoall(self, tensor, name):
        """A new tensor of a part of each rank's."""
        return self.hvd.alltoall(tensor, name=name)

    def reducescatter(self, tensor, name):
        """A part of the sum, in a new tensor."""
        return self.hvd.reducescatter(tensor, op=self.hvd.Sum, name=name)


class Gloo:
    """Sums by torch.distributed's Gloo."""

    def __init__(self):
        import torch.distributed as dist

        self.dist = dist
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = "file://" + os.environ["BENCH_STORE"]
        dist.init_process_group("gloo", init_method=store, rank=self.rank, world_size=self.size)
        self.barrier, self.end = dist.barrier, dist.destroy_process_group

    def sum(self, tensor, name):
        """Sums in place and waits."""
        self.dist.all_reduce(tensor)

    def sums(self, tensors, name):
        """Sums several in place at the same time, and waits for all."""
        for work in [self.dist.all_reduce(t, async_op=True) for t in tensors]:
            work.wait()

    def broadcast(self, tensor, name):
        """Rank 0's tensor, in place."""
        self.dist.broadcast(tensor, 0)
        return tensor

    def allgather(self, tensor, name):
        """All ranks' tensors in a new one."""
        out = tensor.new_empty(tensor.numel() * self.size)
        self.dist.all_gather_into_tensor(out, tensor)
        return out

    def alltoall(self, tensor, name):
        """A new tensor of a part of each rank's."""
        out = torch.empty_like(tensor)
        self.dist.all_to_all_single(out, tensor)
        return out

    def reducescatter(self, tensor, name):
        """A part of the sum, in a new tensor."""
        out = tensor.new_empty(tensor.numel() // self.size)
        self.dist.reduce_scatter_tensor(out, tensor)
        return out


class Rank:
    """The commands, over one of the systems above."""

    def __init__(self, system):
        self.system = system
        place = torch.arange(PERIOD)
        every = [(_residue(place, rank + 1) - _residue(place, rank)).float() for rank in range(system.size)]
        self.mine, self.sum, self.every = every[system.rank], sum(every), every
        self.rooms = {}
        self.resnet = [torch.empty(n) for n in shapes.RESNET50]
        self.flat, self.models = None, {}

    def allreduce(self, bytes, in_a_row, way=None):
        """`in_a_row` tensors of `bytes`, one after the other. way: "arena" has them in Paceline's."""
        tensors = list(self._room(way, bytes * in_a_row // 4).split(bytes // 4))
        return self._timed(tensors, lambda: [self.system.sum(t, f"bench/{bytes}") for t in tensors])

    def broadcast(self, bytes, in_a_row):
        """`in_a_row` tensors of `bytes` from rank 0, one after the other."""
        return self._collective("broadcast", bytes, in_a_row, bytes, lambda n, i: _periods(self.every[0], n, i))

    def allgather(self, bytes, in_a_row):
        """Results of `bytes`, of which each rank has an equal part."""
        part = bytes // self.system.size
        return self._collective(
            "allgather",
            bytes,
            in_a_row,
            part,
            lambda n, i: torch.cat([_periods(e, n // self.system.size, i) for e in self.every]),
        )

    def alltoall(self, bytes, in_a_row):
        """Tensors of `bytes`, of which each rank gets an equal part."""
        return self._collective(
            "alltoall",
            bytes,
            in_a_row,
            bytes,
            lambda n, i: torch.cat([self._part(_periods(e, n, i)) for e in self.every]),
        )

    def reducescatter(self, bytes, in_a_row):
        """Tensors of `bytes`, of whose sum each rank gets an equal part."""
        return self._collective(
            "reducescatter", bytes, in_a_row, bytes, lambda n, i: self._part(_periods(self.sum, n, i))
        )

    def _part(self, tensor):
        return tensor.chunk(self.system.size)[self.system.rank]

    def _collective(self, kind, bytes, in_a_row, input_bytes, want):
        """Seconds of `in_a_row` of a kind, whose result i for tensors of `bytes` is want(elements, i)."""
        tensors = [_periods(self.mine, input_bytes // 4, i) for i in range(in_a_row)]
        do = getattr(self.system, kind)
        self.system.barrier()
        began = time.perf_counter()
        results = [do(t, f"bench/{kind}/{bytes}") for t in tensors]
        seconds = time.perf_counter() - began
        for i, result in enumerate(results):
            if not torch.equal(result, want(bytes // 4, i)):
                sys.exit(f"rank {self.system.rank}: {kind} {i} of {bytes} bytes has a wrong result")
        return {"seconds": seconds}

    def many(self, count, bytes, way=None):
        """`count` tensors of `bytes` at once."""
        tensors = list(self._room(way, count * bytes // 4).split(bytes // 4))
        return self._timed(tensors, lambda: self.system.sums(tensors, f"many/{bytes}"))

    def _room(self, way, elements):
        if self.rooms.get(way, torch.empty(0)).numel() < elements:
            self.rooms[way] = self.system.hvd.zeros_in_arena(elements) if way == "arena" else torch.empty(elements)
        return self.rooms[way][:elements]

    def resnet50(self, way):
        """ResNet-50's gradients, the last layer's first: each by itself, or copied to and from buckets as DDP does."""
        if way == "arena":
            tensors = list(self._room(way, sum(shapes.RESNET50)).split(shapes.RESNET50))
            return self._timed(tensors, lambda: self.system.sums(tensors, "resnet50"))
        if way == "tensors":
            return self._timed(self.resnet, lambda: self.system.sums(self.resnet, "resnet50"))
        return self._timed(self.resnet, lambda: self._buckets())

    def gradients(self, model):
        """A model's gradients, the last layer's first, each by itself."""
        if model not in self.models:
            self.models[model] = [torch.empty(n) for n in shapes.gradients()[model]]
        return self._timed(self.models[model], lambda: self.system.sums(self.models[model], model))

    def idle(self, seconds):
        """Does nothing for some seconds. Answers with the CPU time."""
        self.system.barrier()
        before = _cpu()
        time.sleep(seconds)
        return {"cpu": _cpu() - before}

    def _buckets(self):
        if self.flat is None:
            buckets = list(shapes.buckets(shapes.RESNET50, 25 * MIB // 4))
            self.flat = [(torch.empty(sum(shapes.RESNET50[i] for i in b)), b) for b in buckets]
        for flat, members in self.flat:
            torch.cat([self.resnet[i] for i in members], out=flat)
        self.system.sums([flat for flat, _ in self.flat], "bucket")
        for flat, members in self.flat:
            pieces = flat.split([self.resnet[i].numel() for i in members])
            for i, piece in zip(members, pieces, strict=True):
                self.resnet[i].copy_(piece)

    def _timed(self, tensors, exchange):
        for i, t in enumerate(tensors):
            mine = _from(self.mine, i)
            _whole(t).copy_(mine)
            _rest(t).copy_(mine[: _rest(t).numel()])
        self.system.barrier()
        began = time.perf_counter()
        exchange()
        seconds = time.perf_counter() - began
        for i, t in enumerate(tensors):
            right = _from(self.sum, i)
            if not ((_whole(t) == right).all() and torch.equal(_rest(t), right[: _rest(t).numel()])):
                sys.exit(f"rank {self.system.rank}: tensor {i} of {t.numel()} elements has a wrong sum")
        return {"seconds": seconds}


def _residue(place, rank):
    """A rank's values are the steps to the next one's, whose sum is one step for any number of ranks: from -3 to 3."""
    at = place + PERIOD * rank
    return at * at % MODULUS % 4


def _from(values, number):
    """The period of a tensor of an exchange: each starts at another place."""
    return values.roll(-number)


def _periods(values, n, number):
    """A tensor of n elements that repeats the values."""
    return _from(values, number).repeat(n // PERIOD + 1)[:n].clone()


def _whole(tensor):
    """The tensor's whole periods, one per row."""
    return tensor[: tensor.numel() // PERIOD * PERIOD].view(-1, PERIOD)


def _rest(tensor):
    return tensor[tensor.numel() // PERIOD * PERIOD :]


def _cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def begin():
    """Starts the system that is named."""
    system = Gloo() if sys.argv[1] == "gloo" else Horovods(f"{sys.argv[1]}.torch")
    congestion = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()  # Gloo's; Paceline sets its own
    return Rank(system), {"congestion_control": congestion}, system.end


if __name__ == "__main__":
    obey(
        begin,
        ("allreduce", "many", "broadcast", "allgather", "alltoall", "reducescatter", "resnet50", "gradients", "idle"),
    )
