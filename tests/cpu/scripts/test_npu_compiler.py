"""Tests the set-up of the NPU compiler without Wine: what is missing or in the way is one line, and nothing half-made is left."""

from __future__ import annotations

import base64
import json
import sys
import tempfile
import zipfile
from hashlib import sha256
from importlib.metadata import version

import npu_setup
import pytest
from click.testing import CliRunner
from npu_compiler import command
from npu_setup import manifest_of, remove, set_up

from staticllm.compiler_passes.npu_compiler import wine
from staticllm.compiler_passes.npu_compiler.find import compiler_statuses, find_compiler
from staticllm.compiler_passes.npu_compiler.wine import PACKAGES, default_folder, read_setup, wine_compiler
from staticllm.errors import ConfigError, DeviceError
from staticllm.system.file_lock import acquire

NUMBER = version("openvino")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Wine is used on Linux only")


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """A cache folder of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "staticllm" / "npu_compiler"


@pytest.fixture
def programs(monkeypatch, tmp_path):
    """A function that writes programs, each a line of shell, which are the only ones to be found."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(wine, "_LOADERS", ("wine64",))

    def write(**lines):
        for name, line in lines.items():
            path = folder / name.replace("_", "-")
            path.write_text(f"#!/bin/sh\n{line}\n")
            path.chmod(0o755)

    return write


MINGW = {"x86_64_w64_mingw32_gcc": ""}


def gcc(folder, line):
    path = folder / npu_setup.MINGW
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


@pytest.fixture
def wheel(tmp_path):
    """A function that writes a wheel with the files that are needed; ``changes`` replaces texts in it or its record."""

    def write(number=NUMBER, tag="win_amd64", changes=None, left_out=()):
        names = [f"openvino/libs/{name}" for name in npu_setup._LIBRARIES]
        files = {name: name.encode() for name in [*names, "openvino/include/openvino/c/openvino.h"]}
        record = "".join(
            f"{name},sha256={base64.urlsafe_b64encode(sha256(data).digest()).decode().rstrip('=')},{len(data)}\n"
            for name, data in files.items()
        )
        info = f"openvino-{number}.dist-info"
        files |= {f"{info}/RECORD": record.encode(), f"{info}/WHEEL": f"Tag: cp312-cp312-{tag}\n".encode()}
        files |= changes or {}
        path = tmp_path / f"openvino-{number}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in files.items():
                if name not in left_out:
                    archive.writestr(name, data)
        return path

    return write


def run(*arguments):
    """Run the script's command."""
    return CliRunner().invoke(command, list(map(str, arguments)))


def left_in(cache):
    """Return what is in the cache folder, without lock files."""
    return [path.name for path in cache.iterdir() if path.suffix != ".lock"] if cache.is_dir() else []


def test_without_wine_or_a_compiler_one_line_says_what_to_install(programs, cache):
    with pytest.raises(DeviceError, match="set-up needs Wine and a compiler for Windows") as caught:
        set_up()
    assert all(name in str(caught.value) for name in PACKAGES)
    assert "\n" not in str(caught.value)
    programs(wine64="exit 0")
    with pytest.raises(DeviceError, match="set-up needs a compiler for Windows"):
        set_up()
    with pytest.raises(DeviceError, match="there is no apt-get"):
        set_up(installs_packages=True)
    programs(apt_get="echo 'E: Unable to locate package' >&2; exit 100")
    with pytest.raises(DeviceError, match=r"apt-get update failed \(exit code 100\): E: Unable to locate package"):
        set_up(installs_packages=True)
    assert not left_in(cache)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda write, path: write(changes={f"openvino-{NUMBER}.dist-info/WHEEL": b"no"}), "it is for another system"),
        (lambda write, path: write(number="1.0"), "There is no item named"),
        (lambda write, path: write(tag="manylinux"), "it is for another system"),
        (lambda write, path: write(left_out=("openvino/libs/openvino.dll",)), "There is no item named"),
        (lambda write, path: write(changes={"openvino/libs/tbb12.dll": b"other"}), "another digest than the wheel's record"),
        (lambda write, path: write(changes={f"openvino-{NUMBER}.dist-info/RECORD": b"a,b\n"}), "openvino.dll"),
        (lambda write, path: write(changes={f"openvino-{NUMBER}.dist-info/RECORD": b"\xff"}), "codec can't decode"),
    ],
)  # fmt: skip
def test_a_wheel_that_is_another_or_damaged_is_refused(programs, cache, wheel, tmp_path, make, reason):
    programs(wine64="exit 0")
    gcc(tmp_path / "bin", "exit 0")
    with pytest.raises(ConfigError, match=reason) as caught:
        set_up(wheel=make(wheel, tmp_path))
    assert f"is not OpenVINO {NUMBER}'s wheel for Windows, or is damaged" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not left_in(cache)


