"""What an operation costs in a framework beside the engine's own: `paceline run -np 2 python bench/overhead.py torch`.

All-reduces of a few elements, in rounds that alternate between the ways: by the C interface alone (prepared operations,
submitted and waited for), and by the framework, one after the other and many in flight together. Beside them additions
of the same arrays, which show what an operation of the framework's own costs. Prints microseconds of wall time and of
this process's processor time for each operation, the median of the rounds. The overhead is the difference to the C
interface with as many in flight. In one process (without `paceline run`) the engine itself does least, so that the
overhead shows best.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from paceline.common import abi
from paceline.common.core import init, rank, shutdown, size
from paceline.common.engine import engine
from paceline.common.operation import operation

Run = Callable[[int], Any]  # starts so many operations, waits for them and returns a list of arrays that they made


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("framework", choices=sorted(FRAMEWORKS))
    parser.add_argument("--elements", type=int, default=1024, help="of float32 (default: 1024)")
    parser.add_argument("--operations", type=int, default=512, help="in each round (default: 512)")
    parser.add_argument("--together", type=int, default=64, help="operations in flight together (default: 64)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", help="file for the results")
    return parser.parse_args()


def c_interface(elements: int, together: int) -> Run:
    """Prepared operations, without a framework."""
    memory = np.full((together, elements), mine(), np.float32)
    ops = [
        operation(abi.ALLREDUCE, abi.FLOAT32, row.shape, row.ctypes.data, row.ctypes.data, name=f"bench.{i}")
        for i, row in enumerate(memory)
    ]
    handles = (ctypes.c_int32 * together)()
    singles = [(ctypes.c_int32 * 1).from_buffer(handles, 4 * i) for i in range(together)]

    def run(count: int) -> Any:
        for i in range(count):
            ops[i].at_once = i == count - 1
            engine.submit_into(ops[i], 1, singles[i])
        for handle in singles[:count]:
            if (failure := engine.wait(handle)) is not None:
                raise failure
            engine.release(handle)
        return memory[:count]

    return run


def torch_ways(elements: int, together: int) -> Iterator[tuple[str, Run]]:
    """PyTorch: tensors in place."""
    import torch

    import paceline.torch as hvd

    tensors, others = ([torch.full((elements,), mine()) for _ in range(together)] for _ in range(2))

    def allreduces(count: int) -> Any:
        for handle in [hvd.allreduce_async_(t, name=f"torch.{i}") for i, t in enumerate(tensors[:count])]:
            hvd.synchronize(handle)
        return tensors[:count]

    def additions(count: int) -> None:
        for t in others[:count]:
            t.add_(1)

    yield "addition", additions
    yield "allreduce_async_ and synchronize", allreduces


def jax_ways(elements: int, together: int) -> Iterator[tuple[str, Run]]:
    """JAX: outside of programs, in a program with all operations, and in a loop of one program."""
    import jax
    import jax.numpy as jnp

    import paceline.jax as hvd

    x = jnp.full(elements, mine())

    def outside(function: Callable[[Any], Any]) -> Run:
        return lambda count: jax.block_until_ready([function(x) for _ in range(count)])

    def in_a_loop(function: Callable[[Any], Any]) -> Run:
        loop = jax.jit(lambda x, count: jax.lax.fori_loop(0, count, lambda _, c: function(c), x))
        return lambda count: [jax.block_until_ready(loop(x, count))]

    yield "addition, a program of its own", outside(jax.jit(lambda x: x + 1))
    yield "outside of programs", outside(hvd.allreduce)
    yield "a program of its own", outside(jax.jit(hvd.allreduce))
    yield "addition in a program's loop", in_a_loop(lambda x: x + 1)
    yield "in a program's loop", in_a_loop(hvd.allreduce)


def mxnet_ways(elements: int, together: int) -> Iterator[tuple[str, Run]]:
    """MXNet: operations of its engine, in place."""
    import mxnet as mx

    import paceline.mxnet as hvd

    def waiting(function: Callable[[int, Any], Any]) -> Run:
        arrays = [mx.nd.full((elements,), mine()) for _ in range(together)]

        def run(count: int) -> Any:
            for i, array in enumerate(arrays[:count]):
                function(i, array)
            for array in arrays[:count]:
                array.wait_to_read()
            return arrays[:count]

        return run

    def addition(_: int, array: Any) -> None:
        array += 1

    yield "addition", waiting(addition)
    yield "allreduce_", waiting(lambda i, array: hvd.allreduce_(array, name=f"mxnet.{i}"))


def tensorflow_ways(elements: int, together: int) -> Iterator[tuple[str, Run]]:
    """TensorFlow: eagerly, in a function with so many operations, in a loop of one function, and as one group."""
    import tensorflow as tf

    import paceline.tensorflow as hvd

    xs = [tf.fill([elements], mine()) for _ in range(together)]

    def one_by_one(function: Callable[[Any], Any]) -> Run:
        return lambda count: [function(x) for x in xs[:count]]

    def in_a_function(function: Callable[[Any], Any]) -> Run:
        traced = tf.function(lambda given: [function(x) for x in given])
        return lambda count: traced(xs[:count])

    def in_a_loop(function: Callable[[Any], Any]) -> Run:
        @tf.function
        def loop(x: Any, count: Any) -> Any:
            return tf.while_loop(lambda i, _: i < count, lambda i, x: (i + 1, function(x)), (0, x))

        return lambda count: loop(xs[0], tf.constant(count))[1:]

    def grouped(function: Callable[[Any], Any]) -> Run:
        return lambda count: function(xs[:count])

    yield "addition, eagerly", one_by_one(lambda x: x + 1)
    yield "eagerly", one_by_one(hvd.allreduce)
    yield "additions in a function", in_a_function(lambda x: x + 1)
    yield "in a function", in_a_function(hvd.allreduce)
    yield "addition in a function's loop", in_a_loop(lambda x: x + 1)
    yield "in a function's loop", in_a_loop(hvd.allreduce)
    yield "grouped, eagerly", grouped(hvd.grouped_allreduce)
    yield "grouped in a function", grouped(tf.function(hvd.grouped_allreduce))


# By name: the ways of a framework, each with its name. `together` is the most that a way starts at once.
FRAMEWORKS: dict[str, Callable[[int, int], Iterator[tuple[str, Run]]]] = {
    "jax": jax_ways,
    "mxnet": mxnet_ways,
    "tensorflow": tensorflow_ways,
    "torch": torch_ways,
}


def mine() -> float:
    """The elements of this rank's arrays."""
    return rank() + 1.0


