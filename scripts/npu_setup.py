"""Sets up the NPU compiler under Wine: OpenVINO's Windows wheel, a small program that is built against it, and Wine's folder.

Nothing is downloaded unless this is called. A set-up is made in a folder of its own, tried, and renamed: none is ever half-made.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import shutil
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import Timeout  # registers what it does at a fork before OpenVINO is imported, which forks

from staticllm.children.child import Child, last_words
from staticllm.compiler_passes.npu_compiler import wine
from staticllm.compiler_passes.npu_compiler.child_compiler import ChildCompiler
from staticllm.errors import ConfigError, DeviceError, StaticLLMError, shown
from staticllm.system.file_lock import acquire
from staticllm.system.files import open_regular, write_whole

OnStep = Callable[[str, int, int], None]
"""Gets what is done now, its number from 1, and the number of steps."""
NEEDED_BYTES = 1_600_000_000
"""Free space that set-up needs: the wheel, its libraries, and Wine's folder."""
SOURCE = Path(__file__).with_name("npu_compile.c")
MINGW = "x86_64-w64-mingw32-gcc"
_DOWNLOAD_SECONDS = 3600.0
_BUILD_SECONDS = 300.0
_BOOT_SECONDS = 600.0
_MAX_MEMBER = 1 << 30
_MAX_FILES = 100
_LIBRARIES = (
    "openvino.dll", "openvino_c.dll", "openvino_c.lib", "openvino_intel_npu_compiler.dll",
    "openvino_intel_npu_compiler_loader.dll", "openvino_intel_npu_plugin.dll", "openvino_ir_frontend.dll", "tbb12.dll",
)  # fmt: skip
"""What compiling needs of the wheel, beside the headers of the C interface."""
_HEADERS = "openvino/include/openvino/c/"


def set_up(
    folder: Path | None = None,
    *,
    wheel: Path | None = None,
    installs_packages: bool = False,
    is_forced: bool = False,
    on_step: OnStep = lambda text, number, total: None,
) -> wine.WineSetup:
    """Set up the compiler of the installed OpenVINO's version, and return the set-up; a finished one is kept.

    Args:
        folder: Where; by default ``wine.default_folder``.
        wheel: OpenVINO's wheel for Windows, if it was downloaded before; else pip downloads it, 85 MB.
        installs_packages: Whether missing packages of the distribution are installed with ``apt-get`` (for root).
        is_forced: Whether a finished set-up is made again.
        on_step: Gets the progress.

    Raises:
        ConfigError: the wheel cannot be used, or another process sets the compiler up.
        DeviceError: Wine or the mingw compiler is missing, or a step failed; the message says which, and nothing is left.
    """
    target = wine.default_folder() if folder is None else folder
    if not is_forced and target.is_dir():
        return wine.read_setup(target)
    steps = _Steps(on_step)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lease = acquire(target.with_name(f"{target.name}.lock"), timeout=0)
    except Timeout:
        raise ConfigError(f"another process sets up {target} now: wait for its end") from None
    except OSError as error:
        raise _unwritable(target.parent, error) from None
    with lease:
        steps("checking Wine and the compiler of the distribution")
        _check_packages(installs_packages)
        return _made(target, wheel, steps)


class _Steps:
    """Reports one step after another."""

    TOTAL = 6

    def __init__(self, on_step: OnStep) -> None:
        self._on_step = on_step
        self._number = 0

    def __call__(self, text: str) -> None:
        self._number += 1
        self._on_step(text, self._number, self.TOTAL)


