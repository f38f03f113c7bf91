"""Tests that a model is brought from a hub by its name: what is taken, how it goes on, and that every failure is one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from support.command_line import STATICLLM
from support.hub import COMMIT, git_digest, wait_for

from staticllm import ModelError, StaticEmbeddingPipeline, StaticLLMPipeline, StaticRerankPipeline
from staticllm.model_dir import demo_model_path
from staticllm.model_files import hub_downloads
from staticllm.model_files.model_at import check_model_dir

NAME = "small/demo-ov"
NEEDED = {path.name for path in demo_model_path().iterdir() if path.suffix in (".xml", ".bin", ".json", ".jinja")}
UNWANTED = {"pytorch_model.bin", "model.safetensors", "model.onnx", "modeling.py", ".gitattributes"}


def snapshot_of(cache, name=NAME, commit=COMMIT):
    return cache / f"models--{name.replace('/', '--')}" / "snapshots" / commit


def answer_of(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["text"]


def test_run_of_a_name_answers_as_the_folder_does_and_brings_it_once(hub, demo, cache, command):
    expected = answer_of(command("run", demo_model_path(), "hello", "-n", 6, "--json"))
    first = command("run", NAME, "hello", "-n", 6, "--json")
    assert answer_of(first) == expected
    size = sum(len(demo.files[name]) for name in NEEDED)
    assert first.stderr.splitlines()[0] == (
        f"downloading {NAME} (commit c0ffee0): {len(NEEDED)} files, {size / 1e6:.1f} MB, from {hub.url}"
    )
    snapshot = snapshot_of(cache)
    assert {path.name for path in snapshot.iterdir()} == NEEDED
    assert all((snapshot / name).read_bytes() == demo.files[name] for name in NEEDED)
    assert not any(name in each.path for name in UNWANTED for each in hub.requests)
    hub.requests.clear()
    again = command("run", "hf.co/" + NAME, "hello", "-n", 6, "--json")
    assert answer_of(again) == expected
    assert again.stderr == ""
    assert hub.requests == []


def test_what_is_pulled_is_what_the_package_of_the_hub_finds(demo, cache, bring):
    from huggingface_hub import hf_hub_download, scan_cache_dir, try_to_load_from_cache

    place, _ = bring(NAME)
    for name in NEEDED:
        assert try_to_load_from_cache(NAME, name, cache_dir=cache) == str(place / name)
        assert hf_hub_download(NAME, name, cache_dir=cache, local_files_only=True) == str(place / name)
    found = scan_cache_dir(cache)
    (repo,) = found.repos
    assert not found.warnings
    assert repo.repo_id == NAME
    assert repo.size_on_disk == sum(len(demo.files[name]) for name in NEEDED)
    assert set(repo.refs) == {"main"}


def test_a_path_that_exists_comes_before_a_name(hub, demo, command, zoo):
    for owner in ("small", "other"):
        Path(owner).mkdir()
    Path(NAME).symlink_to(zoo / "llama")
    assert command("run", NAME, "hello", "-n", 2, "--json").returncode == 0
    missing = command("run", "other/demo-ov", "hello")
    assert missing.stderr == "Error: no model directory at 'other/demo-ov': check the path\n"
    assert hub.requests == []


def test_the_classes_use_what_is_here_and_download_nothing(hub, demo, bring, zoo):
    for make in (StaticLLMPipeline, StaticEmbeddingPipeline, StaticRerankPipeline):
        with pytest.raises(ModelError, match=rf"no model directory at '{NAME}': .*staticllm pull {NAME}$"):
            make(NAME, "CPU")
    assert hub.requests == []
    bring(NAME)
    hub.requests.clear()
    with (
        StaticLLMPipeline(NAME, "CPU", MAX_PROMPT_LEN=64) as pipe,
        StaticLLMPipeline(demo_model_path(), "CPU", MAX_PROMPT_LEN=64) as original,
    ):
        assert pipe.generate("hello", max_new_tokens=6) == original.generate("hello", max_new_tokens=6)
    assert hub.requests == []


def test_offline_nothing_is_asked(hub, demo, command, bring):
    done = command("run", NAME, "hello", HF_HUB_OFFLINE="1")
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"Error: {NAME} is not in the cache of Hugging Face, and HF_HUB_OFFLINE is set: unset it"
    )
    assert f"staticllm pull {NAME}" in done.stderr
    assert hub.requests == []
    bring(NAME)
    hub.requests.clear()
    assert answer_of(command("run", NAME, "hello", "-n", 2, "--json", HF_HUB_OFFLINE="1"))
    assert hub.requests == []


def test_an_interrupted_download_goes_on_where_it_ended(hub, demo, cache, bring):
    name = "openvino_model.bin"
    data = demo.files[name]
    assert len(data) > 1 << 20
    hub.cut[name] = len(data) // 2
    hub.is_cut_forever = True
    with pytest.raises(ModelError, match=r"connection to .* broke: .*goes on from there|after .* of .* bytes"):
        bring(NAME)
    partial = cache / "models--small--demo-ov" / "blobs" / f"{demo.digest(name)}.incomplete"
    kept = partial.stat().st_size
    assert 0 < kept <= len(data) // 2
    assert not (snapshot_of(cache) / name).exists()
    with pytest.raises(ModelError, match="staticllm pull"):
        check_model_dir(NAME)
    hub.cut.clear()
    hub.requests.clear()
    _, said = bring(NAME)
    assert f"{kept / 1e6:.1f} MB are here already" in said[0]
    (body,) = [each for each in hub.of_kind("GET", name) if each.path.startswith("/cdn/")]
    assert body.headers["range"] == f"bytes={kept}-"
    assert (snapshot_of(cache) / name).read_bytes() == data
    assert not partial.exists()


def test_a_connection_that_breaks_once_is_not_noticed(hub, demo, cache, bring):
    hub.cut["openvino_model.bin"] = 300_000
    bring(NAME)
    bodies = [
        each.headers.get("range") for each in hub.of_kind("GET", "/cdn/") if each.path.endswith("openvino_model.bin")
    ]
    assert len(bodies) == 2
    assert bodies[0] is None
    assert bodies[1].startswith("bytes=")
    assert (snapshot_of(cache) / "openvino_model.bin").read_bytes() == demo.files["openvino_model.bin"]


@pytest.mark.skipif(os.name == "nt", reason="sends a signal")
def test_ctrl_c_leaves_what_has_arrived(hub, demo, cache, environment):
    hub.speed = 0.05
    process = subprocess.Popen(
        [*STATICLLM, "pull", NAME], stderr=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ}
    )
    name = f"{demo.digest('openvino_model.bin')}.incomplete"
    partial = cache / "models--small--demo-ov" / "blobs" / name
    wait_for(lambda: partial.exists() and partial.stat().st_size > 1 << 19)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in said
    kept = partial.stat().st_size
    assert kept > 1 << 19
    hub.speed = 0.0
    hub.requests.clear()
    again = subprocess.run([*STATICLLM, "pull", NAME], env={**os.environ}, capture_output=True, timeout=60, check=True)
    assert b"are here already" in again.stderr
    assert any(each.headers.get("range") == f"bytes={kept}-" for each in hub.requests)
    assert (snapshot_of(cache) / "openvino_model.bin").read_bytes() == demo.files["openvino_model.bin"]


def test_two_pulls_at_once_download_each_file_once(hub, demo, cache, environment):
    hub.speed = 0.02
    pulls = [
        subprocess.Popen([*STATICLLM, "pull", NAME], stderr=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ})
        for _ in range(2)
    ]
    said = [process.communicate(timeout=120) for process in pulls]
    assert [process.returncode for process in pulls] == [0, 0], said
    assert all((snapshot_of(cache) / name).read_bytes() == demo.files[name] for name in NEEDED)
    bodies = [each.path for each in hub.of_kind("GET", "/cdn/")]
    assert len(bodies) == len(set(bodies)) == sum(name.endswith(".bin") for name in NEEDED)
    assert not list((cache / "models--small--demo-ov" / "blobs").glob("*.incomplete"))


@pytest.mark.parametrize("is_there", [False, True])
def test_files_that_are_removed_during_a_download_are_missed(hub, demo, cache, bring, is_there):
    """Weights that arrive, whose file is gone at the end; and a file that has arrived before them."""
    first = next(name for name in demo.files if name in NEEDED)
    assert first != "openvino_model.bin"
    blobs = cache / "models--small--demo-ov" / "blobs"
    arriving = blobs / f"{demo.digest('openvino_model.bin')}.incomplete"
    hub.speed = 0.02

    def remove(event):
        if arriving.exists() and arriving.stat().st_size:
            (blobs / demo.digest(first) if is_there else arriving).unlink(missing_ok=True)

    with pytest.raises(ModelError, match=f"^files of {NAME} were removed while it was downloaded: pull it again$"):
        bring(NAME, remove)
    hub.speed = 0.0
    place, _ = bring(NAME)
    assert all((place / name).read_bytes() == demo.files[name] for name in NEEDED)


def test_progress_is_reported_in_megabytes(hub, demo, bring):
    hub.speed = 0.02
    events = []
    bring(NAME, events.append)
    total = max(1, round(sum(len(demo.files[name]) for name in NEEDED) / 1e6))
    assert {event.stage for event in events} == {"download"}
    assert {event.total for event in events[:-1]} == {total}
    parts = [event.index for event in events[:-1]]
    assert parts == sorted(parts)
    assert len(set(parts)) > 2


def test_the_token_goes_to_the_hub_alone_and_is_never_shown(hub, demo, cache, command):
    demo.token = "hf_SecretSecretSecret"
    refused = command("pull", NAME)
    assert refused.returncode == 1
    assert refused.stderr == (
        f"Error: there is no model {NAME} at {hub.url}, or it is private: check the name, or log in with `hf auth login`, "
        "or set HF_TOKEN\n"
    )
    hub.requests.clear()
    done = command("pull", NAME, HF_TOKEN=demo.token)
    assert done.returncode == 0, done.stderr
    own = [each for each in hub.requests if each.host in hub.url]
    assert own
    assert all(each.headers["authorization"] == f"Bearer {demo.token}" for each in own)
    others = [each for each in hub.requests if each.host in hub.cdn]
    assert others
    assert not any("authorization" in each.headers for each in others)
    assert demo.token not in done.stdout + done.stderr
    assert not any(demo.token.encode() in path.read_bytes() for path in cache.rglob("*") if path.is_file())


def test_the_stored_token_is_used(hub, demo, command, tmp_path):
    demo.token = "hf_Stored"
    (tmp_path / "hf").mkdir(exist_ok=True)
    (tmp_path / "hf" / "token").write_text(demo.token)
    assert command("pull", NAME).returncode == 0


def test_a_gated_model_names_its_terms_and_the_login(hub, demo, command):
    demo.token = "hf_Other"
    demo.is_gated = True
    for variables in ({}, {"HF_TOKEN": "hf_Mine"}):
        done = command("run", NAME, "hello", **variables)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == (
            f"Error: {NAME} is gated: accept its terms at {hub.url}/{NAME}, then log in with `hf auth login`, or set HF_TOKEN"
        )
        assert "hf_Mine" not in done.stderr


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, "there is no model|refuses"), (403, r"refuses small/demo-ov to this user \(403\): log in"),
        (404, "there is no model"),
        (429, r"refuses more requests for now \(429\): wait"), (500, r"has failed \(500\): try again"),
        (503, r"has failed \(503\): try again"), (418, r"refuses small/demo-ov \(418\)"),
    ],
)  # fmt: skip
def test_a_hub_that_refuses(hub, demo, cache, bring, status, words):
    hub.fail = status
    failure_of(bring, words)
    assert not snapshot_of(cache).exists()


def failure_of(bring, words, name=NAME):
    with pytest.raises(ModelError, match=words) as found:
        bring(name)
    assert len(str(found.value).splitlines()) == 1
    assert len(str(found.value)) < 700
    return str(found.value)


@pytest.mark.parametrize(
    "page",
    ["<html>Sign in to this network</html>", "[]", '{"siblings": 3}', '{"id": "a", "sha": "x"}', "{", "[" * 100_000],
)
def test_an_answer_that_is_none_of_a_hub(hub, demo, bring, page):
    hub.page = page
    failure_of(bring, "is no Hugging Face hub: check HF_ENDPOINT")


def test_redirects_without_end(hub, demo, bring):
    hub.redirects = True
    failure_of(bring, "redirects without end: check HF_ENDPOINT")


def test_a_hub_that_is_not_there(hub, demo, bring, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "no connection to" in failure_of(bring, "check the network")


def test_a_hub_that_does_not_answer(hub, demo, bring):
    hub.hang = True
    failure_of(bring, "does not answer: check the network")


def test_a_body_that_only_drips_is_given_up(hub, demo, cache, bring, monkeypatch):
    monkeypatch.setattr(hub_downloads, "STALL_SECONDS", 3.0)
    hub.speed = 0.9  # a piece of 64 KiB, so that no read is late and nothing of 256 KiB arrives in time
    failure_of(bring, "sends nothing more: check the network")
    assert not (snapshot_of(cache) / "openvino_model.xml").exists()


def test_a_process_that_takes_too_much_memory_is_ended(hub, demo, bring, monkeypatch):
    monkeypatch.setattr(hub_downloads, "MAX_MEMORY", 1 << 20)
    hub.hang = True
    failure_of(bring, "have no end: check HF_ENDPOINT")


def changed(change):
    """Return a damage of the weights."""
    return lambda name, data: change(data) if name == "openvino_model.bin" else data


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (changed(lambda data: data[:-1] + bytes([data[-1] ^ 1])), "is not what the hub says that it is"),
        (changed(lambda data: data[:-1000]), "ended after .* of .* bytes|longer"),
        (changed(lambda data: data + b"more" * (1 << 18)), "longer than the hub says"),
        (changed(lambda data: b""), "ended after 0 of"),
    ],
)
def test_weights_that_are_not_what_the_hub_says_are_not_used(hub, demo, cache, bring, damage, words):
    hub.damage = damage
    failure_of(bring, words)
    blobs = cache / "models--small--demo-ov" / "blobs"
    assert not (blobs / demo.digest("openvino_model.bin")).exists()
    assert not (snapshot_of(cache) / "openvino_model.xml").exists()
    hub.damage = None
    place, _ = bring(NAME)
    assert (place / "openvino_model.bin").read_bytes() == demo.files["openvino_model.bin"]


def test_a_small_file_with_another_digest_is_not_used(hub, demo, cache, bring):
    hub.damage = lambda name, data: data.replace(b"1", b"2") if name == "config.json" else data
    failure_of(bring, "'config.json' of small/demo-ov is not what the hub says")
    assert not (snapshot_of(cache) / "config.json").exists()


@pytest.mark.parametrize(
    "name", ["../../outside.json", "/etc/outside.json", "a//b.json", "..\\x.json", "a\nb.json", "C:x.json"]
)
def test_file_names_that_leave_the_folder(hub, demo, cache, bring, name):
    def listed(found):
        found["siblings"].append({"rfilename": name, "size": 1, "blobId": git_digest(b"x")})
        return found

    hub.listed = listed
    failure_of(bring, "which no folder can hold: nothing of it is taken")
    assert not snapshot_of(cache).exists()


def with_entry(**values):
    def listed(found):
        entry = next(each for each in found["siblings"] if each["rfilename"] == "openvino_model.bin")
        entry.update(values)
        entry["lfs"].update({key: value for key, value in values.items() if key in entry["lfs"]})
        return found

    return listed


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        (with_entry(size=1 << 62), "of 4611686018427387904 bytes, which no hub keeps"),
        (with_entry(size=-1), "of -1 bytes, which no hub keeps"),
        (with_entry(size="many"), "is no Hugging Face hub"),
        (with_entry(size=1 << 49), r"needs 5629\d\d\.\d GB in .*, which has .* GB: free space there, or set HF_HOME"),
        (with_entry(sha256="../../outside"), "is no Hugging Face hub"),
        (with_entry(sha256="0" * 64), "the hub says two things of 'openvino_model.bin'"),
        (lambda found: {**found, "sha": "../../outside"}, "is no Hugging Face hub"),
        (lambda found: {**found, "siblings": found["siblings"] * 2000}, "files, at most 20000 are listed"),
    ],
)
def test_listings_that_are_impossible(hub, demo, cache, bring, listed, words):
    hub.listed = listed
    failure_of(bring, words)
    assert not (snapshot_of(cache) / "openvino_model.xml").exists()


def test_a_full_disk_is_noticed_before(hub, demo, cache, bring, monkeypatch):
    usage = hub_downloads.shutil.disk_usage(".")
    monkeypatch.setattr(hub_downloads.shutil, "disk_usage", lambda place: usage._replace(free=1 << 20))
    failure_of(bring, r"small/demo-ov needs 5\.\d MB in .*, which has 1\.0 MB: free space there, or set HF_HOME")
    assert not hub.of_kind("GET", "/resolve/")


def test_a_revision_is_asked_for(hub, demo, cache, bring):
    failure_of(bring, "has no revision 'v9' at .*: check what follows the @", f"{NAME}@v9")
    place, _ = bring(f"{NAME}@{COMMIT}")
    assert check_model_dir(f"{NAME}@{COMMIT}") == place
    assert not (cache / "models--small--demo-ov" / "refs" / COMMIT).exists()


def test_pull_brings_a_model_up_to_date(hub, demo, cache, command):
    assert command("pull", NAME).returncode == 0
    demo.commit = "d" * 40
    demo.files["config.json"] += b"\n"
    hub.requests.clear()
    done = command("pull", NAME)
    assert done.stdout == f"{NAME} is in {snapshot_of(cache, commit=demo.commit)}\n"
    assert "1 files" in done.stderr or "downloading" in done.stderr
    assert [each.path.rpartition("/")[2] for each in hub.of_kind("GET", "/resolve/")] == ["config.json"]
    assert f"{NAME} (commit ddddddd) is complete" in command("pull", NAME).stderr


def test_without_the_package_the_line_says_what_to_install(demo, command, tmp_path):
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(
        "from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        "def without(name, *more):\n"
        "    return None if name.partition('.')[0] == 'huggingface_hub' else find(name, *more)\n"
        "PathFinder.find_spec = without\n"
    )
    path = os.pathsep.join([str(hidden), os.environ.get("PYTHONPATH", "")])
    assert 'pip install "staticllm[hub]"' in command("pull", NAME, PYTHONPATH=path).stderr
    done = command("run", NAME, "hello", PYTHONPATH=path)
    assert f'pip install "staticllm[hub]"; then staticllm pull {NAME}' in done.stderr
    assert command("list", PYTHONPATH=path).stdout.startswith("no models")


@pytest.mark.parametrize("name", ["demo", "a/b/c", "a/b.gguf", "../b", "a/b:", "a b/c", "a/b@", "a--b/../c"])
def test_pull_of_what_is_no_name(name, command):
    done = command("pull", name)
    assert done.returncode == 1
    assert "is no name of a model: write OWNER/NAME" in done.stderr
