"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.common.engine import engine
from paceline.common.handles import synchronize
from paceline.common.operation import PLAIN, How
from paceline.common.operators import Sum
from paceline.torch._ops_async import allgather_async, reduction, start_group


class SyncBatchNorm(_BatchNorm):
    """BatchNorm with the statistics of all ranks' batches together.

    Input (N, C, ...): N may differ between ranks, and be 0. The result, the running statistics and the gradient of the
    input equal those of torch.nn.BatchNorm on the union of the batches; gradients of weight and bias are this rank's
    share, which DistributedOptimizer reduces. Arguments as in Horovod, but CPU tensors are accepted too. In eval mode,
    and with one rank, it is plain batch normalisation.

    Raises ValueError for an input of other shapes, and what `allreduce` raises.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm takes an input of at least 2 dimensions, got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalises (N, C, ...) over all dimensions but C."""
        self._check_input_dim(input)
        uses_batch = self.training or not self.track_running_stats
        if not uses_batch or engine.size() == 1:
            return super().forward(input)
        momentum = self.momentum
        mean, var, count = _statistics(input)
        batches, running_mean, running_var = self.num_batches_tracked, self.running_mean, self.running_var
        if self.training and batches is not None and running_mean is not None and running_var is not None:
            batches.add_(1)
            if momentum is None:  # a plain average over all batches so far
                momentum = 1.0 / batches.item()
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((var * (count / (count - 1))).to(running_var.dtype), momentum)
        return _Normalise.apply(input, self.weight, self.bias, mean, torch.rsqrt(var + self.eps))


def _statistics(input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Mean and biased variance per channel over all ranks, and the number of values of a channel."""
    dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
    x = input.detach().to(dtype)
    mean, var, total = (_by_sums if engine.setting("elastic") else _by_gather)(x, x.numel() // x.size(1))
    if total <= 1:
        raise ValueError(
            f"batch normalisation in training needs more than one value per channel over all ranks, got "
            f"{total:.0f}: this rank's input has shape {tuple(input.shape)}"
        )
    return mean, var, total


def _by_gather(x: torch.Tensor, values: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Each rank sends (count, mean, sum of squared deviations), which combine without cancellation."""
    channels = x.size(1)
    var, mean = torch.var_mean(x, dim=_all_but_channels(x), unbiased=False) if values else x.new_zeros(2, channels)
    mine = torch.cat([mean.new_tensor([values]), mean, var * values])
    all_ranks = synchronize(allgather_async(mine.unsqueeze(0), name=_name("statistics", mine)))
    counts, means, squares = all_ranks.split([1, channels, channels], dim=1)
    total = counts.sum().item()
    mean = (counts * means).sum(0) / total
    squares = (squares + counts * (means - mean).square()).sum(0)
    return mean, squares / total, total


def _by_sums(x: torch.Tensor, values: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The same with one exchange more, which the loss of a server cannot break, unlike a gather."""
    dims = _all_but_channels(x)
    mean, _ = _mean_of_all(values, x.sum(dims), "sums")
    squares = (x - mean.view([1, -1] + [1] * (x.dim() - 2))).square().sum(dims)
    variance, total = _mean_of_all(values, squares, "squares")
    return mean, variance, total.item()


def _mean_of_all(values: int, sums: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """All ranks' sums divided by the number of their values, and that number.

    It travels with each of the sums: an elastic job may lose ranks between them.
    """
    mine = torch.cat([sums.new_tensor([values]), sums.flatten()])
    part = reduction(mine, False, _name(name, mine), How(Sum, options=PLAIN))
    (total,) = synchronize(start_group([part], at_once=True))
    return total[1:].view(sums.shape) / total[0], total[0]


# The devices in the order of their first use, which is the same on all ranks.
_devices: dict[torch.device, int] = {}


def _name(what: str, tensor: torch.Tensor) -> str:
    """Backward has a thread for each device, and their operations are in flight together."""
    place = _devices.setdefault(tensor.device, len(_devices))
    return f"sync_batch_norm.{what}" + (f".{place}" if place else "")


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


class _Normalise(torch.autograd.Function):
    """(x - mean) * invstd * weight + bias, with mean and invstd of all ranks' x."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        invstd: torch.Tensor,
    ) -> Any:
        ctx.save_for_backward(input, weight, mean, invstd)
        shape = [1, -1] + [1] * (input.dim() - 2)
        scale = invstd if weight is None else invstd * weight
        shift = -mean * scale if bias is None else bias - mean * scale
        ctx.view = shape
        return (input.to(mean.dtype) * scale.view(shape) + shift.view(shape)).to(input.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable  # a second derivative would lack what the other ranks' batches add
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        input, weight, mean, invstd = ctx.saved_tensors
        dims, shape = _all_but_channels(input), ctx.view
        dy = grad.to(mean.dtype)
        normalised = (input.to(mean.dtype) - mean.view(shape)) * invstd.view(shape)
        grad_bias, grad_weight = dy.sum(dims), (dy * normalised).sum(dims)
        grad_input = None
        if ctx.needs_input_grad[0]:
            values = input.numel() // input.size(1)
            (mean_dy, mean_dy_x), _ = _mean_of_all(values, torch.stack([grad_bias, grad_weight]), "gradients")
            scale = invstd if weight is None else invstd * weight
            grad_input = scale.view(shape) * (dy - mean_dy.view(shape) - normalised * mean_dy_x.view(shape))
            grad_input = grad_input.to(input.dtype)
        if weight is not None:
            grad_weight, grad_bias = grad_weight.to(weight.dtype), grad_bias.to(weight.dtype)
        return (
            grad_input,
            grad_weight if ctx.needs_input_grad[1] else None,
            grad_bias if ctx.needs_input_grad[2] else None,
            None,
            None,
        )
