"""Trains with Ray Train on a cluster of this host, and prints the parameters' bits: train_ray.py FOLDER."""

import sys
from pathlib import Path

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train(config):
    import ray.train.torch
    import torch
    from nets import backend, bits, data, network

    model = ray.train.torch.prepare_model(network())
    loader = ray.train.torch.prepare_data_loader(torch.utils.data.DataLoader(data(), batch_size=16))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    rank = ray.train.get_context().get_world_rank()
    Path(config["folder"], str(rank)).write_text(f"{backend()} rank {rank} {bits(model)}\n")


folder = Path(sys.argv[1])
environment = {"PYTHONPATH": str(Path(__file__).parent), "PACELINE_SUM_IN_RANK_ORDER": "1"}
ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": environment})
TorchTrainer(
    train,
    train_loop_config={"folder": str(folder)},
    torch_config=TorchConfig(backend="gloo"),
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=str(folder / "ray")),
).fit()
for rank in range(2):
    print((folder / str(rank)).read_text(), end="", flush=True)
