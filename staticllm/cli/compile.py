"""``staticllm compile`` compiles all programs of a model and writes them as a blob set."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from staticllm.cli.grouped_command import GroupedCommand
from staticllm.cli.model_arguments import model_directory
from staticllm.cli.npu_platform import check_platform, npu_target, platform_options
from staticllm.cli.options import PROGRAM_GROUP, flag, layout_options, model_argument, read_properties, value
from staticllm.cli.progress import Progress, progress
from staticllm.core import ProgramVariant, ProgressEvent
from staticllm.errors import ConfigError, DeviceError
from staticllm.model_dir import demo_model_path
from staticllm.model_paths.arguments import expanded
from staticllm.model_paths.path_kind import for_shell, path_kind

DONE = {"read": "model read", "passes": "model lowered", "compile": "program compiled", "export": "blob written"}

if TYPE_CHECKING:
    from staticllm.compiler_passes.artifacts.manifest import Manifest
    from staticllm.pipelines.loading.kind import LoadJob


@click.command("compile", cls=GroupedCommand, groups=PROGRAM_GROUP)
@model_argument
@click.option(
    "--export-blob",
    "target",
    type=click.Path(),
    is_flag=False,
    flag_value="",
    default="",
    help="Folder to write; must not exist.  [openvino_model.blob in the folder of MODEL, NAME.blob beside NAME.gguf]",
)
@flag(
    "--verify is_verified",
    "Compare the set's logits, or an encoder's vectors, with the CPU in f32; a set that differs too much is never loaded.",
)
@value("--adapter adapters", click.Path(), "A LoRA adapter of the shapes that the set will serve.", multiple=True)
@platform_options
@flag("--json as_json", "Print the manifest.")
@layout_options
def command(
    model: str,
    target: str,
    is_verified: bool,
    adapters: tuple[str, ...],
    platform: str | None,
    compiler: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Compile all programs of MODEL, a decoder, an encoder or a speech model, and export them as a blob set, which the option
    BLOB_PATH loads.

    The set of the embedded demo model is written to demo_model.blob in the current folder. With --platform, the set is for an NPU
    that need not be on this machine.
    """
    check_platform(platform, options["device"], is_verified)
    if platform is None:
        _check_npu(options["device"])
    target = _target(model, target)
    with progress("compiling") as shown, npu_target(platform, compiler) as elsewhere:
        from staticllm.devices import check_device, check_known
        from staticllm.pipelines.diagnostics.kinds import jobs_in

        check = check_device if elsewhere is None else check_known
        found = jobs_in(model, options["device"], read_properties(options), CompileSteps(shown), check)
        jobs = {name: replace(job, target=elsewhere) for name, job in found.items()}
        if "" not in jobs:
            if is_verified or adapters:
                what = found.diagnosis.what(jobs[next(iter(jobs))].directory)
                raise ConfigError(
                    "--verify and --adapter are for models of text: leave them out; `staticllm verify MODEL` compares "
                    + what
                )
            manifests = _written_parts(jobs, Path(target))
        else:
            manifests = {"": _written(jobs[""], Path(target), adapters, is_verified, shown)}
    if as_json:
        from staticllm.compiler_passes.artifacts.manifest import manifest_to_json

        written = {name: manifest_to_json(manifest) for name, manifest in manifests.items()}
        click.echo(json.dumps(written.get("", written), indent=2))
    else:
        _report(manifests, target)
    if any(manifest.has_failed_verification for manifest in manifests.values()):
        raise SystemExit(1)


def _written(
    job: LoadJob[Any], target: Path, adapters: tuple[str, ...], is_verified: bool, shown: Progress
) -> Manifest:
    """Write the set of a model, verify it if that is wanted, and return its manifest."""
    from staticllm.pipelines.diagnostics.kinds import verify_set
    from staticllm.pipelines.loading.export import export_set

    if adapters:
        job = _with_adapters(job, adapters, is_verified)
    manifest = export_set(job, target)
    if is_verified:
        shown.show("comparing with the CPU")
        manifest = verify_set(job, target)
    return manifest


def _written_parts(jobs: Mapping[str, LoadJob[Any]], target: Path) -> dict[str, Manifest]:
    """Write the sets of a model's parts into folders of their own in a new one, or nothing if one of them fails."""
    from staticllm.pipelines.loading.export import export_set

    target.mkdir(exist_ok=True)
    try:
        return {name: export_set(job, target / name) for name, job in jobs.items()}
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise


