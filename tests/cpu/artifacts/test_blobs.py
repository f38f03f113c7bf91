"""Tests blob sets: an exported set loads and gives the same tokens, and any other set is refused with the reason."""

import errno
import json
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from support.helpers import PROMPT, SHORT, tokens_of

from staticllm import StaticLLMConfig, StaticLLMPipeline
from staticllm.compiler_passes.artifacts import blob_set
from staticllm.compiler_passes.artifacts.blob_set import read_manifest, rewrite_manifest
from staticllm.compiler_passes.artifacts.cache import BlobCache
from staticllm.compiler_passes.artifacts.measurements import DIGESTS
from staticllm.errors import BlobError, ConfigError, ModelError
from staticllm.pipelines.loading import load as loader
from staticllm.properties import resolve

pytestmark = pytest.mark.usefixtures("shared_programs")

SLOW = pytest.mark.slow


def answer(path, **properties):
    with StaticLLMPipeline(path, **SHORT, **properties) as pipe:
        return tokens_of(pipe)


def load(path, **properties):
    given = resolve({**SHORT, **properties}, {"INFERENCE_PRECISION_HINT"})
    return loader.load(path, "CPU", given.config, explicit=given.explicit)


@pytest.fixture(scope="module")
def llama_set(tmp_path_factory, zoo):
    """Return a set of the zoo's llama, exported once per module."""
    folder = tmp_path_factory.mktemp("sets") / "llama.blob"
    load(zoo / "llama", BLOB_PATH=folder, EXPORT_BLOB="YES")
    return folder


MODES = ("shared", "phases", "few_rows", "separate")
QUICK = {("llama", "phases"), ("llama", "separate"), ("lfm2", "shared")}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=() if (name, mode) in QUICK else SLOW)
        for name in ("llama", "lfm2", "bloom")
        for mode in MODES
    ],
)
def test_a_loaded_set_generates_the_tokens_of_the_original(name, mode, zoo, tmp_path, original):
    expected = original(zoo / name).greedy(PROMPT, 12)
    target = tmp_path / "compiled.blob"
    assert answer(zoo / name, PROGRAMS=mode, BLOB_PATH=target, EXPORT_BLOB="YES") == expected
    assert answer(zoo / name, PROGRAMS=mode, BLOB_PATH=target) == expected
    assert [path.name for path in tmp_path.iterdir()] == ["compiled.blob"]


@pytest.mark.parametrize("mode", ["OPTIMIZE_SPEED", pytest.param("OPTIMIZE_SIZE", marks=SLOW)])
def test_the_cache_mode_decides_whether_blobs_hold_the_weights(mode, zoo, tmp_path):
    target, weights = tmp_path / "blob", (zoo / "llama" / "openvino_model.bin").stat().st_size
    expected = answer(zoo / "llama", BLOB_PATH=target, EXPORT_BLOB="YES", CACHE_MODE=mode)
    manifest = read_manifest(target)
    assert manifest.is_weightless == (mode == "OPTIMIZE_SIZE")
    assert manifest.is_weightless or manifest.num_bytes > weights
    assert answer(zoo / "llama", BLOB_PATH=target) == expected


def test_weights_can_be_in_another_folder(zoo, tmp_path, llama_set):
    model = tmp_path / "model"
    shutil.copytree(zoo / "llama", model)
    weights = (model / "openvino_model.bin").rename(tmp_path / "weights.bin")
    expected = answer(zoo / "llama")
    assert answer(model, WEIGHTS_PATH=weights) == expected
    assert answer(model, WEIGHTS_PATH=weights, BLOB_PATH=llama_set) == expected


def test_unset_options_are_taken_from_the_set(zoo, llama_set):
    with StaticLLMPipeline(zoo / "llama", BLOB_PATH=llama_set) as pipe:
        assert pipe.config.max_prompt_len == 64
        assert pipe.config.kv_cache_precision == "f32"
    with pytest.raises(BlobError, match="MAX_PROMPT_LEN 1024 asked, the blob has 64"):
        StaticLLMPipeline(zoo / "llama", BLOB_PATH=llama_set, MAX_PROMPT_LEN=1024)


