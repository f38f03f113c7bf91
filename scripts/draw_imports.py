"""Draws the house from its imports, read as text: floors of folders and the arrows between them, as ``docs/structure.md`` shows.

python scripts/draw_imports.py
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAPPED = ("compiler_passes", "kvcache", "pipelines")
"""The folders beside ``staticllm/`` that install as ``staticllm.NAME``."""
ONE_ROOM = ("compiler_passes", "kvcache")
"""The folders whose own files are one room."""
BESIDE_PASSES = tuple(f"compiler_passes/{name}" for name in ("artifacts", "compiling", "conversion", "npu_compiler"))
"""Rooms of ``compiler_passes/`` that hold no passes, and have doors of their own."""
DOOR = "staticllm"
"""The room of ``staticllm/__init__.py``, which only names what others hold. Nothing below it may need it."""
KERNEL = (
    *(
        f"staticllm/{name}"
        for name in ("core", "errors", "kinds", "version", "devices", "metrics", "config", "properties", "ports")
    ),
    *(f"staticllm/{name}" for name in ("results", "events", "model_dir", "system", "wire", "children")),
    *("staticllm/model_paths", "staticllm/adapters", "compiler_passes", "kvcache"),
    *(f"pipelines/{name}" for name in ("costs", "profiling", "generation", "programs", "loading")),
    *(f"pipelines/{name}" for name in ("scheduling", "engine", "text")),
)
"""What runs a decoder: from a graph and a request in token ids to tokens and their text. It imports no feature."""
_CLI = "staticllm/cli"
FEATURES = {
    "grammars and conversation": ("pipelines/grammars", "pipelines/conversation"),
    "decisions": ("pipelines/decisions", f"{_CLI}/decide"),
    "embedding and WindVE": (
        *(f"pipelines/{name}" for name in ("embedding", "encoder_pipeline", "text_embedding_pipeline")),
        "pipelines/text_rerank_pipeline",
        *(f"{_CLI}/{name}" for name in ("embed", "plan_embed", "texts", "vector_files")),
    ),
    "daemon and attach": (
        *("staticllm/daemon", "staticllm/attach", "pipelines/daemon_client", f"{_CLI}/attach", f"{_CLI}/daemon"),
    ),
    "server": ("staticllm/server", f"{_CLI}/serve"),
    "speech": ("pipelines/speech", "pipelines/whisper_pipeline", f"{_CLI}/transcribe"),
    "files of others": (
        *("staticllm/model_files", "staticllm/export", "compiler_passes/conversion"),
        *(f"{_CLI}/{name}" for name in ("export", "pulling", "models")),
    ),
    "NPU elsewhere": ("compiler_passes/npu_compiler", f"{_CLI}/npu_platform"),
    "diagnostics": (
        "pipelines/diagnostics",
        f"{_CLI}/bench",
        f"{_CLI}/model_reports",
        f"{_CLI}/trace",
    ),
    "simulator": ("pipelines/simulator", f"{_CLI}/simulate"),
}
"""What stands beside each other above the kernel. A cluster is a part of the server that nothing else imports."""
DOORS = "doors"
"""The part that puts kernel and features together for users: pipelines, commands, fakes."""
Graph = dict[str, set[str]]


def files() -> dict[str, Path]:
    """Return each file of the library by its place on the disk, such as ``pipelines/engine/engine``."""
    found = sorted(path for folder in (DOOR, *MAPPED) for path in (ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT).with_suffix("").as_posix().removesuffix("/__init__"): path for path in found}


@cache
def _imports_in(path: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return tuple(node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))


def imports(path: Path, known: Collection[str]) -> Iterator[str]:
    """Yield the places that a file names: dots count folders on the disk, ``staticllm.NAME`` is a place below ``staticllm/``."""
    for node in _imports_in(path):
        if isinstance(node, ast.Import):
            yield from (_place(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            folder = path.parents[node.level - 1].relative_to(ROOT).as_posix() if node.level else ""
            base = "/".join(part for part in (folder.removeprefix("."), _place(node.module or "", node.level)) if part)
            inside = (f"{base}/{alias.name}".removeprefix("/") for alias in node.names)
            yield from (place if place in known else base for place in inside)


def _place(module: str, level: int = 0) -> str:
    """Return a place of a module's name. From ``staticllm/`` the mapped folders are named as they install."""
    parts = module.split(".")
    mapped = not level and parts[0] == DOOR and len(parts) > 1 and parts[1] in MAPPED
    return "/".join(parts[1:] if mapped else parts)


