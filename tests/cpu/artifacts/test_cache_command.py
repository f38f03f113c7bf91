"""Tests ``staticllm cache``, ``plan``, ``doctor`` and ``compile --verify`` as a user runs them."""

import json
import shutil

import pytest
from click.testing import CliRunner
from support.command_line import IN_BOTH

from staticllm.cli import cli
from staticllm.pipelines.diagnostics import diagnosis
from staticllm.pipelines.diagnostics.doctor import examine
from staticllm.system.long_calls import wait_for_left

pytestmark = pytest.mark.usefixtures("shared_programs")


@pytest.fixture(scope="module")
def cache(tmp_path_factory, zoo, staticllm):
    """Return a cache with one set, and the set exported from it."""
    folder = tmp_path_factory.mktemp("cache")
    done = staticllm(
        "run",
        "hello",
        "-m",
        zoo / "llama",
        "-n",
        2,
        "--max-prompt-len",
        64,
        "-p",
        f"CACHE_DIR={folder}",
        "-p",
        "PROGRAMS=shared",
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_sets_are_listed_verified_exported_and_imported(cache, tmp_path, staticllm):
    (row,) = json.loads(staticllm("cache", "ls", cache, "--json").stdout)
    assert row["max_prompt_len"] == 64
    assert row["device"] == "CPU"
    assert not row["problem"]
    text = staticllm("cache", "ls", cache).stdout
    assert row["key"] in text
    assert "prompts of 64" in text
    assert "in 1 sets" in text
    done = staticllm("cache", "verify", cache)
    assert done.returncode == 0
    assert done.stdout.splitlines() == [f"ok   {row['key']}", "1 of 1 sets are ok"]
    done = staticllm("cache", "export", cache, row["key"][:6], tmp_path / "set")
    assert done.returncode == 0, done.stderr
    assert staticllm("cache", "import", tmp_path / "other", tmp_path / "set").returncode == 0
    (copy,) = json.loads(staticllm("cache", "ls", tmp_path / "other", "--json").stdout)
    assert copy["key"] == row["key"]
    (blob, *_) = (tmp_path / "other").rglob("*.blob")
    blob.write_bytes(b"x" + blob.read_bytes()[1:])
    done = staticllm("cache", "verify", tmp_path / "other")
    assert done.returncode == 1
    assert "its contents do not match its digest" in done.stdout
    assert f"FAIL {row['key']}" in done.stdout
    assert "0 of 1 sets are ok" in done.stdout
    done = staticllm("cache", "prune", tmp_path / "other", "--all", stdin="n\n")
    assert done.returncode == 1
    assert "Remove 1 sets" in done.stderr
    assert staticllm("cache", "prune", tmp_path / "other", "--limit-gb", 1).stdout == "nothing to remove\n"
    done = staticllm("cache", "prune", tmp_path / "other", "--all", "--yes")
    assert done.stdout.startswith(f"removed  {row['key']}")
    assert staticllm("cache", "ls", tmp_path / "other").stdout == "no sets\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ls", "/no/such/folder"], "there is no cache folder"),
        (["export", "{cache}", "zzz", "x"], "0 sets in"),
        (["import", "{cache}", "/no/such/set"], "no blob set at"),
    ],
)
def test_mistakes_are_one_line_errors(arguments, message, cache, staticllm):
    done = staticllm("cache", *(str(argument).format(cache=cache) for argument in arguments))
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@IN_BOTH
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prune", "{cache}"], "--limit-gb N, or remove every set with --all"),
        (["prune", "{cache}", "--limit-gb", "1", "--all"], "give the size to keep"),
        (["prune", "{cache}", "--limit-gb", "-1"], "'--limit-gb': -1"),
        (["export", "{cache}", "", "x"], "KEY is empty"),
    ],
)
def test_wrong_usage_changes_no_file(arguments, message, cache, tmp_path, monkeypatch, staticllm):
    monkeypatch.chdir(tmp_path)
    done = staticllm("cache", *(argument.format(cache=cache) for argument in arguments))
    assert done.returncode == 2
    assert message in done.stderr
    assert not list(tmp_path.iterdir())
    assert "1 sets" in staticllm("cache", "ls", cache).stdout