def _made(target: Path, wheel: Path | None, steps: _Steps) -> wine.WineSetup:
    """Make a set-up beside its place, try it, and move it there."""
    free = shutil.disk_usage(target.parent).free
    if free < NEEDED_BYTES:
        raise DeviceError(
            f"set-up needs {NEEDED_BYTES / 1e9:.1f} GB in {target.parent}, which has {free / 1e9:.1f} GB free: free some, or set "
            "XDG_CACHE_HOME to a folder of a larger disk"
        )
    try:
        for left in target.parent.glob(f".{target.name}.*"):  # by a process that was killed; its Wine may still run
            if (left / wine.PREFIX).is_dir():
                _stop_server(left)
            shutil.rmtree(left, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise _unwritable(target.parent, error) from None
    try:
        number = version("openvino")
        steps(f"downloading OpenVINO {number} for Windows" if wheel is None else f"taking {wheel.name} from the disk")
        source = _downloaded(scratch, number) if wheel is None else wheel
        steps("checking and unpacking it")
        _unpack(source, scratch, number)
        steps("building the program")
        _build(scratch)
        steps("preparing Wine")
        _boot(scratch)
        steps("compiling a first program")
        found = _tried(scratch)
        shutil.rmtree(scratch / "download", ignore_errors=True)
        shutil.rmtree(scratch / "openvino", ignore_errors=True)
        told = manifest_of(found, scratch / wine.LIBRARIES, bytes_in(scratch))
        write_whole(scratch / wine.MANIFEST, json.dumps(told, indent=1).encode())
        _replace(scratch, target)
    except OSError as error:
        raise _unwritable(scratch, error) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return wine.read_setup(target)


def _check_packages(installs: bool) -> None:
    """Check that Wine and mingw are there; install them if wanted.

    Raises:
        DeviceError: they are not.
    """
    missing = _missing()
    if missing and installs:
        _install()
        missing = _missing()
    if missing:
        remedy = f"install it, on Debian and Ubuntu `{wine.APT_LINE}`, or add --install-packages as root"
        raise DeviceError(f"set-up needs {' and '.join(missing)}, which this machine lacks: {remedy}")


def _missing() -> list[str]:
    missing = [] if shutil.which(MINGW) else [f"a compiler for Windows ({MINGW})"]
    try:
        wine.loader()
    except DeviceError:
        missing.insert(0, "Wine")
    return missing


def _install() -> None:
    """Install the packages.

    Raises:
        DeviceError: there is no apt-get, or it failed.
    """
    if shutil.which("apt-get") is None:
        raise DeviceError(f"there is no apt-get to install {' and '.join(wine.PACKAGES)}: install them by hand")
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    _run(("apt-get", "update", "-q"), _DOWNLOAD_SECONDS, "apt-get update", quiet)
    install = ("apt-get", "install", "-yq", "--no-install-recommends", *wine.PACKAGES)
    _run(install, _DOWNLOAD_SECONDS, "apt-get install", quiet)


def _downloaded(scratch: Path, number: str) -> Path:
    """Return the wheel, which pip has compared with the digest of its index.

    Raises:
        DeviceError: pip failed.
    """
    folder = scratch / "download"
    folder.mkdir()
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input")
    which = ("--no-deps", "--only-binary=:all:", "--platform", "win_amd64", "--python-version", "3.12")
    remedy = "try again, or download the wheel elsewhere and give --wheel"
    _run(
        (*pip, *which, "--implementation", "cp", f"openvino=={number}", "--dest", str(folder)),
        _DOWNLOAD_SECONDS, "pip download", remedy=remedy,
    )  # fmt: skip
    found = sorted(folder.glob("openvino-*.whl"))
    if len(found) != 1:
        raise DeviceError(f"pip downloaded {len(found)} wheels of OpenVINO {number} for Windows, not one: {remedy}")
    return found[0]


def _unpack(wheel: Path, scratch: Path, number: str) -> None:
    """Write the libraries and headers of a wheel, each compared with the wheel's own digests.

    Raises:
        ConfigError: it cannot be read, is no such wheel, or is damaged.
        OSError: they cannot be written.
    """
    remedy = f"`pip download --platform win_amd64 --no-deps openvino=={number}` gets it"
    try:
        file = open_regular(wheel)
    except OSError as error:
        raise ConfigError(f"{wheel} cannot be read ({error.strerror or error}): {remedy}") from None
    try:
        with file, zipfile.ZipFile(file) as archive:
            digests = _digests(archive, number)
            libraries = scratch / wine.LIBRARIES
            libraries.mkdir(parents=True)
            for name in _LIBRARIES:
                (libraries / name).write_bytes(_member(archive, f"openvino/libs/{name}", digests))
            headers = [name for name in digests if name.startswith(_HEADERS) and name.endswith(".h")]
            for name in headers[:_MAX_FILES]:
                header = (scratch / name).resolve()
                if not header.is_relative_to(scratch.resolve() / _HEADERS):
                    raise ValueError(f"{name} is outside of its folder")
                header.parent.mkdir(parents=True, exist_ok=True)
                header.write_bytes(_member(archive, name, digests))
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, KeyError, ValueError) as error:
        text = f"{wheel} is not OpenVINO {number}'s wheel for Windows, or is damaged ({shown(str(error))})"
        raise ConfigError(f"{text}: {remedy}") from None


def _digests(archive: zipfile.ZipFile, number: str) -> dict[str, str]:
    """Return the digest of each file that the wheel's record has. Raises ``KeyError`` and ``ValueError``."""
    info = f"openvino-{number}.dist-info"
    if "win_amd64" not in _text(archive, f"{info}/WHEEL"):
        raise ValueError("it is for another system")
    rows = (line.rsplit(",", 2) for line in _text(archive, f"{info}/RECORD").splitlines())
    return {row[0]: row[1].removeprefix("sha256=") for row in rows if len(row) == 3 and row[1].startswith("sha256=")}


def _text(archive: zipfile.ZipFile, name: str) -> str:
    with archive.open(name) as file:
        return file.read(1 << 22).decode()


