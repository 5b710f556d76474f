"""The optimizer for models under which ranks wait for each other: gradients are reduced before each step."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from paceline.common.codec_tuning import resolved
from paceline.common.compression import Codec, NoneCompressor, SupportsCompress
from paceline.common.declaring import own_prefix
from paceline.common.engine import engine
from paceline.common.handles import synchronize
from paceline.common.operation import How, Options
from paceline.common.operators import Average
from paceline.common.process_sets import ProcessSet
from paceline.common.seat import seat
from paceline.common.significance import Significance
from paceline.common.util import split_list
from paceline.torch._arena import gradients_in_arena
from paceline.torch._distributed import hooked
from paceline.torch._gate import Gate
from paceline.torch._gradient_hooks import GradientHooks, Once, Watched, is_changed, marks_of
from paceline.torch._memory import current_stream, is_direct, is_shared, on_accelerator, part
from paceline.torch._ops_async import reduction, sparse_allreduce_async, start_group, start_one
from paceline.torch._parameter_check import ParameterCheck
from paceline.torch._parameters import byte_sizes, empty_sparse
from paceline.torch._prepared import Batch, Collector, Prepared


class ReducingOptimizer(GradientHooks):
    """Reduces gradients as backward computes them, and waits for them in `step`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[Any] | None,
        compression: SupportsCompress,
        backward_passes_per_step: int,
        op: int,
        gradient_predivide_factor: float,
        groups: int | list[list[torch.Tensor]] | None,
        sparse_as_dense: bool,
        process_set: ProcessSet,
        sync: str | None = None,
        codec: Codec | None = None,
        gate: Significance | None = None,
        in_arena: bool = False,
    ) -> None:
        self._adopt(optimizer, named_parameters, compression, backward_passes_per_step)
        self._gate = None if gate is None else Gate(gate, self._parameter_names, process_set)
        self._prefix = ""  # of the names of gradients
        self.op = op
        self.gradient_predivide_factor = gradient_predivide_factor
        self.sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        self._synchronized = False
        self._should_synchronize = True
        self._sparse: set[torch.Tensor] = set()  # parameters that have had sparse gradients
        self._group_of: dict[torch.Tensor, list[torch.Tensor]] = {}
        # Parameters that wait for the rest of their group, and what tells that a device has made their gradients.
        self._ready: dict[torch.Tensor, Any] = {}
        self._grouping = threading.RLock()  # backward has a thread for each device
        self._collector = Collector(self._backward_begins, self._collected_enough)
        self._unfit: list[torch.Tensor] = []  # parameters whose gradients are not like those of the last step
        # What the batch reduces: parameters, their gradients and these gradients' marks, in the order of its places.
        self._reduced: list[torch.Tensor] = []
        self._grads: list[torch.Tensor] = []
        self._marks: list[tuple[int, int]] = []
        self._unseen: set[torch.Tensor] = set()  # parameters whose last step nobody has waited for: of cross_barrier
        for group in _groups(groups, [p for g in self.param_groups for p in g["params"] if p.requires_grad]):
            self._group_of.update(dict.fromkeys(group, group))
        self._distributed = process_set.included() and (engine.size() > 1 or seat.elastic)
        if self._distributed:
            text = resolved(codec, byte_sizes(self.param_groups), process_set)
            self._options = Options(sync=sync, codec=text)
            if (text or engine.setting("compression") or "none") != "none":
                own = [self._parameter_names[p] for group in self.param_groups for p in group["params"]]
                self._prefix = own_prefix(process_set, own)
            self._watch_all()
            engine.before_wait(self._start_collected)
            weakref.finalize(self, self._collector.forget).atexit = False
        self._batch = Batch(len(self._watched))
        plain = compression is NoneCompressor and codec is None and gate is None
        self._in_arena = in_arena and plain and self._distributed and not seat.elastic
        self._places: dict[torch.Tensor, torch.Tensor] = {}  # of gradients in the arena, by parameter
        self._find_places()
        # Drop-stragglers and others let a rank be steps behind, for which a check would wait.
        self._check = ParameterCheck(process_set) if self._distributed and sync is None else None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters; their gradients are reduced too."""
        super().add_param_group(param_group)
        if self._distributed:
            self._watch(self.param_groups[-1]["params"])
            self._renew_batch()

    def _renew_batch(self) -> None:
        self._leave_batch()
        self._batch = Batch(len(self._watched))
        self._find_places()

    def _find_places(self) -> None:
        if self._in_arena:
            self._places |= gradients_in_arena(p for p in self._watched if p not in self._places)

    def _move(self, p: torch.Tensor) -> None:
        """Moves a gradient to its place in the arena, where it stays until zero_grad drops it."""
        place, grad = self._places.get(p), p.grad
        if place is not None and grad is not None and grad is not place and not grad.is_sparse:
            # Of backward(create_graph=True): the place has been a part of the graph of the step before.
            if grad.requires_grad:
                place = self._places[p] = place.detach()
            p.grad = place.copy_(grad)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Loads options and state; waits for reductions in flight and drops them."""
        with suppress(RuntimeError, ValueError):
            self._backward_ended()
            if self._exchanged() or self._ready:  # other ranks may have made the gradients that are missing here
                self._start(self._missing(self._in_flight.keys() | set(self._reduced)))
        self._unfit.clear()
        self._ready.clear()
        self._synchronized = False
        self._should_synchronize = True
        self._end_in_flight()
        super().load_state_dict(*args, **kwargs)

    def _hook(self, watched: Watched, ready: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        return self._collector.hook(watched, ready)

    def _backward_begins(self) -> None:
        self._finish_interrupted()
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _collected_enough(self) -> None:
        self._start_collected(last=False)
        self._start_unfit()

    def _backward_ended(self) -> None:
        self._start_collected()
        self._start_unfit()

    def _start_collected(self, last: bool = True) -> None:
        """Starts the reductions of what hooks have left that is like that of the last step. The rest becomes unfit.

        Any thread may call it, because it waits for other operations. last: backward has ended, as far as is known.
        """
        watched, unseen = self._watched, self._unseen
        with self._collector.lock:
            reduced, prepared, grads = [], [], []
            for p in self._collector.take(last):
                if self._places:
                    self._move(p)
                one, grad = watched[p].prepared, p.grad
                if grad is None or (unseen and p in unseen) or not one.takes(grad):
                    self._unfit.append(p)
                    continue
                reduced.append(p)
                prepared.append(one)
                grads.append(grad)
            if reduced:
                storages = [grad.untyped_storage() for grad in grads]
                for i, storage in enumerate(storages):
                    if is_shared(storage) and self._places.get(reduced[i]) is not grads[i]:
                        grads[i] = part(reduced[i], grads[i])
                        storages[i] = grads[i].untyped_storage()
                self._reduced += reduced
                self._grads += grads
                marks = marks_of(grads)
                self._marks += marks
                self._batch.start(prepared, storages, [address for _, address in marks], at_once=last)

    def _start_unfit(self) -> None:
        """Has gradients that do not fit what is prepared be reduced as those of the first step are.

        Only backward's thread does that, and the one that steps: they get what is wrong with such gradients.
        """
        with self._collector.lock:
            unfit, self._unfit = self._unfit, []
        for p in unfit:
            self._watched[p].left = 1  # all of them first: `step` reduces what is left after an error
            self._watched[p].prepared = None
        for p in unfit:
            self._gradient_ready(p)

    def _gradient_ready(self, p: torch.Tensor) -> None:
        if self._places and self._watched[p].left == 1:
            self._move(p)
        if p.grad is not None:  # also before the last pass: the next one adds to what it finds
            part(p, p.grad)
        super()._gradient_ready(p)

    def _exchanged(self) -> int:
        return len(self._in_flight) + len(self._reduced) + len(self._collector) + len(self._unfit)

    def _take_in_flight(self) -> tuple[Iterable[torch.Tensor], Iterable[Callable[[], None]]]:
        params, waits = super()._take_in_flight()
        return [*params, *self._take_reduced()], [*waits, self._batch.wait]

    def _leave_batch(self) -> None:
        """Has reductions in flight be followed without the batch's help."""
        self._start_collected()
        self._made.update(zip(self._reduced, zip(self._grads, self._marks, strict=True), strict=True))
        self._in_flight.update(dict.fromkeys(self._take_reduced(), self._batch.wait))

    def _take_reduced(self) -> list[torch.Tensor]:
        """The parameters whose gradients the batch reduces, in the order of their places. They are followed no more."""
        reduced, self._reduced, self._grads, self._marks = self._reduced, [], [], []
        return reduced

    def _changed_params(self) -> set[torch.Tensor]:
        changed = super()._changed_params()
        made = zip(self._reduced, self._grads, self._marks, marks_of(self._grads), strict=True)
        return changed | {p for p, grad, before, now in made if is_changed(p, grad, before, now)}

    def _reduce(self, p: torch.Tensor) -> None:
        group = self._group_of.get(p)
        if group is None:
            self._start([p])
            return
        grad = p.grad
        made = current_stream(grad.device).record_event() if grad is not None and on_accelerator(grad) else None
        with self._grouping:
            self._ready[p] = made
            complete = all(q in self._ready for q in group)
        if complete:
            self._start(group)

    def _start(self, params: Sequence[torch.Tensor]) -> None:
        """Starts the reductions of these parameters' gradients together."""
        dense = []
        for p in params:
            if (made := self._ready.pop(p, None)) is not None:  # each layer's backward has its forward's stream
                current_stream(p.device).wait_event(made)
            if p.grad is None:  # another rank may have a gradient, so this one contributes zeros
                p.grad = empty_sparse(p) if p in self._sparse else torch.zeros_like(p)
            if p.grad.is_sparse:
                self._sparse.add(p)
            if p.grad.is_sparse and not self.sparse_as_dense:
                self._start_sparse(p, p.grad)
            else:
                dense.append((p, p.grad if p in self._made else part(p, p.grad)))
        if dense:
            self._start_dense(dense)

    def _name(self, p: torch.Tensor) -> str:
        return f"allreduce.{self._prefix}{self._parameter_names[p]}"

    def _start_dense(self, params: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        factor = self.gradient_predivide_factor if self.op == Average else 1.0
        how = How(self.op, 1.0 / factor, factor, self.process_set, self._options)
        parts, contexts = [], []
        for p, own in params:
            grad = own.to_dense() if own.is_sparse else own
            empty = False
            if self._gate is not None:
                offered = self._gate.offer(p, grad)
                grad, empty = (grad, True) if offered is None else (offered, False)
            compressed, context = self._compression.compress(grad)
            name = self._name(p)
            parts.append(reduction(compressed, True, name, how, self._watched[p].priority, empty))
            contexts.append(context)
        if len(params) == 1:
            single = start_one(parts[0])
            self._in_flight[params[0][0]] = Once(
                lambda: synchronize(single), lambda result: self._store(*params[0], result, contexts[0])
            )
            p, own = params[0]
            if self._compression is NoneCompressor and self._gate is None and not own.is_sparse and is_direct(own):
                self._watched[p].prepared = Prepared(parts[0].op, own)
            return
        group = start_group(parts)

        def store(results: Any) -> None:  # with the first of them that is waited for
            for (p, own), reduced, context in zip(params, results, contexts, strict=True):
                self._store(p, own, reduced, context)

        self._in_flight.update(dict.fromkeys((p for p, _ in params), Once(lambda: synchronize(group), store)))

    def _start_sparse(self, p: torch.Tensor, grad: torch.Tensor) -> None:
        result = sparse_allreduce_async(grad, self._name(p), self.op, self.process_set)

        def store(grad: torch.Tensor) -> None:
            p.grad = grad

        self._in_flight[p] = Once(result, store)

    def _store(self, p: torch.Tensor, own: torch.Tensor, reduced: torch.Tensor, context: Any) -> None:
        """Stores the result in place of this rank's own gradient."""
        grad = self._compression.decompress(reduced, context)
        if grad is not own:
            own.copy_(grad.to_sparse(own.sparse_dim()) if own.is_sparse else grad)

    def synchronize(self) -> None:
        """Waits until every gradient is reduced. Also reduces, as zeros, those that backward has not computed.

        Call it before using gradients, for example to clip or to unscale them, and step within `skip_synchronize`.
        Raises RuntimeError, which names the parameter, if the program has changed a gradient since backward.
        """
        if not self._finish_interrupted():  # else this was, and the gradients are those that it has reduced
            self._start_missing()
            self._finish_all()
        self._synchronized = True

    def _start_missing(self) -> None:
        self._backward_ended()
        if self._watch_unfrozen():
            self._renew_batch()
        if self._exchanged() < len(self._watched):
            self._start(self._missing(self._in_flight.keys() | set(self._reduced)))
        if self._gate is not None:
            self._gate.clock()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A context in which `step` does not synchronize, because `synchronize` was called before."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    @hooked
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Waits for the gradients and makes the wrapped optimizer's step.

        closure: computes the loss and its gradients, which are reduced each time that the optimizer calls it. Raises
        RuntimeError if the program has changed gradients in flight, or if ranks have different parameters.
        """
        result = self._step_reduced(closure)
        if self._check is not None:
            self._check.stepped(self._compared)
        return result

    def _step_reduced(self, closure: Callable[[], Any] | None) -> Any:
        if not self._should_synchronize:
            if self._exchanged() or self._ready:
                raise RuntimeError(
                    "optimizer.step() within optimizer.skip_synchronize(), but gradients are being reduced: call "
                    "optimizer.synchronize() first"
                )
            self._synchronized = False
            return super().step(closure)
        if self._synchronized:
            self._warn_twice()
        if closure is None:
            self.synchronize()
            self._synchronized = False
            return super().step()

        def reduced() -> Any:
            loss = closure()
            self.synchronize()
            return loss

        try:
            return super().step(reduced)
        finally:
            self._synchronized = False

    def _warn_twice(self) -> None:
        warnings.warn(
            "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
            "The gradients are reduced twice; use `with optimizer.skip_synchronize(): optimizer.step()`",
            stacklevel=4,
        )


def _groups(groups: Any, params: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Lists of the parameters that are reduced together; a parameter in none of them is reduced alone."""
    if groups is None:
        return []
    if isinstance(groups, int) and groups > 0:
        return [group for group in split_list(params, groups) if group]
    if not isinstance(groups, list):
        raise ValueError("groups must be a positive number or a list of lists of tensors")
    members = [p for group in groups for p in group]
    if not all(isinstance(p, torch.Tensor) for p in members):
        raise ValueError("groups must consist of tensors")
    if len(set(members)) != len(members):
        raise ValueError("a parameter can appear only once in groups")
    known = set(params)
    return [[p for p in group if p in known] for group in groups]
