"""The torch.distributed backend "paceline": `torch.distributed.init_process_group("paceline")`.

PyTorch finds it by its name, through the entry point `torch.distributed.backends`; before 2.14 a script imports this
module. With `PACELINE_TAKEOVER=gloo` (`paceline run --takeover gloo`) scripts that ask for "gloo" get it too, and
import nothing. `ddp_hook` and PACELINE_COMPRESSION give DistributedDataParallel Paceline's codecs.
"""

from __future__ import annotations

from typing import Any

from paceline.torch.distributed import versions

__all__ = ["DDPState", "ddp_hook"]

versions.check()
with versions.known():
    from paceline.torch.distributed import names, takeover
if names.OLDER:
    takeover.register()


def __getattr__(name: str) -> Any:
    """`DDPState` and `ddp_hook`, which need more of PyTorch than the backend does."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with versions.known():
        from paceline.torch.distributed import ddp
    return getattr(ddp, name)
