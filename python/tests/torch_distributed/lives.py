"""Lives of the default group, one after another, over one store.

By env:// each would have a store of its own at the same port: a rank may reach that of the life before, which rank 0 is
about to close.
"""

import functools
import itertools

import torch.distributed as dist

_numbers = itertools.count()


@functools.cache
def _rendezvous():
    return next(dist.rendezvous("env://"))


def begin(backend, **how):
    """Begins a life, with keys of its own: Gloo finds its peers of an earlier life in a store that it has used."""
    store, rank, size = _rendezvous()
    own = dist.PrefixStore(f"life {next(_numbers)}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=size, **how)