def check(name: str, results: Any) -> None:
    """Ends this process if a way's results are not the average over the ranks. Refills what was averaged in place."""
    for array in results:
        values = array.asnumpy() if hasattr(array, "asnumpy") else array  # MXNet's
        if not np.allclose(values, (size() + 1) / 2, rtol=1e-3):
            sys.exit(f"rank {rank()}: {name} has a wrong result")
        with contextlib.suppress(TypeError):  # JAX's and TensorFlow's are new ones
            array[:] = mine()


def barrier() -> None:
    """Waits for all ranks."""
    op = operation(abi.BARRIER, abi.UINT8, (0,), 0, 0)
    handles = (ctypes.c_int32 * 1)()
    engine.submit_into(op, 1, handles)
    if (failure := engine.wait(handles)) is not None:
        raise failure
    engine.release(handles)


def main() -> None:
    """Runs the rounds, and prints on rank 0."""
    args = arguments()
    init()
    ways = {"C interface": c_interface(args.elements, args.together)}
    ways |= FRAMEWORKS[args.framework](args.elements, args.together)
    seen: dict[tuple[str, int], tuple[list[float], list[float]]] = {}
    for _ in range(args.rounds + 1):  # the first one compiles
        for name, run in ways.items():
            for count in (1, args.together):
                barrier()
                wall, cpu = time.perf_counter(), time.process_time()
                for _ in range(args.operations // count):
                    results = run(count)
                times = time.perf_counter() - wall, time.process_time() - cpu
                if not name.startswith("addition"):
                    check(name, results)
                for kept, spent in zip(seen.setdefault((name, count), ([], [])), times, strict=True):
                    kept.append(spent / (args.operations // count * count) * 1e6)
    medians = {
        name: [statistics.median(kept[1:]) for count in (1, args.together) for kept in seen[name, count]]
        for name in ways
    }
    if rank() == 0:
        print(f"{args.framework}, {size()} ranks, {args.elements} elements: us for each operation")
        print(f"{'':34}{'one by one':>22}{f'{args.together} in flight':>22}")
        print(f"{'':34}{'wall     CPU':>22}{'wall     CPU':>22}")
        for name, (wall, cpu, wall_together, cpu_together) in medians.items():
            print(f"{name:34}{wall:13.1f}{cpu:9.1f}{wall_together:13.1f}{cpu_together:9.1f}")
    if rank() == 0 and args.json:
        keys = ("wall_us", "cpu_us", "together_wall_us", "together_cpu_us")
        report = {name: dict(zip(keys, values, strict=True)) for name, values in medians.items()}
        pathlib.Path(args.json).write_text(json.dumps(report, indent=1))
    shutdown()


if __name__ == "__main__":
    main()
