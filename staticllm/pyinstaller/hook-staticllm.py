"""PyInstaller runs this for an application that imports staticllm, and finds what no import statement names.

OpenVINO loads its plugins, and GenAI the tokenizer library, by file name at run time; the demo model is data.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, distribution, requires

from PyInstaller.utils.hooks import (
    collect_data_files,
    collect_dynamic_libs,
    collect_submodules,
    copy_metadata,
)

PATTERNS = ["*.dll", "*.dylib", "lib*.so", "lib*.so.*"]
"""PyInstaller itself leaves out libraries whose version stands after .so."""
PACKAGES = ("staticllm", "staticllm.compiler_passes", "staticllm.kvcache", "staticllm.pipelines")
"""In an editable installation the last three do not lie in the first."""
UNUSED = ("_onnx_", "_paddle_", "_pytorch_", "_tensorflow_", "_jax_", "_gguf_")
"""Parts of the names of libraries that read other formats than OpenVINO's own."""


def required(name: str) -> list[str]:
    """Return the names of the installed packages that a package requires, in any of its extras.

    Some read their own version from their metadata while they are imported, such as llguidance, prompt_toolkit and click.
    """
    names = {re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in requires(name) or ()}
    return sorted(each for each in names if _is_installed(each))


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


datas = collect_data_files("staticllm")
binaries = []
collected = {name for package in PACKAGES for name in collect_submodules(package, on_error="ignore")}
hiddenimports = sorted(name for name in collected if ".pyinstaller" not in name)
for package in ("openvino", "openvino_genai", "openvino_tokenizers"):
    binaries += [
        entry
        for entry in collect_dynamic_libs(package, search_patterns=PATTERNS)
        if not any(part in entry[0] for part in UNUSED)
    ]
for name in ("staticllm", *required("staticllm")):
    datas += copy_metadata(name)
