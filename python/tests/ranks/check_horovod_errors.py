"""The errors of Horovod's API: each call with the class that Horovod 0.28.1 raises and the beginning of our text.

Horovod raises ValueError for what it finds when an operation is submitted, and HorovodInternalError, a RuntimeError,
for what its background thread finds. Where Horovod fails by accident (an AttributeError, an IndexError, a crash) or
refuses what works here, a comment says so.
"""

import functools
import warnings

import pytest
import torch

import paceline.torch as hvd

ONES = torch.ones(4)
Internal = hvd.HorovodInternalError
SETS: list[hvd.ProcessSet] = []  # of each rank alone


@pytest.fixture(scope="module", autouse=True)
def sets(job):
    SETS.extend(hvd.add_process_set([rank]) for rank in range(hvd.size()))
    yield
    assert all(hvd.remove_process_set(alone) for alone in SETS)


def own():
    return SETS[hvd.rank()]


def others():
    return SETS[hvd.rank() - 1]


def optimizer(**options):
    net = torch.nn.Linear(2, 1)
    given = {"named_parameters": net.named_parameters()} | options
    return hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), **given)


def lbfgs():
    return torch.optim.LBFGS([torch.ones(1)])


ARGUMENTS = [
    # horovod/torch/mpi_ops.py
    (ValueError, "tensors of type torch.bool cannot be reduced", lambda: hvd.allreduce(ONES.bool())),
    (ValueError, "tensors of type torch.complex64 cannot be sent", lambda: hvd.allgather(ONES + 0j)),
    (ValueError, "tensors of type torch.bool cannot be reduced", lambda: hvd.reducescatter(ONES.bool())),
    (ValueError, "op replaces average", lambda: hvd.allreduce(ONES, average=True, op=hvd.Sum)),
    (ValueError, "op replaces average", lambda: hvd.grouped_allreduce([ONES], average=False, op=hvd.Sum)),
    (ValueError, "op=17 is no reduction operator", lambda: hvd.allreduce(ONES, op=17)),  # undefined
    (NotImplementedError, "Adasum", lambda: hvd.allreduce(ONES, op=hvd.Adasum, process_set=hvd.ProcessSet([0]))),
    (Internal, "Adasum combines floating-point tensors", lambda: hvd.allreduce(ONES.int(), op=hvd.Adasum)),
    (ValueError, "a grouped operation needs", lambda: hvd.grouped_allreduce_async([])),  # IndexError
    (ValueError, "a sparse tensor has no dense memory", lambda: hvd.allreduce(ONES.to_sparse())),
    (ValueError, "a sparse tensor has no dense memory", lambda: hvd.allgather(torch.eye(3).to_sparse_csr())),
    (ValueError, "a nested tensor has no dense memory", lambda: hvd.allreduce(torch.nested.nested_tensor([ONES]))),
    (ValueError, "expected a torch.Tensor", lambda: hvd.allreduce_async([1.0])),  # AttributeError
    (Internal, "allgather joins tensors along", lambda: hvd.allgather(torch.tensor(1.0))),
    (Internal, "allgather joins tensors along", lambda: hvd.grouped_allgather([torch.tensor(1.0)])),
    (Internal, "alltoall shares out the first", lambda: hvd.alltoall(torch.tensor(1.0))),
    (ValueError, "reducescatter shares out the first", lambda: hvd.reducescatter(torch.tensor(1.0))),
    (Internal, "reducescatter takes Average", lambda: hvd.reducescatter(ONES, op=hvd.Adasum)),
    (Internal, "reducescatter takes Average", lambda: hvd.grouped_reducescatter([ONES], op=hvd.Adasum)),
    (ValueError, 'invalid operation: "broadcast', lambda: hvd.broadcast(ONES, hvd.size())),
    (ValueError, 'invalid operation: "broadcast', lambda: hvd.broadcast(ONES, hvd.rank() - 1, process_set=own())),
    (ValueError, 'invalid operation: "alltoall', lambda: hvd.alltoall(torch.ones(hvd.size() + 1))),
    (ValueError, 'invalid operation: "alltoall', lambda: hvd.alltoall(ONES, [1])),
    (ValueError, 'invalid operation: "alltoall', lambda: hvd.alltoall(ONES, [4] * hvd.size())),
    # Undefined in Horovod:
    (ValueError, 'invalid operation: "alltoall', lambda: hvd.alltoall(ONES, [-1] + [1] * (hvd.size() - 1))),
    (ValueError, "splits must be integers", lambda: hvd.alltoall(ONES, torch.ones(hvd.size()))),
    (ValueError, "splits must be integers", lambda: hvd.alltoall(ONES, [0.5] * hvd.size())),  # rounds down
    (ValueError, "splits must be integers", lambda: hvd.alltoall(ONES, ["one"] * hvd.size())),
    (ValueError, "splits must be integers", lambda: hvd.alltoall(ONES, [float("inf")] * hvd.size())),
    (ValueError, "splits must be integers", lambda: hvd.alltoall(ONES, torch.ones(hvd.size()) > 0)),
    (ValueError, "splits [1180591620717411303424, ", lambda: hvd.alltoall(ONES, [2**70] * hvd.size())),
    (ValueError, "splits [-18446744073709551616, ", lambda: hvd.alltoall(ONES, [-(2**64)] * hvd.size())),
    (ValueError, "splits must be integers", lambda: hvd.alltoall(ONES, torch.ones(1, hvd.size(), dtype=torch.int32))),
    (NotImplementedError, "sparse tensors", lambda: hvd.sparse_allreduce_async(ONES.to_sparse(), "s", hvd.Max)),  # adds
    (ValueError, "handle 1000000000 was never given out", lambda: hvd.poll(10**9)),
    # horovod/torch/functions.py
    (ValueError, "broadcast_parameters takes a dict", lambda: hvd.broadcast_parameters(7, 0)),
    (ValueError, "broadcast_parameters takes a dict", lambda: hvd.broadcast_parameters(ONES, 0)),
    (ValueError, "the state of torch.optim.LBFGS", lambda: hvd.broadcast_optimizer_state(lbfgs(), 0)),
    # horovod/torch/optimizer.py
    (ValueError, "named_parameters must be a sequence", lambda: optimizer(named_parameters=[ONES])),
    (ValueError, "parameter names in named_parameters", lambda: optimizer(named_parameters=[("a", ONES), ("a", ONES)])),
    (ValueError, "named_parameters lacks", lambda: optimizer(named_parameters=[("a", ONES)])),
    (ValueError, "groups must be", lambda: optimizer(groups=0)),
    (ValueError, "groups must consist of tensors", lambda: optimizer(groups=[["weight"]])),
    (ValueError, "a parameter can appear only once", lambda: optimizer(groups=[[ONES], [ONES]])),
    (ValueError, "backward_passes_per_step", lambda: optimizer(backward_passes_per_step=0)),
    (ValueError, "backward_passes_per_step=1.5: at least 1", lambda: optimizer(backward_passes_per_step=1.5)),
    (ValueError, "backward_passes_per_step='1': at least 1", lambda: optimizer(backward_passes_per_step="1")),
    (ValueError, "gradient_predivide_factor", lambda: optimizer(op=hvd.Sum, gradient_predivide_factor=2.0)),
    (NotImplementedError, "Adasum", lambda: optimizer(op=hvd.Adasum, process_set=own())),
    (AssertionError, "Skipping synchronization is not supported", lambda: optimizer(op=hvd.Adasum).skip_synchronize()),
    # horovod/torch/sync_batch_norm.py
    (ValueError, "SyncBatchNorm takes", lambda: hvd.SyncBatchNorm(4)(ONES)),
    # horovod/common/process_sets.py
    (ValueError, "a ProcessSet is made from", lambda: hvd.ProcessSet(["a"])),
    (ValueError, "a ProcessSet is made from", lambda: hvd.ProcessSet(3)),
    (ValueError, "a process set with these ranks", lambda: hvd.add_process_set([0])),
    (ValueError, "", lambda: hvd.add_process_set([hvd.size()])),
    # C's integers would be cut:
    (ValueError, "rank 1099511627776", lambda: hvd.add_process_set([2**40])),
    (ValueError, "root rank 4294967297", lambda: hvd.broadcast(ONES, 2**32 + 1)),
    (ValueError, "root rank '0': give an int", lambda: hvd.broadcast(ONES, "0")),
    (ValueError, "root rank None: give an int", lambda: hvd.broadcast(ONES, None)),
    (ValueError, "name=3: a name is a string", lambda: hvd.allreduce(ONES, name=3)),
    (ValueError, "op=17 is no reduction operator", lambda: hvd.reducescatter(ONES, op=17)),
    # TypeError in Horovod:
    (ValueError, "ProcessSet(process_set_id=None", lambda: hvd.allreduce(ONES, process_set=hvd.ProcessSet([0]))),
    *[
        (ValueError, f"process_set={wrong!r}: give a ProcessSet", functools.partial(call, process_set=wrong))
        for wrong in (5, None)
        for call in (
            lambda **to: hvd.allreduce(ONES, **to),
            lambda **to: hvd.allreduce(ONES, op=hvd.Adasum, **to),
            lambda **to: hvd.grouped_allreduce([ONES], **to),
            lambda **to: hvd.allgather(ONES, **to),
            lambda **to: hvd.broadcast(ONES, 0, **to),
            lambda **to: hvd.alltoall(ONES, **to),
            lambda **to: hvd.reducescatter(ONES, **to),
            lambda **to: hvd.broadcast_parameters({"p": ONES}, 0, **to),
            lambda **to: hvd.broadcast_object(1, **to),
            lambda **to: hvd.allgather_object(1, **to),
            lambda **to: hvd.declare(ONES, "nobody's", **to),
            lambda **to: optimizer(**to),
            lambda **to: optimizer(op=hvd.Adasum, **to),
            lambda **to: optimizer(sync="ssp:1", **to),
            hvd.barrier,
            hvd.remove_process_set,
        )
    ],
    (ValueError, "process_set=5: give a ProcessSet", lambda: hvd.init(process_sets=[5])),
    (ValueError, 'invalid operation: "allreduce', lambda: hvd.allreduce(ONES, process_set=others())),
    (ValueError, 'invalid operation: "allgather', lambda: hvd.allgather(ONES, process_set=others())),
    (ValueError, 'invalid operation: "broadcast', lambda: hvd.broadcast(ONES, hvd.rank(), process_set=others())),
    (ValueError, 'invalid operation: "alltoall', lambda: hvd.alltoall(ONES, process_set=others())),
    (ValueError, 'invalid operation: "reducescatter', lambda: hvd.reducescatter(ONES, process_set=others())),
    (ValueError, 'invalid operation: "barrier', lambda: hvd.barrier(others())),
    (ValueError, "this process is not in ProcessSet", lambda: others().rank()),
    # horovod/common/basics.py
    (ValueError, "init(comm=7)", lambda: hvd.init(comm=7)),
    (ValueError, "init(process_sets='static')", lambda: hvd.init(process_sets="static")),  # AttributeError
    (ValueError, "process_sets[0]", lambda: hvd.init(process_sets=[hvd.ProcessSet(range(hvd.size()))])),
    (ValueError, "MPI is not enabled", hvd.mpi_threads_supported),
]


@pytest.mark.parametrize(("error", "beginning", "call"), ARGUMENTS, ids=[case[1] for case in ARGUMENTS])
def test_wrong_arguments(error, beginning, call):
    with pytest.raises(error) as caught:
        call()
    assert caught.type is error
    assert str(caught.value).startswith(beginning)


def step_after_synchronize():
    net = torch.nn.Linear(2, 1)
    training = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    net(torch.ones(1, 2)).sum().backward()
    training.synchronize()
    training.step()


# Scripts filter warnings by their first words and their class.
WARNINGS = [
    (DeprecationWarning, "Parameter `average` has been replaced with `op`", lambda: hvd.allreduce(ONES, average=True)),
    (DeprecationWarning, "Parameter `num_groups` has been replaced by `groups`", lambda: optimizer(num_groups=1)),
    (UserWarning, "optimizer.step() called without optimizer.skip_synchronize() context", step_after_synchronize),
]


@pytest.mark.parametrize(("category", "beginning", "call"), WARNINGS, ids=[case[1] for case in WARNINGS])
def test_warnings(category, beginning, call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert [w.category for w in caught] == [category]
    assert str(caught[0].message).startswith(beginning)
