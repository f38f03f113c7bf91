"""Tests the chat with a folder: what it finds, what it embeds again, and what it says about files that it cannot read."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import zipfile
from itertools import pairwise
from pathlib import Path

import pytest
from support.encoders.encoder_directories import a_directory, scores_directory
from support.encoders.encoder_models import ARCHIVES

from staticllm import StaticEmbeddingPipeline, StaticRerankPipeline

EXAMPLE = Path(__file__).parents[3] / "examples" / "search_folder.py"
F32 = {"INFERENCE_PRECISION_HINT": "f32"}
TEXTS = {
    "one.md": "# Weather\n\n## Rain\n\nRain is water that falls from clouds.",
    "two.txt": "The moon is not hot.",
    "deep/three.md": "A fox is an animal.\n\n# Suns\n\nThe sun is hot.",
}
PIECES = {
    "one.md": ["Weather > Rain\nRain is water that falls from clouds."],
    "two.txt": ["two.txt\nThe moon is not hot."],
    "deep/three.md": ["three.md\nA fox is an animal.", "Suns\nThe sun is hot."],
}
SECONDS = 60


@pytest.fixture(scope="module")
def example():
    for package in ("lancedb", "pypdf", "langchain_text_splitters", "openai", "fastapi"):
        if importlib.util.find_spec(package) is None:
            pytest.fail("pip install '.[examples]'") if os.environ.get("CI") else pytest.skip(f"no {package}")
    spec = importlib.util.spec_from_file_location("search_folder", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    (place / "tiny").mkdir()
    a_directory(place / "tiny")
    scores_directory(place / "scorer")
    with zipfile.ZipFile(ARCHIVES / "bert_tokenizer.zip") as archive:
        archive.extractall(place / "scorer")
    return place


@pytest.fixture(scope="module")
def served(example, models):
    from support.server.served import serving

    from staticllm.server.models.served import demo_spec, model_spec

    with serving([demo_spec(), *(model_spec(str(models / name)) for name in ("tiny", "scorer"))]) as served:
        yield served


@pytest.fixture
def folder(tmp_path):
    for name, text in TEXTS.items():
        path = tmp_path / "folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path / "folder"


@pytest.fixture
def index(example, served, folder, tmp_path):
    import openai

    index = example.FolderIndex(openai.OpenAI(base_url=served.url, api_key="any"), "tiny", folder, tmp_path / "store")
    index.embedded = []
    embed = index.embed

    def noted(texts, kind):
        index.embedded += texts if kind == "document" else []
        return embed(texts, kind)

    index.embed = noted
    return index


@pytest.fixture
def run(example, served, folder, tmp_path, monkeypatch, capsys):
    """Run the example in this process; return its exit code or message, and what it printed and said."""

    def run(*arguments, url=served.url, place=folder):
        monkeypatch.setattr(threading, "excepthook", threading.excepthook)
        command = ["search_folder.py", str(place), *arguments, "--url", url, "--store", str(tmp_path / "store")]
        monkeypatch.setattr(sys, "argv", command)
        code = None
        try:
            example.main()
        except SystemExit as end:
            code = end.code
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def ranked(models, question):
    """The files in the order of their nearest piece, by vectors that the pipeline computes."""
    with StaticEmbeddingPipeline(models / "tiny", "CPU", **F32) as pipe:
        query = pipe.encode([question], prompt=pipe.prompts.get("query", ""))[0]
        scores = {name: max(pipe.encode(texts) @ query) for name, texts in PIECES.items()}
    ordered = sorted(scores, key=scores.get, reverse=True)
    assert all(scores[first] - scores[second] > 1e-3 for first, second in pairwise(ordered)), "order is not certain"
    return ordered


def test_the_best_files_come_first(index, models):
    assert index.update() == "3 files, 3 new, changed, gone or left out"
    assert sorted(index.embedded) == sorted(text for texts in PIECES.values() for text in texts)
    for question in ("Is the moon hot?", "What is an animal?"):
        found = index.search(question, "")
        assert [each["file"] for each in found] == ranked(models, question)


def test_a_reranker_decides(index, models):
    index.update()
    question = "what is a fox?"
    pieces = [(each["file"], each["text"]) for each in index.table.search().to_list()]
    with StaticRerankPipeline(models / "scorer", "CPU", **F32) as pipe:
        scores = dict(pipe.rerank(question, [text for _, text in pieces]))
    ordered = [pieces[place][0] for place in sorted(scores, key=scores.get, reverse=True)]
    assert [each["file"] for each in index.search(question, "scorer")] == list(dict.fromkeys(ordered))


def test_only_what_changed_is_embedded_again(index, folder):
    index.update()
    index.embedded.clear()
    assert index.update() == "3 files, 0 new, changed, gone or left out"
    assert not index.embedded
    (folder / "two.txt").unlink()
    (folder / "deep" / "three.md").write_text("Foxes sleep.", encoding="utf-8")
    (folder / "it's new.txt").write_text("Owls wake.", encoding="utf-8")
    index.update()
    assert sorted(index.embedded) == ["it's new.txt\nOwls wake.", "three.md\nFoxes sleep."]
    kept = sorted((each["file"], each["text"]) for each in index.table.search().to_list())
    rain = PIECES["one.md"][0].partition("\n")[2]
    assert kept == [("deep/three.md", "Foxes sleep."), ("it's new.txt", "Owls wake."), ("one.md", rain)]


def test_it_is_searched_while_it_grows(index):
    entered = threading.Event()
    go_on = threading.Event()
    embed = index.embed

    def held(texts, kind):
        if any("Rain" in text for text in texts) and kind == "document":
            entered.set()
            assert go_on.wait(SECONDS)
        return embed(texts, kind)

    index.embed = held
    growing = threading.Thread(target=index.update)
    growing.start()
    try:
        assert entered.wait(SECONDS)
        assert [each["file"] for each in index.search("Is the sun hot?", "")] == ["deep/three.md"]
    finally:
        go_on.set()
        growing.join(SECONDS)
    assert len(index.search("Is the sun hot?", "")) == 3


def test_a_question_is_answered_with_its_sources(run):
    code, printed, said = run("Is the moon hot?")
    assert code is None
    assert said == "3 files, 3 new, changed, gone or left out\n"
    sources = [line for line in printed.splitlines() if line.startswith("[")]
    assert {line.partition("] ")[2].partition(": ")[0] for line in sources} == set(TEXTS)
    assert len(printed.splitlines()) > len(sources), "there is an answer above the sources"


def test_questions_are_asked_until_the_input_ends(run, example, monkeypatch):
    asked = ["Is the moon hot?", "What is an animal?"]
    ended = threading.Event()
    update = example.FolderIndex.update

    def updated(index):
        try:
            return update(index)
        finally:
            ended.set()

    def typed(prompt):
        assert ended.wait(SECONDS)
        if asked:
            return asked.pop(0)
        raise EOFError

    monkeypatch.setattr(example.FolderIndex, "update", updated)
    monkeypatch.setattr("builtins.input", typed)
    code, printed, _ = run()
    assert code is None
    assert not asked
    assert sum(line.startswith("[3] ") for line in printed.splitlines()) == 2


def test_an_index_that_fails_is_said_and_the_chat_goes_on(run, example, monkeypatch):
    monkeypatch.setattr(example.FolderIndex, "update", lambda index: 1 / 0)
    code, printed, said = run("Is the moon hot?")
    assert code is None
    assert said == "the index ends here: division by zero\n"
    assert printed.strip() == "Nothing is indexed: the folder has no text, or not yet."


def test_a_pdf_is_read_page_by_page(index, folder):
    content = b"BT /F1 12 Tf 72 700 Td (Owls wake at night.) Tj ET"
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 600 800]/Contents 4 0 R/Resources<</Font<</F1 5 0 R>>>>>>",
        b"<</Length %d>>stream\n%s\nendstream" % (len(content), content),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    body = b"%PDF-1.4\n"
    table = b"xref\n0 6\n0000000000 65535 f \n"
    for number, each in enumerate(objects, 1):
        table += b"%010d 00000 n \n" % len(body)
        body += b"%d 0 obj%s endobj\n" % (number, each)
    end = b"trailer<</Root 1 0 R/Size 6>>\nstartxref\n%d\n%%%%EOF" % len(body)
    (folder / "owls.pdf").write_bytes(body + table + end)
    index.update()
    assert "page 1\nOwls wake at night." in index.embedded


def huge(place):
    with (place / "huge.txt").open("wb") as file:
        file.truncate(9 << 20)


def unreadable(place):
    (place / "locked.txt").write_text("x")
    (place / "locked.txt").chmod(0)


BAD_FILES = {
    "huge": (huge, "'huge.txt' is no plain file with a printable name and at most 8388608 bytes"),
    "binary": (lambda place: (place / "image.png").write_bytes(b"\x89PNG\0\xff"), "image.png is no text or PDF"),
    "damaged PDF": (lambda place: (place / "bad.pdf").write_bytes(b"%PDF-1.4 \0\xff"), "bad.pdf is no text or PDF"),
    "link to itself": (lambda place: (place / "loop").symlink_to("loop"), "'loop' is no plain file"),
    "link to the folder": (lambda place: (place / "up").symlink_to(place), "'up' is no plain file"),
    "pipe": (lambda place: os.mkfifo(place / "pipe"), "'pipe' is no plain file"),
    "unreadable": (unreadable, "locked.txt is no text or PDF that can be read"),
}


@pytest.mark.skipif(os.name == "nt", reason="needs links and pipes of POSIX")
@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_cannot_be_read_gets_one_line(index, folder, capsys, name):
    make, expected = BAD_FILES[name]
    make(folder)
    if name == "unreadable" and os.access(folder / "locked.txt", os.R_OK):
        pytest.skip("this user may read every file")
    capsys.readouterr()
    index.update()
    said = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    assert len(said) == 1
    assert expected in said[0]
    assert {each["file"] for each in index.table.search().to_list()} == set(TEXTS)


def test_an_empty_folder_is_said(run, tmp_path):
    (tmp_path / "empty").mkdir()
    code, printed, said = run("Is there anything?", place=tmp_path / "empty")
    assert code is None
    assert printed.strip() == "Nothing is indexed: the folder has no text, or not yet."
    assert said == "0 files, 0 new, changed, gone or left out\n"


def test_a_mistake_gets_one_line(run, tmp_path):
    from support.server.served import serving

    code, _, _ = run("Why?", place=tmp_path / "none")
    assert code == f"{tmp_path / 'none'} is no folder"
    code, _, _ = run("Why?", url="http://127.0.0.1:9/v1")
    assert code == "no server answers at http://127.0.0.1:9/v1: staticllm serve CHAT_MODEL ENCODER"
    code, _, _ = run("Why?", "--chat", "nobody")
    assert "nobody" in code
    assert "\n" not in code
    with serving() as without:
        code, _, _ = run("Why?", url=without.url)
    assert code == "the server lists no embedding model: staticllm serve CHAT_MODEL ENCODER, or --embedding NAME"


def test_the_example_is_short():
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 150