def test_a_damaged_set_that_is_imported_leaves_nothing(cache, tmp_path, staticllm):
    (row,) = json.loads(staticllm("cache", "ls", cache, "--json").stdout)
    assert staticllm("cache", "export", cache, row["key"], tmp_path / "set").returncode == 0
    (blob, *_) = (tmp_path / "set").glob("*.blob")
    blob.write_bytes(b"x" + blob.read_bytes()[1:])
    done = staticllm("cache", "import", tmp_path / "other", tmp_path / "set")
    assert done.returncode == 1
    assert "its contents do not match its digest" in done.stderr
    assert not (tmp_path / "other").exists()


def test_plan_works_for_an_npu_that_is_absent(zoo, staticllm):
    import openvino as ov

    if any(name.startswith("NPU") for name in ov.Core().available_devices):
        pytest.skip("there is one")
    found = json.loads(staticllm("plan", zoo / "llama", "--device", "NPU", "-p", "NPU_TURBO=YES", "--json").stdout)
    assert found["programs"]["mode"] == "blocks"
    assert found["fits"] is None
    assert found["needed"] > 0
    text = staticllm("plan", "--device", "NPU").stdout
    assert "there is no NPU on this machine, so its memory is unknown" in text
    assert "programs  blocks on NPU" in staticllm("inspect", zoo / "llama", "--device", "NPU").stdout
    done = staticllm("compile", zoo / "llama", "--device", "NPU", "--export-blob", zoo / "never")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: there is no NPU on this machine")
    assert "npu_compiler" in done.stderr or "cannot load" not in done.stderr.lower()
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (zoo / "never").exists()


@IN_BOTH
def test_plan_says_whether_it_fits(zoo, monkeypatch, staticllm):
    found = json.loads(staticllm("plan", zoo / "lfm2", "--json").stdout)
    assert found["fits"]
    assert found["needed"] == sum(found["bytes"].values()) < found["available"]
    assert found["bytes"]["recurrent states"] > 0
    assert found["variants"]
    monkeypatch.setattr(diagnosis, "device_memory", lambda core, device: found["needed"] - 1)
    done = CliRunner().invoke(cli, ["plan", str(zoo / "lfm2")])
    assert done.exit_code == 1
    assert "it does not fit: lower" in done.output


def test_doctor_finds_the_cpu_and_tests_it(cache, staticllm):
    done = staticllm("doctor", "--device", "CPU", "--cache-dir", cache, "--json")
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == 0
    assert findings["self-test CPU"]["value"].startswith("16 of 16 tokens")
    assert "openvino 20" in findings["packages"]["value"]
    assert findings["cache"]["level"] == "ok"
    assert all(finding["remedy"] for finding in findings.values() if finding["level"] != "ok")
    done = staticllm("doctor", "--device", "TOASTER")
    assert done.returncode == 1
    assert "FAIL  self-test TOASTER" in done.stdout
    assert "tqdm 4" in done.stdout


@IN_BOTH
def test_compile_verifies_what_it_wrote(zoo, tmp_path, staticllm):
    done = staticllm("compile", zoo / "llama", "--export-blob", tmp_path / "set", "--verify", "--max-prompt-len", 64)
    assert done.returncode == 0, done.stderr
    assert "verified: " in done.stdout
    assert "tokens agree" in done.stdout
    found = json.loads((tmp_path / "set" / "manifest.json").read_text())["content"]["verification"]
    assert found["is_ok"]
    assert found["agreement"] >= 0.9
    assert found["places"] == 97


def test_doctor_notices_weights_that_have_changed(cache, zoo, tmp_path):
    model = shutil.copytree(zoo / "llama", tmp_path / "model")
    for change, level, words in ((0, "ok", "complete, weights"), (1, "warn", "are not those of set")):
        data = bytearray((model / "openvino_model.bin").read_bytes())
        data[1000] ^= change
        wait_for_left()  # the compiler of the pipeline that was closed reads the file until it has ended
        (model / "openvino_model.bin").write_bytes(data)
        (found,) = [f for f in examine(("NONE",), str(cache), str(model)) if f.name == "model"]
        assert found.level == level
        assert words in found.value
    wait_for_left()
    (model / "openvino_model.bin").write_bytes(data[:100])
    (found,) = [f for f in examine(("NONE",), None, str(model)) if f.name == "model"]
    assert found.level == "fail"
    assert "has 100 bytes" in found.value
