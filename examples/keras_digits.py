"""Trains a Keras model on handwritten digits by model.fit: `paceline run -np 2 python keras_digits.py`.

The script fails if the workers' parameters are not identical at the end, bit for bit.
"""

import argparse
import hashlib
import sys
import time

import tensorflow as tf
from tensorflow_digits import digits, network

import paceline.keras as hvd

keras = tf.keras  # Keras 2 or 3, as TensorFlow has it


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=32, help="images per worker and step (default: 32)")
    parser.add_argument("--lr", type=float, default=1e-3, help="Adam's learning rate for one worker (default: 0.001)")
    args = parser.parse_args()

    hvd.init()
    keras.utils.set_random_seed(1 + hvd.rank())
    images, test_images, labels, test_labels = digits()
    rows = len(images) // hvd.size()  # as many on each worker, so that all make as many steps
    mine = slice(hvd.rank() * rows, (hvd.rank() + 1) * rows)

    model = network()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(args.lr * hvd.size() ** 0.5))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    started = time.perf_counter()
    model.fit(
        images[mine],
        labels[mine],
        batch_size=args.batch_size,
        epochs=args.epochs,
        verbose=2 if hvd.rank() == 0 else 0,
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()],
    )
    seconds = time.perf_counter() - started

    model.optimizer.agree()  # under models that let ranks run ahead, gives all the same parameters
    _, accuracy = model.evaluate(test_images, test_labels, verbose=0)
    digest = hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest()
    same = digest == hvd.broadcast_object(digest, root_rank=0)
    if hvd.rank() == 0:
        print(f"\ntest accuracy: {accuracy:.2%}")
        print(f"throughput:    {args.epochs * rows * hvd.size() / seconds:,.0f} images/s over {hvd.size()} workers")
    print(f"worker {hvd.rank()}: parameters {'identical to' if same else 'DIFFERENT from'} worker 0's")
    hvd.shutdown()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
