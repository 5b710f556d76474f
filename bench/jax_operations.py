"""What an operation of paceline.jax costs beside the engine's own: `paceline run -np 2 python bench/jax_operations.py`.

An all-reduce of a few elements, one after the other, in rounds that alternate between the ways: by the C interface
alone (one prepared operation, submitted and waited for), outside of programs, as a program of its own, and within a
loop of one program. Beside them the same loop and the same program with an addition in place of the operation. Prints
microseconds of wall time and of this process's processor time for each operation, the median of the rounds.
"""

import argparse
import ctypes
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

import paceline.jax as hvd
from paceline.common import abi
from paceline.common.engine import engine
from paceline.common.operation import operation


def arguments():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=1024, help="of float32 (default: 1024)")
    parser.add_argument("--operations", type=int, default=500, help="in each round (default: 500)")
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


def ways(elements, count):
    """Functions that each do `count` operations, by name."""
    values = np.ones(elements, np.float32)
    handles = (ctypes.c_int32 * 1)()

    def by_the_c_interface():
        address = values.ctypes.data  # the function keeps the memory
        op = operation(abi.ALLREDUCE, abi.FLOAT32, values.shape, address, address, name="bench")
        op.at_once = True
        for _ in range(count):
            engine.submit_into(op, 1, handles)
            if (failure := engine.wait(handles)) is not None:
                raise failure
            engine.release(handles)

    x = jnp.ones(elements)
    program, addition = jax.jit(hvd.allreduce), jax.jit(lambda x: x + 1)
    loop = jax.jit(lambda x: jax.lax.fori_loop(0, count, lambda i, c: hvd.allreduce(c), x))
    additions = jax.jit(lambda x: jax.lax.fori_loop(0, count, lambda i, c: c + 1, x))

    def one_by_one(function):
        def run():
            for _ in range(count):
                jax.block_until_ready(function(x))

        return run

    return {
        "C interface": by_the_c_interface,
        "outside of programs": one_by_one(hvd.allreduce),
        "program of one operation": one_by_one(program),
        "program of one addition": one_by_one(addition),
        "operation in a loop": lambda: jax.block_until_ready(loop(x)),
        "addition in a loop": lambda: jax.block_until_ready(additions(x)),
    }


def main():
    """Runs the rounds, and prints on rank 0."""
    args = arguments()
    hvd.init()
    runs = ways(args.elements, args.operations)
    seen = {name: ([], []) for name in runs}
    for _ in range(args.rounds + 1):  # the first one compiles
        for name, run in runs.items():
            hvd.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            seen[name][0].append(time.perf_counter() - wall)
            seen[name][1].append(time.process_time() - cpu)
    if hvd.rank() == 0:
        print(f"JAX {jax.__version__}, {hvd.size()} ranks, {args.elements} elements: us for each operation")
        print(f"{'':26}{'wall':>8}{'CPU':>8}")
        for name, times in seen.items():
            wall, cpu = (statistics.median(t[1:]) / args.operations * 1e6 for t in times)
            print(f"{name:26}{wall:8.1f}{cpu:8.1f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
