"""Tests blob sets and the cache of encoders: the same vectors, no compilation, and one line for a set that does not fit."""

import json
import shutil
import warnings

import numpy as np
import pytest
from support.encoders.encoder_directories import TEXTS, a_directory, no_compilation, scores_directory
from support.helpers import forge

from staticllm import StaticLLMPipeline, demo_model_path
from staticllm.compiler_passes.artifacts.blob_set import MANIFEST, read_manifest
from staticllm.core import EncoderVariant
from staticllm.errors import BlobError, ConfigError
from staticllm.pipelines.embedding.encoder_job import encoder_job
from staticllm.pipelines.embedding.encoder_kind import BLOCK_ROWS, BLOCK_SIZES, EncoderChoices
from staticllm.pipelines.loading.export import export_set
from staticllm.pipelines.loading.load import load_job
from staticllm.pipelines.text_embedding_pipeline import StaticEmbeddingPipeline
from tests.support.inside import driver_of

pytestmark = pytest.mark.usefixtures("shared_lowering")

F32 = {"INFERENCE_PRECISION_HINT": "f32"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return a_directory(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def expected(directory):
    return vectors(directory)


@pytest.fixture
def blob_set(directory, tmp_path):
    target = tmp_path / "set"
    export_set(encoder_job(directory, "CPU", EncoderChoices(properties=F32)), target)
    return target


def vectors(directory, **properties):
    with StaticEmbeddingPipeline(directory, "CPU", **{**F32, **properties}) as pipe:
        return pipe.encode(TEXTS)


@pytest.mark.parametrize("mode", ["OPTIMIZE_SIZE", "OPTIMIZE_SPEED"])
@pytest.mark.parametrize("programs", ["shared", "separate"])
def test_an_exported_set_is_loaded_without_a_graph_and_computes_the_same(
    directory, expected, tmp_path, monkeypatch, mode, programs
):
    options = {"BLOB_PATH": str(tmp_path / "set"), "CACHE_MODE": mode, "PROGRAMS": programs}
    vectors(directory, EXPORT_BLOB=True, **options)
    manifest = read_manifest(tmp_path / "set")
    assert manifest.is_weightless == (mode == "OPTIMIZE_SIZE")
    assert len(manifest.blobs) == (1 if programs == "shared" else len(manifest.variants))
    no_compilation(monkeypatch)
    np.testing.assert_allclose(vectors(directory, **options), expected, atol=1e-6, rtol=0)


def test_a_set_in_blocks_computes_the_same_from_one_bank(directory, expected, tmp_path, monkeypatch):
    options = {"BLOB_PATH": str(tmp_path / "set"), "PROGRAMS": "blocks"}
    np.testing.assert_allclose(vectors(directory, EXPORT_BLOB=True, **options), expected, atol=1e-6, rtol=0)
    manifest = read_manifest(tmp_path / "set")
    assert all(variant.batch == 1 and variant.rows <= BLOCK_ROWS for variant in manifest.files_of(EncoderVariant))
    assert len({variant.rows for variant in manifest.files_of(EncoderVariant)} & {rows for _, rows in BLOCK_SIZES}) > 3
    no_compilation(monkeypatch)
    np.testing.assert_allclose(vectors(directory, **options), expected, atol=1e-6, rtol=0)


def test_a_cross_encoder_has_sets_too(tmp_path, monkeypatch):
    directory = scores_directory(tmp_path / "model")
    texts = [np.arange(5, 5 + length) for length in (3, 9, 20)]
    found = []
    for _ in range(2):
        job = encoder_job(directory, "CPU", EncoderChoices(properties={**F32, "CACHE_DIR": str(tmp_path / "cache")}))
        loaded = load_job(job)
        found.append((loaded.programs_from, scores_of(loaded.runner, texts)))
        no_compilation(monkeypatch)
    assert [origin for origin, _ in found] == ["compiled", "cache"]
    np.testing.assert_array_equal(found[0][1], found[1][1])


def scores_of(runner, texts):
    from staticllm.pipelines.embedding.packing.tokenized_text import TokenizedText

    variant = next(variant for variant in runner.variants if variant.rows >= 32)
    return runner.run(variant, [[TokenizedText(ids) for ids in texts]])


def test_what_is_left_out_is_taken_from_the_set(directory, tmp_path):
    vectors(directory, EXPORT_BLOB=True, BLOB_PATH=str(tmp_path / "set"), max_length=64)
    with StaticEmbeddingPipeline(directory, "CPU", BLOB_PATH=str(tmp_path / "set"), **F32) as pipe:
        assert pipe.encode(["a " * 300]).shape == (1, pipe.width)
    with pytest.raises(BlobError, match="max_length 32 asked, the blob has 64") as error:
        vectors(directory, BLOB_PATH=str(tmp_path / "set"), max_length=32)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"normalize": False}, "normalize False asked, the blob has True"),
        ({"INFERENCE_PRECISION_HINT": "bf16"}, "properties .*bf16.* asked, the blob has .*f32"),
        ({"PROGRAMS": "separate"}, "PROGRAMS separate asked, the blob has shared"),
    ],
)
def test_a_set_for_other_options_is_refused(directory, blob_set, other, message):
    with pytest.raises(BlobError, match=message):
        vectors(directory, BLOB_PATH=str(blob_set), **other)