def test_a_wheel_that_cannot_be_read_is_refused(programs, cache, tmp_path):
    programs(wine64="exit 0")
    gcc(tmp_path / "bin", "exit 0")
    for path, reason in ((tmp_path / "missing.whl", "No such file"), (tmp_path, "is not an ordinary file")):
        with pytest.raises(ConfigError, match=rf"cannot be read \(.*{reason}.*\): `pip download"):
            set_up(wheel=path)
    assert not left_in(cache)


def test_a_header_outside_of_its_folder_is_refused(programs, cache, wheel, tmp_path):
    name = "openvino/include/openvino/c/../../../../../../evil.h"
    digest = base64.urlsafe_b64encode(sha256(b"evil").digest()).decode().rstrip("=")
    plain = wheel()
    with zipfile.ZipFile(plain) as archive:
        record = archive.read(f"openvino-{NUMBER}.dist-info/RECORD")
    changes = {name: b"evil", f"openvino-{NUMBER}.dist-info/RECORD": record + f"{name},sha256={digest},4\n".encode()}
    programs(wine64="exit 0")
    gcc(tmp_path / "bin", "exit 0")
    with pytest.raises(ConfigError, match="is outside of its folder"):
        set_up(wheel=wheel(changes=changes))
    assert not list(tmp_path.rglob("evil.h"))


def test_a_step_that_fails_leaves_nothing_and_keeps_the_earlier_set_up(programs, cache, wheel, tmp_path):
    programs(wine64="echo 'wine: bad exe format' >&2; exit 3", wineserver="exit 0")
    earlier = default_folder()
    earlier.mkdir(parents=True)
    (earlier / "mark").touch()
    left = earlier.with_name(f".{earlier.name}.killed")
    left.mkdir()
    gcc(tmp_path / "bin", "echo 'npu_compile.c:1: error: no' >&2; exit 1")
    steps = []
    with pytest.raises(
        DeviceError, match=r"building npu_compile.exe failed \(exit code 1\): npu_compile.c:1: error: no"
    ):
        set_up(wheel=wheel(), is_forced=True, on_step=lambda *step: steps.append(step))
    assert [number for _, number, _ in steps] == [1, 2, 3, 4]
    gcc(tmp_path / "bin", "exit 0")
    with pytest.raises(DeviceError, match=r"preparing Wine failed \(exit code 3\): wine: bad exe format"):
        set_up(wheel=wheel(), is_forced=True)
    programs(wine64="exit 0")
    with pytest.raises(DeviceError, match="the NPU compiler under Wine ended when it started"):
        set_up(wheel=wheel(), is_forced=True)
    assert left_in(cache) == [earlier.name], "what a killed process left is removed"
    assert (earlier / "mark").exists()


def test_what_a_killed_set_up_left_is_ended_and_removed(programs, cache, tmp_path):
    left = cache / f".{default_folder().name}.killed"
    (left / wine.PREFIX).mkdir(parents=True)
    programs(wine64="exit 0", wineserver=f'echo "$1 $WINEPREFIX" >> {tmp_path / "asked.txt"}', **MINGW)
    gcc(tmp_path / "bin", "exit 0")
    with pytest.raises(ConfigError, match="cannot be read"):
        set_up(wheel=tmp_path / "none.whl")
    assert (tmp_path / "asked.txt").read_text() == f"-k {left / wine.PREFIX}\n-w {left / wine.PREFIX}\n"
    assert not left_in(cache)


