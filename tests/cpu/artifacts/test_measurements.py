"""Costs and times of probes that are kept in files: what is stored is found again, and anything else counts as nothing."""

import json
import math
import os
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.helpers import FINGERPRINT, KEY, SHORT, a_manifest, tokens_of

from staticllm import StaticLLMPipeline, demo_model_path
from staticllm.compiler_passes.artifacts import measurements
from staticllm.compiler_passes.artifacts.blob_set import COSTS, LOCK, copy_set, read_manifest, write_set
from staticllm.compiler_passes.artifacts.cache import BlobCache
from staticllm.compiler_passes.artifacts.fingerprint import bytes_digest, file_digest
from staticllm.compiler_passes.artifacts.measurements import (
    CostsPlace,
    KeptProbes,
    MeasurementFile,
    digests_in,
    probes_in,
)
from staticllm.compiler_passes.compiling.compile import CompileOptions
from staticllm.config import StaticLLMConfig
from staticllm.core import Variant
from staticllm.devices import get_core
from staticllm.errors import ModelError
from staticllm.pipelines.costs import probe as cost_probe
from staticllm.pipelines.costs.probe import worth_measuring
from staticllm.pipelines.loading import kind
from staticllm.pipelines.loading.decoder_kind import job_of
from staticllm.pipelines.loading.kind import probes_of
from staticllm.system.file_lock import acquire

OPTIONS = CompileOptions("CPU", "shared", "f32", {"prefill": {}, "generate": {}})
MEASURED = {Variant(1, 64): 0.05, Variant(16, 0): 0.125}


@pytest.fixture
def place(tmp_path):
    return CostsPlace(tmp_path, FINGERPRINT)


def stored(place):
    return place.costs_of(Variant, OPTIONS).read()


def test_costs_are_found_again_for_the_same_programs_and_the_same_machine(place, monkeypatch):
    place.costs_of(Variant, OPTIONS).write(MEASURED)
    assert stored(place) == MEASURED
    for other in (
        replace(OPTIONS, layout="phases"),
        replace(OPTIONS, few_rows=16),
        replace(OPTIONS, properties={"prefill": {}, "generate": {"INFERENCE_PRECISION_HINT": "f32"}}),
    ):
        assert not place.costs_of(Variant, other).read(), other
    for name in ("device_name", "openvino", "weights_digest", "passes"):
        assert not stored(replace(place, fingerprint=replace(FINGERPRINT, **{name: "another"}))), name
    assert not stored(replace(place, key=KEY)), "not signed"
    monkeypatch.setattr(measurements, "usable_cores", lambda: 999)
    assert not stored(place)


def test_costs_are_left_out_if_the_lock_cannot_be_held(place, monkeypatch):
    """A lock that is a link to itself, and a file system without locks, raise a RuntimeError on the engine's thread."""
    if os.name != "nt":
        (place.folder / LOCK).symlink_to(LOCK)
        place.costs_of(Variant, OPTIONS).write(MEASURED)
        assert not stored(place)

    def refuse(path, timeout):
        raise NotImplementedError("no locks")

    monkeypatch.setattr(measurements, "acquire", refuse)
    place.costs_of(Variant, OPTIONS).write(MEASURED)
    assert not stored(place)


def test_a_file_is_written_again_only_for_new_costs(place):
    kept = place.costs_of(Variant, OPTIONS)
    kept.write(MEASURED)
    written = (place.folder / COSTS).stat()
    kept.write({**MEASURED, Variant(1, 64): 0.052})
    assert (place.folder / COSTS).stat().st_ino == written.st_ino
    assert (place.folder / COSTS).stat().st_mtime_ns == written.st_mtime_ns
    kept.write({**MEASURED, Variant(1, 64): 0.1})
    assert stored(place)[Variant(1, 64)] == 0.1
    kept = place.costs_of(Variant, OPTIONS)
    kept.read()
    kept.write({**MEASURED, Variant(1, 64): 0.1, Variant(32, 0): 0.2})
    assert len(stored(place)) == 3


