"""Hooks into backward, for the optimizers whose exchanges start while it runs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import torch

from paceline.common.exceptions import HorovodInternalError
from paceline.torch._distributed import Distributed
from paceline.torch._parameters import parameter_names

_EARLY_ZERO_GRAD = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
    "optimizer.synchronize(): what backward has made is being exchanged"
)
_CHANGED = (
    "gradients were changed after backward() and before optimizer.step(), while they were being exchanged: {names}. "
    "{recipe}"
)
_UNSCALING = "GradScaler is about to unscale gradients that are being exchanged. {recipe}"
_RECIPE = (
    "Before you clip, unscale (GradScaler) or replace gradients, wait for their reduction:\n"
    "    optimizer.synchronize()\n"
    "    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)\n"
    "    with optimizer.skip_synchronize():\n"
    "        optimizer.step()"
)


def marks_of(grads: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """`mark_of` each."""
    try:
        return [(grad._version, grad.data_ptr()) for grad in grads]
    except RuntimeError:  # one is an inference tensor, or sparse
        return [mark_of(grad) for grad in grads]


def mark_of(grad: torch.Tensor | None) -> tuple[int, int]:
    """What changes with a gradient: autograd's count of changes, and the address, which grad.data = ... changes.

    The engine writes into the memory without either.
    """
    if grad is None:
        return -1, 0
    version = -1 if grad.is_inference() else grad._version
    return version, grad.data_ptr() if grad.layout is torch.strided else 0


def is_changed(p: torch.Tensor, grad: torch.Tensor | None, before: tuple[int, int], now: tuple[int, int]) -> bool:
    """Whether the program has changed a parameter's gradient, by its marks.

    The count of changes of a part of one flat gradient is that of all parts, to which backward adds as well.
    """
    if p.grad is not grad:
        return True
    if grad is None or before == now:
        return False
    in_flat = grad.layout is torch.strided and grad.untyped_storage().nbytes() > grad.nbytes
    return not in_flat or before[1] != now[1]


class Watched:
    """What an optimizer knows of a parameter with a hook."""

    __slots__ = ("left", "prepared", "priority")

    def __init__(self, left: int, priority: int) -> None:
        self.left = left  # backward passes before its gradient is exchanged
        self.priority = priority
        self.prepared: Any = None  # ReducingOptimizer's


class Once:
    """Waits for an operation and has its result stored, once. Ctrl-C ends one of both, which the next call does."""

    __slots__ = ("_result", "_store", "_wait")

    def __init__(self, wait: Callable[[], Any], store: Callable[[Any], None]) -> None:
        """wait: returns the operation's result, when it is first called."""
        self._wait: Callable[[], Any] | None = wait
        self._store: Callable[[Any], None] | None = store
        self._result: Any = None

    def __call__(self) -> None:
        """Waits and stores. Raises HorovodInternalError if the operation failed, and then stores nothing."""
        if self._store is None:
            return
        try:
            if self._wait is not None:
                self._result = self._wait()
                self._wait = None
            self._store(self._result)
        except Exception:
            self._store = self._result = None
            raise
        self._store = self._result = None

    def end(self) -> None:
        """Waits, and has nothing stored, also if the operation failed."""
        if self._store is not None and self._wait is not None:
            with suppress(RuntimeError, ValueError):
                self._wait()
        self._wait = self._store = self._result = None