def test_wine_has_the_temporary_folder_that_python_found(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", "/nowhere")
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert wine.environment(tmp_path)["TMPDIR"] == tempfile.gettempdir() != "/nowhere"


def test_a_full_disk_and_another_process_are_one_line(programs, cache, wheel, tmp_path, monkeypatch):
    programs(wine64="exit 0")
    gcc(tmp_path / "bin", "exit 0")
    cache.mkdir(parents=True)
    with (
        acquire(default_folder().with_name(f"{default_folder().name}.lock")),
        pytest.raises(ConfigError, match="another process sets up"),
    ):
        set_up(wheel=wheel())
    usage = type("Usage", (), {"free": 5_000_000})
    monkeypatch.setattr(npu_setup.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        DeviceError, match=r"set-up needs 1\.6 GB in .*, which has 0\.0 GB free: free some, or set XDG_CACHE_HOME"
    ):
        set_up(wheel=wheel())
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    with pytest.raises(DeviceError, match=r"/proc/nowhere.* cannot be written .*: set XDG_CACHE_HOME"):
        set_up(wheel=wheel())
    assert not left_in(cache)


@pytest.fixture
def finished(programs):
    """A folder that looks like a finished set-up, whose program exits at once."""
    programs(wine64="echo 'no npu' >&2; exit 9")
    folder = default_folder()
    (folder / wine.LIBRARIES).mkdir(parents=True)
    (folder / wine.LIBRARIES / wine.PROGRAM).write_bytes(b"MZ")
    (folder / wine.PREFIX / "system.reg").write_text("WINE REGISTRY")
    told = manifest_of("openvino 1, NPU compiler 8.4", folder / wine.LIBRARIES, 12)
    (folder / wine.MANIFEST).write_text(json.dumps(told))
    return folder


def test_a_finished_set_up_is_kept_and_found(finished):
    assert set_up() == read_setup(finished) == wine.WineSetup(finished, "openvino 1, NPU compiler 8.4", 12)
    assert [each.version for each in compiler_statuses() if each.kind == "wine"] == ["openvino 1, NPU compiler 8.4"]
    with (
        wine_compiler() as compiler,
        pytest.raises(DeviceError, match=r"ended when it started, .*: no npu; run `python scripts/npu_compiler"),
    ):
        compiler.compile(None, "4000", name="a model")
    done = run("status")
    assert "wine   openvino 1, NPU compiler 8.4" in done.stdout
    assert run("remove").stdout.endswith("GB removed\n")
    assert not finished.exists()
    assert remove() == 0
    assert "nothing is set up" in run("remove").stdout


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "setup.json").unlink(), "is not set up completely"),
        (lambda folder: (folder / "setup.json").write_text("{"), "is not set up completely"),
        (lambda folder: (folder / "setup.json").write_text("[]"), "is not set up completely"),
        (lambda folder: (folder / "setup.json").write_text('{"files": 1}'), "is not set up completely"),
        (lambda folder: (folder / "setup.json").write_bytes(b" " * 100_000), "is not set up completely"),
        (lambda folder: (folder / wine.LIBRARIES / wine.PROGRAM).unlink(), "is broken .npu_compile.exe is missing or damaged"),
        (lambda folder: (folder / wine.LIBRARIES / wine.PROGRAM).write_bytes(b""), "is broken .npu_compile.exe"),
        (lambda folder: (folder / wine.PREFIX / "system.reg").unlink(), "Wine's folder is missing"),
    ],
)  # fmt: skip
def test_a_broken_set_up_is_refused_with_its_remedy(finished, damage, message):
    damage(finished)
    for call in (wine_compiler, lambda: find_compiler("wine"), set_up):
        with pytest.raises(
            DeviceError, match=rf"{message}.*: run `python scripts/npu_compiler.py setup --force` in a checkout"
        ):
            call()
    done = run("status", "--json")
    assert message.replace(".", "(", 1)[:20] in done.stdout or message[:12] in done.stdout


def test_a_set_up_of_another_source_is_refused(finished, monkeypatch):
    monkeypatch.setattr(wine, "SOURCE", "other")
    with pytest.raises(DeviceError, match="by another version of staticllm: run"):
        wine_compiler()


def test_without_a_set_up_or_wine_the_compiler_says_so(programs):
    with pytest.raises(
        DeviceError, match=r"is not set up .*: run `python scripts/npu_compiler.py setup` in a checkout .* once"
    ):
        find_compiler("wine")
    default_folder().mkdir(parents=True)
    with pytest.raises(DeviceError, match="there is no Wine on this machine: install it, on Debian"):
        find_compiler("wine")
    with pytest.raises(ConfigError, match="compiler 'vine' is not known: use one of auto, local, wine"):
        find_compiler("vine")


def test_the_command_reports_errors_and_progress(programs, wheel, tmp_path):
    gcc(tmp_path / "bin", "exit 1")
    programs(wine64="exit 0")
    done = run("setup", "--wheel", wheel())
    assert str(done.exception).startswith("building npu_compile.exe failed (exit code 1)")
    assert done.stderr.splitlines()[:2] == [
        "1 of 6: checking Wine and the compiler of the distribution",
        f"2 of 6: taking openvino-{NUMBER}.whl from the disk",
    ]
    assert run("status").exit_code in (0, 1)


def test_the_library_knows_the_programs_source():
    assert sha256(npu_setup.SOURCE.read_bytes()).hexdigest() == wine.SOURCE
