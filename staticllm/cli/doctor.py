"""``staticllm doctor`` checks packages, devices, a model and a cache, and the tokens of the embedded model."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from staticllm.cli.model_arguments import one_model
from staticllm.cli.progress import progress

MARKS = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red")}


@click.command("doctor")
@click.option("--device", "devices", multiple=True, help="Devices for the self-test.  [all]")
@click.argument("model", type=click.Path(), required=False)
@click.option("-m", "--model", "named", type=click.Path(), help="The same as MODEL.")
@click.option("--cache-dir", type=click.Path(), help="A cache folder whose sets are verified.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    devices: tuple[str, ...], model: str | None, named: str | None, cache_dir: str | None, as_json: bool
) -> None:
    """Check packages, devices, memory and a cache, load MODEL, and run the embedded model. Exit with code 1 if a check fails.

    MODEL is compiled with short lengths and runs a chat turn, a text or pairs, on the first --device, else on the CPU. With
    --cache-dir, its weights are compared with those that the sets in the cache were compiled from.
    """
    model = one_model(model, named)
    findings = []
    with progress("examining") as shown:
        from staticllm.pipelines.diagnostics.doctor import examine

        for finding in examine(devices, cache_dir, model, shown):
            findings.append(finding)
            if not as_json:
                mark, colour = MARKS[finding.level]
                remedy = f"\n      {finding.remedy}" if finding.remedy else ""
                shown.write(f"{click.style(mark, fg=colour)}  {finding.name}: {finding.value}{remedy}")
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    if any(finding.level == "fail" for finding in findings):
        raise SystemExit(1)
