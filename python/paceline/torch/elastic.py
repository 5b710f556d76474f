"""Horovod's elastic training, which Paceline lacks: the import is an error that says what to use instead."""

from paceline._absent import instead

raise ImportError(f"Paceline has no horovod.torch.elastic: {instead('torch.elastic')}")
