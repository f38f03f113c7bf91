"""Tests forged and unfinished blob sets and caches: they are refused by name, and no file outside them is touched."""

import json
import os
import subprocess
import sys
import threading

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.helpers import FINGERPRINT, KEY, a_manifest, a_set, forge
from support.quick import examples

from staticllm import StaticLLMPipeline
from staticllm.cli import cli
from staticllm.compiler_passes.artifacts.blob_set import MANIFEST, copy_set, read_manifest, read_stored
from staticllm.compiler_passes.artifacts.cache import BlobCache, key_of
from staticllm.compiler_passes.artifacts.fingerprint import bytes_digest
from staticllm.compiler_passes.artifacts.manifest import ManifestError, StoredBlob, _canonical, _framed, decode, encode
from staticllm.errors import BlobError

pytestmark = pytest.mark.usefixtures("shared_programs")


def renamed(name):
    def change(content):
        (entry,) = content["blobs"].values()
        content["blobs"] = {name: entry}
        content["variants"][0]["file"] = name

    return change


def refused(folder):
    with pytest.raises(BlobError) as error:
        list(read_stored(folder, read_manifest(folder)))
    assert "\n" not in str(error.value)
    assert folder.name in str(error.value)
    return str(error.value)


# -- names that lead outside, files that are none


@pytest.mark.parametrize(
    "name",
    ["../../x.blob", "/etc/x.blob", "a/b.blob", "a\\b.blob", "..", "C:x.blob", ".blob", "a..b.blob", "x", "a\n.blob"],
)
def test_only_plain_file_names_are_accepted(name, tmp_path):
    source, cache = tmp_path / "a" / "source", BlobCache(tmp_path / "deep" / "cache")
    a_set(source)
    forge(source, renamed(name))
    before = sorted(tmp_path.rglob("*"))
    assert "not a plain file name" in refused(source)
    with pytest.raises(BlobError):
        copy_set(source, cache.path("0" * 24))
    done = subprocess.run(
        [sys.executable, "-m", "staticllm", "cache", "import", str(cache.folder), str(source)],
        capture_output=True, text=True, check=False,
    ) if name == "../../x.blob" else None  # fmt: skip
    assert done is None or (done.returncode == 1 and len(done.stderr.splitlines()) == 1)
    assert [path for path in sorted(tmp_path.rglob("*")) if "deep" not in path.parts] == before
    assert not [path for path in (tmp_path / "deep").rglob("*") if path.suffix == ".blob"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in the file system here")
@pytest.mark.parametrize("what", ["blob", "manifest"])
def test_a_pipe_is_refused_without_waiting(what, tmp_path):
    written = a_set(tmp_path / "set")
    path = tmp_path / "set" / (MANIFEST if what == "manifest" else next(iter(written.blobs)))
    path.unlink()
    os.mkfifo(path)
    if what == "blob":
        forge(tmp_path / "set", lambda content: next(iter(content["blobs"].values())).update(bytes=0))
    found = []
    thread = threading.Thread(target=lambda: found.append(refused(tmp_path / "set")), daemon=True)
    thread.start()
    thread.join(10)
    assert "not an ordinary file" in found[0]


@pytest.mark.skipif(os.name == "nt", reason="links need rights on Windows")
def test_links_are_not_followed_out_of_a_set(tmp_path):
    written = a_set(tmp_path / "set")
    (name,) = written.blobs
    secret = (tmp_path / "set" / name).rename(tmp_path / "secret")
    (tmp_path / "set" / name).symlink_to(secret)
    forge(tmp_path / "set", lambda content: content["blobs"][name].update(bytes=len(str(secret))))
    assert "is a link" in refused(tmp_path / "set")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / f"staticllm-{'0' * 24}").symlink_to(tmp_path / "set")
    cache = BlobCache(tmp_path / "cache")
    assert not cache.entries()
    assert not cache.prune(0)
    assert (tmp_path / "set" / MANIFEST).exists()


def test_an_oversized_manifest_is_refused(tmp_path):
    a_set(tmp_path / "set")
    with (tmp_path / "set" / MANIFEST).open("r+b") as file:
        file.truncate(1 << 33)
    assert "at most 16777216 are read" in refused(tmp_path / "set")


# -- manifests


