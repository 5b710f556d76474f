"""Trains a small convolutional network on handwritten digits, data-parallel: `paceline run -np 2 python digits.py`.

The data are scikit-learn's 1,797 images of 8 x 8 pixels. The script fails if the workers' parameters are not identical
at the end, bit for bit.
"""

import argparse
import hashlib
import sys
import time

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import paceline.torch as hvd


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
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    train, test = train_test_split(range(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    labels = torch.tensor(labels)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def network():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def train_one_epoch(model, optimizer, loader):
    """Returns the mean loss over this epoch's steps on this worker."""
    model.train()
    total = 0.0
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader)


@torch.no_grad()
def accuracy(model, data):
    """The share of data that the model gets right; each worker looks at its part."""
    model.eval()
    images, labels = data[hvd.rank() :: hvd.size()]
    counts = torch.tensor([(model(images).argmax(1) == labels).sum(), len(labels)])
    right, seen = hvd.allreduce(counts, op=hvd.Sum, name="accuracy").tolist()
    return right / seen


def fingerprint(model):
    """A hash over every bit of the model's parameters and buffers."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(name.encode())
        digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()


def main():
    args = arguments()
    hvd.init()
    torch.manual_seed(args.seed + hvd.rank())

    train, test = digits()
    sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler)

    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr * hvd.size() ** 0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    started, seconds = time.perf_counter(), 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss = train_one_epoch(model, optimizer, loader)
        seconds, share = time.perf_counter() - started, accuracy(model, test)
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1:2d}/{args.epochs}  loss {loss:.4f}  test accuracy {share:.2%}", flush=True)

    optimizer.agree()  # under models that let ranks run ahead, gives all the same parameters
    share = accuracy(model, test)
    prints = hvd.allgather_object(fingerprint(model))
    same = len(set(prints)) == 1
    if hvd.rank() == 0:
        images = args.epochs * len(sampler) * hvd.size()
        print(f"\ntest accuracy: {share:.2%}")
        print(f"throughput:    {images / seconds:,.0f} images/s over {hvd.size()} workers")
        print(f"parameters:    {'identical' if same else 'DIFFERENT'} on all workers, sha256 {prints[0][:16]}")
    hvd.shutdown()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
