"""``staticllm transcribe`` writes what is said in recordings, as text or as subtitles."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from staticllm.cli.grouped_command import GroupedCommand
from staticllm.cli.options import DEVICE_HELP, flag, property_option, value, with_properties
from staticllm.cli.progress import Progress, progress
from staticllm.cli.terminal import printable
from staticllm.errors import ConfigError, PromptError, StaticLLMError, quoted
from staticllm.system.files import refusal_of, write_whole

if TYPE_CHECKING:
    from staticllm.pipelines.speech.results import WhisperDecodedResults
    from staticllm.pipelines.speech.transcription_watch import WindowHeard
    from staticllm.pipelines.whisper_pipeline import StaticWhisperPipeline

SUFFIXES = {"text": "txt", "srt": "srt", "vtt": "vtt", "json": "json"}
GROUPS = {
    "Output": ("form", "timestamps", "output"),
    "Silence and doubt": ("temperatures", "no_speech_threshold", "logprob_threshold", "compression_ratio_threshold"),
}


@dataclass(frozen=True)
class Transcribed:
    """One recording: its path, the second at which it ends, and what is said in it, by the times of its file."""

    path: Path
    seconds: float
    results: WhisperDecodedResults


@click.command("transcribe", cls=GroupedCommand, groups=GROUPS)
@click.argument("files", nargs=-1, required=True, type=click.Path(), metavar="FILE...")
@value("-m --model", click.Path(), "Directory of a speech model.", required=True)
@value("--language", None, "Language that is spoken, such as de.  [the model detects it]", metavar="CODE")
@flag("--translate", "Write it in English.")
@value(
    "--parallel-windows",
    click.IntRange(min=1),
    "Cut each recording at silences, and transcribe this many of its windows together.  [one after another]",
)
@value("--device", None, DEVICE_HELP, "CPU")
@property_option
@value(
    "--temperatures",
    None,
    "Decode a window at these temperatures, until its text is good.  [0,0.2,0.4,0.6,0.8,1]",
    metavar="LIST",
)
@value("--no-speech-threshold", None, "A doubtful window is silent above this probability, or none.  [0.6]")
@value("--logprob-threshold", None, "Text is doubtful below this mean log-probability, or none.  [-1]")
@value("--compression-ratio-threshold", None, "Text repeats itself above this ratio of its tokens, or none.  [1.35]")
@click.option("--text", "form", flag_value="text", default=True, help="Write text.  [the default]")
@click.option("--srt", "form", flag_value="srt", help="Write SubRip subtitles.")
@click.option("--vtt", "form", flag_value="vtt", help="Write WebVTT subtitles.")
@click.option("--json", "form", flag_value="json", help="Write JSON, with the times of segments.")
@flag("--timestamps", "Write a line of text per segment, with its times.")
@value("-o --output", click.Path(), "Folder for a file per recording.  [stdout]", metavar="DIR")
def transcribe(files: tuple[str, ...], model: str, **options: Any) -> None:
    """Write what is said in each FILE: a recording or a film in any usual format.

    Several files are transcribed at the same time, and written in their order. The model is Whisper, exported by optimum-cli
    for automatic-speech-recognition-with-past.
    """
    paths = [Path(file) for file in files]
    targets = _targets(paths, options)
    with progress("loading") as shown, _loaded(model, options, len(paths), shown) as pipe:
        asked = _asked(options) | {"word_timestamps": pipe.has_words and options["form"] == "json"}
        work = Transcriptions(pipe, asked, shown)
        for target, found in zip(targets, work.run(paths), strict=True):
            _write(found, target, options, len(paths) > 1, shown)


def _targets(paths: list[Path], options: dict[str, Any]) -> list[Path | None]:
    """Return the file that is written for each recording; None for stdout.

    Raises:
        UsageError: options contradict each other.
        ConfigError: the folder cannot be written.
    """
    form = options["form"]
    output = options["output"]
    if options["timestamps"] and form != "text":
        raise click.UsageError(f"--timestamps is for text, --{form} has times anyway: leave it out")
    if output is None:
        if len(paths) > 1 and form in ("srt", "vtt"):
            raise click.UsageError(f"{len(paths)} files with --{form}: give --output DIR, where each gets its own")
        return [None] * len(paths)
    folder = Path(output)
    if not folder.is_dir():
        raise ConfigError(f"--output {quoted(output)} is no folder: make it first")
    if reason := refusal_of(folder):
        raise ConfigError(f"--output {quoted(output)} {reason}: choose another folder")
    targets: list[Path | None] = [folder / f"{path.stem}.{SUFFIXES[form]}" for path in paths]
    for index, target in enumerate(targets):
        if target in targets[:index]:
            other = paths[targets.index(target)]
            raise ConfigError(
                f"{quoted(other)} and {quoted(paths[index])} would both become {quoted(target)}: transcribe them apart"
            )
    return targets


def _asked(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of ``submit``."""
    found: dict[str, Any] = {"return_timestamps": options["form"] != "text" or options["timestamps"]}
    if options["language"] is not None:
        found["language"] = options["language"]
    if options["translate"]:
        found["task"] = "translate"
    if options["parallel_windows"] is not None:
        found["parallel_windows"] = options["parallel_windows"]
    return found


