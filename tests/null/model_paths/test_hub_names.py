"""Tests the grammar of names on Hugging Face."""

import pytest

from staticllm.model_paths.hub_names import HubName, parse_hub_name
from staticllm.model_paths.path_kind import path_kind

NAMES = {
    "owner/name": HubName("owner/name"),
    "OpenVINO/Qwen3-0.6B-int4-ov": HubName("OpenVINO/Qwen3-0.6B-int4-ov"),
    "hf.co/owner/name": HubName("owner/name", is_prefixed=True),
    "huggingface.co/owner/name:Q8_0": HubName("owner/name", quant="Q8_0", is_prefixed=True),
    "https://huggingface.co/owner/name": HubName("owner/name", is_prefixed=True),
    "https:/hf.co/owner/name:Q8_0": HubName("owner/name", quant="Q8_0", is_prefixed=True),
    "owner/name@v1.0": HubName("owner/name", "v1.0"),
    "owner/name@refs/pr/3": HubName("owner/name", "refs/pr/3"),
    "owner/name:Q4_K_M": HubName("owner/name", quant="Q4_K_M"),
    "owner/name@main:IQ4_XS": HubName("owner/name", "main", "IQ4_XS"),
    "owner/name/file.gguf": HubName("owner/name", file="file.gguf"),
    "owner/name/sub/file-Q4.gguf@v1": HubName("owner/name", "v1", file="sub/file-Q4.gguf"),
}


@pytest.mark.parametrize("text", NAMES)
def test_a_name_is_read(text):
    name = parse_hub_name(text)
    assert name == NAMES[text]
    assert parse_hub_name(str(name)) == HubName(name.repo, name.revision, name.quant, name.file)


@pytest.mark.parametrize(
    "text",
    [
        "", "name", "/owner/name", "owner/", "/name", "./name", "../name", "owner/..", "owner/../name", "owner/name/other",
        "owner/name.gguf", "owner/name.zip", "owner/name.git", "owner/name/../x.gguf", "owner/name@../x", "owner/name@a/../b",
        "owner/name:", "owner/name@", "owner/na me", "owner\\name", "owner/n--n", "o--o/name", "owner/näme", "~/name",
        "owner/name/file.gguf:Q8_0", "owner/name:Q8/0", "C:/name", "https://hf.co/owner", "a" * 97 + "/b", "a/" + "b" * 2000,
        "https://example.com/owner/name", "owner/name\n", "owner/name@x\n", "owner/name//x.gguf",
    ],
)  # fmt: skip
def test_what_is_no_name(text):
    assert parse_hub_name(text) is None


def test_a_folder_that_exists_makes_a_path_of_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "staticllm pull models/chat" in path_kind("models/chat").remedy
    (tmp_path / "models").mkdir()
    assert path_kind("models/chat").remedy == "check the path"
    assert "staticllm pull" in path_kind("hf.co/models/chat").remedy
