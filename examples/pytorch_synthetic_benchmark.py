"""Images per second of a ResNet that trains on random images, measured as by Horovod's synthetic benchmark.

paceline run -np 2 python pytorch_synthetic_benchmark.py --model resnet18 --batch-size 8
"""

import argparse
import statistics
import timeit

import torch
import torch.nn.functional as F
from torch import nn, optim

import paceline.torch as hvd

# Blocks per stage, and whether a block is a bottleneck of three convolutions (He et al. 2015, table 1).
MODELS = {
    "resnet18": ((2, 2, 2, 2), False),
    "resnet34": ((3, 4, 6, 3), False),
    "resnet50": ((3, 4, 6, 3), True),
    "resnet101": ((3, 4, 23, 3), True),
}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--batch-size", type=int, default=32, help="images per worker and step (default: 32)")
    parser.add_argument("--image-size", type=int, default=224, help="pixels on a side (default: 224)")
    parser.add_argument("--num-warmup-batches", type=int, default=10)
    parser.add_argument("--num-batches-per-iter", type=int, default=10)
    parser.add_argument("--num-iters", type=int, default=10)
    parser.add_argument("--no-cuda", action="store_true", help="run on the CPU even where a GPU is")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as 16-bit floats")
    parser.add_argument("--use-adasum", action="store_true", help="combine gradients by Adasum")
    args = parser.parse_args()
    args.cuda = not args.no_cuda and torch.cuda.is_available()
    return args


def convolution(inputs, outputs, kernel, stride=1):
    """A convolution without bias that keeps the size at stride 1, and its batch normalisation."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


class Block(nn.Module):
    """One residual block: the input, projected if its shape changes, plus the convolutions' output."""

    def __init__(self, inputs, width, stride, bottleneck):
        super().__init__()
        self.outputs = 4 * width if bottleneck else width
        if bottleneck:
            shapes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, self.outputs, 1, 1)]
        else:
            shapes = [(inputs, width, 3, stride), (width, width, 3, 1)]
        self.layers = nn.ModuleList(convolution(*shape) for shape in shapes)
        changes = stride != 1 or inputs != self.outputs
        self.shortcut = convolution(inputs, self.outputs, 1, stride) if changes else nn.Identity()

    def forward(self, x):
        """Maps (n, inputs, h, w) to (n, outputs, h / stride, w / stride)."""
        y = x
        for layer in self.layers[:-1]:
            y = F.relu(layer(y))
        return F.relu(self.layers[-1](y) + self.shortcut(x))


def resnet(name):
    """A ResNet for 1,000 classes with the shapes of the paper; resnet50 has 25,557,032 parameters."""
    depths, bottleneck = MODELS[name]
    layers = [convolution(3, 64, 7, stride=2), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)]
    channels = 64
    for stage, depth in enumerate(depths):
        for index in range(depth):
            stride = 2 if stage > 0 and index == 0 else 1
            block = Block(channels, 64 << stage, stride, bottleneck)
            channels = block.outputs
            layers.append(block)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


def log(message):
    if hvd.rank() == 0:
        print(message, flush=True)


def main():
    args = arguments()
    hvd.init()
    device = f"cuda:{hvd.local_rank()}" if args.cuda else "cpu"

    model = resnet(args.model).to(device)
    optimizer = optim.SGD(model.parameters(), lr=0.01 * (1 if args.use_adasum else hvd.size()))
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
    labels = torch.randint(1000, (args.batch_size,), device=device)

    def step():
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    log(f"Model: {args.model}")
    log(f"Batch size: {args.batch_size}")
    log(f"Number of workers: {hvd.size()}")
    log("Running warmup...")
    timeit.timeit(step, number=args.num_warmup_batches)

    log("Running benchmark...")
    rates = []
    for index in range(args.num_iters):
        seconds = timeit.timeit(step, number=args.num_batches_per_iter)
        rates.append(args.batch_size * args.num_batches_per_iter / seconds)
        log(f"Iter #{index}: {rates[-1]:.1f} img/sec per worker")

    mean, margin = statistics.mean(rates), 1.96 * statistics.pstdev(rates)
    log(f"Img/sec per worker: {mean:.1f} +-{margin:.1f}")
    log(f"Total img/sec on {hvd.size()} worker(s): {hvd.size() * mean:.1f} +-{hvd.size() * margin:.1f}")


if __name__ == "__main__":
    main()
