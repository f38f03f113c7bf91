"""Tests the commands with model directories of encoders: inspect, verify, plan, compile, cache, and those of decoders."""

import json

import numpy as np
import openvino as ov
import pytest
from click.testing import CliRunner
from openvino import opset13 as ops
from support.encoders.encoder_directories import a_directory, scores_directory
from support.encoders.encoder_models import TinyEncoder

from staticllm import StaticLLMPipeline, demo_model_path
from staticllm.cli import cli
from staticllm.errors import ConfigError, DeviceError, ModelError
from staticllm.pipelines.diagnostics.reference import EncoderReference
from staticllm.pipelines.text_embedding_pipeline import StaticEmbeddingPipeline


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return str(a_directory(tmp_path_factory.mktemp("encoder")))


@pytest.fixture(scope="module")
def scores(tmp_path_factory):
    return str(scores_directory(tmp_path_factory.mktemp("scores") / "model"))


def run(*arguments, code=0):
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout


def refused(*arguments):
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exit_code not in (0, None)
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    return line


def test_inspect_describes_an_encoder(encoder):
    text = run("inspect", encoder)
    assert "encoder: embeddings, 32 numbers per text" in text
    assert "pooling   mean (from the model's files), normalised" in text
    assert "texts     up to 128 tokens" in text
    assert "packable  yes" in text
    report = json.loads(run("inspect", encoder, "--json"))
    assert report["kind"] == "encoder"
    assert [entry["name"] for entry in report["passes"][-2:]] == ["add_pooling", "expose_past"]
    assert all(entry["nodes_after"] for entry in report["passes"])
    assert report["masks"] == ["full"]
    assert report["unsafe_rows"] == [4]


def test_inspect_describes_a_cross_encoder_and_one_that_cannot_be_packed(scores, tmp_path):
    report = json.loads(run("inspect", scores, "--json"))
    assert report["output"] == "scores"
    assert report["pooling"] is None
    mixed = TinyEncoder(on_hidden=with_sum_so_far).model()
    ov.save_model(mixed, tmp_path / "openvino_model.xml", compress_to_fp16=False)
    text = run("inspect", tmp_path)
    assert "packable  no, one text per sequence: " in text
    assert "pooling   first (from the default)" in text
    verdicts = json.loads(run("verify", tmp_path, "--programs", "shared", "--json"))["checks"]
    assert [_texts(verdict["detail"]) for verdict in verdicts[1:]] == [(8, 4), (8, 4)]  # one text per sequence


def with_sum_so_far(hidden, rows):
    """Add a share of the sum of all vectors before, which includes those of other texts in the sequence."""
    return ops.add(hidden, ops.multiply(ops.cum_sum(hidden, ops.constant(1)), ops.constant(np.float32(0.01))))


@pytest.mark.parametrize("kind", ["encoder", "scores"])
def test_verify_compares_alone_packed_and_the_original(kind, encoder, scores):
    found = json.loads(run("verify", encoder if kind == "encoder" else scores, "--json"))
    assert found["ok"]
    assert [check["check"].split(": ")[1] for check in found["checks"][:3]] == [
        "alone, against the original",
        "packed, against the original",
        "packed, against alone",
    ]
    assert all(check["value"] < 1e-5 for check in found["checks"])
    packed = found["checks"][1]["detail"]
    num_texts, num_calls = _texts(packed)
    assert num_texts > 2 * num_calls


def _texts(detail):
    words = detail.split()
    return int(words[words.index("texts") - 1]), int(words[words.index("calls") - 1])


