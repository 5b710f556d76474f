"""Gates, and the parameters that the servers hold, of MXNet's arrays: what `common` asks of a framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mxnet as mx
import numpy as np

from paceline.common import gate
from paceline.common.held import Use
from paceline.common.operation import How, Options
from paceline.common.operators import Max
from paceline.common.process_sets import ProcessSet
from paceline.mxnet.mpi_ops import allreduce, run_held


class _Arrays:
    """What gates and held parameters do with arrays. Sums and copies are operations of MXNet's engine."""

    def norm(self, array: Any) -> float:
        wide = array.astype("float32") if array.dtype == np.float16 else array
        return float(mx.nd.norm(wide).asscalar())

    def copy(self, array: Any) -> Any:
        return array.copy()

    def add(self, total: Any, contribution: Any) -> Any:
        total += contribution
        return total

    def restored(self, saved: Any, like: Any) -> Any:
        return saved.as_in_context(like.context).astype(like.dtype) if saved.shape == like.shape else None

    def dump(self, state: gate.State) -> bytes:
        return gate.dump({key: (i, None if change is None else change.asnumpy()) for key, (i, change) in state.items()})

    def load(self, data: bytes) -> gate.State:
        arrays = gate.load(data)
        return {k: (i, None if a is None else mx.nd.array(a, dtype=a.dtype)) for k, (i, a) in arrays.items()}

    def difference(self, new: Any, old: Any) -> Any:
        mx.nd.elemwise_sub(new, old, out=old)
        return old

    def change(self, parameter: Any, by: Any) -> None:
        parameter += by

    def exchange(self, uses: Sequence[Use], op: int, process_set: ProcessSet, options: Options) -> None:
        how = How(op, process_set=process_set, options=options)
        for use in uses:
            run_held(use, how)

    def settle(self, arrays: Sequence[Any]) -> None:
        for array in arrays:
            array.wait_to_read()

    def most(self, number: int, process_set: ProcessSet) -> int:
        most = allreduce(mx.nd.array([number], dtype="int64"), op=Max, process_set=process_set)
        return int(most.asscalar())


arrays = _Arrays()
gates = gate.Gates("mxnet.gates", arrays)
