"""Trains a network on handwritten digits with a loop in TensorFlow: `paceline run -np 2 python tensorflow_digits.py`.

The data are scikit-learn's 1,797 images of 8 x 8 pixels. The script fails if the workers' parameters are not identical
at the end, bit for bit.
"""

import argparse
import hashlib
import sys
import time

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import paceline.tensorflow as hvd


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=32, help="images per worker and step (default: 32)")
    parser.add_argument("--lr", type=float, default=1e-3, help="Adam's learning rate for one worker (default: 0.001)")
    return parser.parse_args()


def digits():
    """(training images, test images, training labels, test labels), the same on every worker."""
    images, labels = load_digits(return_X_y=True)
    images = images.astype(np.float32).reshape(-1, 8, 8, 1) / 16
    return train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)


def network():
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            tf.keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPool2D(2),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )


def main():
    args = arguments()
    hvd.init()
    tf.keras.utils.set_random_seed(1 + hvd.rank())
    images, test_images, labels, test_labels = digits()

    model = network()
    optimizer = tf.keras.optimizers.Adam(args.lr * hvd.size() ** 0.5)
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables([*model.weights, *optimizer.variables], root_rank=0)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))  # noqa: B905, which tf.function of TensorFlow 2.12 lacks
        return loss

    steps = len(images) // (args.batch_size * hvd.size())
    started = time.perf_counter()
    for epoch in range(args.epochs):
        order = np.random.default_rng(epoch).permutation(len(images))[hvd.rank() :: hvd.size()]
        for i in range(steps):
            batch = order[i * args.batch_size : (i + 1) * args.batch_size]
            loss = step(tf.constant(images[batch]), tf.constant(labels[batch]))
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1:2d}/{args.epochs}  loss of the last batch {float(loss):.4f}", flush=True)
    seconds = time.perf_counter() - started

    mine = slice(hvd.rank(), None, hvd.size())
    right = np.sum(np.argmax(model(test_images[mine]), 1) == test_labels[mine])
    right, seen = hvd.allreduce(tf.constant([right, len(test_labels[mine])]), op=hvd.Sum).numpy()
    digest = hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest()
    prints = hvd.allgather_object(digest)
    same = len(set(prints)) == 1
    if hvd.rank() == 0:
        count = args.epochs * steps * args.batch_size * hvd.size()
        print(f"\ntest accuracy: {right / seen:.2%}")
        print(f"throughput:    {count / seconds:,.0f} images/s over {hvd.size()} workers")
        print(f"parameters:    {'identical' if same else 'DIFFERENT'} on all workers, sha256 {digest[:16]}")
    hvd.shutdown()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
