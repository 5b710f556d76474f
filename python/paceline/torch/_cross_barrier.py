"""Steps that end behind `step`: the next forward pass waits for each layer's parameters alone (BytePS's cross barrier).

`step` notes which options hold and takes the gradients, but does not wait. A hook before each module's forward waits
for the reductions of its parameters and steps these; while it has to wait, it steps others whose gradients are there.
The wrapped optimizer makes the steps, on some of its parameters at a time, with the options that `step` noted.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

from paceline.common.engine import engine
from paceline.torch._gradient_hooks import options_of
from paceline.torch._prepared import Member
from paceline.torch._reducing_optimizer import ReducingOptimizer

_USED = (
    "cross_barrier: parameter {name!r} was used before its step had ended. Forward waits for the parameters of each "
    "module that is called; call optimizer.agree() before a forward that uses them otherwise, and do not keep a graph "
    "from before optimizer.step()"
)
_WRITTEN = (
    "cross_barrier: parameter {name!r} was changed between optimizer.step() and the end of its step, which comes with "
    "the next forward: call optimizer.agree() before changing parameters"
)

_compiling = getattr(torch.compiler, "is_compiling", lambda: False)  # before PyTorch 2.3 hooks run in compiled code


class _Step(NamedTuple):
    """A parameter's step that has not been made."""

    gradient: torch.Tensor
    wait: Callable[[], None]
    group: int
    version: int  # of the parameter


