"""Tests names of GGUF files and of what is no model, the list and the removal of models, and the server of a name."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess

import pytest
from support.command_line import STATICLLM
from support.hub import Repository, wait_for
from support.models import gguf_files

from staticllm import ModelError, StaticLLMPipeline
from staticllm.model_dir import demo_model_path
from staticllm.model_files.converted import converted
from staticllm.model_files.hub import located
from staticllm.model_files.hub_files import is_gguf_model, quant_of
from staticllm.model_files.model_at import check_model_dir

DEMO, GGUFS = "small/demo-ov", "some/demo-GGUF"


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    return gguf_files.write(demo_model_path(), folder / "model.gguf", "demo", "Q8_0").path.read_bytes()


@pytest.fixture
def ggufs(hub, gguf_bytes):
    """A repository of several quantizations, one in parts; only two files are models here."""
    other = gguf_bytes[:-200] + bytes(7) + gguf_bytes[-193:]
    names = {
        "demo-Q8_0.gguf": gguf_bytes, "demo.q4_k_m.gguf": other, "UD/demo-UD-Q4_K_M.gguf": b"GGUF",
        "demo-F16-00001-of-00002.gguf": b"GGUF", "demo-F16-00002-of-00002.gguf": b"GGUF", "mmproj-demo-F16.gguf": b"GGUF",
    }  # fmt: skip
    hub.repositories[GGUFS] = Repository({**names, "config.json": b"{}", "README.md": b"#"}, tuple(names))
    return hub.repositories[GGUFS]


@pytest.mark.parametrize(
    ("name", "file"),
    [
        (GGUFS, "demo.q4_k_m.gguf"), (f"{GGUFS}:Q8_0", "demo-Q8_0.gguf"), (f"{GGUFS}:q8_0", "demo-Q8_0.gguf"),
        (f"hf.co/{GGUFS}:Q4_K_M", "demo.q4_k_m.gguf"), (f"{GGUFS}/UD/demo-UD-Q4_K_M.gguf", "UD/demo-UD-Q4_K_M.gguf"),
        (f"{GGUFS}:UD-Q4_K_M", "UD/demo-UD-Q4_K_M.gguf"), (f"{GGUFS}@main:Q8_0", "demo-Q8_0.gguf"),
    ],
)  # fmt: skip
def test_a_name_means_one_gguf_file(hub, ggufs, bring, name, file):
    place, said = bring(name)
    assert str(place).endswith(f"/snapshots/{ggufs.commit}/{file}")
    assert place.read_bytes() == ggufs.files[file]
    assert f": {file}, " in said[0]
    assert {each.path.partition("/cdn/some/demo-GGUF/")[2] for each in hub.of_kind("GET", "/cdn/")} == {file}
    assert located(name).path == place


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"{GGUFS}:Q2_K", f"has no quantization 'Q2_K': give one of {GGUFS}:Q8_0, {GGUFS}:Q4_K_M, {GGUFS}:UD-Q4_K_M$"),
        (
            f"{GGUFS}:F16",
            "'demo-F16-00001-of-00002.gguf' of some/demo-GGUF is one of 2 parts: choose a file that is whole",
        ),
        (f"{GGUFS}/none.gguf", f"has no file 'none.gguf': give one of {GGUFS}:"),
        (f"{DEMO}:Q8_0", "holds no GGUF model, 'Q8_0' is none of its: leave :Q8_0 out"),
    ],
)
def test_a_name_that_means_no_file_says_which_there_are(hub, demo, ggufs, bring, name, words):
    with pytest.raises(ModelError, match=words):
        bring(name)
    assert not hub.of_kind("GET", "/cdn/")


def test_without_the_default_the_choices_are_named(hub, ggufs, bring):
    del ggufs.files["demo.q4_k_m.gguf"]
    with pytest.raises(ModelError, match=f"holds several GGUF models: give one of {GGUFS}:Q8_0, {GGUFS}:UD-Q4_K_M$"):
        bring(GGUFS)
    del ggufs.files["UD/demo-UD-Q4_K_M.gguf"]
    del ggufs.files["demo-F16-00001-of-00002.gguf"]
    place, _ = bring(GGUFS)
    assert place.name == "demo-Q8_0.gguf"


QUANTS = {
    "demo-Q8_0.gguf": "Q8_0", "demo.q4_k_m.gguf": "Q4_K_M", "Q8_0/model.gguf": "Q8_0", "quants/Q8_0/model.gguf": "Q8_0",
    "demo-Q8_0/model.gguf": "Q8_0", "UD/demo-UD-Q4_K_M.gguf": "UD-Q4_K_M", "UD-Q2_K_XL/m-00001-of-00003.gguf": "UD-Q2_K_XL",
    "BF16/M-BF16-00001-of-00002.gguf": "BF16", "phi-3-mini-4k-q4.gguf": "Q4", "x-fp16.gguf": "F16", "F32/a.gguf": "F32",
    "m.i1-Q4_K_M.gguf": "Q4_K_M", "Llama-3.2-1B-Q4_0_4_4.gguf": "Q4_0_4_4", "m.f16.q6.gguf": "Q6",
    "M-Q4_K_M-imat.gguf": "Q4_K_M", "gpt-oss-20b-mxfp4.gguf": "MXFP4", "gpt-oss-MXFP4_MOE.gguf": "MXFP4_MOE",
    "ggml-model-q4_0.gguf": "Q4_0", "Q5_K_M.gguf": "Q5_K_M", "M.IQ4_XS.gguf": "IQ4_XS", "M-IQ3_XXS.gguf": "IQ3_XXS",
    "model.gguf": "", "qat-q4_0-v2.gguf": "Q4_0", "M-Q6_K_L.gguf": "Q6_K_L", "chat-v1.0.Q4_K_M.gguf": "Q4_K_M",
    "m-TQ1_0.gguf": "TQ1_0", "q2-chat-7b.gguf": "", "Q4_0/demo-Q8_0.gguf": "Q8_0", "M.Q4_K_M.imatrix.gguf": "Q4_K_M",
    "M-F16-Q8_0.gguf": "Q8_0", "M_Q8_0.gguf": "Q8_0",
}  # fmt: skip
"""Names as published repositories have them."""


@pytest.mark.parametrize("name", QUANTS)
def test_a_quantization_is_read_from_the_name_of_a_file_or_of_its_folder(name):
    assert quant_of(name) == QUANTS[name]


def test_parts_and_projectors_are_no_models():
    others = (
        "mmproj-a.gguf",
        "Qwen-mmproj-F16.gguf",
        "a.mmproj.gguf",
        "imatrix.gguf",
        "a-Q4_K_M-00002-of-00002.gguf",
        "a.bin",
    )
    assert not any(map(is_gguf_model, others))
    assert all(map(is_gguf_model, QUANTS))


@pytest.mark.parametrize("place", ["Q8_0/model.gguf", "quants/Q8_0/demo.gguf", "demo-Q8_0/demo.gguf"])
def test_a_quantization_in_the_name_of_a_folder(hub, bring, command, gguf_bytes, place):
    hub.repositories["own/folders"] = Repository(
        {place: gguf_bytes, "Q2_K/model.gguf": b"GGUF"}, (place, "Q2_K/model.gguf")
    )
    for name in ("own/folders:Q8_0", "own/folders:q8_0"):
        assert str(bring(name)[0]).endswith(place)
        assert str(located(name).path).endswith(place)
    assert "own/folders:Q8_0" in command("list").stdout
    done = command("run", "own/folders:Q8_0", "hello", "-n", 3)
    assert done.returncode == 0, done.stderr


def test_a_name_without_a_quantization_says_which_runs(hub, ggufs, bring, command):
    """The same command gives another model after a pull, so it says which."""
    bring(f"{GGUFS}:Q8_0")
    done = command("run", GGUFS, "hello", "-n", 3)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[0] == f"{GGUFS} is {GGUFS}:Q8_0 here"
    with pytest.warns(
        UserWarning, match=f"^{GGUFS} is {GGUFS}:Q8_0 here: write that name to have the same model whatever else"
    ):
        check_model_dir(GGUFS, needs_tokenizer=False)
    bring(f"{GGUFS}:Q4_K_M")
    assert located(GGUFS).note == f"{GGUFS} is {GGUFS}:Q4_K_M here"
    assert not located(GGUFS).is_guess  # no pull changes what it is
    assert not located(f"{GGUFS}:Q8_0").note


@pytest.fixture
def two_commits(demo, hub, bring, cache):
    """The demo model in the cache in two revisions, as a program without staticllm brings them: no reference names one."""
    place, _ = bring(DEMO)
    folder = cache / "models--small--demo-ov"
    shutil.rmtree(folder / "refs")
    other = folder / "snapshots" / ("a" * 40)
    shutil.copytree(place, other, symlinks=True)
    return place, other


def test_the_only_snapshot_of_a_name_is_taken_without_a_main_revision(two_commits, command, monkeypatch):
    first, second = two_commits
    shutil.rmtree(second)
    found = located(DEMO)
    assert found.directory == first
    assert found.note == f"{DEMO} is {DEMO}@{first.name} here"
    done = command("run", DEMO, "hello", "-n", 3, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[0] == found.note


def test_of_several_snapshots_without_a_main_revision_the_names_are_given(two_commits, command):
    names = ", ".join(sorted(f"{DEMO}@{place.name}" for place in two_commits))
    words = f"give one of those that the cache has, {names}, or: staticllm pull {DEMO}"
    assert words in command("run", DEMO, "hello", HF_HUB_OFFLINE="1").stderr
    with pytest.raises(ModelError, match=re.escape(words)):
        check_model_dir(DEMO)
    done = command("run", f"{DEMO}@{'a' * 40}", "hello", "-n", 3, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("end", ["\n", "\r\n", " \n"])
def test_a_reference_with_the_end_of_a_line_is_read(demo, bring, cache, end, command):
    place, _ = bring(DEMO)
    (cache / "models--small--demo-ov" / "refs" / "main").write_bytes(place.name.encode() + end.encode())
    (cache / "models--small--demo-ov" / "snapshots" / ("b" * 40)).mkdir()
    assert located(DEMO).directory == place
    assert DEMO in command("list").stdout


OTHERS = {
    "safetensors": (
        {"config.json": b"{}", "model.safetensors": b""}, "holds a Hugging Face model .model.safetensors.: export it: "
    ),
    "images": (
        {"config.json": b'{"vision_config": {}, "architectures": ["XForConditionalGeneration"]}', "model.safetensors": b""},
        "holds a Hugging Face model for images and text",
    ),
    "adapter": ({"adapter_config.json": b"{}", "adapter_model.safetensors": b""}, "holds a LoRA adapter, which changes a model"),
    "vlm": ({"openvino_language_model.xml": b"", "openvino_text_embeddings_model.xml": b""}, "holds a model for images and text"),
    "onnx": ({"onnx/model.onnx": b"", "config.json": b"{}"}, "holds an ONNX model"),
    "pickle": ({"pytorch_model.bin": b"", "config.json": b"{}", "modeling.py": b"1 / 0"}, "holds a Hugging Face model"),
    "below": ({"fp16/openvino_model.xml": b"", "fp16/openvino_model.bin": b""}, "holds its model in a subfolder .*hf download"),
    "nothing": ({"README.md": b"#", "data.csv": b""}, "holds no model of OpenVINO or GGUF"),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_a_repository_that_holds_something_else_says_what(hub, bring, cache, kind):
    files, words = OTHERS[kind]
    hub.repositories["some/thing"] = Repository(files)
    with pytest.raises(ModelError, match=f"'some/thing' {words}") as found:
        bring("some/thing")
    assert len(str(found.value).splitlines()) == 1
    assert {each.path.rpartition("/")[2] for each in hub.of_kind("GET", "/resolve/")} <= {"config.json"}
    assert not (cache / "models--some--thing").exists()


def test_run_of_a_gguf_name(ggufs, gguf_bytes, command, tmp_path):
    own = tmp_path / "own.gguf"
    own.write_bytes(gguf_bytes)
    done = command("run", f"{GGUFS}:Q8_0", "hello", "-n", 4, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["text"] == json.loads(command("run", own, "hello", "-n", 4, "--json").stdout)["text"]
    with StaticLLMPipeline(f"{GGUFS}:Q8_0", "CPU", MAX_PROMPT_LEN=64) as pipe:
        assert pipe.generate("hello", max_new_tokens=4)


def test_list_and_rm(hub, demo, ggufs, gguf_bytes, bring, command, cache, tmp_path):
    assert command("list").stdout == "no models: staticllm pull OWNER/NAME brings one\n"
    bring(DEMO)
    bring(f"{GGUFS}:Q8_0")
    bring(f"{GGUFS}:Q4_K_M")
    own = tmp_path / "own.gguf"
    own.write_bytes(gguf_bytes[:-200] + bytes(8) + gguf_bytes[-192:])  # other weights
    folders = [converted(located(f"{GGUFS}:Q8_0").path), converted(own)]
    rows = {row["name"]: row for row in json.loads(command("list", "--json").stdout)}
    assert {name: row["kind"] for name, row in rows.items()} == {
        DEMO: "openvino", f"{GGUFS}:Q8_0": "gguf", f"{GGUFS}:Q4_K_M": "gguf", str(own): "converted",
    }  # fmt: skip
    assert rows[f"{GGUFS}:Q8_0"]["converted"] == str(folders[0])
    assert rows[f"{GGUFS}:Q8_0"]["bytes"] > rows[f"{GGUFS}:Q4_K_M"]["bytes"] == len(ggufs.files["demo.q4_k_m.gguf"])
    head, *lines = command("list").stdout.splitlines()
    assert head.split() == ["name", "kind", "size", "used"]
    assert len(lines) == 4
    assert command("rm", f"{GGUFS}:Q8_0").returncode == 2
    assert folders[0].is_dir()
    done = command("rm", f"{GGUFS}:Q8_0", own, "--yes")
    assert done.returncode == 0, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        ["removed", f"{GGUFS}:Q8_0"],
        ["removed", str(own)],
    ]
    assert own.is_file()
    assert not any(folder.exists() for folder in folders)
    assert located(f"{GGUFS}:Q8_0").kind.name == "missing"
    assert located(f"{GGUFS}:Q4_K_M").is_loadable
    assert not (cache / "models--some--demo-GGUF" / "blobs" / ggufs.digest("demo-Q8_0.gguf")).exists()
    assert command("rm", DEMO, GGUFS, "--yes").returncode == 0
    assert command("list", "--json").stdout == "[]\n"
    assert not list(cache.glob("models--*/blobs/*"))


def test_rm_takes_any_file_that_a_model_was_converted_from(gguf_bytes, command, tmp_path, environment):
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    for path in (first, second):
        path.write_bytes(gguf_bytes)
        folder = converted(path)
    assert [row["name"] for row in json.loads(command("list", "--json").stdout)] == [str(first)]
    for path in (first, second, tmp_path / "here" / ".." / "b.gguf"):
        assert command("rm", path, "--yes").returncode == 0
        assert not folder.exists()
        for each in (first, tmp_path / "here" / ".." / second.name):
            assert converted(each) == folder  # it is made again
    assert [row["name"] for row in json.loads(command("list", "--json").stdout)] == [str(first)]


def test_rm_of_a_link_to_a_file_elsewhere_keeps_the_file(cache, command, gguf_bytes, tmp_path):
    """People link their own files into the cache."""
    own = [tmp_path / f"own-{quant}.gguf" for quant in ("Q4_K_M", "Q8_0", "F16")]
    for index, path in enumerate(own):
        path.write_bytes(gguf_bytes)
        folder = cache / "models--a--b" / "snapshots" / (str(index // 2) * 40)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / path.name).symlink_to(path)
    (cache / "models--a--b" / "blobs").mkdir()
    (cache / "models--a--b" / "refs").mkdir()
    (cache / "models--a--b" / "refs" / "main").write_text("0" * 40)
    for name in ("a/b:Q8_0", "a/b@" + "1" * 40):
        done = command("rm", name, "--yes")
        assert done.returncode == 0, done.stderr
    assert [path.read_bytes() for path in own] == [gguf_bytes] * 3
    assert [row["name"] for row in json.loads(command("list", "--json").stdout)] == ["a/b:Q4_K_M"]


@pytest.mark.parametrize("name", [DEMO, f"{DEMO}:Q8_0", "demo", "/etc", "../x", "a b"])
def test_rm_of_what_is_not_there(demo, command, name):
    done = command("rm", name, "--yes")
    assert done.returncode == 1
    assert done.stderr == f"Error: there is no model {name!r} to remove: staticllm list shows their names\n"


def test_doctor_says_what_helps_without_network(hub, demo, command, bring):
    done = command("doctor", DEMO, "--device", "CPU")
    assert done.returncode == 1
    assert f"no model directory at '{DEMO}'" in done.stdout
    assert f"\n      if it is a name on Hugging Face, bring it here: staticllm pull {DEMO}\n" in done.stdout
    assert hub.requests == []
    bring(DEMO)
    hub.requests.clear()
    done = command("doctor", DEMO, "--device", "CPU")
    assert "model: complete, in the cache of Hugging Face, weights" in done.stdout
    assert hub.requests == []


def test_doctor_knows_a_model_of_safetensors_in_the_cache(command, cache):
    snapshot = cache / "models--some--thing" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (cache / "models--some--thing" / "refs").mkdir()
    (cache / "models--some--thing" / "refs" / "main").write_text("a" * 40)
    (snapshot / "config.json").write_text("{}")
    assert "staticllm pull some/thing" in command("doctor", "some/thing").stdout
    (snapshot / "model.safetensors").write_text("")
    done = command("doctor", "some/thing")
    assert "'some/thing' holds a Hugging Face model (model.safetensors)" in done.stdout
    assert "--model some/thing" in done.stdout or "export some/thing" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "--json"), ("plan", "--json"), ("compile", "--export-blob", "new.blob"),
        ("bench", "--n-prompt", 16, "--n-gen", 4, "-r", 1),
    ],
)  # fmt: skip
def test_other_commands_bring_a_name_too(demo, command, cache, arguments):
    verb, *rest = arguments
    done = command(verb, DEMO, *rest, "--max-prompt-len", 64)
    assert "downloading small/demo-ov" in done.stderr
    assert done.returncode == 0, done.stderr


def test_serve_of_a_name(demo, ggufs, command, environment, tmp_path):
    httpx = pytest.importorskip("httpx")
    ready = tmp_path / "ready.json"
    arguments = [
        "serve",
        DEMO,
        f"two={GGUFS}:Q8_0",
        "--port",
        "0",
        "--ready-file",
        str(ready),
        "--max-prompt-len",
        "64",
    ]
    process = subprocess.Popen(
        [*STATICLLM, *arguments], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env={**os.environ}, text=True
    )
    try:
        wait_for(lambda: (ready.is_file() and ready.read_text()) or process.poll() is not None, 90)
        assert process.poll() is None, process.stderr.read()
        url = json.loads(ready.read_text())["url"].removesuffix("/v1")
        models = httpx.get(f"{url}/v1/models", timeout=30).json()["data"]
        assert [each["id"] for each in models] == [DEMO, "two"]
        assert httpx.get(f"{url}/v1/models/{DEMO}", timeout=30).json()["id"] == DEMO
        for name in (DEMO, "two"):
            body = {"model": name, "prompt": "hello", "max_tokens": 3}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
            assert answer.status_code == 200, answer.text
        done = command("run", "hello", "-m", f"hf.co/{DEMO}", "-n", 3, "--server", url)
        assert done.returncode == 0, done.stderr
        listed = command("list", "--server", url).stdout
        assert re.search(f"^{DEMO} +chat +loaded", listed, re.MULTILINE)
    finally:
        process.terminate()
        process.communicate(timeout=60)
