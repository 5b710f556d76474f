"""A script as in Horovod's documentation, with one line changed: the import.

The data are scikit-learn's digits, so nothing is downloaded.

    paceline run -np 2 python pytorch_mnist.py
    paceline run -np 2 --horovod python the_same_script_with_its_horovod_import.py
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler

import paceline.torch as hvd


def arguments():
    parser = argparse.ArgumentParser(description="Digits with Horovod's API")
    parser.add_argument("--batch-size", type=int, default=64, help="per worker (default: 64)")
    parser.add_argument("--test-batch-size", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.05, help="for one worker (default: 0.05)")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--log-interval", type=int, default=5, help="steps between two lines")
    parser.add_argument("--no-cuda", action="store_true", help="train on the CPU even where a GPU is")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as 16-bit floats")
    parser.add_argument("--use-adasum", action="store_true", help="combine gradients by Adasum")
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
    parser.add_argument("--backward-passes-per-step", type=int, default=1)
    args = parser.parse_args()
    args.cuda = not args.no_cuda and torch.cuda.is_available()
    return args


class Net(nn.Module):
    """Two convolutions and two linear layers, for images of 8 x 8 pixels."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.dropout = nn.Dropout2d()
        self.fc1 = nn.Linear(128, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        """Log-probabilities of the ten digits for images x of shape (n, 1, 8, 8)."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.dropout(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        x = F.dropout(x, training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)


def datasets():
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    whole = TensorDataset(images, torch.tensor(labels))
    return random_split(whole, [0.8, 0.2], torch.Generator().manual_seed(0))


def train(args, model, optimizer, loader, sampler, epoch):
    model.train()
    sampler.set_epoch(epoch)  # another order in each epoch
    for step, (data, target) in enumerate(loader):
        if args.cuda:
            data, target = data.cuda(), target.cuda()
        optimizer.zero_grad()
        pieces = max(1, len(data) // args.backward_passes_per_step)
        batches = list(zip(data.split(pieces), target.split(pieces), strict=True))[: args.backward_passes_per_step]
        for piece, truth in batches:
            loss = F.nll_loss(model(piece), truth) / len(batches)
            loss.backward()
        optimizer.step()
        if step % args.log_interval == 0 and hvd.rank() == 0:
            print(f"Train Epoch: {epoch} [{step * len(data)}/{len(sampler)}]\tLoss: {loss.item():.6f}", flush=True)


@torch.no_grad()
def test(args, model, loader, sampler):
    model.eval()
    loss, right = 0.0, 0.0
    for data, target in loader:
        if args.cuda:
            data, target = data.cuda(), target.cuda()
        output = model(data)
        loss += F.nll_loss(output, target, reduction="sum").item()
        right += (output.argmax(dim=1) == target).sum().item()
    loss = hvd.allreduce(torch.tensor(loss / len(sampler)), name="avg_loss").item()
    right = hvd.allreduce(torch.tensor(right / len(sampler)), name="avg_accuracy").item()
    if hvd.rank() == 0:
        print(f"\nTest set: Average loss: {loss:.4f}, Accuracy: {100 * right:.2f}%\n", flush=True)


def loader_of(dataset, batch_size):
    """A loader of this worker's part of the data, and its sampler."""
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler), sampler


def main():
    args = arguments()

    hvd.init()
    torch.manual_seed(args.seed)
    if args.cuda:
        torch.cuda.set_device(hvd.local_rank())

    train_data, test_data = datasets()
    train_loader, train_sampler = loader_of(train_data, args.batch_size)
    test_loader, test_sampler = loader_of(test_data, args.test_batch_size)

    model = Net()
    if args.cuda:
        model.cuda()

    # The batch of N workers is N times larger, so the learning rate is too; Adasum needs no scaling.
    scale = args.backward_passes_per_step * (1 if args.use_adasum else hvd.size())
    optimizer = optim.SGD(model.parameters(), lr=args.lr * scale, momentum=args.momentum)

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        backward_passes_per_step=args.backward_passes_per_step,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )

    for epoch in range(1, args.epochs + 1):
        train(args, model, optimizer, train_loader, train_sampler, epoch)
        test(args, model, test_loader, test_sampler)


if __name__ == "__main__":
    main()
