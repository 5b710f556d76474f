"""The state of a distributed optimizer, and the gate, which is a part of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paceline.common.significance import Significance

Tree = Any


class DistributedState(NamedTuple):
    """The state: the wrapped optimizer's, and what this rank keeps. The latter differs between ranks."""

    inner: Any
    passes: Any = None  # since the last step
    accumulated: Any = None  # gradients of these passes
    iteration: Any = None  # of the gate, from 1
    withheld: Any = None  # by the gate


def with_gate(state: DistributedState, params: Tree) -> DistributedState:
    """The state of an optimizer with a gate, which withholds nothing yet."""
    zeros = jax.tree_util.tree_map(jnp.zeros_like, params)
    return state._replace(iteration=jnp.ones((), jnp.int32), withheld=zeros)


def offer(
    gate: Significance, changes: Tree, state: DistributedState, params: Tree
) -> tuple[Tree, jax.Array, DistributedState]:
    """The changes plus what was withheld; which of them are too small, so that they are withheld; the new state.

    Changes that are not finite are always sent.
    """
    if params is None:
        raise ValueError("with a gate, update needs the parameters: update(grads, state, params)")
    threshold = gate.threshold / state.iteration.astype(jnp.float32) ** gate.decay
    total = jax.tree_util.tree_map(jnp.add, changes, state.withheld)
    small = jax.tree_util.tree_map(lambda t, p: norm(t) < threshold * norm(p), total, params)
    withheld = jax.tree_util.tree_map(lambda s, t: jnp.where(s, t, jnp.zeros_like(t)), small, total)
    empty = jnp.stack(jax.tree_util.tree_leaves(small)).astype(jnp.uint8)
    return total, empty, state._replace(iteration=state.iteration + 1, withheld=withheld)


def norm(array: jax.Array) -> jax.Array:
    """The L2 norm, for float16 in float32."""
    return jnp.linalg.norm(array.astype(jnp.promote_types(array.dtype, jnp.float32)).ravel())


def flags_of(empty: jax.Array | None) -> list[jax.Array]:
    """The first array of a gated call, if there is a gate."""
    return [] if empty is None else [empty]


def byte_sizes(tree: Tree) -> list[int]:
    """The bytes of each array."""
    return [leaf.size * leaf.dtype.itemsize for leaf in map(jnp.asarray, jax.tree_util.tree_leaves(tree))]


def is_traced(tree: Tree) -> bool:
    """Whether an array of the tree belongs to a program that is being compiled."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree_util.tree_leaves(tree))


def paths(tree: Tree) -> list[str]:
    """The place of each array in its pytree, such as "layers.0.kernel"."""
    return [
        ".".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path) or "params"
        for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]