@pytest.mark.parametrize(("longest", "compared"), [(64, "of 1 to 60 tokens"), (1100, "of 1 to 1025 tokens")])
def test_a_decoder_whose_files_say_how_to_embed_runs_as_an_encoder(longest, compared, tmp_path):
    directory = scores_directory(tmp_path / "model", "qwen3_with_past")
    (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": longest}))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    assert "pooling   last (from the model's files), normalised" in run("inspect", directory)
    found = json.loads(run("verify", directory, "--programs", "shared", "--json"))
    assert found["ok"]
    assert len(found["checks"]) == 3
    assert compared in found["checks"][0]["detail"], "long texts run in chunks"
    assert ("512+1024" in run("inspect", directory)) == (longest > 512)


def test_verify_exits_with_1_if_texts_see_each_other(encoder, monkeypatch):
    from staticllm.pipelines.embedding.packing import encoder_buffers

    monkeypatch.setattr(encoder_buffers, "HIDDEN", 0.0)
    text = run("verify", encoder, "--programs", "shared", code=1)
    assert "FAIL shared: packed, against the original" in text
    assert "NOT the same as the original" in text


def test_verify_finds_vectors_that_are_not_the_originals(encoder, monkeypatch):
    pooled = EncoderReference.vector
    monkeypatch.setattr(EncoderReference, "vector", lambda self, states: pooled(self, states[::-1] * 1.01 + 1))
    assert "FAIL shared: alone, against the original" in run("verify", encoder, "--programs", "shared", code=1)


def test_plan_estimates_memory_and_reads_seconds_from_a_cache(encoder, tmp_path):
    estimate = json.loads(run("plan", encoder, "--json"))
    assert set(estimate["bytes"]) == {"weights", "programs", "buffers"}
    assert estimate["fits"] is True
    assert estimate["seconds_source"] == "unknown"
    cache = str(tmp_path / "cache")
    StaticEmbeddingPipeline(encoder, "CPU", CACHE_DIR=cache).close()
    known = json.loads(run("plan", encoder, "--json", "-p", f"CACHE_DIR={cache}"))
    assert known["seconds_source"] == "kept in the cache"
    measured = [variant for variant in known["variants"] if variant["seconds"] is not None]
    assert all(variant["seconds"] > 0 for variant in measured)
    assert 1 < len(measured) < len(known["variants"]), "sizes that share a program run as their rows double"
    assert "tokens/s" in run("plan", encoder, "--measured")
    npu = json.loads(run("plan", encoder, "--json", "--device", "NPU"))
    assert npu["num_programs"] == len(npu["variants"])


def test_compile_writes_a_verified_set_that_the_pipeline_loads(encoder, tmp_path):
    target = tmp_path / "set"
    text = run("compile", encoder, "--export-blob", target, "--verify", "--precision", "f32", "-p", "max_length=64")
    assert "verified: " in text
    assert "cosine 1.0000" in text
    with StaticEmbeddingPipeline(encoder, BLOB_PATH=str(target), INFERENCE_PRECISION_HINT="f32") as pipe:
        assert pipe.encode(["a fox"]).shape == (1, 32)
    assert "exists already" in refused("compile", encoder, "--export-blob", target)


def test_a_set_that_fails_verification_is_never_loaded(encoder, tmp_path, monkeypatch):
    monkeypatch.setattr(EncoderReference, "vector", lambda self, states: np.ones(32, np.float32) + states[0])
    text = run("compile", encoder, "--export-blob", tmp_path / "set", "--verify", code=1)
    assert "FAILED verification, never loaded" in text
    monkeypatch.undo()
    with pytest.raises(Exception, match="failed verification"):
        StaticEmbeddingPipeline(encoder, BLOB_PATH=str(tmp_path / "set"))


def test_a_cache_lists_sets_of_both_kinds(encoder, tmp_path):
    cache = str(tmp_path / "cache")
    StaticEmbeddingPipeline(encoder, "CPU", CACHE_DIR=cache).close()
    assert "texts of 128, 1 blobs" in run("cache", "ls", cache)
    assert json.loads(run("cache", "ls", cache, "--json"))[0]["kind"] == "encoder"
    assert "1 of 1 sets are ok" in run("cache", "verify", cache)
    key = json.loads(run("cache", "ls", cache, "--json"))[0]["key"]
    run("cache", "export", cache, key, tmp_path / "copy")
    StaticEmbeddingPipeline(encoder, "CPU", BLOB_PATH=str(tmp_path / "copy")).close()


def test_commands_of_decoders_name_the_remedy(encoder):
    line = refused("run", "-m", encoder, "hello")
    assert "is not a causal language model but a text embedding model" in line
    assert "use StaticEmbeddingPipeline or `staticllm embed`" in line
    with pytest.raises(ModelError, match="use StaticEmbeddingPipeline"):
        StaticLLMPipeline(encoder, "CPU")


def test_options_of_decoders_are_refused_for_encoders(encoder, scores):
    assert "MAX_PROMPT_LEN is an option of decoders" in refused("inspect", encoder, "--max-prompt-len", 30)
    assert "max_length=1000: the model was made for texts" in refused("inspect", scores, "-p", "max_length=1000")
    assert "max_length=0: must be a whole number" in refused("plan", encoder, "-p", "max_length=0")
    assert "unknown property 'CACHE_DIRR': did you mean 'CACHE_DIR'?" in refused(
        "inspect", encoder, "-p", "CACHE_DIRR=x"
    )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device": "TPU"}, DeviceError, "device 'TPU' is not on this machine; there are: "),
        ({"NO_SUCH": 1}, ConfigError, "unknown property 'NO_SUCH'"),
        ({"KV_SLOTS": 8}, ConfigError, "KV_SLOTS is an option of decoders, this model is an encoder"),
        ({"PROGRAMS": "phases"}, ConfigError, "PROGRAMS='phases': an encoder has 'separate', 'blocks' or 'shared'"),
        ({"BLOB_PATH": "nowhere"}, Exception, "no blob set at 'nowhere'"),
    ],
)
def test_wrong_options_of_the_pipeline_get_one_line(encoder, options, error, message):
    with pytest.raises(error, match=message) as caught:
        StaticEmbeddingPipeline(encoder, **options)
    assert "\n" not in str(caught.value)


def test_a_model_of_another_kind_or_half_a_model_gets_one_line(scores, tmp_path):
    with pytest.raises(ModelError, match=r"is not an encoder but a causal language model .* use StaticLLMPipeline"):
        StaticEmbeddingPipeline(demo_model_path())
    with pytest.raises(ModelError, match=r"openvino_tokenizer\.xml is missing"):
        StaticEmbeddingPipeline(scores)
    directory = a_directory(_made(tmp_path / "half"))
    (directory / "openvino_model.bin").write_bytes(b"x" * 100)
    with pytest.raises(ModelError, match=r"has 100 bytes, openvino_model\.xml needs"):
        StaticEmbeddingPipeline(directory)
    directory = a_directory(_made(tmp_path / "pooling"))
    (directory / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(ModelError, match="pooling_mode_max_tokens: must be one of cls, mean, lasttoken"):
        StaticEmbeddingPipeline(directory)


def test_a_cross_encoder_is_no_embedding_model(tmp_path):
    from support.encoders.encoder_directories import add_tokenizer

    directory = scores_directory(tmp_path / "scores")
    add_tokenizer(directory)
    with pytest.raises(ModelError, match=r"is a cross-encoder .* use StaticRerankPipeline"):
        StaticEmbeddingPipeline(directory)


def _made(folder):
    folder.mkdir()
    return folder
