"""A user's script with every public name, for `mypy --strict` (test_types.py). It is not run."""

from collections.abc import Callable
from typing import Any, assert_type

import torch

import paceline
import paceline.torch as hvd
from paceline.common.exceptions import HorovodInternalError, HorovodVersionMismatchError, NotInitializedError
from paceline.compression import Auto, Codec
from paceline.torch.compression import Compressor
from paceline.torch.optimizer import Distributed


def job() -> None:
    hvd.init(process_sets=[hvd.ProcessSet([0, 1])], settings={"sync": "ssp:3"})
    paceline.init(process_sets="dynamic")
    assert_type(hvd.is_initialized() and paceline.is_initialized(), bool)
    assert_type(hvd.rank() + hvd.size() + hvd.local_rank() + hvd.local_size() + hvd.cross_rank(), int)
    assert_type(paceline.rank() + paceline.size() + paceline.local_rank() + paceline.local_size(), int)
    assert_type(hvd.cross_size() + paceline.cross_size() + paceline.cross_rank(), int)
    for built in (hvd.mpi_enabled, hvd.mpi_built, hvd.mpi_threads_supported, hvd.gloo_enabled, hvd.gloo_built):
        assert_type(built(), bool)
    for built in (hvd.ddl_built, hvd.ccl_built, hvd.cuda_built, hvd.rocm_built, hvd.paceline_built):
        assert_type(built(), bool)
    assert_type(hvd.nccl_built(), int)
    assert_type(hvd.is_homogeneous() and hvd.gpu_available("torch") and hvd.num_rank_is_power_2(4), bool)
    assert_type(hvd.handle_average_backwards_compatibility(None, True), int)
    functions: list[type[torch.autograd.Function]] = [hvd.HorovodAllreduce, hvd.HorovodGroupedAllreduce]
    functions += [hvd.HorovodAllgather, hvd.HorovodGroupedAllgather, hvd.HorovodBroadcast, hvd.HorovodAlltoall]
    functions += [hvd.HorovodReducescatter, hvd.HorovodGroupedReducescatter]
    for start, stop in (
        (hvd.start_timeline, hvd.stop_timeline),
        (paceline.start_timeline, paceline.stop_timeline),
    ):
        start("trace.json", mark_cycles=True)
        stop()
    assert_type(paceline.tally(), dict[str, int])
    assert_type(paceline.supersteps(), list[dict[str, Any]])
    state: bytes = paceline.compression_state()
    paceline.load_compression_state(state)
    print(paceline.__version__)
    hvd.shutdown()
    paceline.shutdown()


def process_sets() -> None:
    some = hvd.add_process_set([0, 1])
    assert_type(some, paceline.ProcessSet)
    paceline.add_process_set(paceline.ProcessSet([1, 2]))
    assert_type(some.ranks, list[int] | None)
    assert_type(some.size(), int | None)
    assert_type(some.rank(), int | None)
    assert_type(some.included(), bool | None)
    assert_type(hvd.remove_process_set(some) or paceline.remove_process_set(some), bool)
    hvd.barrier(process_set=hvd.global_process_set)
    hvd.barrier(paceline.global_process_set)


def collectives(x: torch.Tensor) -> None:
    assert_type(hvd.allreduce(x, name="x", op=hvd.Average, compression=hvd.Compression.fp16), torch.Tensor)
    assert_type(hvd.allreduce(x, compression=hvd.Compression.topk(0.01)), torch.Tensor)
    assert_type(hvd.allreduce(x, compression="int8", prescale_factor=0.5), torch.Tensor)
    assert_type(hvd.allreduce_(x, op=hvd.Sum), torch.Tensor)
    handle = hvd.allreduce_async(x, op=hvd.Min)
    assert_type(handle, int)
    assert_type(hvd.poll(handle), bool)
    x = hvd.synchronize(handle)
    hvd.synchronize(hvd.allreduce_async_(x, op=hvd.Max))
    assert_type(hvd.grouped_allreduce([x, x], op=hvd.Product), list[torch.Tensor])
    assert_type(hvd.grouped_allreduce_([x, x], op=hvd.Adasum), tuple[torch.Tensor, ...])
    first, second = hvd.synchronize(hvd.grouped_allreduce_async([x, x]))
    hvd.synchronize(hvd.grouped_allreduce_async_([first, second]))
    later = hvd.sparse_allreduce_async(x, name="sparse", op=hvd.Sum)
    assert_type(later, Callable[[], torch.Tensor])
    assert_type(hvd.allgather(x, name="rows"), torch.Tensor)
    hvd.synchronize(hvd.allgather_async(x))
    assert_type(hvd.grouped_allgather([x, x]), tuple[torch.Tensor, ...])
    hvd.synchronize(hvd.grouped_allgather_async([x, x]))
    assert_type(hvd.broadcast(x, root_rank=0), torch.Tensor)
    assert_type(hvd.broadcast_(x, 0), torch.Tensor)
    hvd.synchronize(hvd.broadcast_async(x, 0))
    hvd.synchronize(hvd.broadcast_async_(x, 0, name="b"))
    assert_type(hvd.alltoall(x), torch.Tensor)
    assert_type(hvd.alltoall(x, splits=[1, 2]), tuple[torch.Tensor, torch.Tensor])
    hvd.synchronize(hvd.alltoall_async(x, splits=torch.tensor([1, 2])))
    assert_type(hvd.reducescatter(x, op=hvd.Sum), torch.Tensor)
    hvd.synchronize(hvd.reducescatter_async(x))
    assert_type(hvd.grouped_reducescatter([x, x]), list[torch.Tensor])
    hvd.synchronize(hvd.grouped_reducescatter_async([x, x]))
    assert_type(hvd.join(), int)


