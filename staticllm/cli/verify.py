"""``staticllm verify`` compares a lowered model with the original."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from staticllm.cli import encoders
from staticllm.cli.options import model_argument
from staticllm.cli.progress import progress

if TYPE_CHECKING:
    from staticllm.pipelines.diagnostics.reports import Verdict


@click.command("verify")
@model_argument
@click.option("--device", default="CPU", show_default=True, help="OpenVINO device: CPU, NPU, GPU …")
@click.option(
    "--programs",
    type=click.Choice(["both", "separate", "shared"]),
    default="both",
    show_default=True,
    help="One program per variant, or one for all.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def command(ctx: click.Context, model: str, device: str, programs: str, as_json: bool) -> None:
    """Compare MODEL with its original stateful IR on the CPU, in f32: logits of 96 tokens, and greedy answers.

    The chunks are small, and generation exceeds the smaller KV lengths. An encoder runs texts of several lengths, alone and
    packed into the same calls. Exit with code 1 if anything differs.
    """
    from staticllm.core import ProgramMode
    from staticllm.pipelines.diagnostics.verify import verify_model

    modes: dict[str, tuple[ProgramMode, ...]] = {
        "both": ("separate", "shared"), "separate": ("separate",), "shared": ("shared",),
    }  # fmt: skip
    verdicts: list[Verdict] = []
    with progress("comparing with the original") as shown:
        if is_encoder := encoders.is_encoder(model):
            found = encoders.verify(model, device, modes[programs], shown)
        else:
            found = verify_model(model, device, modes[programs], on_progress=shown)
        for verdict in found:
            verdicts.append(verdict)
            shown.show("comparing with the original")
            if not as_json:
                shown.write(_line(verdict, is_encoder))
    is_ok = all(verdict.is_ok for verdict in verdicts)
    if as_json:
        click.echo(json.dumps({"model": model, "device": device, "ok": is_ok, "checks": [asdict(v) for v in verdicts]}))
    else:
        click.echo("the same as the original" if is_ok else "NOT the same as the original")
    ctx.exit(0 if is_ok else 1)


def _line(verdict: Verdict, is_encoder: bool) -> str:
    check, value, detail = verdict.check, verdict.value, verdict.detail
    if is_encoder or check.endswith(("logits", "interleaved", "draft")):
        figure = f"{'numbers' if is_encoder else 'logits'} differ by {value:.1e} of their range"
    else:
        figure = f"{value:.0%} of the tokens are the same"
    return f"{'ok  ' if verdict.is_ok else 'FAIL'} {check:<40} {figure}{': ' + detail if detail else ''}"