def test_nothing_is_written_where_nothing_can_be(place, tmp_path):
    CostsPlace(tmp_path / "absent", FINGERPRINT).costs_of(Variant, OPTIONS).write(MEASURED)
    assert not (tmp_path / "absent").exists()
    with acquire(place.folder / LOCK):
        place.costs_of(Variant, OPTIONS).write(MEASURED)
    assert not (place.folder / COSTS).exists(), "another process is writing the set"
    (place.folder / COSTS).mkdir()
    place.costs_of(Variant, OPTIONS).write(MEASURED)
    assert not stored(place)
    assert {path.name for path in place.folder.iterdir()} - {LOCK} == {COSTS}, "a file of a failed write is left"


def forged(place, change):
    """Change what a file holds, and sign it again."""
    content = json.loads((place.folder / COSTS).read_bytes())["content"]
    change(content)
    digest = bytes_digest(json.dumps(content, sort_keys=True).encode())
    (place.folder / COSTS).write_text(json.dumps({"digest": digest, "content": content}))


A_VARIANT = {"rows": 1, "kv_len": 64, "sequences": 1, "extra_logits": 0}


@pytest.mark.parametrize(
    "costs",
    [
        *([{**A_VARIANT, "seconds": value}] for value in (math.nan, math.inf, -1.0, 0, 1e9, True, None, "1", [], 10**400)),
        [{**A_VARIANT, "rows": -1, "seconds": 0.1}],
        [{**A_VARIANT, "rows": 1 << 40, "seconds": 0.1}],
        [{**A_VARIANT, "lines": 1, "seconds": 0.1}],
        [{"seconds": 0.1}],
        [[]], [None], {}, 7, None, "costs",
        [{**A_VARIANT, "seconds": 0.1}] * ((1 << 14) + 1),
    ],
)  # fmt: skip
def test_impossible_costs_are_ignored(costs, place):
    place.costs_of(Variant, OPTIONS).write(MEASURED)
    forged(place, lambda content: content["measured"].update(costs=[{**A_VARIANT, "seconds": 0.25}]))
    assert stored(place) == {Variant(1, 64): 0.25}, "the forged file itself is read"
    forged(place, lambda content: content["measured"].update(costs=costs))
    assert stored(place) == {}


@pytest.mark.parametrize("name", ["schema", "subject", "measured"])
def test_files_of_another_schema_or_subject_are_ignored(name, place):
    place.costs_of(Variant, OPTIONS).write(MEASURED)
    forged(place, lambda content: content.update({name: 99}))
    assert stored(place) == {}
    forged(place, lambda content: content.pop(name))
    assert stored(place) == {}


def test_a_flipped_byte_is_noticed(place):
    place.costs_of(Variant, OPTIONS).write(MEASURED)
    whole = (place.folder / COSTS).read_bytes()
    (place.folder / COSTS).write_bytes(whole.replace(b"0.05", b"0.85"))
    assert stored(place) == {}
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        (place.folder / COSTS).write_bytes(whole[:length])
        assert stored(place) == {}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.binary(max_size=200) | st.sampled_from([b"[" * 100_000, b'{"content": ' * 20_000, b"NaN", b"1" * 5000]))
def test_any_bytes_are_ignored(data, place):
    (place.folder / COSTS).write_bytes(data)
    assert stored(place) == {}


def test_a_file_of_a_gigabyte_is_not_read(place):
    place.costs_of(Variant, OPTIONS).write(MEASURED)
    with (place.folder / COSTS).open("r+b") as file:
        file.truncate(1 << 30)  # sparse
    assert stored(place) == {}


@pytest.mark.skipif(os.name == "nt", reason="links need rights on Windows")
def test_links_and_pipes_are_not_read(place, tmp_path):
    place.costs_of(Variant, OPTIONS).write(MEASURED)
    (place.folder / COSTS).rename(tmp_path / "elsewhere")
    (place.folder / COSTS).symlink_to(tmp_path / "elsewhere")
    assert stored(place) == {}
    place.costs_of(Variant, OPTIONS).write(MEASURED)
    assert stored(place) == MEASURED, "the link itself was replaced"
    (place.folder / COSTS).unlink()
    os.mkfifo(place.folder / COSTS)
    assert stored(place) == {}


