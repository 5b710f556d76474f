"""What scripts that ask for the backend "paceline" import: before PyTorch 2.14 it is not found by its name."""

import torch

if torch.__version__ < "2.14":
    import paceline.torch.distributed  # noqa: F401
