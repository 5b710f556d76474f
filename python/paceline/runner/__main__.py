"""A rank of paceline.runner.run: python -m paceline.runner DIRECTORY."""

import os
import sys
import traceback
from pathlib import Path

import cloudpickle  # type: ignore[import-untyped]

directory, rank = Path(sys.argv[1]), os.environ["PACELINE_RANK"]
try:
    result = cloudpickle.loads((directory / "call").read_bytes())()
    (directory / f"result.{rank}").write_bytes(cloudpickle.dumps(result))
except BaseException:
    (directory / f"failed.{rank}").write_text(traceback.format_exc())
    raise
