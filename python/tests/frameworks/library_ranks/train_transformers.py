"""Trains a tiny GPT-2, made from a configuration, with the Trainer: train_transformers.py FOLDER."""

import sys

import torch
from nets import bits, say
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2))
tokens = torch.randint(32, (64, 16), generator=torch.Generator().manual_seed(0))
data = [{"input_ids": row, "labels": row} for row in tokens]
arguments = TrainingArguments(
    output_dir=sys.argv[1],
    use_cpu=True,
    ddp_backend="gloo",
    per_device_train_batch_size=4,
    num_train_epochs=2,
    save_strategy="no",
    logging_strategy="no",
    report_to=[],
    disable_tqdm=True,
    seed=0,
)
trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data)
trainer.train()
say(arguments.process_index, trainer.evaluate()["eval_loss"], bits(model))