def paths_of(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield from paths_of(inner, (*path, name))


def put(content, path, value):
    *lead, last = path
    for name in lead:
        content = content[name]
    if value is ...:
        del content[last]
    else:
        content[last] = value


CONTENT = json.loads(encode(a_manifest(blobs={"0.blob": StoredBlob("0" * 64, 3)})))["content"]
PATHS = [path for path in paths_of(CONTENT) if path]
VALUES = [
    ...,
    None,
    True,
    -1,
    0,
    1.5,
    1e400,
    10**30,
    "",
    "x" * 100_000,
    "../x",
    [],
    {},
    [[]],
    {"a": 1},
    "\ud800",
    float("nan"),
]


def forged(path, value):
    content = json.loads(json.dumps(CONTENT))
    put(content, path, value)
    return _framed(content, bytes_digest(_canonical(content)), False)


@pytest.mark.parametrize(
    "verification",
    [{"is_ok": False, "agreement": "0.5"}, {"is_ok": False, "reason": ["no"]}, {"is_ok": "no"}, {"distance": 0.1}],
)
def test_an_impossible_verification_is_refused(verification):
    with pytest.raises(ManifestError, match="has an impossible value"):
        decode(forged(("verification",), verification))


def test_a_digest_that_is_not_utf_8_is_refused():
    with pytest.raises(ManifestError, match="damaged"):
        decode(_framed(CONTENT, "\ud800", False))


@settings(max_examples=examples(400), deadline=None)
@given(st.sampled_from(PATHS), st.sampled_from(VALUES))
def test_a_missing_or_wrong_field_is_refused_or_harmless(path, value):
    """The digest is valid. An accepted manifest can be read and is unchanged by a round trip."""
    try:
        manifest = decode(forged(path, value))
    except Exception as error:
        assert type(error).__name__ == "ManifestError"
        assert len(str(error)) < 600
        assert "\n" not in str(error)
        return
    assert decode(encode(manifest)) == manifest
    assert {entry.file for entry in manifest.variants} <= set(manifest.blobs)
    if not (manifest.verification or {}).get("is_ok", True):
        assert manifest.has_failed_verification


JSON = st.recursive(st.none() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_bytes_that_are_not_a_manifest_are_refused(data):
    with pytest.raises(Exception, match="damaged") as error:
        decode(data)
    assert type(error.value).__name__ == "ManifestError"


def test_an_unknown_field_is_named_in_the_error(tmp_path):
    a_set(tmp_path / "set")
    forge(tmp_path / "set", lambda content: content.update(surprise=1))
    assert "'surprise'" in refused(tmp_path / "set")


def test_one_damaged_manifest_in_a_cache_does_not_stop_the_others(tmp_path, staticllm):
    cache = BlobCache(tmp_path)
    good, bad = key_of(FINGERPRINT), "f" * 24
    a_set(cache.path(good))
    a_set(cache.path(bad))
    forge(cache.path(bad), lambda content: content.pop("config"))
    assert {entry.key: bool(entry.problem) for entry in cache.entries()} == {good: False, bad: True}
    problems = {entry.key: problem for entry, problem in cache.verify()}
    assert not problems[good]
    assert bad in problems[bad]
    for verb in ("ls", "verify"):
        done = staticllm("cache", verb, tmp_path, "--json")
        assert {row["key"] for row in json.loads(done.stdout)} == {good, bad}, done.stderr
    assert {entry.key for entry in cache.prune(0)} == {good, bad}


def test_a_set_with_user_properties_is_refused(zoo, tmp_path):
    """Otherwise the properties of a foreign manifest could name files."""
    options = {"MAX_PROMPT_LEN": 32, "MIN_RESPONSE_LEN": 16, "BLOB_PATH": tmp_path / "set"}
    StaticLLMPipeline(zoo / "llama", EXPORT_BLOB=True, **options).close()
    forge(tmp_path / "set", lambda content: content["properties"]["generate"].update(CACHE_DIR="/tmp/elsewhere"))
    with pytest.raises(BlobError, match="have CACHE_DIR=/tmp/elsewhere"):
        StaticLLMPipeline(zoo / "llama", **options)


def test_a_manifest_whose_shapes_differ_from_the_blob_is_refused(zoo, tmp_path):
    options = {"MAX_PROMPT_LEN": 32, "MIN_RESPONSE_LEN": 16, "BLOB_PATH": tmp_path / "set"}
    StaticLLMPipeline(zoo / "llama", EXPORT_BLOB=True, **options).close()
    forge(tmp_path / "set", lambda content: content["shape"]["kv_states"][0].update(heads=7))
    with pytest.raises(BlobError, match="do not match their manifest"):
        StaticLLMPipeline(zoo / "llama", **options)


# -- signatures


def test_sets_with_another_signature_are_refused(zoo, tmp_path):
    options = {"MAX_PROMPT_LEN": 32, "MIN_RESPONSE_LEN": 16, "BLOB_PATH": tmp_path / "set"}
    StaticLLMPipeline(zoo / "llama", EXPORT_BLOB=True, INTEGRITY_KEY=KEY, **options).close()
    StaticLLMPipeline(zoo / "llama", INTEGRITY_KEY=KEY, **options).close()
    for key, words in ((None, "is signed: give its INTEGRITY_KEY"), (KEY[::-1], "signed with another INTEGRITY_KEY")):
        with pytest.raises(BlobError, match=words):
            StaticLLMPipeline(zoo / "llama", INTEGRITY_KEY=key, **options)
    for flags, words in (([], "is signed"), (["--key-file", str(tmp_path / "key")], "")):
        (tmp_path / "key").write_bytes(KEY)
        done = CliRunner().invoke(
            cli, ["cache", *flags, "import", str(tmp_path / f"cache{len(flags)}"), str(tmp_path / "set")]
        )
        assert (done.exit_code == 0) is bool(flags)
        assert words in done.output
    forge(tmp_path / "set", lambda content: None)  # not signed
    with pytest.raises(BlobError, match="is not signed"):
        StaticLLMPipeline(zoo / "llama", INTEGRITY_KEY=KEY, **options)
