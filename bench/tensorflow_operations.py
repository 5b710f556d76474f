"""What an operation of paceline.tensorflow costs: `paceline run -np 2 python bench/tensorflow_operations.py`.

An all-reduce of a few elements, one after the other, in rounds that alternate between the ways: by the C interface
alone (one prepared operation, submitted and waited for), eagerly, as a tf.function of its own, within a loop of one
tf.function, and groups of tensors. Beside them an addition in place of the operation. Prints microseconds of wall time
and of this process's processor time for each operation, or group, the median of the rounds.
"""

import argparse
import ctypes
import statistics
import time

import numpy as np
import tensorflow as tf

import paceline.tensorflow as hvd
from paceline.common import abi
from paceline.common.engine import engine
from paceline.common.operation import operation

GROUP = 16


def arguments():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=1024, help="of float32 (default: 1024)")
    parser.add_argument("--operations", type=int, default=200, help="in each round (default: 200)")
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

    x = tf.ones([elements])
    xs = [tf.ones([elements]) for _ in range(GROUP)]

    def one_by_one(function, given=x):
        def run():
            for _ in range(count):
                function(given)

        return run

    def in_a_loop(function):
        @tf.function
        def loop(x):
            for _ in tf.range(count):
                x = function(x)
            return x

        return lambda: loop(x)

    return {
        "C interface": by_the_c_interface,
        "eager": one_by_one(hvd.allreduce),
        "eager addition": one_by_one(lambda x: x + 1),
        "function": one_by_one(tf.function(hvd.allreduce)),
        "function of an addition": one_by_one(tf.function(lambda x: x + 1)),
        "loop in a function": in_a_loop(hvd.allreduce),
        "loop of additions": in_a_loop(lambda x: x + 1),
        f"eager group of {GROUP}": one_by_one(hvd.grouped_allreduce, xs),
        f"function of a group of {GROUP}": one_by_one(tf.function(hvd.grouped_allreduce), xs),
    }


def main():
    """Runs the rounds, and prints on rank 0."""
    args = arguments()
    hvd.init()
    runs = ways(args.elements, args.operations)
    seen = {name: ([], []) for name in runs}
    for _ in range(args.rounds + 1):  # the first one traces
        for name, run in runs.items():
            hvd.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            seen[name][0].append(time.perf_counter() - wall)
            seen[name][1].append(time.process_time() - cpu)
    if hvd.rank() == 0:
        print(f"TensorFlow {tf.__version__}, {hvd.size()} ranks, {args.elements} elements: us for each operation")
        print(f"{'':30}{'wall':>8}{'CPU':>8}")
        for name, times in seen.items():
            wall, cpu = (statistics.median(t[1:]) / args.operations * 1e6 for t in times)
            print(f"{name:30}{wall:8.1f}{cpu:8.1f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