@contextmanager
def _loaded(model: str, options: dict[str, Any], num_files: int, shown: Progress) -> Iterator[StaticWhisperPipeline]:
    """Load the model; for one window at a time, if that is all that is needed: static programs read the places of all."""
    from staticllm.model_paths.arguments import expanded
    from staticllm.pipelines.speech.speech_jobs import with_fall_back
    from staticllm.pipelines.speech.whisper_config import FALL_BACK
    from staticllm.pipelines.whisper_pipeline import StaticWhisperPipeline

    given = {name.upper(): options[name] for name in FALL_BACK if options[name] is not None}
    flags = {name: name.upper() for name in FALL_BACK}
    properties = with_fall_back(with_properties(given, flags, options["properties"]))
    has_one = num_files == 1 and options["parallel_windows"] is None
    if has_one and not {"MAX_WINDOWS", "BLOB_PATH"} & {name.upper() for name in properties}:
        properties["MAX_WINDOWS"] = 1
    with StaticWhisperPipeline(expanded(model), options["device"], on_progress=shown, config=properties) as pipe:
        yield pipe


class Transcriptions:
    """Transcribes recordings, as many at once as the programs decode together, and yields them in order."""

    def __init__(self, pipe: StaticWhisperPipeline, asked: dict[str, Any], shown: Progress) -> None:
        from staticllm.pipelines.speech.transcription_watch import Cancellation

        self._pipe = pipe
        self._asked = asked
        self._shown = shown
        self._cancellation = Cancellation()
        self._lock = threading.Lock()
        self._transcribed: dict[int, float] = {}  # seconds of each recording that are transcribed
        self._lengths: dict[int, float] = {}

    def run(self, paths: list[Path]) -> Iterator[Transcribed]:
        """Yield what is said in each file. After an exception, also Ctrl-C, no thread is left.

        Raises:
            StaticLLMError: a file cannot be read, or not transcribed.
        """
        with ThreadPoolExecutor(self._pipe.num_windows, "staticllm-transcribe") as pool:
            futures: list[Future[Transcribed]] = []
            try:
                futures += [pool.submit(self._transcribe, index, path) for index, path in enumerate(paths)]
                while futures:
                    yield futures[0].result()
                    futures.pop(0)
            finally:
                self._cancellation.cancel()
                for future in futures:
                    future.cancel()

    def _transcribe(self, index: int, path: Path) -> Transcribed:
        from staticllm.pipelines.speech.audio_stream import read_cancellable
        from staticllm.pipelines.speech.results import later

        recording = read_cancellable(path, self._cancellation)
        start = recording.start
        seconds = len(recording.samples) / self._pipe.sampling_rate
        self._tell(index, 0.0, seconds)

        def on_window(window: WindowHeard) -> None:
            self._tell(index, window.seconds, seconds)

        try:
            handle = self._pipe.submit(recording.samples, on_window=on_window, **self._asked)
        except PromptError as error:
            raise PromptError(f"{quoted(path)}: {error}") from error
        del recording
        with self._cancellation.ending(handle.cancel):
            return Transcribed(path, max(0.0, start + seconds), later(handle.result(), start))

    def _tell(self, index: int, transcribed: float, seconds: float) -> None:
        with self._lock:
            self._transcribed[index] = transcribed
            self._lengths[index] = seconds
            done = sum(self._transcribed.values())
            total = sum(self._lengths.values())
        self._shown.show("transcribing, s of sound", int(done), max(2, int(total)))


def _write(
    found: Transcribed, target: Path | None, options: dict[str, Any], is_one_of_many: bool, shown: Progress
) -> None:
    text = _text_of(found, options)
    if target is not None:
        try:
            write_whole(target, text.encode(errors="replace"))  # names of files may be in no encoding
        except OSError as error:
            raise StaticLLMError(f"{quoted(target)} cannot be written: {error.strerror or error}") from None
        return
    form = options["form"]
    head = f"# {found.path}\n" if is_one_of_many and form == "text" else ""
    shown.write(printable(head + text).rstrip("\n") if form == "text" else text.rstrip("\n"))


def _text_of(found: Transcribed, options: dict[str, Any]) -> str:
    from staticllm.pipelines.speech.subtitles import Layout, lines, verbose_json, written

    form = options["form"]
    layout = Layout(duration=found.seconds)
    if form == "json":
        entry = {"file": str(found.path), **verbose_json(found.results, layout)}
        return json.dumps(entry, ensure_ascii=False) + "\n"
    if form in ("srt", "vtt"):
        return written(found.results, form, layout)
    return lines(found.results, layout) if options["timestamps"] else str(found.results).strip() + "\n"
