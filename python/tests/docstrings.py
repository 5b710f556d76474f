"""What the docstrings of a framework's module must say."""

import inspect
import re

# How the names of operations on tensors end, and of what else can fail.
OPERATIONS = ("reduce", "gather", "cast", "alltoall", "scatter")
OTHERS = ("join", "barrier", "poll", "synchronize", "declare", "init", "load_model", "Tape", "Trainer")
OTHERS += ("_object", "_object_fn", "_variables", "_parameters", "_state", "_timeline")
OTHERS += ("_process_set", "Optimizer", "_optimizer", "SyncBatchNorm", "SyncBatchNormalization")


def check_docstrings(module, operations):
    """Every name says which errors it raises; operations, of which there are so many, the shapes that they take too.

    Each argument of an operation is in its docstring, or this refers to another operation's.
    """
    said = {name: getattr(module, name).__doc__ or "" for name in module.__all__}
    kinds = {name: name.rstrip("_").removesuffix("_async") for name in said if name[0].islower()}
    taking = [name for name, kind in kinds.items() if kind.endswith(OPERATIONS)]
    assert len(taking) == operations, taking
    assert [name for name in taking if "shape" not in said[name].lower() and "as of" not in said[name]] == []
    for name in taking:
        arguments = inspect.signature(getattr(module, name)).parameters.keys() - {"tensor", "tensors"}
        untold = [a for a in arguments if not re.search(rf"\b{a}\b", said[name])]
        assert not untold or re.search("`[a-z_.]+`", said[name]), (name, untold)
    failing = taking + [name for name in said if callable(getattr(module, name)) and name.endswith(OTHERS)]
    assert [name for name in failing if "raises" not in said[name].lower()] == []
