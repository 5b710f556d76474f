"""Commands for a rank: a line of JSON for each command, and one for its answer. fleet.py is the other end."""

import json
import os
import sys

import torch


def obey(begin, names):
    """Runs commands until the input ends. names: the methods that are commands.

    begin: starts the system under test; returns the object with the methods, further versions, and what ends it.
    """
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)  # output of libraries is no answer
        torch.set_num_threads(1)
        rank, versions, end = begin()
        print(json.dumps({"torch": torch.__version__, "kernel": os.uname().release} | versions), file=answers)
        for line in sys.stdin:
            command = json.loads(line)
            what = command.pop("what")
            assert what in names, what
            print(json.dumps(getattr(rank, what)(**command)), file=answers)
        end()