# -- probes


def test_times_of_probes_are_found_again(tmp_path):
    probes = probes_in(tmp_path, get_core(), "CPU")
    assert probes.times("which is faster?", 2) is None
    probes.add("which is faster?", [0.5, 0.25])
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("staticllm-probes-")
    again = probes_in(tmp_path, get_core(), "CPU")
    assert again.times("which is faster?", 2) == [0.5, 0.25]
    assert again.times("which is faster?", 3) is None, "other candidates"
    assert again.times("which is slower?", 2) is None
    assert probes_in(tmp_path, get_core(), "CPU", KEY).times("which is faster?", 2) is None
    assert not BlobCache(tmp_path).entries(), "the file is no set"


def test_a_file_is_digested_once_until_it_changes(tmp_path, monkeypatch):
    """Also if its time is set back; one that has just been written is read again, because its stamp may not show a change."""
    path = tmp_path / "weights.bin"
    path.write_bytes(b"one")
    now = time.time_ns()
    runs = []
    monkeypatch.setattr(measurements, "file_digest", lambda path: runs.append(path) or file_digest(path))
    wanted = file_digest(path)
    assert [digests_in(tmp_path).of(path) for _ in range(2)] == [wanted] * 2
    assert len(runs) == 2
    monkeypatch.setattr(measurements.time, "time_ns", lambda: now + 10 * measurements.STEP_NS)
    assert [digests_in(tmp_path).of(path) for _ in range(3)] == [wanted] * 3
    assert len(runs) == 3
    assert digests_in(tmp_path, KEY).of(path) == wanted
    assert len(runs) == 4, "signed by nobody"
    stat = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert digests_in(tmp_path, KEY).of(path) == file_digest(path) != wanted
    path.unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        digests_in(tmp_path).of(path)


def test_a_new_cache_keeps_the_digests_of_its_first_start(zoo, tmp_path, monkeypatch):
    runs = []
    monkeypatch.setattr(measurements, "file_digest", lambda path: runs.append(path) or file_digest(path))
    job = job_of(zoo / "llama", "CPU", StaticLLMConfig(cache_dir=str(tmp_path / "new" / "cache")))
    first, second = (job.kind.fingerprint(job) for _ in range(2))
    assert first == second
    assert len(runs) == 2, "the graph and the weights, once"


def test_probes_are_old_after_a_month_and_signed_apart(tmp_path):
    probes_in(tmp_path, get_core(), "CPU").add("?", [0.5, 0.25])
    probes_in(tmp_path, get_core(), "CPU", KEY).add("?", [0.125, 0.25])
    assert probes_in(tmp_path, get_core(), "CPU").times("?", 2) == [0.5, 0.25]
    assert probes_in(tmp_path, get_core(), "CPU", KEY).times("?", 2) == [0.125, 0.25]
    old = time.time() - measurements.MAX_AGE_SECONDS - 60
    for path in tmp_path.iterdir():
        os.utime(path, (old, old))
    assert probes_in(tmp_path, get_core(), "CPU").times("?", 2) is None


