"""Base classes for a script's own data loaders, by Horovod's names (`horovod.data`)."""

from paceline.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