def _member(archive: zipfile.ZipFile, name: str, digests: Mapping[str, str]) -> bytes:
    """Return a file of the wheel.

    Raises:
        KeyError, ValueError: it is too large, or has another digest.
    """
    if archive.getinfo(name).file_size > _MAX_MEMBER:
        raise ValueError(f"{name} is larger than {_MAX_MEMBER} bytes")
    data = archive.read(name)
    digest = base64.urlsafe_b64encode(sha256(data).digest()).decode().rstrip("=")
    if digest != digests[name]:
        raise ValueError(f"{name} has another digest than the wheel's record")
    return data


def _build(scratch: Path) -> None:
    libraries = scratch / wine.LIBRARIES
    program = libraries / wine.PROGRAM
    flags = ("-O1", "-s", "-I", str(scratch / "openvino" / "include"))
    command = (MINGW, *flags, str(SOURCE), str(libraries / "openvino_c.lib"), "-o", str(program))
    _run(command, _BUILD_SECONDS, f"building {wine.PROGRAM}")
    (libraries / "openvino_c.lib").unlink()


def _boot(scratch: Path) -> None:
    """Complete Wine's folder, which has only our libraries yet."""
    (scratch / "home").mkdir()
    command = (str(wine.loader()), "wineboot", "--init")
    try:
        _run(command, _BOOT_SECONDS, "preparing Wine", wine.environment(scratch))
    finally:
        _stop_server(scratch)


def _tried(scratch: Path) -> str:
    """Compile a small program, and return the versions of the compiler."""
    import openvino as ov
    from openvino import opset13 as ops

    value = ops.parameter([1, 16], ov.Type.f16)
    model = ov.Model([ops.relu(value)], [value], "the first program")  # pyright: ignore[reportGeneralTypeIssues]
    try:
        with ChildCompiler(wine.launch(scratch)) as compiler:
            compiler.compile(model, "4000", seconds=_BUILD_SECONDS)
            return compiler.version
    finally:
        _stop_server(scratch)


def _stop_server(scratch: Path) -> None:
    """End Wine's server of a folder, which would run on for seconds after its last program, and wait for its end."""
    beside = wine.loader().resolve().with_name("wineserver")
    server = str(beside) if beside.is_file() else shutil.which("wineserver")
    if server is None:
        return
    for argument in ("-k", "-w"):
        child = Child((server, argument), environment=wine.environment(scratch))
        child.wait(60.0)


def _replace(scratch: Path, target: Path) -> None:
    """Move a finished set-up to its place. The previous one is removed after it."""
    if target.exists():
        old = target.with_name(f".{target.name}.old-{secrets.token_hex(4)}")
        target.rename(old)
        scratch.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    else:
        scratch.rename(target)


def _run(
    command: Sequence[str],
    seconds: float,
    what: str,
    environment: Mapping[str, str] | None = None,
    remedy: str = "read the message, and try again",
) -> None:
    """Run a program to its end.

    Raises:
        DeviceError: it cannot be started, failed, or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="staticllm-") as folder:
        errors = Path(folder) / "stderr.txt"
        try:
            child = Child(command, environment=environment, errors=errors)
        except OSError as error:
            raise DeviceError(f"{what} failed ({command[0]}: {error.strerror or error}): {remedy}") from None
        try:
            child.wait_until(lambda: False, seconds)
            code = child.exit_code
        finally:
            child.kill_all()
            child.wait(5.0)
        if code != 0:
            how = f"did not end in {seconds:g} s" if code is None else f"failed (exit code {code})"
            raise DeviceError(f"{what} {how}: {last_words(errors) or 'it said nothing'}; {remedy}")


def _unwritable(folder: Path, error: OSError) -> StaticLLMError:
    return DeviceError(
        f"{error.filename or folder} cannot be written ({error.strerror or error}): set XDG_CACHE_HOME to a folder of yours"
    )


def remove() -> int:
    """Remove all set-ups of this user, also of other versions of OpenVINO; return their bytes.

    Raises:
        DeviceError: one cannot be removed.
    """
    folder = wine.default_folder().parent
    if not folder.is_dir():
        return 0
    size = bytes_in(folder)
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise DeviceError(f"{folder} cannot be removed ({error.strerror or error}): remove it by hand") from None
    return size


def manifest_of(version_text: str, libraries: Path, num_bytes: int) -> dict[str, Any]:
    """Return the content of ``setup.json``."""
    sizes = {path.name: path.stat().st_size for path in sorted(libraries.iterdir())}
    return {
        "format": wine.FORMAT, "source": wine.SOURCE, "version": version_text, "files": sizes, "bytes": num_bytes,
    }  # fmt: skip


def bytes_in(folder: Path) -> int:
    """Return the bytes of all files below a folder, without following links."""
    return sum((Path(parent) / name).lstat().st_size for parent, _, names in os.walk(folder) for name in names)
