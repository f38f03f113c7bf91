"""Tests that an argument that is a path, or looks like one, is a model, for every command that takes a model or text."""

import shutil

import pytest
from support.command_line import IN_BOTH, in_here

from staticllm import demo_model_path
from staticllm.cli.model_arguments import ModelAndPrompt, model_and_prompt, served_name
from staticllm.cli.run import command as run_command


@pytest.fixture
def chat(zoo, tmp_path, monkeypatch):
    """Return the folder of a model, ``my_model`` in the current folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(zoo / "llama", tmp_path / "my_model")
    shutil.copytree(tmp_path / "my_model", tmp_path / "with blanks")
    return tmp_path / "my_model"


@pytest.mark.usefixtures("chat")
@pytest.mark.parametrize(
    ("arguments", "named", "model", "prompt"),
    [
        ((), None, None, None),
        (("hello",), None, None, "hello"),
        (("what is and/or?",), None, None, "what is and/or?"),
        (("my_model",), None, "my_model", None),
        (("with blanks",), None, "with blanks", None),
        (("./none",), None, "./none", None),
        (("my_model", "hi"), None, "my_model", "hi"),
        (("my_model", "./path"), None, "my_model", "./path"),
        (("none", "hi"), None, "none", "hi"),
        (("my_model",), "other", "other", "my_model"),
        ((), "other", "other", None),
    ],
)
def test_arguments_are_a_model_and_a_prompt(arguments, named, model, prompt):
    found = model_and_prompt(arguments, named)
    assert (found.model, found.prompt) == (model, prompt)
    assert isinstance(found, ModelAndPrompt)


NAMES = """
    llama3.2 llama3.2:1b qwen2.5 qwen2.5-coder phi3 gemma2 gemma3:270m mistral:latest qwen3-coder deepseek-r1 deepseek-r1:7b
    mistral-7b mistral-7b-instruct tinyllama-1.1b Llama-3.2-1B-Instruct-Q4_K_M gpt-oss-20b gpt-oss:20b smollm2-135m phi4-mini
    SmolLM2-135M-Instruct-GGUF qwen3 model.Q8_0 mixtral-8x7b gpt-oss-20b-mxfp4
"""
WORDS = """
    hello Hello! why? covid-19 12:30 3.14 24/7 h2o mp3 Hi don't 2+2 ok Apollo-11 e.g. U.S. well-known R2D2 C3PO Hello: 1,000 v2
    http://a.b:80 state-of-the-art 1b x
"""


def test_a_word_that_looks_like_the_name_of_a_model_is_no_prompt():
    for word in NAMES.split():
        done = in_here("run", word)
        assert done.returncode == 2, word
        assert f"Error: {word!r} looks like the name of a model" in done.stderr
        assert "OWNER/NAME" in done.stderr
        assert model_and_prompt((word,), "other").prompt == word
        assert model_and_prompt((word, "hi"), None).model == word
    for word in WORDS.split():
        assert model_and_prompt((word,), None).prompt == word


def test_the_demo_model_says_that_it_answers(chat):
    done = in_here("run", "hello", "-n", 4)
    assert done.returncode == 0
    assert done.stderr.startswith(
        "the embedded demo model answers, which knows little: staticllm run MODEL [PROMPT] asks "
    )
    assert "demo" not in in_here("run", chat, "hello", "-n", 4).stderr


@pytest.mark.usefixtures("chat")
@pytest.mark.parametrize(
    "arguments", [["my_model", "hello"], ["-m", "my_model", "hello"], ["my_model/openvino_model.xml", "hello"]]
)
def test_run_takes_the_model_first_or_by_name(arguments, staticllm):
    done = staticllm("run", *arguments, "-n", 4, "--json")
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout == staticllm("run", "-m", "my_model", "hello", "-n", 4, "--json").stdout or '"text"' in done.stdout
    )


@IN_BOTH
@pytest.mark.usefixtures("chat")
def test_run_of_a_model_alone_reads_the_prompt_from_stdin(staticllm):
    piped = staticllm("run", "my_model", "-n", 4, stdin="hello")
    assert piped.returncode == 0, piped.stderr
    assert piped.stdout == staticllm("run", "my_model", "hello", "-n", 4).stdout


def test_a_model_that_exists_is_not_a_prompt_of_the_demo_model(chat, monkeypatch):
    loaded = []
    monkeypatch.setattr("staticllm.cli.run._load", lambda model, options: (loaded.append(model), 1 / 0))
    for arguments in (["my_model"], ["what is and/or?"]):
        with pytest.raises(ZeroDivisionError):
            in_here("run", *arguments, stdin="hi")
    assert loaded == ["my_model", str(demo_model_path())]
    assert chat.is_dir()


@pytest.mark.usefixtures("chat")
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["run", "./none"], 1, "no model directory at './none': check the path; if it is a prompt, pipe it"),
        (["run", "none/model"], 1, "staticllm pull none/model"),
        (["run", "chat.gguf", "hi"], 1, "there is no file 'chat.gguf': check the path"),
        (
            ["run", "tell", "me"],
            1,
            "no model directory at 'tell': check the path, or put a prompt of several words in quotes",
        ),
        (
            ["run", "tell", "me", "more"],
            2,
            "3 arguments, at most a MODEL and a PROMPT: put a prompt of several words in quotes",
        ),
        (["run", "-m", "my_model", "tell", "me"], 2, "put a prompt of several words in quotes"),
        (["run", "-m", "my_model", "my_model", "hi"], 2, "the model is given twice"),
        (["run", "my_model"], 1, "standard input is empty, and there is no PROMPT"),
        (["embed", "a text"], 1, "no model directory at 'a text': check the path; the model comes before the texts"),
        (["embed", "./none", "a text"], 1, "no model directory at './none': check the path\n"),
        (["embed", "my_model", "my_model/config.json"], 2, "is a file: give its lines with --file"),
        (["embed", "-m", "my_model", "my_model", "text"], 2, "the model is given twice"),
        (["rerank", "my_model", "my_model", "--query", "q"], 2, "the model is given twice"),
        (["serve", "chat=./none"], 1, "no model directory at './none': check the path"),
    ],
)
def test_mistakes_in_arguments_get_one_line(arguments, code, words, staticllm):
    done = staticllm(*arguments)
    assert words in done.stderr
    assert done.returncode == code


@pytest.mark.usefixtures("chat")
@pytest.mark.parametrize(
    ("given", "name"), [("my_model", "my_model"), ("./my_model", "my_model"), ("demo", "demo"), (None, None)]
)
def test_a_server_gets_the_name_of_a_folder(given, name):
    assert served_name(given) == name


def test_run_there_takes_the_model_as_an_argument(monkeypatch):
    asked = []
    monkeypatch.setattr("staticllm.cli.run.ServerBackend", lambda client, model, options: asked.append(model))
    monkeypatch.setattr("staticllm.cli.run._respond", lambda backend, prompt, options: asked.append(prompt))
    for arguments in (["demo", "hi"], ["-m", "demo", "hi"], ["hi"], ["owner/name"]):
        assert in_here("run", "--server", "http://127.0.0.1:1", *arguments, stdin="piped").returncode == 0
    assert asked == ["demo", "hi", "demo", "hi", None, "hi", "owner/name", "piped"]
    assert run_command.name == "run"