def graph_of_files() -> Graph:
    """Return which files need which, at once, in a function or for types."""
    known = files()
    return {
        place: {name for name in imports(path, known) if name in known and name != place}
        for place, path in known.items()
    }


def room_of(place: str) -> str:
    """Return the folder to which a place belongs, or the file itself if it stands beside folders of other rooms."""
    room = "/".join(place.split("/")[:2])
    top = room.split("/")[0]
    return top if top in ONE_ROOM and not (ROOT / room).is_dir() else room


def graph_of_rooms(needs: Graph) -> Graph:
    """Return which rooms need which. The door of ``staticllm`` is left out."""
    found: Graph = {}
    for place, others in needs.items():
        room = room_of(place)
        if room in (DOOR, "pipelines"):
            continue
        below = {room_of(other) for other in others} - {room, DOOR, "pipelines"}
        found.setdefault(room, set()).update(below)
    return found


def floors(rooms: Graph) -> dict[str, int]:
    """Return the floor of each room: one above the highest that it needs. Raises ``CycleError`` (rooms in a circle)."""
    found: dict[str, int] = {}
    for room in TopologicalSorter(rooms).static_order():
        found[room] = 1 + max((found[other] for other in rooms.get(room, ())), default=0)
    return found


def direct(room: str, rooms: Mapping[str, set[str]]) -> list[str]:
    """Return the rooms that a room needs and that no other of them needs, so that the drawing has few arrows."""
    reached: dict[str, set[str]] = {}

    def below(other: str) -> set[str]:
        if other not in reached:
            reached[other] = set().union(*({each} | below(each) for each in rooms.get(other, ())))
        return reached[other]

    return sorted(each for each in rooms[room] if not any(each in below(other) for other in rooms[room]))


def part_of(place: str) -> str:
    """Return ``kernel``, the name of a feature, or ``doors``."""
    parts = {**FEATURES, "kernel": KERNEL}
    names = (name for name, roots in parts.items() for root in roots if place == root or place.startswith(f"{root}/"))
    return next(names, DOORS)


def doors() -> dict[str, set[str]]:
    """Return, for each folder, its modules that another room imports. Inside one feature, and for the pipelines, all are open."""
    known = files()
    found: dict[str, set[str]] = {}
    for place, others in graph_of_files().items():
        for other in others:
            is_near = _house(place) == _house(other) or part_of(place) == part_of(other) != "kernel"
            if known[other].name == "__init__.py" or _house(other) == other or place == DOOR or is_near:
                continue
            folder, _, name = other.rpartition("/")
            found.setdefault(folder, set()).add(name)
    return found


def _house(place: str) -> str:
    """Return the room of a place; the rooms of ``compiler_passes/`` are one."""
    top = place.split("/", maxsplit=1)[0]
    return top if top in ONE_ROOM else room_of(place)


def sizes() -> dict[str, int]:
    """Return the lines of each part."""
    found = dict.fromkeys(("kernel", *FEATURES, DOORS), 0)
    for place, path in files().items():
        found[part_of(place)] += len(path.read_text(encoding="utf-8").splitlines())
    return found


def drawing() -> str:
    """Return the floors from the top to the bottom, as text."""
    needs = graph_of_files()
    list(TopologicalSorter(needs).static_order())  # raises for a circle of files
    rooms = graph_of_rooms(needs)
    height = floors(rooms)
    arrows = sum(map(len, rooms.values()))
    lines = [
        f"{len(needs)} files in {len(rooms)} rooms on {max(height.values())} floors; {arrows} arrows, none of them up",
        "",
    ]
    for floor in range(max(height.values()), 0, -1):
        for room in sorted(name for name, at in height.items() if at == floor):
            lines.append(f"{floor:2}  {room:34} {' '.join(direct(room, rooms))}".rstrip())
    return "\n".join(lines)


if __name__ == "__main__":
    print(drawing())
