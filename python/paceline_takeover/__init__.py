"""What PyTorch loads when it is imported (entry point `torch.backends`): nothing, unless PACELINE_TAKEOVER is set."""

import os


def load() -> None:
    """Has Paceline take the place of the torch.distributed backends that PACELINE_TAKEOVER names."""
    names = os.environ.get("PACELINE_TAKEOVER")
    if names:
        from paceline.torch.distributed.takeover import take_over

        take_over(names)
