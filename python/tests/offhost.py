"""A device named "offhost", for tests without a GPU: see offhost.cpp.

`build(folder)` compiles it; a process that has OFFHOST=library in its environment has the device once it imports this.
"""

import functools
import os
import subprocess
import types
from pathlib import Path

import torch


def _module():
    """What PyTorch asks the module of a device."""
    return types.SimpleNamespace(
        Stream=functools.partial(torch.Stream, device="offhost"),
        Event=functools.partial(torch.Event, "offhost"),
        _is_in_bad_fork=lambda: False,
        current_device=lambda: torch.accelerator.current_device_index(),
        current_stream=lambda device=None: torch.accelerator.current_stream(device),
        device_count=lambda: int(os.environ.get("OFFHOST_DEVICES", "1")),
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        is_available=lambda: True,
        is_initialized=lambda: True,
        manual_seed_all=lambda _: None,
        set_device=lambda device: torch.accelerator.set_device_index(device),
        stream=lambda stream: stream,
        synchronize=lambda device=None: torch.accelerator.synchronize(device),
    )


def build(folder):
    """The library, made for this PyTorch in a folder."""
    torch_folder, library = Path(torch.__file__).parent, Path(folder) / "offhost.so"
    include = torch_folder / "include"
    subprocess.run(
        ["c++", "-std=c++20", "-O0", "-shared", "-fPIC", Path(__file__).with_suffix(".cpp"), "-o", library]
        + [f"-I{include}", f"-I{include}/torch/csrc/api/include", f"-L{torch_folder}/lib", "-ltorch_cpu", "-lc10"]
        + [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"],
        check=True,
    )
    return library


if "OFFHOST" in os.environ:
    torch.ops.load_library(os.environ["OFFHOST"])
    torch.utils.rename_privateuse1_backend("offhost")
    torch._register_device_module("offhost", _module())
    torch.utils.generate_methods_for_privateuse1_backend()
