"""The commands that the tests run, `paceline` and `python`, are those of the interpreter that runs the tests."""

import os
import sys

os.environ["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
