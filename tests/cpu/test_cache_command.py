"""``staticllm cache``, ``plan``, ``doctor`` and ``compile --verify``, as a user runs them."""

import json
import subprocess
import sys

import pytest

STATICLLM = [sys.executable, "-m", "staticllm"]


def staticllm(*arguments):
    return subprocess.run(
        [*STATICLLM, *map(str, arguments)], capture_output=True, text=True, check=False, encoding="utf-8"
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory, zoo):
    """A cache with one set, and the set exported from it."""
    folder = tmp_path_factory.mktemp("cache")
    done = staticllm("run", "hello", "-m", zoo / "llama", "-n", 2, "--max-prompt-len", 64, "-p", f"CACHE_DIR={folder}")
    assert done.returncode == 0, done.stderr
    return folder


def test_sets_are_listed_verified_exported_and_imported(cache, tmp_path):
    (row,) = json.loads(staticllm("cache", "ls", cache, "--json").stdout)
    assert row["max_prompt_len"] == 64 and row["device"] == "CPU" and not row["problem"]
    text = staticllm("cache", "ls", cache).stdout
    assert row["key"] in text and "prompts of 64" in text and "in 1 sets" in text
    assert staticllm("cache", "verify", cache).returncode == 0
    done = staticllm("cache", "export", cache, row["key"][:6], tmp_path / "set")
    assert done.returncode == 0, done.stderr
    assert staticllm("cache", "import", tmp_path / "other", tmp_path / "set").returncode == 0
    (copy,) = json.loads(staticllm("cache", "ls", tmp_path / "other", "--json").stdout)
    assert copy["key"] == row["key"]
    (blob, *_) = (tmp_path / "other").rglob("*.blob")
    blob.write_bytes(b"x" + blob.read_bytes()[1:])
    done = staticllm("cache", "verify", tmp_path / "other")
    assert done.returncode == 1 and "its digest does not agree" in done.stdout
    done = staticllm("cache", "prune", tmp_path / "other", "--json")
    assert [entry["key"] for entry in json.loads(done.stdout)] == [row["key"]]
    assert staticllm("cache", "ls", tmp_path / "other").stdout == "no sets\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ls", "/no/such/folder"], "there is no cache folder"),
        (["export", "{cache}", "zzz", "x"], "0 sets in"),
        (["import", "{cache}", "/no/such/set"], "no blob set at"),
        (["prune", "{cache}", "--limit-gb", "-1"], "must be 0 or more"),
    ],
)
def test_mistakes_get_one_line(arguments, message, cache):
    done = staticllm("cache", *(str(argument).format(cache=cache) for argument in arguments))
    assert done.returncode == 1 and message in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_plan_says_whether_it_fits(zoo):
    found = json.loads(staticllm("plan", zoo / "lfm2", "--json").stdout)
    assert found["fits"] and found["needed"] == sum(found["bytes"].values()) < found["available"]
    assert found["bytes"]["recurrent states"] > 0 and found["variants"]
    done = staticllm("plan", zoo / "llama", "--max-prompt-len", 1000000, "-p", "KV_ROWS=16000000")
    assert done.returncode == 1 and "it does not fit: lower" in done.stdout


def test_doctor_finds_the_cpu_and_tests_it(cache):
    done = staticllm("doctor", "--device", "CPU", "--cache-dir", cache, "--json")
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == 0
    assert findings["self-test CPU"]["value"].startswith("16 of 16 tokens")
    assert "openvino 20" in findings["packages"]["value"] and findings["cache"]["level"] == "ok"
    assert all(finding["remedy"] for finding in findings.values() if finding["level"] != "ok")
    done = staticllm("doctor", "--device", "TOASTER")
    assert done.returncode == 1 and "FAIL  self-test TOASTER" in done.stdout


def test_compile_verifies_what_it_wrote(zoo, tmp_path):
    done = staticllm("compile", zoo / "llama", "--export-blob", tmp_path / "set", "--verify", "--max-prompt-len", 64)
    assert done.returncode == 0, done.stderr
    assert "verified: " in done.stdout and "tokens agree" in done.stdout
    found = json.loads((tmp_path / "set" / "manifest.json").read_text())["content"]["verification"]
    assert found["is_ok"] and found["agreement"] >= 0.9 and found["places"] == 97
