"""The models of this computer by their names: ``staticllm pull``, ``list`` and ``rm``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from staticllm.cli.options import flag
from staticllm.cli.pulling import pulled
from staticllm.cli.server_client import SERVER_VARIABLE, ServerClient, api_key_option, server_option
from staticllm.cli.servers import list_served
from staticllm.cli.terminal import cell
from staticllm.errors import ConfigError, ModelError, quoted
from staticllm.model_paths.arguments import expanded
from staticllm.model_paths.hub_names import HubName, parse_hub_name
from staticllm.system.table import table

if TYPE_CHECKING:
    from staticllm.model_files.converted import ConvertedModel
    from staticllm.model_files.hub_cache import PulledModel


@dataclass(frozen=True)
class LocalModel:
    """A model of this computer: one that was pulled, one that was converted, or both."""

    name: str
    pulled: PulledModel | None
    converted: ConvertedModel | None

    @property
    def num_bytes(self) -> int:
        """The bytes on disk, with those of the converted model."""
        return sum(each.num_bytes for each in (self.pulled, self.converted) if each is not None)

    def as_dict(self) -> dict[str, Any]:
        used = max(each.used for each in (self.pulled, self.converted) if each is not None)
        path = self.pulled.path if self.pulled is not None else next(iter(self.converted.files), None)  # type: ignore[union-attr]
        return {
            "name": self.name,
            "kind": self.pulled.kind if self.pulled is not None else "converted",
            "bytes": self.num_bytes,
            "used": datetime.fromtimestamp(used).astimezone().isoformat(timespec="seconds"),
            "path": None if path is None else str(path),
            "converted": None if self.converted is None else str(self.converted.folder),
        }


@click.command("pull")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@flag("--json as_json", "Print JSON.")
def pull_models(names: tuple[str, ...], as_json: bool) -> None:
    """Download models from Hugging Face into its cache, or bring them up to date.

    NAME is OWNER/NAME of a repository with an OpenVINO model, or of one with GGUF files, from which :QUANT (by default Q4_K_M)
    or /FILE.gguf chooses one; @REVISION takes another than the latest. HF_HOME, HF_ENDPOINT, HF_TOKEN and the login of the hf
    command are used. An interrupted download goes on where it ended.
    """
    rows = []
    for text in names:
        name = parse_hub_name(text)
        if name is None:
            raise ConfigError(
                f"{quoted(text)} is no name of a model: write OWNER/NAME, or OWNER/NAME:QUANT for a GGUF file"
            )
        place = pulled(name)
        rows.append({"name": str(name), "path": str(place)})
        if not as_json:
            click.echo(f"{name} is in {place}")
    if as_json:
        click.echo(json.dumps(rows, indent=2))


@click.command("list")
@flag("--json as_json", "Print JSON.")
@server_option
@api_key_option
def list_models(as_json: bool, server: str | None, api_key: str | None) -> None:
    """List the models of this computer: those in the cache of Hugging Face, and GGUF files that were converted.

    With --server or STATICLLM_SERVER, the models that a server knows, with their kinds, and whether they are loaded.
    """
    if server is not None or os.environ.get(SERVER_VARIABLE):
        with ServerClient(server, api_key) as client:
            list_served(client, as_json)
        return
    if api_key is not None:
        raise click.UsageError("--api-key goes with --server")
    rows = [model.as_dict() for model in local_models()]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        click.echo("no models: staticllm pull OWNER/NAME brings one")
        return
    cells = [
        [cell(row["name"]), row["kind"], f"{row['bytes'] / 1e6:.1f} MB", row["used"][:16].replace("T", " ")]
        for row in rows
    ]
    click.echo(table(["name", "kind", "size", "used"], cells))


@click.command("rm")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@flag("--yes is_sure", "Do not ask.")
@flag("--json as_json", "Print JSON.")
def remove_models(names: tuple[str, ...], is_sure: bool, as_json: bool) -> None:
    """Remove models by the names that `staticllm list` shows: downloaded files, and what was converted from them.

    Of OWNER/NAME alone all files and revisions are removed. Of a GGUF file of your own, only the converted model is removed.
    """
    known = list(local_models())
    chosen: dict[str, LocalModel] = {}
    for text in names:
        found = [model for model in known if _is_meant(text, model)]
        if not found:
            raise ModelError(f"there is no model {quoted(text)} to remove: staticllm list shows their names")
        chosen.update({model.name: model for model in found})
    models = list(chosen.values())
    size = f"{sum(model.num_bytes for model in models) / 1e6:.1f} MB"
    if not is_sure:
        if sys.stdin is None or not sys.stdin.isatty():
            raise click.UsageError(f"{', '.join(chosen)} ({size}): confirm with --yes where no one can be asked")
        click.confirm(f"Remove {', '.join(chosen)} ({size})?", abort=True, err=True)
    _remove(models)
    if as_json:
        click.echo(json.dumps([model.as_dict() for model in models], indent=2))
        return
    for model in models:
        click.echo(f"removed  {cell(model.name)}  {model.num_bytes / 1e6:.1f} MB")


def _remove(models: Sequence[LocalModel]) -> None:
    from staticllm.model_files.converted import remove_converted

    downloads = [model.pulled for model in models if model.pulled is not None]
    for model in models:
        if model.converted is not None:
            remove_converted(model.converted)
    if downloads:
        from staticllm.model_files.hub_cache import remove_pulled

        remove_pulled(downloads)


def _is_meant(text: str, model: LocalModel) -> bool:
    """Return whether an argument names a model: its name, its repository or one revision of it, or the path of its file."""
    if model.pulled is None:
        path = os.path.abspath(expanded(text))  # noqa: PTH100 - links are not followed
        made = model.converted
        return text == model.name or (made is not None and path in map(os.path.abspath, made.files))
    name = parse_hub_name(text)
    if name is None:
        return False
    whole = HubName(name.repo, name.revision)
    own = model.pulled.name
    is_revision = name.revision in ("", own.revision, model.pulled.commit)
    is_file = str(whole) == str(name) or _file_of(name) in (_file_of(own), _file_name(model.pulled))
    return own.repo == name.repo and is_revision and is_file


def _file_of(name: HubName) -> str:
    return name.file or f":{name.quant.upper()}"


def _file_name(model: PulledModel) -> str:
    return model.path.as_posix().partition(f"/{model.commit}/")[2]


def local_models() -> Iterator[LocalModel]:
    """Yield the models of this computer, pulled ones first. A file that was converted is listed while it exists."""
    from staticllm.model_files.converted import converted_models

    made = converted_models()
    for model in _pulled_models():
        own = next((each for each in made if model.path in each.files), None)
        yield LocalModel(str(model.name), model, own)
        made = [each for each in made if each is not own]
    for each in made:
        yield LocalModel(str(each.files[0] if each.files else each.folder), None, each)


def _pulled_models() -> list[PulledModel]:
    try:
        from staticllm.model_files.hub_cache import pulled_models

        return pulled_models()
    except ModuleNotFoundError:  # without the package there are no names
        return []
