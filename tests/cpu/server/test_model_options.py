"""Tests options per model: by `-p MODEL:NAME=VALUE` and by a TOML file, for each kind of model."""

from __future__ import annotations

import shutil
from dataclasses import replace

import httpx
import numpy as np
import pytest
from click.testing import CliRunner
from support.encoders.encoder_directories import TEXTS, a_directory, a_scorer
from support.server.served import serving

from staticllm import StaticEmbeddingPipeline
from staticllm.cli.serve import command
from staticllm.errors import StaticLLMError
from staticllm.server import process
from staticllm.server.models.served import demo_spec, model_spec

openai = pytest.importorskip("openai")
F32 = {"INFERENCE_PRECISION_HINT": "f32"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return a_directory(tmp_path_factory.mktemp("embedder"))


@pytest.fixture
def run(monkeypatch):
    """A function that runs the command, and returns its result and what it would serve."""
    monkeypatch.setattr(process, "serve", lambda specs, settings, *_: taken.append((specs, settings)))
    taken = []

    def run(*arguments):
        taken.clear()
        result = CliRunner().invoke(command, list(map(str, arguments)))
        assert result.exception is None or isinstance(result.exception, StaticLLMError), result.exception
        return result, taken[0] if taken else None

    return run


def test_options_of_the_command_line_reach_their_models(directory, run):
    result, (specs, settings) = run(
        "chat=" + str(demo_spec().path), f"tiny={directory}", "-p", "chat:MAX_NUM_SEQS=3", "-p", "tiny:max_length=24",
        "-p", "INFERENCE_PRECISION_HINT=f32", "-p", "KV_CACHE_PRECISION=f32",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    with (
        serving(specs, properties=settings.properties) as served,
        openai.OpenAI(base_url=served.url + "/v1", api_key="any", max_retries=0) as client,
        StaticEmbeddingPipeline(directory, "CPU", max_length=24, **F32) as alone,
    ):
        client.chat.completions.create(model="chat", messages=[{"role": "user", "content": "Hi"}], max_tokens=2)
        found = client.embeddings.create(model="tiny", input=TEXTS)
        assert served.pipeline("chat").config.max_num_seqs == 3
        assert served.pipeline("tiny").max_length == 24
        assert max(map(len, TEXTS)) > 100, "no text is truncated"
        vectors = np.array([each.embedding for each in found.data], np.float32)
        np.testing.assert_allclose(vectors, alone.encode(TEXTS), atol=1e-6)


@pytest.mark.parametrize("named", ["tiny", "{path}"])
def test_a_model_is_named_by_its_name_or_its_path(directory, run, named):
    result, served = run(f"tiny={directory}", "-p", named.format(path=directory) + ":max_length=24")
    assert result.exit_code == 0, result.exception
    assert [spec.properties for spec in served[0]] == [{"max_length": 24}]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("tini:max_length=4", "'tini', which is not served: did you mean 'tiny'?"),
        ("tiny:max_lenght=4", "the model 'tiny': unknown property 'max_lenght': did you mean 'max_length'?"),
        ("tiny:LATENCY=4", "did you mean 'LATENCY_MS'?"),
        ("tiny:MAX_NUM_SEQS=4", "the model 'tiny': MAX_NUM_SEQS is an option of decoders"),
        ("demo:HETEROGENEOUS=yes", "the model 'demo': unknown property 'HETEROGENEOUS'"),
        ("LATENCY_M=4", "unknown property 'LATENCY_M': did you mean 'LATENCY_MS'?"),
        ("tiny:LATENCY_MS=-4", "the model 'tiny': LATENCY_MS=-4: must be a number of ms above 0"),
        ("tiny:overflow=drop", "overflow='drop': must be"),
    ],
)
def test_unknown_options_and_models_are_refused_by_name(directory, run, option, said):
    result, served = run(f"demo={demo_spec().path}", f"tiny={directory}", "-p", option)
    assert served is None
    assert said in str(result.exception)
    assert "\n" not in str(result.exception)