def test_a_set_of_another_model_is_refused(directory, blob_set, tmp_path):
    copy = shutil.copytree(directory, tmp_path / "copy")
    weights = bytearray((copy / "openvino_model.bin").read_bytes())
    weights[100] ^= 1
    (copy / "openvino_model.bin").write_bytes(weights)
    with pytest.raises(BlobError, match="weights digest: different weights"):
        vectors(copy, BLOB_PATH=str(blob_set))


def test_sets_are_not_exchanged_between_decoders_and_encoders(directory, blob_set, tmp_path):
    with pytest.raises(BlobError, match="are of an encoder: load them with StaticEmbeddingPipeline"):
        StaticLLMPipeline(demo_model_path(), "CPU", BLOB_PATH=str(blob_set))
    short = {"MAX_PROMPT_LEN": 32, "MIN_RESPONSE_LEN": 8, "PROGRAMS": "shared", "BLOB_PATH": str(tmp_path / "llm")}
    StaticLLMPipeline(demo_model_path(), "CPU", EXPORT_BLOB=True, **short).close()
    with pytest.raises(BlobError, match="are of a decoder: load them with StaticLLMPipeline"):
        vectors(directory, BLOB_PATH=str(tmp_path / "llm"))


def test_a_blob_set_in_place_of_a_model_gets_a_remedy(blob_set):
    with pytest.raises(ConfigError, match="is a blob set: give the directory of its model, and the set with BLOB_PATH"):
        StaticEmbeddingPipeline(blob_set)


def test_a_damaged_blob_is_refused_and_in_a_cache_compiled_again(directory, expected, blob_set, tmp_path):
    flip(next(blob_set.glob("*.blob")))
    with pytest.raises(BlobError, match="is damaged: its contents do not match its digest"):
        vectors(directory, BLOB_PATH=str(blob_set))
    cache = {"CACHE_DIR": str(tmp_path / "cache")}
    np.testing.assert_allclose(vectors(directory, **cache), expected, atol=1e-6, rtol=0)
    flip(next((tmp_path / "cache").glob("*/*.blob")))
    with pytest.warns(RuntimeWarning, match=r"compiled again: .* is damaged"):
        np.testing.assert_allclose(vectors(directory, **cache), expected, atol=1e-6, rtol=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vectors(directory, **cache)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["variants"][0].update(rows=1 << 20),
        lambda content: content["shape"].update(width=7),
        lambda content: content["shape"].update(masks=[{"before": None, "after": 0}]),
        lambda content: content["config"].update(longest=1 << 20),
        lambda content: content["config"].update(longest=0),
        lambda content: content["shape"].update(pooling="sum"),
        lambda content: content.update(kv_type="f32"),
        lambda content: content["variants"][0].pop("batch"),
        lambda content: content["fingerprint"].update({"kind of model": "decoder"}),
        lambda content: content["fingerprint"].update({"kind of model": "speech"}),  # it has parts, each with a set
        lambda content: content.update(properties={"prefill": {}}),
    ],
)
def test_a_forged_manifest_is_refused_in_one_line(directory, blob_set, change):
    forge(blob_set, change)
    with pytest.raises(BlobError) as error:
        vectors(directory, BLOB_PATH=str(blob_set))
    assert "\n" not in str(error.value)


def test_costs_are_kept_beside_the_set_and_not_measured_again(directory, tmp_path, monkeypatch):
    cache = {"CACHE_DIR": str(tmp_path / "cache"), **F32}
    StaticEmbeddingPipeline(directory, "CPU", **cache).close()
    (kept,) = (tmp_path / "cache").glob("*/costs.json")
    stored = json.loads(kept.read_text())["content"]["measured"]["costs"]
    with StaticEmbeddingPipeline(directory, "CPU", **cache) as pipe:
        found = driver_of(pipe).runner.costs.measured
    assert {(each["batch"], each["rows"]): each["seconds"] for each in stored} == {
        (variant.batch, variant.rows): seconds for variant, seconds in found.items()
    }
    assert (kept.parent / MANIFEST).exists()


def test_loading_reports_its_parts(directory, tmp_path):
    stages = []

    def load():
        cache = {"CACHE_DIR": str(tmp_path / "cache"), **F32}
        StaticEmbeddingPipeline(directory, "CPU", on_progress=lambda event: stages.append(event.stage), **cache).close()

    load()
    assert list(dict.fromkeys(stages)) == ["read", "passes", "compile", "export", "warm-up", "ready"]
    stages.clear()
    load()
    assert list(dict.fromkeys(stages)) == ["import", "warm-up", "ready"]