def test_the_same_set_loads_several_times_in_one_process(zoo, llama_set):
    pipes = [StaticLLMPipeline(zoo / "llama", BLOB_PATH=llama_set) for _ in range(3)]
    answers = [tokens_of(pipe, count=8) for pipe in pipes]
    for pipe in pipes:
        pipe.close()
    assert answers[0] == answers[1] == answers[2]


def test_encrypted_blobs_need_their_key(zoo, tmp_path):
    key = bytes(range(1, 256))

    def crypt(data):
        return (np.frombuffer(data, np.uint8) ^ np.resize(np.frombuffer(key, np.uint8), len(data))).tobytes()

    target = tmp_path / "blob"
    expected = answer(zoo / "llama", BLOB_PATH=target, EXPORT_BLOB=True, CACHE_ENCRYPTION_CALLBACKS=(crypt, crypt))
    assert answer(zoo / "llama", BLOB_PATH=target, CACHE_ENCRYPTION_CALLBACKS=(crypt, crypt)) == expected
    with pytest.raises(BlobError, match="are encrypted: give CACHE_ENCRYPTION_CALLBACKS"):
        load(zoo / "llama", BLOB_PATH=target)
    with pytest.raises(BlobError, match="cannot be decrypted: KeyError"):
        load(zoo / "llama", BLOB_PATH=target, CACHE_ENCRYPTION_CALLBACKS=(crypt, lambda data: {}["key"]))


@SLOW
def test_weights_can_be_encrypted_on_disk(zoo, tmp_path):
    expected, model = answer(zoo / "llama"), tmp_path / "model"
    shutil.copytree(zoo / "llama", model)
    weights = model / "openvino_model.bin"
    weights.write_bytes(bytes(255 - byte for byte in weights.read_bytes()))

    def decrypt(data):
        return (255 - np.frombuffer(data, np.uint8)).tobytes()

    assert answer(model, WEIGHTS_DECRYPTION_CALLBACK=decrypt) == expected
    options = {"BLOB_PATH": tmp_path / "blob", "CACHE_ENCRYPTION_CALLBACKS": (decrypt, decrypt)}
    assert answer(model, WEIGHTS_DECRYPTION_CALLBACK=decrypt, EXPORT_BLOB=True, **options) == expected
    assert answer(model, WEIGHTS_DECRYPTION_CALLBACK=decrypt, **options) == expected
    assert not read_manifest(tmp_path / "blob").is_weightless
    with pytest.raises(ModelError, match="10 bytes decrypted"):
        load(model, WEIGHTS_DECRYPTION_CALLBACK=lambda data: data[:10])
    with pytest.raises(ModelError, match="cannot be decrypted: KeyError"):
        load(model, WEIGHTS_DECRYPTION_CALLBACK=lambda data: {}["key"])