def test_an_option_that_no_served_model_knows_is_refused(directory, run):
    result, served = run(f"tiny={directory}", "-p", "MAX_NUM_SEQS=4")
    assert served is None
    assert "MAX_NUM_SEQS is an option of decoders" in str(result.exception)
    _, served = run(f"tiny={directory}", demo_spec().path, "-p", "MAX_NUM_SEQS=4")
    assert served is not None


def write(tmp_path, text):
    path = tmp_path / "server.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_has_models_with_their_options(directory, tmp_path, run):
    shutil.copytree(directory, tmp_path / "embedder")
    path = write(
        tmp_path,
        f'port = 9123\ndevice = "CPU"\noptions.INFERENCE_PRECISION_HINT = "f32"\n'
        f'[[models]]\nname = "chat"\npath = {str(demo_spec().path)!r}\noptions = {{ MAX_NUM_SEQS = 3 }}\n'
        '[[models]]\npath = "embedder"\ndevice = "CPU"\n[models.options]\nmax_length = 24\nLATENCY_MS = 1500.5\n',
    )
    _, (specs, settings) = run("--config", path)
    assert (settings.port, settings.device, settings.properties) == (9123, "CPU", F32)
    assert [(spec.name, spec.kind, spec.device) for spec in specs] == [
        ("chat", "chat", None),
        ("embedder", "embedding", "CPU"),
    ]
    assert specs[0].properties == {"MAX_NUM_SEQS": 3}
    assert specs[1].properties == {"max_length": 24, "LATENCY_MS": 1500.5}
    _, (specs, settings) = run("--config", path, "--port", "0", "-p", "embedder:max_length=16")
    assert settings.port == 0
    assert specs[1].properties["max_length"] == 16


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("modles = []", "unknown key 'modles': did you mean 'models'?"),
        ('[[models]]\npath = "x"\noption = {}', "unknown key models[0].'option': did you mean 'options'?"),
        ("[[models]]\nname = 'x'", "models[0].path is missing"),
        ("models = 3", "models is 3"),
        ("port = 70000", "port"),
        ("port = ", "server.toml"),
        ("a = " + "[" * 5000, "server.toml"),
        ('[[models]]\npath = "/no/such/folder"', "/no/such/folder"),
        ('[[models]]\npath = "\\u0000"', "models[0].path is"),
        ('[[models]]\npath = "' + "a" * 300 + '"', "no model directory at 'aaa"),
        ('[[models]]\npath = "x"\nname = "a=b"', "models[0].name is 'a=b'"),
        ('[[models]]\npath = "x"\nname = "a\\n"', "models[0].name is 'a\\n'"),
        ('[[models]]\npath = "x"\ndevice = ""', "models[0].device is ''"),
        ('device = ""', "device is ''"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path, run, text, said):
    result, served = run("--config", write(tmp_path, text))
    assert served is None
    assert said in str(result.exception)
    assert "\n" not in str(result.exception)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_top_n_of_a_served_reranker_counts_where_a_request_says_none(tmp_path, path):
    plain = model_spec(f"plain={a_scorer(tmp_path / 'model')}")
    specs = [plain, replace(plain, name="two", properties={"top_n": 2})]
    for common in ({}, {"top_n": 3}):
        with serving(specs, properties=common) as served:

            def ranked(model, url=served.url, **more):
                body = {"model": model, "query": "a fox", "documents": TEXTS, **more}
                return [each["index"] for each in httpx.post(url + path, json=body, timeout=60).json()["results"]]

            everything = ranked("plain", top_n=len(TEXTS))
            assert len(everything) == len(TEXTS)
            assert ranked("plain") == everything[: common.get("top_n")]
            assert ranked("two") == everything[:2]
            assert ranked("two", top_n=4) == everything[:4]
