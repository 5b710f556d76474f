"""The commands that the tests run, `paceline` and `python`, are those of the interpreter that runs the tests.

Ctrl-C means to them what it means at a terminal, also where the tests run in the background of a shell, which has its
background processes ignore it.
"""

import os
import signal
import sys

os.environ["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
signal.signal(signal.SIGINT, signal.default_int_handler)
