"""GradScaler beside gradients in flight: it changes them without autograd's count, so that it has to ask first."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from paceline.torch._gradient_hooks import GradientHooks


def _asking(unscale: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(unscale)
    def unscale_unless_in_flight(scaler: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if isinstance(optimizer, GradientHooks):
            optimizer.check_unscaling()
        return unscale(scaler, optimizer, *args, **kwargs)

    return unscale_unless_in_flight


def guard() -> None:
    """Makes GradScaler's `unscale_` and `step` raise RuntimeError while an optimizer's gradients are exchanged."""
    scaler = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler  # before PyTorch 2.3
    if not hasattr(scaler._unscale_grads_, "__wrapped__"):
        scaler._unscale_grads_ = _asking(scaler._unscale_grads_)  # type: ignore[method-assign]
