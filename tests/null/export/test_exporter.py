"""Tests exports with an interpreter in place of optimum's: what is refused, and that a target appears whole or not at all."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest
from support.export.stub_python import MODEL, NAME, has_ended, stub_python, writes

from staticllm.errors import ConfigError, ModelError
from staticllm.export import exporter
from staticllm.export.config_size import check_config_size
from staticllm.export.exporter import ExportRequest, check_request, export

CHAT = {"architectures": ["SomeForCausalLM"]}
IR = "<net>"


def folder_of(path, **files):
    path.mkdir(exist_ok=True)
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text if isinstance(text, str) else json.dumps(text))
    return path


@pytest.fixture
def source(tmp_path):
    return folder_of(tmp_path / "source", config__json=CHAT, model__safetensors="x" * 100)


def asked(tmp_path):
    return json.loads((tmp_path / "request").read_text())


def left(tmp_path):
    return {path.name for path in tmp_path.iterdir()} - {"source", NAME, "calls", "pid", "request"}


def test_a_folder_is_exported_whole_and_offline(tmp_path, source):
    steps = []
    request = ExportRequest(str(source), tmp_path / "out")
    done = export(request, stub_python(tmp_path, writes()), lambda text, detail="": steps.append(text))
    assert steps == ["working"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(MODEL)
    assert left(tmp_path) == {"out"}
    assert done.num_bytes == len(MODEL)
    assert str(done.weights) == "int4, symmetric, groups of 128"
    found = asked(tmp_path)
    assert found["task"] == "text-generation-with-past"
    assert found["offline"] == "1"
    assert found["trust_remote_code"] is False
    assert found["compression"]["sym"] is True


def test_an_empty_folder_is_taken(tmp_path, source):
    (tmp_path / "out").mkdir()
    export(ExportRequest(str(source), tmp_path / "out", "CPU"), stub_python(tmp_path, writes()))
    assert (tmp_path / "out" / "openvino_model.xml").is_file()


def test_an_encoder_keeps_16_bits_and_needs_no_detokenizer(tmp_path):
    config = {"architectures": ["SomeModel"], "vocab_size": 9}
    source = folder_of(tmp_path / "source", config__json=config, model__safetensors="")
    export(ExportRequest(str(source), tmp_path / "out"), stub_python(tmp_path, writes(MODEL[:4])))
    assert asked(tmp_path)["task"] == "feature-extraction"
    assert asked(tmp_path)["dtype"] == "fp16"


def test_a_task_may_be_given(tmp_path, source):
    request = ExportRequest(str(source), tmp_path / "out", task="text-classification")
    export(request, stub_python(tmp_path, writes()))
    assert asked(tmp_path)["task"] == "text-classification"


def test_only_trusted_code_runs_and_may_go_online(tmp_path, source, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    request = ExportRequest(str(source), tmp_path / "out", trusts_remote_code=True)
    export(request, stub_python(tmp_path, writes()))
    assert asked(tmp_path)["trust_remote_code"] is True
    assert asked(tmp_path)["offline"] is None


def test_a_name_is_resolved_by_the_tool(tmp_path, source, monkeypatch):
    monkeypatch.chdir(tmp_path)
    work = (
        f"answer({{'done': {{'folder': {str(source)!r}}}}}) if request['do'] == 'resolve' else None\n        {writes()}"
    )
    work = work.replace("pathlib.Path(request", "'target' in request and pathlib.Path(request")
    export(ExportRequest("owner/name", tmp_path / "out"), stub_python(tmp_path, work))
    assert asked(tmp_path)["folder"] == str(source)


@pytest.mark.parametrize(
    ("work", "words"),
    [
        ("answer({'error': 'no such layer\\x1b[1m'})", "cannot be exported: no such layer?[1m"),
        (
            "answer({'error': \"We couldn't connect to 'https://hub' to load the files (OSError)\"})",
            "cannot be exported: a file is missing that would be looked up on the hub",
        ),
        ("answer({'error': 'pass trust_remote_code=True'})", "add --trust-remote-code if it may run"),
        ("sys.exit(7)", "its process ended with code 7"),
        pytest.param(
            "os.kill(os.getpid(), 9)",
            "by signal 9; it may have been killed because memory was short",
            marks=pytest.mark.skipif(os.name == "nt", reason="it has no signals"),
        ),
        ("sys.stderr.write('a\\nlast words\\n'); sys.exit(1)", "last words"),
        (writes(MODEL[:2]), "optimum has not written openvino_tokenizer.xml"),
        (writes(()), "optimum has not written openvino_model.xml"),
    ],
)
def test_a_failure_is_one_line_and_leaves_nothing(work, words, tmp_path, source):
    with pytest.raises(ModelError) as error:
        export(ExportRequest(str(source), tmp_path / "out"), stub_python(tmp_path, work))
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert left(tmp_path) == set()


def test_a_name_that_is_not_here_gets_a_line_of_ours(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = "Cannot find a snapshot folder, outgoing traffic has been disabled: pass 'local_files_only=False'"
    with pytest.raises(ModelError) as error:
        export(ExportRequest("owner/name", tmp_path / "out"), stub_python(tmp_path, f"answer({{'error': {said!r}}})"))
    assert str(error.value) == (
        "'owner/name' is no folder, and cannot be had from Hugging Face (it is not in its cache, and the hub cannot be asked): "
        "check the name, the network, HF_HUB_OFFLINE and HF_TOKEN, or give a folder"
    )


REAL = {"hidden_size": 4096, "num_hidden_layers": 80, "vocab_size": 128256, "max_position_embeddings": 1 << 20}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (REAL | {"num_hidden_layers": 10**9}, "has num_hidden_layers=1000000000, at most 1024 are exported"),
        ({"n_embd": 64, "n_layer": 2000}, "has n_layer=2000, at most 1024"),
        (REAL | {"max_position_embeddings": 10**12}, "has max_position_embeddings=1000000000000, at most"),
        (
            REAL | {"hidden_size": 10**7},
            "has hidden_size=10000000, num_hidden_layers=80 and vocab_size=128256, a model of more than 8e+06",
        ),
        ({"hidden_size": 4096, "vocab_size": 10**9}, "vocab_size=1000000000, a model of more than 4.1e+03 billion"),
        ({"text_config": {"hidden_size": 10**7, "num_layers": 2}}, "has hidden_size=10000000"),
        ({"hidden_size": 64, "num_layers": 2, "intermediate_size": 10**10}, "its weights have 0.0 MB"),
    ],
)
def test_a_config_that_no_weights_can_hold_is_refused_before_the_work(config, words, tmp_path):
    source = folder_of(tmp_path / "source", config__json=CHAT | config, model__safetensors="x" * 100)
    with pytest.raises(ModelError) as error:
        export(ExportRequest(str(source), tmp_path / "out"), stub_python(tmp_path, writes()))
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert left(tmp_path) == set()
    assert not (tmp_path / "request").exists()


def test_a_config_of_the_size_of_its_weights_is_exported(tmp_path):
    check_config_size(folder_of(tmp_path / "real", config__json=CHAT | REAL), 35 << 30)
    check_config_size(folder_of(tmp_path / "other", config__json="["), 0)
    odd = {"hidden_size": "many", "num_layers": True, "vocab_size": -5, "intermediate_size": 1e300}
    check_config_size(folder_of(tmp_path / "odd", config__json=odd), 0)


def test_an_interruption_ends_the_process_and_leaves_nothing(tmp_path, source):
    def interrupt(text, detail=""):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(ExportRequest(str(source), tmp_path / "out"), stub_python(tmp_path, "time.sleep(600)"), interrupt)
    assert has_ended(int((tmp_path / "pid").read_text()))
    assert left(tmp_path) == set()


def test_a_full_disk_is_said_before_anything_is_written(tmp_path, source, monkeypatch):
    monkeypatch.setattr(exporter.shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(ConfigError, match=r"needs about .* free space, or choose a folder"):
        export(ExportRequest(str(source), tmp_path / "out"), stub_python(tmp_path, writes()))
    assert left(tmp_path) == set()


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"openvino_model__xml": IR, "openvino_model__bin": ""}, "needs no export: use it as it is, staticllm run "),
        ({"a__gguf": "GGUF"}, "needs no export"),
        (
            {"adapter_config__json": {"base_model_name_or_path": "owner/base"}, "adapter_model__safetensors": ""},
            "export the model that it was made for (owner/base), and give the adapter with adapters=",
        ),
        ({"adapter_config__json": "[1]", "adapter_model__safetensors": ""}, "export the model that it was made for, "),
        ({"config__json": {"vision_config": {}}, "model__safetensors": ""}, "VLMPipeline"),
        (
            {"config__json": {"num_mel_bins": 80}, "model__safetensors": ""},
            "--task automatic-speech-recognition-with-past",
        ),
        ({"config__json": {"architectures": ["SoundForCTC"]}, "model__safetensors": ""}, "no language model, embedder"),
        ({"model__safetensors": "version https://git-lfs"}, "lfs pull"),
        ({}, "is empty"),
    ],
)
def test_a_source_that_is_something_else_gets_what_helps(files, words, tmp_path):
    source = folder_of(tmp_path / "source", **files)
    with pytest.raises(ModelError) as error:
        check_request(ExportRequest(str(source), tmp_path / "out"))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_source_is_one_line(tmp_path):
    with pytest.raises(ModelError, match="no model directory at '/none/such/one': check the path"):
        check_request(ExportRequest("/none/such/one", tmp_path / "out"))


def test_a_target_that_cannot_be_made_is_refused(tmp_path, source, monkeypatch):
    (tmp_path / "file").write_text("")
    cases = {
        source: "is not empty", tmp_path / "file": "is no folder",
        tmp_path / "none" / "out": "does not exist: make it first",
    }  # fmt: skip
    if os.name != "nt":  # links need rights there
        (tmp_path / "link").symlink_to(source)
        cases[tmp_path / "link"] = "is no folder"
    for target, words in cases.items():
        with pytest.raises(ConfigError, match=words):
            check_request(ExportRequest(str(source), target))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ConfigError, match="in use"):
        check_request(ExportRequest(str(source), tmp_path / "here"))


def test_a_tokenizer_that_differs_is_named_and_the_model_is_written(tmp_path, source):
    line = "'in 2024' is [1], [2] in tokenizer.json\n\x1b[2J"
    work = (
        writes()
        .replace("{'done': {}}", f"{{'done': {{'tokenizer': {line!r}}}}}")
        .replace('{"done": {}}', f'{{"done": {{"tokenizer": {line!r}}}}}')
    )
    done = export(ExportRequest(str(source), tmp_path / "out"), stub_python(tmp_path, work))
    assert done.difference == "'in 2024' is [1], [2] in tokenizer.json??[2J"
    assert (tmp_path / "out" / "openvino_model.xml").is_file()


def test_a_tokenizer_that_does_not_differ_is_not_named(tmp_path, source):
    assert not export(ExportRequest(str(source), tmp_path / "out"), stub_python(tmp_path, writes())).difference