class GradientHooks(Distributed):
    """Base of these optimizers: a hook on each parameter that counts backward passes and starts its exchange.

    `DistributedOptimizer` makes a class of it and the wrapped optimizer's class, in this order. An instance adopts the
    wrapped optimizer's attributes: groups, options and state.
    """

    _recipe: ClassVar[str] = _RECIPE  # for a program that changes gradients between backward and step

    def _adopt(
        self, optimizer: torch.optim.Optimizer, named_parameters: Any, compression: Any, backward_passes_per_step: int
    ) -> None:
        self.__dict__.update({k: v for k, v in vars(optimizer).items() if k != "step"})  # a scheduler wraps step
        self._parameter_names = parameter_names(self.param_groups, named_parameters)
        self._compression = compression
        self._prepare(backward_passes_per_step)

    def _prepare(self, backward_passes_per_step: int) -> None:
        self.backward_passes_per_step = backward_passes_per_step
        self._watched: dict[torch.Tensor, Watched] = {}
        self._frozen: list[torch.Tensor] = []  # parameters without a hook, which PyTorch would refuse
        self._resting: set[torch.Tensor] = set()  # those with one that were frozen before this backward pass
        self._in_flight: dict[torch.Tensor, Callable[[], None]] = {}  # by parameter: waits, stores the result
        # by parameter: its gradient since the last step, not to be changed, and the gradient's mark
        self._made: dict[torch.Tensor, tuple[torch.Tensor | None, tuple[int, int]]] = {}
        self._unfinished: list[Callable[[], None]] = []  # what waits for exchanges: Ctrl-C may leave some of it
        self._finishing = threading.RLock()
        self._stepping = threading.Lock()  # backward has a thread for each device

    def _watch_all(self) -> None:
        for group in self.param_groups:
            self._watch(group["params"])

    def _watch(self, params: Iterable[torch.Tensor]) -> None:
        """Hooks into backward. The first parameters have the highest priority: forward needs them first."""
        ref = weakref.ref(self)
        for p in params:
            if not p.requires_grad:
                self._frozen.append(p)
            elif p not in self._watched:
                watched = self._watched[p] = Watched(self.backward_passes_per_step, -len(self._watched))
                registered: list[Any] = []
                hook = self._hook(watched, _ready(ref, registered))
                registered.append(p.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def _watch_unfrozen(self) -> bool:
        """Hooks into parameters that require gradients only since the last step. Returns whether there are any."""
        unfrozen = [p for p in self._frozen if p.requires_grad]
        if unfrozen:
            self._frozen = [p for p in self._frozen if not p.requires_grad]
            self._watch(unfrozen)
        return bool(unfrozen)

    def _missing(self, exchanged: Collection[torch.Tensor]) -> list[torch.Tensor]:
        """The parameters that are yet to be exchanged: backward has not reached them, but another rank's may have.

        What was frozen before backward, and has no gradient, has none anywhere, and is left alone, as without us.
        """
        resting = {p for p in self._resting if not p.requires_grad and p.grad is None}
        return [p for p in self._watched if p not in exchanged and p not in resting]

    def _note_resting(self) -> None:
        self._resting = {p for p in self._watched if not p.requires_grad}

    def _hook(self, watched: Watched, ready: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        """The hook on a parameter, which keeps neither it nor the optimizer. ready: has `_gradient_ready` called."""
        return ready

    def _gradient_ready(self, p: torch.Tensor) -> None:
        self._finish_interrupted()
        watched = self._watched[p]
        if watched.left <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). "
                "Increase backward_passes_per_step to accumulate gradients locally."
            )
        watched.left -= 1
        if watched.left == 0:
            self._reduce(p)
            self._made[p] = p.grad, mark_of(p.grad)

    def _reduce(self, p: torch.Tensor) -> None:
        raise NotImplementedError

    def _stepped(self, p: torch.Tensor) -> torch.Tensor:
        """The wrapped optimizer's step of one parameter: the new value, in a copy. The parameter's state advances.

        The parameter itself does not change, because backward may still need it.
        """
        copy = torch.nn.Parameter(p.detach().clone())
        copy.grad = p.grad
        with self._stepping, self._only(lambda params: [copy for q in params if q is p]):
            try:
                if p in self.state:
                    self.state[copy] = self.state.pop(p)
                self._step_unhooked()
            finally:
                if copy in self.state:
                    self.state[p] = self.state.pop(copy)
        return copy.detach()

    @contextmanager
    def _only(self, chosen: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> Iterator[None]:
        """A context in which each group has only the chosen parameters."""
        everyone = [group["params"] for group in self.param_groups]
        try:
            for group, params in zip(self.param_groups, everyone, strict=True):
                group["params"] = chosen(params)
            yield
        finally:
            for group, params in zip(self.param_groups, everyone, strict=True):
                group["params"] = params

    def _step_unhooked(self, *closure: Callable[[], Any] | None) -> Any:
        """The wrapped optimizer's step without PyTorch's step hooks, which run once for all parameters."""
        step: Any = super().step
        function = step.__wrapped__ if getattr(step, "hooked", False) else step.__func__
        return function(self, *closure)

    def _check_options(self, before: list[dict[str, Any]], why: str, instead: str) -> None:
        """Raises ValueError if a step has changed options, which all parameters of a group share."""
        for old, new in zip(before, options_of(self.param_groups), strict=True):
            changed = [
                option
                for option, (value, version) in new.items()
                if option not in old or value is not old[option][0] or version != old[option][1]
            ]
            if changed:
                raise ValueError(
                    f"{why}: the optimizer's step changes {', '.join(changed)} of all parameters together, so that "
                    f"it cannot step them one by one; use {instead}"
                )

    def _finish_all(self) -> None:
        """Waits for every exchange in flight, even if one fails. Raises RuntimeError if a gradient was changed."""
        changed = self._changed()
        self._made = {}
        params, waits = self._take_in_flight()
        self._unfinished += waits
        for p in params:
            self._watched[p].left = self.backward_passes_per_step
        failure = self._finish_waits()
        self._note_resting()
        if failure is not None and (isinstance(failure, HorovodInternalError) or not changed):
            raise failure
        if changed:  # which other failures follow from
            names = ", ".join(map(repr, changed[:3])) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
            raise RuntimeError(_CHANGED.format(names=names, recipe=self._recipe))

    def _finish_waits(self) -> RuntimeError | ValueError | None:
        """Waits for what is unfinished, and returns the first failure."""
        failure: RuntimeError | ValueError | None = None
        with self._finishing:
            while self._unfinished:
                try:
                    self._unfinished[0]()
                except (RuntimeError, ValueError) as e:
                    failure = failure or e
                except Exception:
                    del self._unfinished[0]
                    raise
                del self._unfinished[0]
        return failure

    def _finish_interrupted(self) -> bool:
        """Waits for what a wait that was interrupted (Ctrl-C) has left: the engine uses the gradients until then.

        Returns whether there was any.
        """
        if not self._unfinished:
            return False
        if (failure := self._finish_waits()) is not None:
            raise failure
        return True

    def _take_in_flight(self) -> tuple[Iterable[torch.Tensor], Iterable[Callable[[], None]]]:
        """The parameters that are exchanged, which are so no longer, and what waits for them."""
        taken, self._in_flight = self._in_flight, {}
        return taken, dict.fromkeys(taken.values())  # many gradients have the same

    def _exchanged(self) -> int:
        """How many parameters are exchanged."""
        return len(self._in_flight)

    def _changed(self) -> list[str]:
        """The names of the parameters whose gradients in flight the program has changed."""
        changed = self._changed_params()
        return [name for p, name in self._parameter_names.items() if p in changed] if changed else []

    def _changed_params(self) -> set[torch.Tensor]:
        return {p for p, (grad, mark) in self._made.items() if is_changed(p, grad, mark, mark_of(grad))}

    def check_unscaling(self) -> None:
        """Raises RuntimeError if GradScaler would change gradients in flight."""
        unfrozen = any(p.requires_grad and p.grad is not None for p in self._frozen)  # `step` reduces these
        if self._made or self._exchanged() or unfrozen:
            raise RuntimeError(_UNSCALING.format(recipe=self._recipe))

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets the number of backward passes before each step."""
        self.backward_passes_per_step = passes
        for watched in self._watched.values():
            watched.left = passes

    def _end_in_flight(self) -> None:
        """Waits for the exchanges in flight, whose names are in use until then, and drops what comes of them."""
        self._unfinished += self._take_in_flight()[1]
        self._made.clear()  # before it waits, for Ctrl-C: the next backward waits for what is left then
        self.set_backward_passes_per_step(self.backward_passes_per_step)
        with self._finishing:
            for wait in self._unfinished:
                with suppress(RuntimeError, ValueError):
                    (wait.end if isinstance(wait, Once) else wait)()
            self._unfinished.clear()

    def _drop_in_flight(self) -> None:
        """Forgets the exchanges in flight: nobody waits for their results."""
        self._in_flight.clear()
        self._unfinished.clear()
        self._made.clear()
        self.set_backward_passes_per_step(self.backward_passes_per_step)

    def _compared(self) -> dict[torch.Tensor, str]:
        """The parameters that are the same on all ranks after each step, with their names."""
        return {p: self._parameter_names[p] for p in self._watched}

    def agree(self) -> None:
        """Does nothing: ranks agree after every step. Under models that let ranks run ahead it waits."""

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clears the gradients. Raises AssertionError while they are being reduced."""
        self._finish_interrupted()
        if self._exchanged():
            raise AssertionError(_EARLY_ZERO_GRAD)
        super().zero_grad(*args, **kwargs)
        if kwargs.get("set_to_none", args[0] if args else True):
            self._note_resting()
        else:  # a frozen parameter is stepped with zeros, as without us
            self._resting.clear()


def options_of(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """What tells whether options were changed: the values, and tensors' versions."""
    return [{k: (v, v._version if isinstance(v, torch.Tensor) else 0) for k, v in group.items()} for group in groups]


def _ready(ref: weakref.ref[GradientHooks], registered: list[Any]) -> Callable[[torch.Tensor], None]:
    """A hook that removes itself when its optimizer no longer exists."""

    def hook(p: torch.Tensor) -> None:
        optimizer = ref()
        if optimizer is None:
            registered[0].remove()
        else:
            optimizer._gradient_ready(p)

    return hook