def test_a_user_without_a_home_has_no_probes(zoo, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(kind, "user_cache", no_home)
    assert probes_of(job_of(zoo / "llama", "CPU", StaticLLMConfig())) is None


def test_probes_are_kept_for_this_user_where_no_cache_is_given(zoo, tmp_path, monkeypatch):
    """A folder that cannot be made keeps them for the load alone."""
    monkeypatch.setattr(kind, "user_cache", lambda: tmp_path / "cache")
    job = job_of(zoo / "llama", "CPU", StaticLLMConfig())
    probes_of(job).add("which is faster?", [0.5, 0.25])
    assert probes_of(job).times("which is faster?", 2) == [0.5, 0.25]
    (tmp_path / "file").touch()
    monkeypatch.setattr(kind, "user_cache", lambda: tmp_path / "file")
    probes = probes_of(job)
    assert probes.times("which is faster?", 2) is None
    probes.add("which is faster?", [0.5, 0.25])
    assert probes.times("which is faster?", 2) == [0.5, 0.25]


@pytest.mark.parametrize("times", [[math.nan, 0.1], [-1, 0.1], [0.1], "ab", None, {"0": 1}, [1e9, 1e9], [True, True]])
def test_impossible_times_are_ignored(times, tmp_path):
    file = MeasurementFile(tmp_path / "probes", "here")
    KeptProbes(file).add("?", [0.5, 0.25])
    (question,) = file.read()
    file.write({question: times})
    assert KeptProbes(file).times("?", 2) is None


def test_only_the_newest_questions_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(measurements, "MAX_PROBES", 3)
    file = MeasurementFile(tmp_path / "probes", "here")
    probes = KeptProbes(file)
    for number in range(5):
        probes.add(f"{number}?", [0.5])
    again = KeptProbes(file)
    assert [again.times(f"{number}?", 1) for number in range(5)] == [None, None, [0.5], [0.5], [0.5]]


# -- with blob sets and pipelines


def test_costs_beside_a_set_are_no_part_of_it(tmp_path):
    source, copy = tmp_path / "set", tmp_path / "copy"
    written = write_set(source, a_manifest(), {"0.blob": b"program"})
    CostsPlace(source, FINGERPRINT).costs_of(Variant, OPTIONS).write(MEASURED)
    copy_set(source, copy)
    assert read_manifest(source) == read_manifest(copy) == written
    assert not (copy / COSTS).exists()
    write_set(source, a_manifest(), {"0.blob": b"other"})
    assert stored(CostsPlace(source, FINGERPRINT)) == MEASURED


@pytest.mark.parametrize("place_of", ["CACHE_DIR", "BLOB_PATH"])
def test_the_next_start_measures_a_few_costs_again_and_chooses_the_same_tokens(place_of, tmp_path, monkeypatch):
    monkeypatch.setattr(cost_probe, "IDLE_SECONDS", 3600.0)
    given = {place_of: tmp_path / "set", **SHORT, "MAX_NUM_SEQS": 2}
    first = {"EXPORT_BLOB": True} if place_of == "BLOB_PATH" else {}
    with StaticLLMPipeline(demo_model_path(), "CPU", **given, **first) as pipe:
        expected = tokens_of(pipe)
        runner, probe = pipe.engine.runner, pipe.engine.runner.probe
        assert probe.num_left > 3
        assert not list(tmp_path.rglob(COSTS)), "written while there is nothing new"
        while not probe.is_done:
            pipe.engine.run_between_steps(lambda: probe.measure_next(lambda: False))
        (path,) = tmp_path.rglob(COSTS)
        costs, wanted = runner.costs.stable, worth_measuring(runner.programs)
    num_long = sum(variant not in costs for variant in wanted)
    with StaticLLMPipeline(demo_model_path(), "CPU", **given) as pipe:
        assert pipe.engine.runner.probe.num_left == 3 + num_long, "a sample shows whether the machine has changed"
        assert pipe.engine.runner.costs.adopted == set(costs)
        assert tokens_of(pipe) == expected
    path.write_bytes(b"damaged")
    with StaticLLMPipeline(demo_model_path(), "CPU", **given) as pipe:
        assert not pipe.engine.runner.costs.adopted
        assert pipe.engine.runner.probe.num_left == len(wanted)
        assert tokens_of(pipe) == expected


def test_nothing_is_written_without_a_cache(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written = []
    monkeypatch.setattr(MeasurementFile, "write", lambda self, measured: written.append(self.path))
    with StaticLLMPipeline(demo_model_path(), "CPU", **SHORT, MAX_NUM_SEQS=2) as pipe:
        pipe.generate(np.arange(5, 25)[None], max_new_tokens=12, ignore_eos=True)
    assert not written
    assert not list(tmp_path.iterdir())
