"""The NPU compiler of OpenVINO's Windows wheel, under Wine. ``scripts/npu_compiler.py`` makes the folder that it runs from."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from staticllm.errors import DeviceError
from staticllm.system.files import read_regular, user_cache

from .child_compiler import ChildCompiler, Launch

COMMAND = "python scripts/npu_compiler.py setup"
WHERE = "in a checkout of staticllm (docs/npu.md)"
PACKAGES = ("wine64", "gcc-mingw-w64-x86-64")
"""The distribution's packages (Debian, Ubuntu) that set-up needs; compiling needs the first."""
APT_LINE = f"apt-get install --no-install-recommends {' '.join(PACKAGES)}"
SOURCE = "aaef1100c97b104f7b313ef025ad3695d09152d18f5c97221e817c5abea41beb"
"""The digest of ``scripts/npu_compile.c``, which says whether a set-up is of this version."""
MANIFEST = "setup.json"
FORMAT = 1
PREFIX = "prefix"
LIBRARIES = "prefix/drive_c/npu_compiler"
"""In Wine's own drive, because libraries are not found below a folder whose name is not ASCII."""
PROGRAM = "npu_compile.exe"
WHAT = "the NPU compiler under Wine"
_MAX_MANIFEST = 1 << 16
_LOADERS = ("wine64", "/usr/lib/wine/wine64", "wine")


@dataclass(frozen=True)
class WineSetup:
    """A finished set-up: its folder, the versions of its compiler, and its bytes on the disk when it was made."""

    folder: Path
    version: str
    num_bytes: int


def default_folder() -> Path:
    """Return the folder of the set-up for the installed OpenVINO; it may not exist."""
    return user_cache() / "npu_compiler" / f"openvino-{version('openvino')}"


def wine_compiler(folder: Path | None = None) -> ChildCompiler:
    """Return the compiler of a set-up, by default of that for the installed OpenVINO.

    Raises:
        DeviceError: there is no set-up or no Wine, or one of them is broken.
    """
    found = read_setup(default_folder() if folder is None else folder)
    return ChildCompiler(launch(found.folder))


def launch(folder: Path) -> Launch:
    """Return how the child of a set-up is started.

    Raises:
        DeviceError: there is no Wine.
    """
    command = (str(loader()), rf"C:\{Path(LIBRARIES).name}\{PROGRAM}")
    return Launch(command, environment(folder), WHAT, f"run `{COMMAND} --force` {WHERE}")


def loader() -> Path:
    """Return Wine's program.

    Raises:
        DeviceError: there is none.
    """
    if sys.platform == "linux":
        for name in _LOADERS:
            found = shutil.which(name)
            if found is not None:
                return Path(found)
    raise DeviceError(f"there is no Wine on this machine: {_wine_remedy()}")


def _wine_remedy() -> str:
    return f"install it, on Debian and Ubuntu `{APT_LINE}`" if sys.platform == "linux" else "it is used on Linux only"


def environment(folder: Path) -> Mapping[str, str]:
    """Return the variables with which Wine uses only the folder: no window, no debugger, nothing in the user's home.

    Wine's server starts only if ``TMPDIR`` can be written; Python takes another folder then, and so does Wine here.
    """
    folder = folder.absolute()
    overrides = "winedbg.exe,winemenubuilder.exe,mscoree,mshtml=d"
    return {
        "WINEPREFIX": str(folder / PREFIX), "WINEARCH": "win64", "WINEDEBUG": "-all", "WINEDLLOVERRIDES": overrides,
        "HOME": str(folder / "home"), "XDG_CACHE_HOME": str(folder / "home"), "LC_ALL": "C.UTF-8",
        "DISPLAY": "", "WAYLAND_DISPLAY": "", "TMPDIR": tempfile.gettempdir(),
    }  # fmt: skip


def read_setup(folder: Path) -> WineSetup:
    """Return the set-up in a folder, after a look at each of its files.

    Raises:
        DeviceError: there is none, it is broken or of another version, or Wine is missing.
    """
    if not folder.is_dir():
        raise DeviceError(f"{WHAT} is not set up ({folder} does not exist): run `{COMMAND}` {WHERE} once")
    loader()
    remedy = f"run `{COMMAND} --force` {WHERE}"
    try:
        told = json.loads(read_regular(folder / MANIFEST, _MAX_MANIFEST, follow=False))
        text = str(told["version"])
        sizes = {str(name): int(size) for name, size in told["files"].items()}
        num_bytes = int(told["bytes"])
        is_ours = told["format"] == FORMAT and told["source"] == SOURCE
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DeviceError(f"{WHAT} in {folder} is not set up completely ({MANIFEST} is damaged): {remedy}") from None
    if not is_ours:
        raise DeviceError(f"{WHAT} in {folder} was set up by another version of staticllm: {remedy}")
    for name, size in sizes.items():
        path = folder / LIBRARIES / Path(name).name
        if not path.is_file() or path.stat().st_size != size:
            raise DeviceError(f"{WHAT} in {folder} is broken ({name} is missing or damaged): {remedy}")
    if not (folder / PREFIX / "system.reg").is_file():
        raise DeviceError(f"{WHAT} in {folder} is broken (Wine's folder is missing): {remedy}")
    return WineSetup(folder, text, num_bytes)
