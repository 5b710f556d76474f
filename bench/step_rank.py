"""One rank of step.py and overlap.py: training steps by Paceline, by DDP over Gloo, and computing alone.

"backend" is DDP over Paceline's backend of torch.distributed, "arena" is Paceline with gradients_in_arena. Further ways
are "cross", with cross_barrier, and "exchange", Paceline's steps without computing.
commands.py has the protocol. A wrong result ends the rank with an error. Before PyTorch 2.14 the backend is not found
unless paceline.torch.distributed is imported.
"""

import gc
import os
import resource
import sys
import time

import torch
import torch.distributed as dist
from commands import obey
from networks import NETWORKS
from torch.nn.parallel import DistributedDataParallel

import paceline.torch as hvd
import paceline.torch.distributed  # noqa: F401
from paceline.common.engine import engine

LEARNING_RATE = 1e-3  # small: training that is not stable makes much of the last bit of a sum
# Of two results' difference, relative to how far the parameters have moved, after one step and after more.
TOLERANCE, TOLERANCES = 1e-4, 0.05
# In this order before and in the other after what is measured, so that what the process has used holds the thread's.
WHOSE = (("", resource.RUSAGE_SELF), ("thread_", resource.RUSAGE_THREAD))


class Rank:
    """The commands."""

    def __init__(self, rank, group=None):
        """group: of Paceline's backend."""
        self.rank = rank
        self.groups = {"ddp": None, "backend": group}  # None: the default group, which is Gloo's

    def prepare(self, model, work, ways):
        """Makes a model, once for each way; all have the same memory for their parameters.

        work: examples for which simulated layers compute.
        """
        make, batches, self.loss = NETWORKS[model]
        self.batches = batches(self.rank)
        self.ways, self.reference = {}, None
        for way in ways:
            torch.manual_seed(0)
            network = make(0 if way == "exchange" else work, self.rank)
            if not self.ways:
                self.parameters = list(network.parameters())
                self.begin = _flat(self.parameters)
            for own, common in zip(network.parameters(), self.parameters, strict=True):
                own.data = common.data
            optimizer = torch.optim.SGD(network.parameters(), LEARNING_RATE)
            if way in self.groups:
                network = DistributedDataParallel(network, process_group=self.groups[way])
            elif way != "alone":
                named = [(f"{model}.{name}", p) for name, p in network.named_parameters()]
                optimizer = hvd.DistributedOptimizer(
                    optimizer, named, cross_barrier=way == "cross", gradients_in_arena=way == "arena"
                )
            self.ways[way] = network, optimizer
        return {"tensors": len(self.parameters), "parameters": self.begin.numel()}

    def train(self, way, steps, before=0):
        """So many steps from the first parameters. Answers with the seconds, and with what they cost this process.

        before: steps that are made before them and do not count.
        """
        network, optimizer = self.ways[way]
        _copy(self.begin, self.parameters)
        torch.manual_seed(self.rank)  # dropout
        gc.collect(1)  # what the last way left; the oldest objects, those of imported modules, take a fifth of a second
        dist.barrier()
        for i in range(before + steps):
            if i == before:
                garbage, costs, began = _garbage(), _costs(WHOSE), time.perf_counter()
            inputs, labels = self.batches[i % len(self.batches)]
            optimizer.zero_grad()
            self.loss(network(inputs), labels).backward()
            optimizer.step()
        seconds = time.perf_counter() - began
        costs = {k: v - costs[k] for k, v in _costs(WHOSE[::-1]).items()}
        costs |= {k: v - garbage[k] for k, v in _garbage().items()}
        if way == "cross":
            optimizer.agree()
        optimizer.zero_grad()
        if way != "alone":
            self.check(way, before + steps)
        return {"seconds": seconds} | costs

    def check(self, way, steps):
        """Compares the parameters after a way's training with those after as many steps of another."""
        result = _flat(self.parameters)
        if self.reference is None or self.reference[0] != steps:
            self.reference = steps, result
            return
        apart = (result - self.reference[1]).norm().item()
        moved = (result - self.begin).norm().item()
        if not apart <= (TOLERANCE if steps == 1 else TOLERANCES) * moved:
            sys.exit(f"rank {self.rank}: {way} ends {apart / moved:.2g} of {steps} steps' way from the other's result")


def _flat(parameters):
    return torch.cat([p.detach().flatten() for p in parameters])


@torch.no_grad()
def _copy(flat, parameters):
    for p, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.copy_(piece.view_as(p))


def _costs(whose):
    """CPU seconds and context switches of this process; `thread_`: of the thread that trains."""
    costs = {}
    for prefix, who in whose:
        usage = resource.getrusage(who)
        costs |= {f"{prefix}user": usage.ru_utime, f"{prefix}system": usage.ru_stime}
        costs |= {f"{prefix}voluntary": usage.ru_nvcsw, f"{prefix}involuntary": usage.ru_nivcsw}
    return costs


def _garbage():
    """How often the collectors of Python and Go have run, and the objects that the engine has taken from Go's heap."""
    heap = engine._info()["heap"]
    collections = sum(generation["collections"] for generation in gc.get_stats())
    return {"python_gc": collections, "go_gc": heap["collections"], "go_objects": heap["objects"]}


def begin():
    """Joins Paceline's job and Gloo's group."""
    hvd.init()
    store = "file://" + os.environ["BENCH_STORE"]
    dist.init_process_group("gloo", init_method=store, rank=hvd.rank(), world_size=hvd.size())
    return Rank(dist.get_rank(), dist.new_group(backend="paceline")), {}, end


def end():
    """Leaves both."""
    dist.destroy_process_group()
    hvd.shutdown()


if __name__ == "__main__":
    obey(begin, ("prepare", "train"))
