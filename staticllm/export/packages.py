"""The packages of the environment for exports: the versions that were tested together, and those that another may have.

They stand here, and not only in the extra `export` of pyproject.toml, because staticllm also runs from a checkout, whose metadata
may be missing or old. A test compares both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version


@dataclass(frozen=True)
class Package:
    """A package: the version that set-up installs, and the range ``[first, below)`` that an own environment may have."""

    name: str
    tested: str
    first: str
    below: str

    @property
    def pinned(self) -> str:
        """The requirement of set-up."""
        return f"{self.name}=={self.tested}"

    @property
    def bounds(self) -> str:
        """The requirement of the extra."""
        return f"{self.name}>={self.first},<{self.below}"

    def takes(self, found: str) -> bool:
        """Return whether a version is in the range."""
        return numbers(self.first) <= numbers(found) < numbers(self.below)


TORCH = Package("torch", "2.13.0", "2.13", "3")
OPTIMUM = (Package("optimum", "2.3.0", "2.3", "3"), Package("optimum-intel", "2.2.0", "2.2", "3"))
"""Installed without what they require: optimum-intel requires torchvision, which exports of language models do not use."""
OTHERS = (
    Package("nncf", "3.4.0", "3.4", "4"),
    Package("transformers", "5.5.4", "5.5", "5.6"),
    Package("huggingface-hub", "1.21.0", "1.5", "1.22"),
    Package("requests", "2.34.2", "2.32", "3"),
)
OPENVINO = ("openvino", "openvino-tokenizers")
"""Of the same version as in this process: it reads the graphs that they write."""
PACKAGES = (TORCH, *OPTIMUM, *OTHERS)


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers at the beginning of a version: (2, 13, 0) of ``2.13.0+cpu``."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def installations() -> tuple[tuple[str, ...], ...]:
    """Return the arguments of pip for each step of set-up; torch is the first, so that the others do not choose one."""
    same = (f"{name}=={version(name)}" for name in OPENVINO)
    return (
        (TORCH.pinned,),
        ("--no-deps", *(package.pinned for package in OPTIMUM)),
        (*(package.pinned for package in OTHERS), *same),
    )


def mismatches(found: Mapping[str, str | None]) -> list[str]:
    """Return what is wrong with the packages of an environment: "torch is missing, torch>=2.13,<3 is needed"."""
    wrong = []
    for package in PACKAGES:
        have = found.get(package.name)
        if have is None or not package.takes(have):
            wrong.append(f"{_have(package.name, have)}, {package.bounds} is needed")
    for name in OPENVINO:
        have = found.get(name)
        own = numbers(version(name))[:2]
        if have is None or numbers(have)[:2] != own:
            wrong.append(
                f"{_have(name, have)}, {name} {'.'.join(map(str, own))} is needed, as in staticllm's environment"
            )
    return wrong


def _have(name: str, found: str | None) -> str:
    return f"{name} is missing" if found is None else f"{name} is {found}"
