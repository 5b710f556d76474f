"""One rank of compression.py: trains a model with a codec. commands.py has the protocol."""

import os
import sys
from pathlib import Path

import torch
from commands import obey
from images import CLASSES, pictures
from resnet import projection, resnet
from training import Training

import paceline
import paceline.torch as hvd

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from digits import digits, network

SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


class Digits:
    """The digits model with the optimizer, learning rate and batch of examples/digits.py."""

    batch, keep, warm_up = 32, 5, 0
    make, data = staticmethod(network), staticmethod(digits)

    @staticmethod
    def optimizer(params, momentum):
        """Adam. Without momentum it only scales gradients."""
        return torch.optim.Adam(params, lr=1e-3 * hvd.size() ** 0.5, betas=(0.9 if momentum else 0.0, 0.999))


class ResNet:
    """A small ResNet with the shape of ResNet-18: a block on each of four scales.

    The learning rate rises in the first iterations, then is constant.
    """

    batch, keep, warm_up = 16, 10, 20
    data = staticmethod(pictures)

    @staticmethod
    def make():
        """The network."""
        return resnet(1, [20, 40, 80, 160], projection, CLASSES)

    @staticmethod
    def optimizer(params, momentum):
        """SGD with momentum."""
        return torch.optim.SGD(params, lr=0.05, momentum=0.9 if momentum else 0.0)


MODELS = {"digits": Digits, "resnet": ResNet}


class Rank:
    """The commands. A rank answers when it has ended a command, independently of the others."""

    def __init__(self):
        self.data = {}
        self.runs = 0

    def load(self, model):
        """Makes the data of a model. Answers with the numbers of its parameters and of their tensors."""
        self.data[model] = MODELS[model].data()
        params = list(MODELS[model].make().parameters())
        return {"parameters": sum(p.numel() for p in params), "tensors": len(params)}

    def prepare(self, model, setting, seed):
        """Makes the network and its optimizer, the same on every rank, and shuffles this rank's part of the data.

        Answers with the error of the setting, if any.
        """
        self.runs += 1
        self.model = kind = MODELS[model]
        torch.manual_seed(seed)
        made = kind.make()
        named = [(f"{self.runs}.{name}", p) for name, p in made.named_parameters()]
        try:
            optimizer = distributed(kind.optimizer(made.parameters(), "dgc" not in setting), named, setting)
        except ValueError as e:
            return {"wrong": str(e)}
        keep = kind.keep if hvd.rank() == 0 else 0
        self.lr = optimizer.param_groups[0]["lr"]
        self.training = Training(made, optimizer, self.data[model], hvd.rank(), hvd.size(), seed, kind.batch, keep)
        return {"wrong": None}

    def train(self, iterations):
        """Trains. Rank 0 keeps copies of its parameters. Answers with the seconds of each iteration."""
        seconds = []
        for _ in range(iterations):
            done, rise = self.training.done, self.model.warm_up
            begun, ended = self.training.iterate(lr=self.lr * min(1, (done + 1) / rise) if rise else None)
            seconds.append(ended - begun)
        return {"seconds": seconds}

    def sent(self):
        """The bytes that this host has sent."""
        return {"bytes": int(SENT.read_text())}

    def accuracies(self):
        """The test accuracy of each new copy of the parameters, on all cores: the other ranks are idle."""
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        answer = self.training.accuracies()
        torch.set_num_threads(1)
        return {"accuracies": answer}


def distributed(optimizer, named, setting):
    """The optimizer with a setting: a codec, and optionally a synchronisation model and "wait-free", between spaces.

    "alone": each rank by itself.
    """
    codec, _, rest = setting.partition(" ")
    if codec == "alone":
        return optimizer
    sync = rest.removesuffix(" wait-free")
    model = eval(sync, vars(paceline)) if sync else None
    return hvd.DistributedOptimizer(optimizer, named, compression=codec, sync=model, wait_free=sync != rest)


def begin():
    """Joins the job."""
    hvd.init()
    return Rank(), {}, hvd.shutdown


if __name__ == "__main__":
    obey(begin, ("load", "prepare", "train", "sent", "accuracies"))