CORRUPTIONS = """
import json, random, shutil, sys
from pathlib import Path
from staticllm import StaticLLMConfig
from staticllm.errors import StaticLLMError
from staticllm.pipelines.loading import kind
from staticllm.pipelines.loading import load as loader
from staticllm.properties import resolve

model, blobs, scratch = map(Path, sys.argv[1:4])
num_bits, num_cuts = int(sys.argv[4]), int(sys.argv[5])
random.seed(0)
shutil.copytree(model, scratch / "model")
refused, reasons, ran = 0, set(), []

def attempt(what, **properties):
    global refused
    try:
        given = resolve({"BLOB_PATH": scratch / "set", **properties}, {"INFERENCE_PRECISION_HINT"})
        loader.load(scratch / "model", "CPU", given.config, explicit=given.explicit)
        ran.append(what)
    except StaticLLMError as error:
        assert "\\n" not in str(error), error
        refused += 1
        reasons.add(what.split()[0] + ": " + str(error).replace(str(scratch), "")[:150])

def fresh():
    shutil.rmtree(scratch / "set", ignore_errors=True)
    shutil.copytree(blobs, scratch / "set")

fresh()
config = StaticLLMConfig(blob_path=str(scratch / "set"))
loader.load(scratch / "model", "CPU", config)  # the unchanged set loads
names = sorted(path.name for path in blobs.iterdir() if path.name == "manifest.json" or path.suffix == ".blob")
places = [("set", name) for name in names] + [("model", "openvino_model.xml"), ("model", "openvino_model.bin")]
for folder, name in places:
    path = scratch / folder / name
    whole = path.read_bytes()
    for index in range(num_bits // len(places)):
        place = random.randrange(len(whole))
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << random.randrange(8))]) + whole[place + 1:])
        attempt(f"bit {folder}/{name} {place}")
    for index in range(num_cuts):
        path.write_bytes(whole[:random.randrange(len(whole))])
        attempt(f"cut {folder}/{name}")
    path.unlink()
    attempt(f"missing {folder}/{name}")
    path.write_bytes(whole)
for name, properties in (("MAX_PROMPT_LEN", 128), ("MIN_RESPONSE_LEN", 64), ("PROGRAMS", "separate"), ("MAX_NUM_SEQS", 3),
                         ("KV_CACHE_PRECISION", "f16"), ("PREFILL_ROWS", [16]), ("INFERENCE_PRECISION_HINT", "bf16")):
    attempt(f"asked {name}", **{name: properties})
machine = kind.machine_values
for name, value in (("openvino", "2026.3.0"), ("device_name", "Another CPU"), ("passes", "0"), ("capabilities", "FP32")):
    kind.machine_values = lambda core, device, name=name, value=value: {**machine(core, device), name: value}
    attempt(f"machine {name}")
kind.machine_values = machine
loader.load(scratch / "model", "CPU", config)  # the restored set loads
print(json.dumps({"refused": refused, "ran": ran, "reasons": sorted(reasons)}))
"""


