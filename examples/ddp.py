"""Trains the network of digits.py with DistributedDataParallel: `paceline run -np 2 --takeover gloo python ddp.py`.

Nothing of the training is Paceline's: with `torchrun --nproc-per-node 2` alone the same script runs on Gloo. It fails
if the workers' parameters are not identical at the end, bit for bit.
"""

import argparse
import sys
import time

import torch
import torch.distributed as dist
from digits import digits, fingerprint, network, train_one_epoch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=32, help="images per worker and step (default: 32)")
    parser.add_argument("--lr", type=float, default=1e-3, help="Adam's learning rate for one worker (default: 0.001)")
    return parser.parse_args()


@torch.no_grad()
def accuracy(model, data):
    """The share of data that the model gets right; each worker looks at its part."""
    model.eval()
    images, labels = data[dist.get_rank() :: dist.get_world_size()]
    counts = torch.tensor([(model(images).argmax(1) == labels).sum(), len(labels)])
    work = dist.all_reduce(counts, async_op=True)
    work.wait()
    right, seen = counts.tolist()
    return right / seen, type(work).__module__.partition(".")[0]


def main():
    args = arguments()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1 + rank)

    train, test = digits()
    sampler = DistributedSampler(train, seed=1)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler)
    model = network()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=args.lr * size**0.5)

    started = time.perf_counter()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss = train_one_epoch(ddp, optimizer, loader)
        if rank == 0:
            print(f"epoch {epoch + 1:2d}/{args.epochs}  loss {loss:.4f}", flush=True)
    seconds = time.perf_counter() - started

    share, backend = accuracy(model, test)
    prints = [None] * size
    dist.all_gather_object(prints, fingerprint(model))
    same = len(set(prints)) == 1
    if rank == 0:
        print(f"\ntest accuracy: {share:.2%}")
        print(f"throughput:    {args.epochs * len(sampler) * size / seconds:,.0f} images/s over {size} workers")
        print(f"parameters:    {'identical' if same else 'DIFFERENT'} on all workers, sha256 {prints[0][:16]}")
        print(f"exchanged by:  {backend}")
    dist.destroy_process_group()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
