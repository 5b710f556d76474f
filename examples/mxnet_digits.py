"""Trains a small convolutional network on handwritten digits with MXNet: `paceline run -np 2 python mxnet_digits.py`.

The data are scikit-learn's 1,797 images of 8 x 8 pixels. The script fails if the workers' parameters are not identical
at the end, bit for bit.
"""

import argparse
import hashlib
import sys
import time

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import paceline.mxnet as hvd


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
    images = images.astype(np.float32).reshape(-1, 1, 8, 8) / 16
    return train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)


def network():
    net = gluon.nn.HybridSequential()
    net.add(
        gluon.nn.Conv2D(16, 3, padding=1, activation="relu"),
        gluon.nn.Conv2D(32, 3, padding=1, activation="relu"),
        gluon.nn.MaxPool2D(2),
        gluon.nn.Dense(128, activation="relu"),
        gluon.nn.Dense(10),
    )
    return net


def fingerprint(net):
    """A hash over every bit of the parameters."""
    parts = [p.data().asnumpy().tobytes() for p in net.collect_params().values()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def main():
    args = arguments()
    hvd.init()
    mx.random.seed(args.seed + hvd.rank())
    train_images, test_images, train_labels, test_labels = digits()

    net = network()
    net.initialize(mx.init.Xavier())
    net(mx.nd.array(train_images[:1]))
    net.hybridize()
    params = net.collect_params()
    hvd.broadcast_parameters(params, root_rank=0)
    trainer = hvd.DistributedTrainer(params, "adam", {"learning_rate": args.lr * hvd.size() ** 0.5})
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()

    def accuracy():
        """The share of the test data that the network gets right; each worker looks at its part."""
        each = len(test_labels) // hvd.size()
        part = slice(hvd.rank() * each, (hvd.rank() + 1) * each)
        right = (net(mx.nd.array(test_images[part])).asnumpy().argmax(1) == test_labels[part]).mean()
        return float(hvd.allreduce(mx.nd.array([right]), name="right").asscalar())

    order = np.random.default_rng(args.seed)  # the same on every worker
    batch = args.batch_size * hvd.size()
    steps = len(train_labels) // batch
    seconds = 0.0
    for epoch in range(args.epochs):
        shuffled = order.permutation(len(train_labels))[: steps * batch].reshape(steps, hvd.size(), -1)
        started = time.perf_counter()
        for places in shuffled[:, hvd.rank()]:
            with autograd.record():
                loss = loss_of(net(mx.nd.array(train_images[places])), mx.nd.array(train_labels[places]))
            loss.backward()
            trainer.step(args.batch_size)
        mx.nd.waitall()
        seconds += time.perf_counter() - started
        share = accuracy()
        if hvd.rank() == 0:
            mean = float(loss.mean().asscalar())
            print(f"epoch {epoch + 1:2d}/{args.epochs}  loss {mean:.4f}  test accuracy {share:.2%}", flush=True)

    trainer.agree()  # under models that let ranks run ahead, gives all the same parameters
    share = accuracy()
    prints = hvd.allgather_object(fingerprint(net))
    same = len(set(prints)) == 1
    if hvd.rank() == 0:
        print(f"\ntest accuracy: {share:.2%}")
        print(f"throughput:    {args.epochs * steps * batch / seconds:,.0f} images/s over {hvd.size()} workers")
        print(f"parameters:    {'identical' if same else 'DIFFERENT'} on all workers, sha256 {prints[0][:16]}")
    hvd.shutdown()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
