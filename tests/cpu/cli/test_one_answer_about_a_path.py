"""Tests that every verb and class says the same of a path that is no model, and that doctor loads what it calls complete."""

import re
import shutil
import zipfile
from html import escape

import pytest
from support import command_line
from support.encoders.encoder_directories import scores_directory
from support.encoders.encoder_models import ARCHIVES

from staticllm import (
    AdapterError,
    ModelError,
    StaticEmbeddingPipeline,
    StaticLLMPipeline,
    StaticRerankPipeline,
    draft_model,
)
from staticllm.adapters.lora import read_adapter
from staticllm.errors import quoted
from staticllm.model_paths.path_kind import path_kind
from staticllm.pipelines.diagnostics.doctor import check_model
from staticllm.pipelines.embedding.text_tokenizer import TextTokenizer

VERBS = {
    "run": ["run", "MODEL", "hi"],
    "run -m": ["run", "hi", "-m", "MODEL"],
    "serve": ["serve", "MODEL"],
    "compile": ["compile", "MODEL", "--export-blob", "never"],
    "inspect": ["inspect", "MODEL"],
    "verify": ["verify", "MODEL"],
    "plan": ["plan", "MODEL"],
    "bench": ["bench", "MODEL"],
    "embed": ["embed", "MODEL", "text"],
    "rerank": ["rerank", "MODEL", "text", "--query", "q"],
    "trace": ["trace", "record", "-o", "never.json", "-m", "MODEL"],
}
FOLDERS = {
    "several gguf": {"chat.gguf": "GGUF", "other.gguf": "GGUF"},
    "hugging face": {"config.json": "{}", "model.safetensors": ""},
    "images": {"openvino_language_model.xml": "<net>"},
    "empty": {},
}


def folder_of(kind, tmp_path):
    folder = tmp_path / "held"
    folder.mkdir()
    for name, text in FOLDERS[kind].items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(params=FOLDERS)