def _target(model: str, given: str) -> str:
    """Return the folder of the set: the given one, or that beside the model's files, for a GGUF file beside it.

    Raises:
        UsageError: it is a model, which click took for the value of ``--export-blob``.
        ConfigError: it exists, or cannot be written.
    """
    from staticllm.pipelines.loading.export import DEFAULT_BLOB, check_new

    if given and path_kind(expanded(given)).is_loadable:
        raise click.UsageError(
            f"--export-blob {given} names a model: give it first, staticllm compile {given} --export-blob"
        )
    directory = Path(model_directory(model, takes_parts=True))
    if directory == demo_model_path():
        beside = Path("demo_model.blob")
    elif directory.is_file():
        beside = directory.with_suffix(".blob")
    else:
        beside = directory / DEFAULT_BLOB
    target = Path(expanded(given)) if given else beside
    check_new(target)
    return str(target)


def _with_adapters(job: LoadJob[Any], paths: tuple[str, ...], is_verified: bool) -> LoadJob[Any]:
    """Return the job with adapters.

    Raises:
        ConfigError: this kind of model has none, or the set would be compared with the original, which has none.
        AdapterError: a file is no adapter.
    """
    from staticllm.adapters.adapter_set import AdapterSet
    from staticllm.adapters.lora import read_adapter
    from staticllm.compiler_passes.artifacts.fingerprint import with_article
    from staticllm.pipelines.diagnostics.kinds import diagnosis_of

    if not diagnosis_of(job.kind.name).takes_adapters:
        what = with_article(job.kind.name)
        raise ConfigError(f"--adapter changes decoders, this model is {what}: leave it out")
    if is_verified:
        raise ConfigError("--verify compares a set with the original, which has no adapters: leave one of both out")
    found = AdapterSet.of((read_adapter(path), 1.0) for path in paths)
    return replace(job, config=replace(job.config, adapters=found))


def _check_npu(device: str) -> None:
    """Check that there is an NPU if ``device`` is one.

    Raises:
        DeviceError: there is no NPU; the message also names OpenVINO's NPU compiler if that is missing.
    """
    from staticllm.devices import get_core, kind, npu_compiler_problem

    core = get_core()
    if kind(device) != "NPU" or any(name.startswith("NPU") for name in core.available_devices):
        return
    problem = npu_compiler_problem(core)
    remedy = (
        "compile on a machine with an NPU, or for one with --platform; `staticllm plan --device NPU` works without one"
    )
    raise DeviceError(f"there is no NPU on this machine{f', and {problem}' if problem else ''}: {remedy}")


def _report(manifests: Mapping[str, Manifest], target: str) -> None:
    for name, manifest in manifests.items():
        size = f"{manifest.num_bytes / 1e6:.1f} MB" + (", weights not included" if manifest.is_weightless else "")
        folder = Path(target) / name
        click.echo(f"{len(manifest.blobs)} blobs for {len(manifest.variants)} variants in {folder} ({size})")
    if not any(manifest.has_failed_verification for manifest in manifests.values()):
        click.echo(f"later starts load it with -p BLOB_PATH={for_shell(target)}")
    for manifest in manifests.values():
        _report_verification(manifest)


def _report_verification(manifest: Manifest) -> None:
    found = manifest.verification
    if found is not None:
        from staticllm.pipelines.diagnostics.kinds import diagnosis_of

        verdict = "verified" if found["is_ok"] else "FAILED verification, never loaded"
        text = diagnosis_of(manifest.kind).agreement_text(found)
        click.echo(f"{verdict}: {text} ({found['against']})")


class CompileSteps:
    """Shows the progress on stderr: a bar on a terminal, else one line per program that is compiled or written."""

    def __init__(self, shown: Progress) -> None:
        self._shown = shown
        self._is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._compiled: list[ProgramVariant | None] = []  # the variant that each program was compiled for

    def __call__(self, event: ProgressEvent) -> None:
        self._shown(event)
        if self._is_terminal or not event.is_done or event.stage not in DONE:
            return
        text = DONE[event.stage]
        index = event.index
        total = event.total
        if event.stage == "compile":
            self._compiled = [*(self._compiled if index > 1 else []), event.variant]
        if event.stage == "export":  # reported per variant; variants of one program share its blob
            if event.variant not in self._compiled:
                return
            index = self._compiled.index(event.variant) + 1
            total = len(self._compiled)
        what = f"{text} {index} of {total}" if total > 1 else text
        click.echo(f"{what:<28} {event.seconds:6.2f} s", err=True)
