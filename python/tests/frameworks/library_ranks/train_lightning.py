"""Trains with Lightning's ddp strategy, and prints the parameters' bits."""

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from nets import backend, bits, data, network, say


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = network()

    def training_step(self, batch, _):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.network(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=DDPStrategy(process_group_backend="gloo"),
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
module = Module()
trainer.fit(module, torch.utils.data.DataLoader(data(), batch_size=16))
say(trainer.global_rank, float(trainer.callback_metrics["loss"]), bits(module))
if backend() == "ProcessGroupGloo":  # which may abort at the end of a process that still has it
    torch.distributed.destroy_process_group()