def test_a_changed_set_is_never_loaded(zoo, llama_set, tmp_path, in_full):
    num_bits, num_cuts, least = (200, 20, 280) if in_full else (40, 4, 70)
    done = subprocess.run(
        [sys.executable, "-c", CORRUPTIONS, zoo / "llama", llama_set, tmp_path, str(num_bits), str(num_cuts)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["ran"]
    assert found["refused"] >= least
    named = ("OpenVINO 2026.3.0, blob 2026.4", "weights digest", "IR digest", "MAX_PROMPT_LEN 128 asked", "Another CPU")
    for reason in named:
        assert any(reason in text for text in found["reasons"]), (reason, found["reasons"])


def test_a_set_that_failed_verification_is_never_used(zoo, llama_set, tmp_path):
    target = tmp_path / "blob"
    shutil.copytree(llama_set, target)
    rewrite_manifest(
        target, replace(read_manifest(target), verification={"is_ok": False, "agreement": 0.5, "distance": 0.2})
    )
    with pytest.raises(BlobError, match="failed verification"):
        load(zoo / "llama", BLOB_PATH=target)


@pytest.mark.parametrize("change", [lambda text: text.replace(" ", "  ", 1), lambda text: text.replace("\n", "\t", 1)])
def test_a_manifest_with_another_spelling_is_refused(change, llama_set, tmp_path):
    """JSON can write the same value in several ways, and a flipped bit may lead from one to another."""
    shutil.copytree(llama_set, tmp_path / "blob")
    path = tmp_path / "blob" / "manifest.json"
    text = path.read_text()
    changed = change(text)
    assert changed != text
    assert json.loads(changed) == json.loads(text)
    path.write_text(changed)
    with pytest.raises(BlobError, match="is damaged"):
        read_manifest(tmp_path / "blob")


def test_export_replaces_a_set_and_nothing_else(zoo, tmp_path):
    target = tmp_path / "deep" / "blob"
    for _ in range(2):
        load(zoo / "llama", BLOB_PATH=target, EXPORT_BLOB=True)
    assert [path.name for path in target.parent.iterdir()] == ["blob"]
    diary = tmp_path / "diary"
    diary.mkdir()
    (diary / "page.txt").write_text("dear diary")
    with pytest.raises(ConfigError, match="is not a blob set"):
        load(zoo / "llama", BLOB_PATH=diary, EXPORT_BLOB=True)
    assert (diary / "page.txt").read_text() == "dear diary"


# -- the cache


def test_the_second_start_loads_what_the_first_compiled(zoo, tmp_path, original):
    first, second = (load(zoo / "llama", CACHE_DIR=tmp_path, PROGRAMS="shared") for _ in range(2))
    assert (first.programs_from, second.programs_from) == ("compiled", "cache")
    assert second.programs.costs
    assert second.programs.shape == first.programs.shape
    assert answer(zoo / "llama", CACHE_DIR=tmp_path, PROGRAMS="shared") == original(zoo / "llama").greedy(PROMPT, 12)
    other = load(zoo / "llama", CACHE_DIR=tmp_path, PROGRAMS="shared", MAX_PROMPT_LEN=32)
    assert other.programs_from == "compiled"
    assert len(BlobCache(tmp_path).entries()) == 2


def test_a_damaged_set_in_the_cache_is_compiled_again(zoo, tmp_path):
    load(zoo / "llama", CACHE_DIR=tmp_path, PROGRAMS="shared")
    (entry,) = BlobCache(tmp_path).entries()
    (blob, *_) = entry.folder.glob("*.blob")
    blob.write_bytes(blob.read_bytes()[:-1])
    ((_, problem),) = BlobCache(tmp_path).verify()
    assert "the manifest says" in problem
    with pytest.warns(RuntimeWarning, match="compiled again: .*the manifest says"):
        assert load(zoo / "llama", CACHE_DIR=tmp_path, PROGRAMS="shared").programs_from == "compiled"
    assert load(zoo / "llama", CACHE_DIR=tmp_path, PROGRAMS="shared").programs_from == "cache"


@pytest.mark.parametrize("property_name", ["CACHE_DIR", pytest.param("BLOB_PATH", marks=SLOW)])
def test_a_full_disk_leaves_no_half_set(property_name, zoo, tmp_path, monkeypatch):
    count, write = [], blob_set._write

    def full(path, data):
        count.append(path)
        if len(count) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data)

    monkeypatch.setattr(blob_set, "_write", full)
    if property_name == "CACHE_DIR":
        with pytest.warns(RuntimeWarning, match="nothing was cached: .*No space left"):
            assert load(zoo / "llama", CACHE_DIR=tmp_path, PROGRAMS="shared").programs_from == "compiled"
    else:
        with pytest.raises(ConfigError, match="No space left"):
            load(zoo / "llama", BLOB_PATH=tmp_path / "blob", EXPORT_BLOB=True)
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock" and path.name != DIGESTS]


@SLOW
def test_the_least_recently_used_sets_are_removed_except_those_in_use(zoo, tmp_path):
    for length in (16, 32, 48):
        load(zoo / "llama", CACHE_DIR=tmp_path, PROGRAMS="shared", MAX_PROMPT_LEN=length)
        time.sleep(0.05)
    load(zoo / "llama", CACHE_DIR=tmp_path, PROGRAMS="shared", MAX_PROMPT_LEN=16)  # used again, so 32 is now the oldest
    cache = BlobCache(tmp_path)
    entries = cache.entries()
    lengths = [entry.manifest.config["max_prompt_len"] for entry in entries]
    assert lengths == [16, 48, 32]
    with cache.lease(entries[-1].key):
        in_use = threading.Thread(target=lambda: removed.extend(cache.prune(entries[0].num_bytes + 1)))
        removed = []
        in_use.start()
        in_use.join()
    assert [entry.manifest.config["max_prompt_len"] for entry in removed] == [48]
    assert [entry.key for entry in cache.prune(0, keep=entries[0].key)] == [entries[2].key]
    assert [entry.key for entry in cache.entries()] == [entries[0].key]


START = """
import json, sys
from pathlib import Path
from staticllm import StaticLLMConfig
from staticllm.pipelines.loading import load as loader
from staticllm.compiler_passes.artifacts.fingerprint import file_digest
sys.stdin.readline()
config = StaticLLMConfig(cache_dir=sys.argv[2], max_prompt_len=64, programs="shared")
loaded = loader.load(sys.argv[1], "CPU", config)
files = sorted(path for path in Path(sys.argv[2]).rglob("*") if path.is_file() and path.suffix != ".lock")
print(json.dumps([loaded.programs_from, {path.name: file_digest(path) for path in files}]))
"""


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=SLOW)])
def test_of_several_processes_one_compiles_and_the_others_load(count, zoo, tmp_path):
    children = [
        subprocess.Popen(
            [sys.executable, "-c", START, zoo / "llama", tmp_path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(count)
    ]
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    results = [json.loads(child.communicate(timeout=120)[0]) for child in children]
    assert sorted(origin for origin, _ in results) == ["cache"] * (count - 1) + ["compiled"]
    assert all(files == results[0][1] for _, files in results)
    assert results[0][1]


AGAIN = """
import sys
from staticllm import StaticLLMConfig
from staticllm.pipelines.loading import load as loader
from staticllm.compiler_passes.artifacts.cache import BlobCache
from staticllm.compiler_passes.artifacts.blob_set import remove_set
while True:
    print("compiles", flush=True)
    loader.load(sys.argv[1], "CPU", StaticLLMConfig(cache_dir=sys.argv[2], max_prompt_len=64, programs="shared"))
    for entry in BlobCache(sys.argv[2]).entries():
        remove_set(entry.folder)
"""


@SLOW
def test_a_killed_process_leaves_a_working_cache(zoo, tmp_path):
    for seconds in np.linspace(0, 1.2, 8):
        child = subprocess.Popen(
            [sys.executable, "-c", AGAIN, zoo / "llama", tmp_path],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        child.stdout.readline()
        time.sleep(seconds)
        child.kill()
        child.communicate()
        config = StaticLLMConfig(cache_dir=str(tmp_path), max_prompt_len=64, programs="shared")
        loaded = loader.load(zoo / "llama", "CPU", config)
        assert loaded.programs_from in ("compiled", "cache")
        (entry,) = BlobCache(tmp_path).entries()
        left = {path.name for path in entry.folder.iterdir()} - {blob_set.MANIFEST, blob_set.LOCK}
        assert left == set(entry.manifest.blobs), "what a dead process had begun is removed"


@SLOW
@pytest.mark.parametrize("name", ["gpt_oss", "qwen2_moe"])
def test_a_model_whose_blobs_compute_other_values_runs_without_them(name, zoo, tmp_path, original):
    """In OpenVINO 2026.4, blobs of mixtures of experts are refused or compute other values than their programs."""
    expected = original(zoo / name).greedy(PROMPT, 12)
    with pytest.raises(BlobError, match="do not compute what"):
        load(zoo / name, BLOB_PATH=tmp_path / "blob", EXPORT_BLOB=True)
    for _ in range(2):  # the second start knows that blobs do not work
        with pytest.warns(RuntimeWarning, match="CACHE_DIR is not used: .*do not compute what"):
            assert answer(zoo / name, CACHE_DIR=tmp_path, PROGRAMS="shared") == expected
    assert not list(tmp_path.rglob("*.blob"))
