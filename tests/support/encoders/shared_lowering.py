"""Lowers each encoder only once per module of tests. Each pipeline still compiles its own programs.

Most tests of embedding pipelines load the same tiny encoder, and of such a load three quarters are its lowering.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from staticllm.pipelines.embedding import encoder_kind
from staticllm.pipelines.loading import kind

MAX_READ = 8  # models that were read and are not lowered yet: those of others never are, here


class SharedLowering:
    """Wraps the functions with which the loader reads and lowers encoders, and caches the lowered ones.

    They are known by the bytes of the graph and of its weights, the options and the passes.
    """

    def __init__(self) -> None:
        self._read: dict[int, tuple[Any, tuple]] = {}  # models that were read but not lowered, by their identity
        self._lowered: dict = {}
        self._read_model, self._lower = kind.read_model, encoder_kind.lower_encoder
        self._keep_small_constants = kind.keep_small_constants

    @contextmanager
    def in_place(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kind, "read_model", self.read_model)
            patch.setattr(kind, "keep_small_constants", self.keep_small_constants)
            patch.setattr(encoder_kind, "lower_encoder", self.lower)
            yield

    def read_model(self, core, path, *given, **more):
        model = self._read_model(core, path, *given, **more)
        if not any(value is not None for value in given[:2]):  # else weights from elsewhere, or decrypted ones
            self._read[id(model)] = (model, ("whole", *digests(Path(path))))
            while len(self._read) > MAX_READ:
                self._read.pop(next(iter(self._read)), None)
        return model

    def keep_small_constants(self, model):
        if id(model) in self._read:
            self._read[id(model)] = (model, ("for blobs", *self._read[id(model)][1][1:]))
        return self._keep_small_constants(model)

    def lower(self, model, options, passes):
        _, of_model = self._read.pop(id(model), (None, None))
        if of_model is None or options.dense:
            return self._lower(model, options, passes)
        name = (of_model, options, id(passes))
        if name not in self._lowered:
            self._lowered[name] = self._lower(model, options, passes)
        return self._lowered[name]


def digests(path: Path) -> list[bytes]:
    """Return the digests of the files of the models in a directory."""
    files = sorted(file for file in path.iterdir() if file.suffix in (".xml", ".bin"))
    return [sha256(file.read_bytes()).digest() for file in files]