def objects(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_parameters(model.named_parameters(), 0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    epoch: int = hvd.broadcast_object(3, root_rank=0, name="epoch")
    lent: torch.Tensor = hvd.zeros_in_arena(2, 3, dtype=torch.float16)
    print(lent)
    everyones: list[int] = hvd.allgather_object(epoch)
    print(everyones)


class Halves(Compressor):
    """A compressor of the user's."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return tensor.half(), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        return tensor.to(ctx)


def train(model: torch.nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    model = torch.nn.Sequential(model, hvd.SyncBatchNorm(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), op=hvd.Average, compression=Halves
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for x, y in batches:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]  # PyTorch's
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        schedule.step()
    optimizer.agree()
    assert isinstance(optimizer, Distributed)


def ahead(model: torch.nn.Module, x: torch.Tensor) -> None:
    models: list[paceline.sync.Model] = [
        paceline.BSP(),
        paceline.ASP(parking="soft-barrier"),
        paceline.SSP(3, cached=True),
        paceline.DSPS(3, 15),
        paceline.PSSP(3, 0.5),
        paceline.DynamicPSSP(3, "significance"),
        paceline.DropStragglers(2),
        paceline.Adaptive(3, 3),
        paceline.ElasticBSP(15),
        paceline.Expression("lead < 3"),
    ]
    gate = paceline.Significance(0.01, decay=0.5)
    for sync in models:
        optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(model.parameters()), sync=sync, gate=gate, pull_gate=gate, wait_free=True
        )
        optimizer.step()
    value = hvd.declare(x, "x", sync="ssp:3", compression=hvd.Compression.onebit())
    assert_type(value, hvd.Value)
    value.push(x)
    value.clock(significance=0.1)
    hvd.synchronize(value.pull(wait=False))
    assert_type(value.sync(), torch.Tensor)
    since: int = paceline.set_pull_condition(paceline.DSPS(3, 15), names=["x"], servers=[0])
    since = paceline.set_push_condition("count[V] >= N - 1", names="x")
    print(since)


def come_and_go(model: torch.nn.Module, optimizer: torch.optim.Optimizer, samples: list[int]) -> None:
    sampler = hvd.elastic.ElasticSampler(samples, shuffle=False, seed=1)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, batch=0)
    state.register_reset_callbacks([lambda: print(hvd.size())])

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState, epochs: int) -> float:
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for batch, _ in enumerate(sampler):
                sampler.record_batch(batch, 1)
                state.batch += 1
                state.commit()
                state.check_host_updates()
        return 0.5

    assert_type(train(state, 2), float)
    print(hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0))


def codecs() -> list[Codec]:
    c = hvd.Compression
    auto = c.auto(allow_residual=True, candidates=["fp16", c.int8()])
    assert isinstance(auto, Auto) and issubclass(c.none, Compressor)
    return [
        c.codec("int8"), c.bf16(), c.float16(), c.int8(block=256), c.int4(), c.qsgd(levels=4), c.terngrad(clip=2.5),
        c.natural(), c.onebit(lossless="zstd"), c.topk(0.01, warmup=10), c.randomk(count=5), c.threshold(1e-3),
        c.dgc(0.01, momentum=0.9), c.policy([{"codec": "fp16", "min_bytes": 4096}]),
    ]  # fmt: skip


def failures() -> None:
    try:
        hvd.barrier()
    except NotInitializedError as e:
        print(e)
    except (hvd.HorovodInternalError, HorovodInternalError):
        raise
    except HorovodVersionMismatchError as e:
        print(e.version)
