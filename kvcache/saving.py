"""Rows on disk: written whole or not at all, and read only into the model that made them."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from staticllm.errors import SavedRowsError
from staticllm.kvcache.cache import StoredRows

FORMAT = 1
Identity = Mapping[str, str]


def save(stored: StoredRows, path: str | os.PathLike[str], identity: Identity) -> None:
    """Write rows to ``path``, beside it first, so that an interruption leaves what was there before.

    ``identity`` says what must be equal where they are read: model, type of the rows, layout.

    Raises:
        OSError: the file cannot be written.
    """
    target = Path(path)
    header = {"format": FORMAT, "identity": dict(identity), "digest": _digest(stored)}
    arrays: dict[str, Any] = {f"rows{index}": rows for index, rows in enumerate(stored.rows)}
    arrays |= {f"states{index}": states for index, states in enumerate(stored.states)}
    arrays["tokens"] = np.array(stored.tokens, np.int64)
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    handle, scratch = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, **arrays)
        Path(scratch).replace(target)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise


def load(path: str | os.PathLike[str], identity: Identity) -> StoredRows:
    """Rows that ``save`` wrote.

    Raises:
        SavedRowsError: no such file, a damaged one, or rows of another model; names what differs.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            header = json.loads(file["header"].tobytes())
            rows, states = (
                tuple(file[f"{kind}{index}"] for index in range(sum(name.startswith(kind) for name in file.files)))
                for kind in ("rows", "states")
            )
            stored = StoredRows(tuple(file["tokens"].tolist()), rows, states)
    except FileNotFoundError:
        raise SavedRowsError(f"{str(path)!r} is not there: save rows first") from None
    except OSError as error:
        raise SavedRowsError(f"{str(path)!r} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile, NotImplementedError, AttributeError) as error:
        raise SavedRowsError(f"{str(path)!r} is damaged, or no file of rows: save them again") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise SavedRowsError(f"{str(path)!r} has another format than {FORMAT}: save the rows again")
    for name, value in identity.items():
        if header["identity"].get(name) != value:
            raise SavedRowsError(
                f"{str(path)!r} holds rows of another {name} ({header['identity'].get(name)}, here {value}): save them again"
            )
    if header["digest"] != _digest(stored):
        raise SavedRowsError(f"{str(path)!r} is damaged: its digest does not agree; save the rows again")
    return stored


def _digest(stored: StoredRows) -> str:
    digest = hashlib.sha256(np.array(stored.tokens, np.int64).tobytes())
    for rows in (*stored.rows, *stored.states):
        digest.update(repr(rows.shape).encode())
        digest.update(np.ascontiguousarray(rows).tobytes())
    return digest.hexdigest()
