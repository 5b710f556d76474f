"""Trains on handwritten digits while workers come and go: `paceline run -np 3 --min-np 2 python elastic_digits.py`.

Kill a worker (`kill -9`): the others go back to the last commit and train on. With --blacklist-cooldown-range 1 60
another one takes its place. The data are scikit-learn's 1,797 images of 8 x 8 pixels. The script fails if the workers'
parameters are not identical at the end, bit for bit.
"""

import argparse
import hashlib
import os
import sys

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline.torch as hvd


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=32, help="images per worker and step (default: 32)")
    parser.add_argument("--lr", type=float, default=1e-3, help="Adam's learning rate for one worker (default: 0.001)")
    parser.add_argument("--commit", type=int, default=5, help="batches from one commit to the next (default: 5)")
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
    sampler = hvd.elastic.ElasticSampler(train, seed=args.seed)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr * hvd.size() ** 0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0)

    @hvd.elastic.run
    def train_from(state):
        """Called at the start and after each change of the workers, with the state as it was committed."""
        place = f"rank {hvd.rank()} of {hvd.size()} (pid {os.getpid()})"
        print(f"{place} trains from epoch {state.epoch + 1}, batch {state.batch}", flush=True)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * hvd.size() ** 0.5
        while state.epoch < args.epochs:
            model.train()
            for images, labels in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
                sampler.record_batch(state.batch, len(images))
                state.batch += 1
                if state.batch % args.commit == 0:
                    state.commit()
            optimizer.agree()  # under models that let ranks run ahead, gives all the same parameters
            state.epoch, state.batch = state.epoch + 1, 0
            sampler.set_epoch(state.epoch)
            state.commit()
            share = accuracy(model, test)
            if hvd.rank() == 0:
                print(f"epoch {state.epoch:2d}/{args.epochs}  test accuracy {share:.2%}", flush=True)
        return accuracy(model, test), hvd.allgather_object(fingerprint(model))

    share, prints = train_from(state)
    same = len(set(prints)) == 1
    if hvd.rank() == 0:
        print(f"\ntest accuracy: {share:.2%}")
        print(f"parameters:    {'identical' if same else 'DIFFERENT'} on all workers, sha256 {prints[0][:16]}")
    hvd.shutdown()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
