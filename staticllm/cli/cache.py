"""``staticllm cache`` lists, verifies, prunes, exports and imports the blob sets in a cache folder."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from staticllm.cli.options import Number, flag, options_of, value
from staticllm.cli.progress import progress
from staticllm.errors import BlobError, ConfigError, quoted
from staticllm.system.files import read_regular

if TYPE_CHECKING:
    from staticllm.compiler_passes.artifacts.cache import BlobCache, CachedSet

GB = 1e9
INPUTS = {"max_length": "texts", "max_prompt_len": "prompts"}
"""Choices of a set that say how long its inputs may be."""
MAX_KEY = 1 << 16


@click.group("cache")
@value("--key-file", click.Path(), "File with the INTEGRITY_KEY that the sets are signed with.")
@click.pass_context
def command(ctx: click.Context, key_file: str | None) -> None:
    """Manage the blob sets in a cache folder (CACHE_DIR)."""
    ctx.obj = b""
    if key_file is not None:
        try:
            ctx.obj = read_regular(Path(key_file), MAX_KEY)
        except OSError as error:
            raise ConfigError(f"--key-file {quoted(key_file)} cannot be read: {error.strerror or error}") from None


def _key() -> bytes:
    """Return the key that signs the sets; empty if they are not signed."""
    key: bytes = click.get_current_context().obj
    return key


_common = options_of(click.argument("folder", type=click.Path()), flag("--json as_json", "Print JSON."))


def _open(folder: str) -> BlobCache:
    from staticllm.compiler_passes.artifacts.cache import BlobCache

    if not Path(folder).is_dir():
        raise ConfigError(f"there is no cache folder {quoted(folder)}: give the folder that CACHE_DIR names")
    return BlobCache(folder, key=_key())


def _row(entry: CachedSet, problem: str = "") -> dict[str, Any]:
    from staticllm.compiler_passes.artifacts.crashes import LIMIT, num_crashes

    manifest = entry.manifest
    problem = problem or entry.problem
    if manifest is not None and manifest.has_failed_verification:
        problem = problem or "failed verification: never used"
    if num_crashes(entry.folder) >= LIMIT:
        problem = problem or "crashed twice: never used, remove it"
    return {
        "key": entry.key,
        "bytes": entry.num_bytes,
        "used": time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used)),
        "device": manifest.fingerprint.device if manifest else None,
        "kind": manifest.kind if manifest else None,
        "max_prompt_len": manifest.config.get("max_prompt_len") if manifest else None,
        "max_length": manifest.config.get("max_length") if manifest else None,
        "programs": manifest.programs if manifest else None,
        "blobs": len(manifest.blobs) if manifest else None,
        "weights": manifest.fingerprint.weights_digest[:12] if manifest else None,
        "openvino": manifest.fingerprint.openvino if manifest else None,
        "verified": (manifest.verification or {}).get("is_ok") if manifest else None,
        "problem": problem,
    }


def _show(rows: list[dict[str, Any]], as_json: bool, empty: str, verb: str = "") -> None:
    """Print the sets. ``verb``: what was done with them, before each line; ``empty``: the text if there are none."""
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        size = f"{row['bytes'] / 1e6:9.1f} MB"
        inputs = "".join(f"{what} of {row[name]}, " for name, what in INPUTS.items() if row[name])
        what = f"{row['device']}, {inputs}{row['blobs']} blobs, weights {row['weights']}"
        click.echo(f"{verb}{row['key']}  {size}  {row['used']}  {row['problem'] or what}")
    click.echo(f"{sum(row['bytes'] for row in rows) / 1e6:.1f} MB in {len(rows)} sets" if rows else empty)


@command.command("ls")
@_common
def list_sets(folder: str, as_json: bool) -> None:
    """List the sets in FOLDER, the most recently used first."""
    _show([_row(entry) for entry in _open(folder).entries()], as_json, "no sets")


@command.command("verify")
@_common
def verify(folder: str, as_json: bool) -> None:
    """Compare every byte of every set in FOLDER with its digest. Exit with code 1 if a set is damaged."""
    cache = _open(folder)
    rows = []
    with progress("comparing digests") as shown:
        num_sets = len(cache.entries())
        for entry, problem in cache.verify():
            rows.append(_row(entry, problem))
            shown.show("comparing digests", len(rows), num_sets)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    for row in rows if not as_json else ():
        click.echo(f"FAIL {row['key']}  {row['problem']}" if row["problem"] else f"ok   {row['key']}")
    num_failed = sum(bool(row["problem"]) for row in rows)
    if not as_json:
        click.echo(f"{len(rows) - num_failed} of {len(rows)} sets are ok" if rows else "no sets")
    if num_failed:
        raise SystemExit(1)


@command.command("prune")
@_common
@value("--limit-gb", Number(0, 1e6), "Keep the most recently used sets, up to this size.")
@flag("--all is_all", "Remove every set.")
@flag("--yes is_sure", "Do not ask before --all.")
def prune(folder: str, as_json: bool, limit_gb: float | None, is_all: bool, is_sure: bool) -> None:
    """Remove sets from FOLDER, the least recently used first. Sets in use are kept."""
    if (limit_gb is None) != is_all:
        raise click.UsageError("give the size to keep with --limit-gb N, or remove every set with --all")
    cache = _open(folder)
    if is_all and not is_sure:
        entries = cache.entries()
        size = f"{sum(entry.num_bytes for entry in entries) / 1e6:.1f} MB"
        click.confirm(f"Remove {len(entries)} sets ({size}) from {folder}?", abort=True, err=True)
    removed = cache.prune(int((limit_gb or 0.0) * GB))
    _show([_row(entry) for entry in removed], as_json, "nothing to remove", "removed  ")


@command.command("export")
@click.argument("folder", type=click.Path())
@click.argument("key")
@click.argument("target", type=click.Path())
@flag("--json as_json", "Print JSON.")
def export(folder: str, key: str, target: str, as_json: bool) -> None:
    """Copy the set KEY (or a unique prefix) from FOLDER to TARGET, a new folder that the option BLOB_PATH loads."""
    cache = _open(folder)
    if not key:
        raise click.UsageError("KEY is empty: give a key or its prefix, `staticllm cache ls` shows the keys")
    found = [entry for entry in cache.entries() if entry.key.startswith(key)]
    if len(found) != 1:
        raise ConfigError(
            f"{len(found)} sets in {quoted(folder)} begin with {key!r}: `staticllm cache ls` shows the keys"
        )
    _copy(cache, found[0].folder, Path(target), found[0].key)
    click.echo(json.dumps(_row(found[0])) if as_json else f"{found[0].num_bytes / 1e6:.1f} MB in {target}")


@command.command("import")
@click.argument("folder", type=click.Path())
@click.argument("source", type=click.Path())
@flag("--json as_json", "Print JSON.")
def import_(folder: str, source: str, as_json: bool) -> None:
    """Copy the blob set SOURCE into FOLDER, where a pipeline with CACHE_DIR finds it."""
    from staticllm.compiler_passes.artifacts.blob_set import read_manifest, read_stored
    from staticllm.compiler_passes.artifacts.cache import BlobCache, key_of

    manifest = read_manifest(Path(source), _key())
    for _ in read_stored(Path(source), manifest):  # check all bytes first, so that nothing of a damaged set is copied
        pass
    cache = BlobCache(folder, key=_key())
    key = key_of(manifest.fingerprint)
    _copy(cache, Path(source), cache.path(key), key)
    click.echo(json.dumps({"key": key, "folder": str(cache.path(key))}) if as_json else f"{key} in {folder}")


def _copy(cache: BlobCache, original: Path, target: Path, key: str) -> None:
    """Copy a whole set, or nothing; every byte is compared with its digest."""
    from staticllm.compiler_passes.artifacts.blob_set import copy_set

    if target.exists():
        raise ConfigError(f"{quoted(target)} exists already: choose another path or remove it")
    try:
        with cache.lease(key):
            copy_set(original, target, _key())
    except OSError as error:
        raise BlobError(f"{quoted(target)} cannot be written: {error.strerror or error}") from error
