"""``staticllm compile``: compile every variant, show each, write the blobs."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from staticllm.cli.options import layout_options, read_config
from staticllm.core import ProgressEvent

if TYPE_CHECKING:
    from staticllm.pipelines.manifest import Manifest

WIDTH = 24


@click.command("compile")
@click.argument("model", type=click.Path())
@click.option("--export-blob", "target", type=click.Path(), required=True, help="Folder to write; must not exist.")
@click.option(
    "--verify", "is_verified", is_flag=True, help="Compare its words with the CPU in f32; a bad set is marked."
)
@click.option("--json", "as_json", is_flag=True, help="Print the manifest.")
@layout_options
def command(model: str, target: str, is_verified: bool, as_json: bool, **options: Any) -> None:
    """Compile all programs of MODEL and export them as a set of blobs with a manifest: BLOB_PATH loads it."""
    from staticllm.pipelines.blob_export import export_set, job_of

    manifest = export_set(job_of(model, options["device"], read_config(options), Bars()), Path(target))
    if is_verified:
        from staticllm.pipelines.verification import verify_set

        manifest = verify_set(model, options["device"], Path(target))
    if as_json:
        click.echo(json.dumps(asdict(manifest), indent=2))
    else:
        _report(manifest, target)
    if manifest.is_bad:
        raise SystemExit(1)


def _report(manifest: Manifest, target: str) -> None:
    size = f"{manifest.num_bytes / 1e6:.1f} MB" + (", weights not included" if manifest.is_weightless else "")
    click.echo(f"{len(manifest.blobs)} blobs for {len(manifest.variants)} variants in {target} ({size})")
    found = manifest.verification
    if found is not None:
        verdict = "verified" if found["is_ok"] else "BAD, marked so, and never loaded"
        text = f"{found['agreement']:.1%} of {found['places']} tokens agree, logits {found['distance']:.1e} of their range off"
        click.echo(f"{verdict}: {text} ({found['against']})")


class Bars:
    """One bar a variant on stderr: empty while it compiles, half full when compiled, full when written.

    Plain lines if stderr is no terminal.
    """

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._spent = 0.0

    def __call__(self, event: ProgressEvent) -> None:
        if event.variant is None:
            click.echo(f"{event.stage:<24} {event.seconds:6.2f} s", err=True)
            return
        is_written = event.stage == "export"
        self._spent = event.seconds + (self._spent if is_written else 0.0)
        if self._is_terminal:
            filled = "█" * (WIDTH if is_written else WIDTH // 2 if event.is_done else 0)
            line = f"\r{event.variant!s:<24} {filled:░<{WIDTH}} {event.index}/{event.total} {self._spent:6.2f} s"
            click.echo(line, err=True, nl=is_written)
        elif is_written:
            click.echo(f"{event.variant!s:<24} {event.index}/{event.total} {self._spent:6.2f} s", err=True)
