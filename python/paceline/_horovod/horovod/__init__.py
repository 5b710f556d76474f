"""`import horovod` under `paceline run --horovod`: every module of it is Paceline's module of that name.

The launcher puts the directory above on PYTHONPATH. `horovod.torch` and `paceline.torch` are one module object, and so
are their submodules. Importing a part of Horovod that Paceline lacks raises ModuleNotFoundError, which says what to use
instead. `__version__` is that of the Horovod whose API this is, for scripts that require a minimum version.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys

from paceline._absent import absence, explain_absent_names
from paceline.runner import run

__all__ = ["run"]
__version__ = "0.28.1"


class _PacelineModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `horovod.x.y` as `paceline.x.y`."""

    def find_spec(self, fullname, path=None, target=None):
        """A spec for any module below horovod."""
        if not fullname.startswith("horovod."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec):
        """The module of Paceline itself."""
        name = "paceline" + spec.name.removeprefix("horovod")
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as e:
            if e.name != name:
                raise
            raise ModuleNotFoundError(
                f"No module named {spec.name!r}: {absence(spec.name.removeprefix('horovod.'))}", name=spec.name
            ) from None
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module):
        """Runs nothing. Restores the module's own spec, which the import has replaced."""
        module.__spec__ = module.__spec__.loader_state


sys.meta_path.insert(0, _PacelineModules())
explain_absent_names("horovod")
