"""What scripts that ask for the backend "paceline" import: before PyTorch 2.14 it is not found by its name.

The tests' device comes with it, for scripts that use it.
"""

import os

import torch

if "OFFHOST" in os.environ:
    import offhost  # noqa: F401

if torch.__version__ < "2.14":
    import paceline.torch.distributed  # noqa: F401
