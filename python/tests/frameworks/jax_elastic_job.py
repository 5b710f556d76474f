"""A training that goes on as ranks come and go, for test_jax.py: `jax_elastic_job.py DIRECTORY`.

Each rank writes a line whenever the training function begins and ends. The training ends when DIRECTORY/stop exists.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import paceline.jax as hvd

stop, COMMIT_EVERY = Path(sys.argv[1]) / "stop", 5
hvd.init()
numbers = np.random.default_rng(hvd.rank())
params = {"w": jnp.asarray(numbers.normal(size=(6, 3)), jnp.float32), "b": jnp.zeros(3)}
optimizer = hvd.distributed_optimizer(optax.adam(0.01))


def digest(state):
    return digest_of((state.params, state.opt_state))


def digest_of(trees):
    leaves = jax.tree_util.tree_leaves(trees)
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest()[:16]


def say(what, state):
    place = {"process": int(os.environ["PACELINE_ELASTIC_PROCESS"]), "pid": os.getpid(), "resets": len(resets)}
    place["round"] = int(os.environ.get("PACELINE_ELASTIC_ROUND", "0"))  # 0: told only which place to expect
    place |= {"rank": hvd.rank(), "size": hvd.size(), "step": state.step, "digest": digest(state)}
    sys.stdout.write(json.dumps({"what": what} | place) + "\n")
    sys.stdout.flush()


@jax.jit
def step(params, opt_state, x):
    grads = jax.grad(lambda p: ((x @ p["w"] + p["b"]) ** 2).mean())(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


@hvd.elastic.run
def train(state):
    say("begin", state)
    assert state.committed is None or digest_of(state.committed) == digest(state), "the state is not what was committed"
    assert state.step % COMMIT_EVERY == 0, state.step
    while True:
        x = jnp.asarray(np.random.default_rng(100 * state.step + hvd.rank()).normal(size=(4, 6)), jnp.float32)
        state.params, state.opt_state = step(state.params, state.opt_state, x)
        state.step += 1
        if state.step % COMMIT_EVERY == 0:
            state.committed = state.params, state.opt_state  # which may be in flight
            state.commit()
            if hvd.broadcast_object(stop.exists(), name="stop"):
                return


resets = []
state = hvd.elastic.JaxState(params=params, opt_state=optimizer.init(params), step=0, committed=None)
state.register_reset_callbacks([lambda: resets.append(hvd.size())])
train(state)
say("end", state)