class CrossBarrierOptimizer(ReducingOptimizer):
    """Leaves each parameter's step to the next forward pass that needs the parameter.

    Modules are learned as they are called: one waits for its own parameters, and for those of modules below it that are
    never called, such as out_proj of nn.MultiheadAttention. `step` waits for parameters that no called module has.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._steps: dict[torch.Tensor, _Step] = {}  # not made yet, in the order of forward
        self._options_then: list[dict[str, Any]] = []
        self._settling = threading.RLock()
        # by called module: what its forward waits for
        self._waits: weakref.WeakKeyDictionary[nn.Module, list[torch.Tensor]] = weakref.WeakKeyDictionary()
        self._claimed: set[torch.Tensor] = set()
        self._learned = False  # whether all of _waits have what they shall have
        if self._distributed:
            _guard()
            registered: list[Any] = []
            hook = _forward_hook(weakref.ref(self), registered)
            registered.append(nn.modules.module.register_module_forward_pre_hook(hook))

    def agree(self) -> None:
        """Ends the last `step`: waits for every gradient and steps every parameter. Raises HorovodInternalError."""
        self._unseen.clear()
        self._make(tuple(self._steps))

    def synchronize(self) -> None:
        """As without cross_barrier: waits until every gradient is reduced."""
        self.agree()
        super().synchronize()

    def state_dict(self) -> dict[str, Any]:
        """The state after the last `step`, which it ends."""
        self.agree()
        return super().state_dict()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Ends the last `step`, then loads options and state; waits for reductions in flight and drops them."""
        self.agree()
        super().load_state_dict(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters; their gradients are reduced too."""
        self.agree()
        super().add_param_group(param_group)
        self._learned = False

    def _compared(self) -> dict[torch.Tensor, str]:
        self.agree()
        return super()._compared()

    def _backward_begins(self) -> None:
        self._end_forward()
        super()._backward_begins()

    def _gradient_ready(self, p: torch.Tensor) -> None:
        if p in self._unseen:
            raise RuntimeError(_USED.format(name=self._parameter_names[p]))
        self._end_forward()
        super()._gradient_ready(p)

    def _end_forward(self) -> None:
        """Makes the steps of parameters whose modules the forward pass, which is over, has not called."""
        if self._steps:
            self._make(tuple(self._steps))

    def _finish_all(self) -> None:
        try:
            super()._finish_all()
        finally:
            self._end_batch()

    def _end_batch(self) -> None:
        with suppress(RuntimeError, ValueError):  # which the wait for the gradient has raised
            self._batch.wait()

    def _step_reduced(self, closure: Callable[[], Any] | None) -> Any:
        if not self._distributed:
            return super()._step_reduced(closure)
        self.agree()
        return self._begin_step(closure) if self._should_synchronize else super()._step_reduced(closure)

    @torch.optim.Optimizer.profile_hook_step
    def _begin_step(self, closure: Callable[[], Any] | None) -> Any:
        if self._synchronized:
            self._warn_twice()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._start_missing()
        if self._changed():
            self._finish_all()  # raises
        self._note()
        if not self._learned:
            self._learn()
        if self._optimizer_step_post_hooks or _global_optimizer_post_hooks:
            self.agree()  # they may use every parameter
        else:
            self._settle([p for p in self._steps if p not in self._claimed])
        return loss

    def _note(self) -> None:
        """Takes the gradients and the options, so that the program may change both."""
        self._synchronized = False
        self._made = {}
        self._options_then = [
            {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}
            for group in self.param_groups
        ]
        group_of = {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}
        with self._settling:
            waits = self._in_flight | {p: Member(self._batch, place) for place, p in enumerate(self._take_reduced())}
            for p in filter(waits.__contains__, self._watched):
                assert p.grad is not None
                self._steps[p] = _Step(p.grad, waits[p], group_of[p], p._version)
                p.grad = None
            self._in_flight = {}
            self._unseen = set(self._steps)
            _unsettled.add(self)
        own = [p for p in group_of if p.grad is not None]  # gradients that are not reduced
        self._step_some([(p, group_of[p]) for p in own])
        self._note_resting()
        self.set_backward_passes_per_step(self.backward_passes_per_step)

    # The modules

    def _enter(self, module: nn.Module) -> None:
        """Waits for what a module's forward needs."""
        training = torch.is_grad_enabled()
        waits = self._waits.get(module)
        if waits is None:
            waits = self._own(module)
            if training and (waits or module._modules):
                self._waits[module] = waits
                self._learned &= not any(map(self._own, module.modules()))
        if self._unseen:
            if not training:  # evaluation may use parameters of modules below without calling these
                waits = [p for m in module.modules() for p in self._own(m)]
            if not self._unseen.isdisjoint(waits):
                self._settle(waits)

    def _own(self, module: nn.Module) -> list[torch.Tensor]:
        return [p for p in module._parameters.values() if p is not None and p in self._watched]

    def _learn(self) -> None:
        for module in list(self._waits):
            self._waits[module] = list(self._needed(module))
        self._claimed = {p for waits in self._waits.values() for p in waits}
        self._learned = True

    def _needed(self, module: nn.Module) -> Iterator[torch.Tensor]:
        yield from self._own(module)
        for child in module.children():
            if child not in self._waits:
                yield from self._needed(child)

    # The steps

    def _settle(self, wanted: Collection[torch.Tensor]) -> None:
        """Makes the steps of parameters that are about to be used."""
        self._unseen.difference_update(wanted)
        self._make(wanted)

    def _make(self, wanted: Iterable[torch.Tensor]) -> None:
        """Waits for the gradients of these parameters and steps them; meanwhile others whose gradients are there."""
        with self._settling:
            wanted = [p for p in dict.fromkeys(wanted) if p in self._steps]
            if not wanted:
                return
            try:
                while not all(map(self._arrived, wanted)):
                    other = next(filter(self._arrived, self._steps), None)
                    if other is None:
                        break
                    self._finish([other])
                self._finish([p for p in wanted if p in self._steps])
            except Exception:
                self._abandon()
                raise
            if not self._steps:
                self._end_batch()
                _unsettled.discard(self)

    def _arrived(self, p: torch.Tensor) -> bool:
        step = self._steps.get(p)
        return step is None or (isinstance(step.wait, Member) and step.wait.ended())

    def _finish(self, params: list[torch.Tensor]) -> None:
        """Waits for these gradients and makes the steps."""
        before = [p.grad for p in params]
        try:
            for p in params:
                step = self._steps[p]
                p.grad = step.gradient
                step.wait()
                if p._version != step.version:
                    raise RuntimeError(_WRITTEN.format(name=self._parameter_names[p]))
            self._step_some([(p, self._steps.pop(p).group) for p in params])
        finally:
            for p, grad in zip(params, before, strict=True):
                p.grad = grad

    def _step_some(self, params: list[tuple[torch.Tensor, int]]) -> None:
        """The wrapped optimizer's step of these parameters, which are given with the numbers of their groups."""
        if not params:
            return
        some: dict[int, dict[str, Any]] = {}
        for p, number in params:
            some.setdefault(number, {**self._options_then[number], "params": []})["params"].append(p)
        everything, self.param_groups = self.param_groups, list(some.values())
        before = options_of(self.param_groups)
        try:
            with torch.inference_mode(False), torch.no_grad(), torch.autocast(params[0][0].device.type, enabled=False):
                self._step_unhooked()
            self._check_options(before, "cross_barrier", "cross_barrier=False")
        finally:
            self.param_groups = everything

    def _abandon(self) -> None:
        """Forgets the steps, when the engine no longer uses the memory of their gradients."""
        for step in self._steps.values():
            with suppress(RuntimeError, ValueError):  # the first failure is raised
                step.wait()
        self._steps.clear()
        self._unseen.clear()
        self._end_batch()
        _unsettled.discard(self)


_unsettled: set[CrossBarrierOptimizer] = set()  # keeps them until their steps have ended


def settle() -> None:
    """Ends the last steps of all optimizers, even if one fails."""
    failure = None
    for optimizer in tuple(_unsettled):
        try:
            optimizer.agree()
        except (RuntimeError, ValueError) as e:
            failure = failure or e
    if failure is not None:
        raise failure


def check(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError for an optimizer that cannot step its parameters one by one, some time after `step`."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    why = None
    if isinstance(optimizer, torch.optim.LBFGS) or (closure is not None and closure.default is closure.empty):
        why = "evaluates the loss again within a step, with all parameters"
    elif any(group.get("differentiable") for group in optimizer.param_groups):
        why = "is differentiable, so that its steps belong to the graph"
    if why:
        raise ValueError(f"cross_barrier with {type(optimizer).__name__}, which {why}: use cross_barrier=False")


def _forward_hook(ref: weakref.ref[CrossBarrierOptimizer], registered: list[Any]) -> Callable[..., None]:
    """A hook before every module's forward that removes itself when its optimizer no longer exists.

    Compiled modules do not run it: the module outside of the compiled code waits for all of theirs.
    """

    def hook(module: nn.Module, _: Any) -> None:
        if _compiling():
            return
        optimizer = ref()
        if optimizer is None:
            registered[0].remove()
        else:
            optimizer._enter(module)

    return hook


@functools.cache
def _guard() -> None:
    """Ends steps before a program uses parameters by a module's methods, copies them or moves them."""
    for name in ("state_dict", "load_state_dict", "_apply"):
        setattr(nn.Module, name, _settled(getattr(nn.Module, name)))
    for name in ("__deepcopy__", "__reduce_ex__"):
        setattr(nn.Parameter, name, _settled(getattr(nn.Parameter, name)))
    nn.Module.named_parameters = _settling(nn.Module.named_parameters)  # type: ignore[method-assign]
    engine.before_rest(settle)


def _settled(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def settled(*args: Any, **kwargs: Any) -> Any:
        if _unsettled:
            settle()
        return method(*args, **kwargs)

    return settled


def _settling(named_parameters: Callable[..., Any]) -> Callable[..., Any]:
    """The iterator, by which `parameters` iterates too; it waits for each parameter that is asked for."""

    @functools.wraps(named_parameters)
    def settling(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for name, p in named_parameters(*args, **kwargs):
            for optimizer in tuple(_unsettled):
                optimizer._settle([p])
            yield name, p

    return settling