def held(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return folder_of(request.param, tmp_path)


def check_verb(verb, held, run):
    done = run(*(str(held) if word == "MODEL" else word for word in VERBS[verb]))
    assert done.stderr == f"Error: {path_kind(held).problem}\n"
    assert done.returncode == 1


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_gives_the_one_answer(verb, held):
    check_verb(verb, held, command_line.in_here)


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_a_process_of_its_own_gives_it_too(verb, tmp_path, monkeypatch):
    """Each verb with one of the folders, and each folder with several verbs: a process takes seconds to start."""
    monkeypatch.chdir(tmp_path)
    kind = list(FOLDERS)[list(VERBS).index(verb) % len(FOLDERS)]
    check_verb(verb, folder_of(kind, tmp_path), command_line.in_child)


def test_doctor_gives_the_same_answer(held, staticllm):
    done = staticllm("doctor", held, "--device", "CPU")
    found = path_kind(held)
    assert f"FAIL  model: {found.what}\n      {found.remedy}\n" in done.stdout
    assert done.returncode == 1


@pytest.mark.parametrize("make", [StaticLLMPipeline, StaticEmbeddingPipeline, StaticRerankPipeline])
def test_every_class_gives_the_one_answer(make, held):
    with pytest.raises(ModelError) as error:
        make(held, "CPU")
    assert str(error.value) == path_kind(held).problem


def test_a_draft_model_gives_it_too(held, zoo):
    with pytest.raises(ModelError) as error:
        StaticLLMPipeline(zoo / "llama", "CPU", draft_model=draft_model(held), MAX_PROMPT_LEN=64)
    assert str(error.value) == path_kind(held).problem


def test_an_adapter_gives_it_too(held):
    with pytest.raises(AdapterError) as error:
        read_adapter(held)
    assert path_kind(held).what in str(error.value)


def test_an_adapter_that_is_a_pickle_is_saved_as_safetensors(tmp_path):
    for name in ("adapter_config.json", "adapter_model.bin"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(AdapterError, match=r"adapter_model\.bin: save it as safetensors"):
        read_adapter(tmp_path)


def test_the_graph_stands_for_its_folder(zoo):
    with StaticLLMPipeline(zoo / "llama" / "openvino_model.xml", "CPU", MAX_PROMPT_LEN=64) as pipe:
        assert pipe.generate("hello", max_new_tokens=2)


@command_line.IN_BOTH
def test_doctor_runs_a_model_that_it_calls_complete(zoo, staticllm):
    done = staticllm("doctor", zoo / "llama", "--device", "CPU")
    assert done.returncode == 0
    (line,) = [line for line in done.stdout.splitlines() if " model: " in line]
    assert line.startswith("ok    model: complete")
    assert "loaded and run on CPU" in line
    assert line.endswith("with its chat template")


@pytest.fixture
def with_template(zoo, tmp_path):
    """Return a function that copies a model and gives the copy another chat template."""

    def copied(template):
        model = shutil.copytree(zoo / "llama", tmp_path / "model")
        xml = model / "openvino_tokenizer.xml"
        text = re.sub(r"<chat_template value=\"[^\"]*\"", f'<chat_template value="{escape(template)}"', xml.read_text())
        xml.write_text(text)
        return model

    return copied


@pytest.mark.parametrize(
    ("template", "level", "words"),
    [
        ("{{ messages[0].content.nothing() }}", "fail", "the chat template fails in line 1"),
        ("{{ 'word ' * 500 }}", "ok", "with its chat template"),
        ("", "ok", "without a chat template"),
    ],
)
def test_doctor_runs_a_turn_through_the_chat_template(template, level, words, with_template):
    found = check_model(str(with_template(template)), "CPU", None, lambda event: None)
    assert found.level == level
    assert words in found.value
    assert ("correct the chat template" in found.remedy) is (level == "fail")


def test_doctor_runs_a_reranker_with_pairs(tmp_path, monkeypatch):
    calls = []
    encode = TextTokenizer.encode_pairs
    monkeypatch.setattr(TextTokenizer, "encode_pairs", lambda *given: (calls.append(given[1:]), encode(*given))[1])
    folder = scores_directory(tmp_path / "model")
    with zipfile.ZipFile(ARCHIVES / "bert_tokenizer.zip") as archive:
        archive.extractall(folder)
    found = check_model(str(folder), "CPU", None, lambda event: None)
    assert found.level == "ok"
    assert found.value.endswith("with a query and two texts")
    ((query, texts),) = calls
    assert query not in texts
    assert len(texts) == 2
    monkeypatch.setattr("openvino_genai.Tokenizer.supports_paired_input", lambda tokenizer: False)
    found = check_model(str(folder), "CPU", None, lambda event: None)
    assert found.level == "warn"
    assert "its tokenizer encodes no pairs" in found.value
    assert found.remedy


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_damaged_gguf_file_gets_one_line_from_every_verb(is_folder, tmp_path, monkeypatch, staticllm):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "held" / "chat.gguf"
    path.parent.mkdir()
    path.write_bytes(b"GGUF\3\0\0\0" + b"\xff" * 16)
    for words in VERBS.values():
        done = staticllm(*(str(path.parent if is_folder else path) if word == "MODEL" else word for word in words))
        assert done.stderr.startswith(f"Error: {quoted(path)} is damaged (the number of tensors is ")
        assert done.stderr.count("\n") == 1
        assert done.returncode == 1
    with pytest.raises(ModelError, match="is damaged"):
        StaticLLMPipeline(path, "CPU")


def test_doctor_calls_nothing_complete_that_no_verb_loads(zoo, tmp_path, staticllm):
    """Every file is there and whole, but the graph cannot be lowered."""
    model = shutil.copytree(zoo / "llama", tmp_path / "model")
    xml = (model / "openvino_model.xml").read_text()
    assert 'type="Range"' in xml
    (model / "openvino_model.xml").write_text(xml.replace('type="Range"', 'type="Rang"'))
    done = staticllm("doctor", model, "--device", "CPU")
    assert "FAIL  model: " in done.stdout
    assert done.returncode == 1
    run = staticllm("run", model, "hi")
    assert run.returncode == 1
    assert run.stderr.removeprefix("Error: ").strip() in done.stdout
