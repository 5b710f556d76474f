"""Trains a small convolutional network on handwritten digits with JAX: `paceline run -np 2 python jax_digits.py`.

The data are scikit-learn's 1,797 images of 8 x 8 pixels. The script fails if the workers' parameters are not identical
at the end, bit for bit.
"""

import argparse
import hashlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import paceline.jax as hvd


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=32, help="images per worker and step (default: 32)")
    parser.add_argument("--lr", type=float, default=1e-3, help="Adam's learning rate for one worker (default: 0.001)")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def digits():
    """The images and labels, split into training and test data in the same way on every worker."""
    images, labels = load_digits(return_X_y=True)
    images = images.astype(np.float32).reshape(-1, 8, 8, 1) / 16
    return train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)


def new_parameters(key):
    def layer(key, *shape):
        scale = np.sqrt(2 / np.prod(shape[:-1]))
        return {"kernel": scale * jax.random.normal(key, shape), "bias": jnp.zeros(shape[-1])}

    keys = jax.random.split(key, 4)
    shapes = [(3, 3, 1, 16), (3, 3, 16, 32), (4 * 4 * 32, 128), (128, 10)]
    return [layer(key, *shape) for key, shape in zip(keys, shapes, strict=True)]


def network(params, images):
    first, second, hidden, last = params
    x = images
    for p in (first, second):
        x = jax.lax.conv_general_dilated(x, p["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(x + p["bias"])
    x = x.reshape(-1, 4, 2, 4, 2, 32).max(axis=(2, 4)).reshape(-1, 4 * 4 * 32)
    x = jax.nn.relu(x @ hidden["kernel"] + hidden["bias"])
    return x @ last["kernel"] + last["bias"]


def loss_of(params, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(network(params, images), labels).mean()


@jax.jit
def right(params, images, labels):
    """How many labels the network finds on all workers together."""
    return hvd.allreduce((network(params, images).argmax(1) == labels).sum(), op=hvd.Sum, name="right")


def fingerprint(params):
    """A hash over every bit of the parameters."""
    leaves = jax.tree_util.tree_leaves(params)
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest()


def main():
    args = arguments()
    hvd.init()
    train_images, test_images, train_labels, test_labels = digits()

    params = new_parameters(jax.random.PRNGKey(args.seed + hvd.rank()))
    params = hvd.broadcast_parameters(params, root_rank=0)
    optimizer = hvd.distributed_optimizer(optax.adam(args.lr * hvd.size() ** 0.5))
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, images, labels):
        loss, grads = jax.value_and_grad(loss_of)(params, images, labels)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    def accuracy():
        """The share of the test data that the network gets right; each worker looks at its part."""
        each = len(test_labels) // hvd.size()
        part = slice(hvd.rank() * each, (hvd.rank() + 1) * each)
        return float(right(params, test_images[part], test_labels[part])) / (each * hvd.size())

    order = np.random.default_rng(args.seed)  # the same on every worker
    batch = args.batch_size * hvd.size()
    steps = len(train_labels) // batch
    seconds = 0.0
    for epoch in range(args.epochs):
        shuffled = order.permutation(len(train_labels))[: steps * batch].reshape(steps, hvd.size(), -1)
        started = time.perf_counter()
        for places in shuffled[:, hvd.rank()]:
            params, state, loss = step(params, state, train_images[places], train_labels[places])
        jax.block_until_ready(params)
        if epoch:  # the first one compiles
            seconds += time.perf_counter() - started
        share = accuracy()
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1:2d}/{args.epochs}  loss {loss:.4f}  test accuracy {share:.2%}", flush=True)

    params = optimizer.agree(params)  # under models that let ranks run ahead, gives all the same parameters
    share = accuracy()
    prints = hvd.allgather_object(fingerprint(params))
    same = len(set(prints)) == 1
    if hvd.rank() == 0:
        print(f"\ntest accuracy: {share:.2%}")
        if seconds:
            images = (args.epochs - 1) * steps * batch
            print(f"throughput:    {images / seconds:,.0f} images/s over {hvd.size()} workers")
        print(f"parameters:    {'identical' if same else 'DIFFERENT'} on all workers, sha256 {prints[0][:16]}")
    hvd.shutdown()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
