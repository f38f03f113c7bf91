"""Tests the layout: which folder holds what, which module may import which, and what no file may contain."""

from __future__ import annotations

import ast
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from functools import cache

import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="reads the sources, which are the same there")
HOUSE = {
    "pyproject.toml", "staticllm", "compiler_passes", "kvcache", "pipelines", "tests", "scripts",
    "README.md", "LICENSE", "CHANGELOG.md", "docs", "examples", "findings", ".ci", ".gitignore",
}  # fmt: skip
ROOMS = ("staticllm", "compiler_passes", "kvcache", "pipelines")
LEVELS = (
    "core errors kinds version wire",
    "attach devices metrics system",
    "children model_paths",
    "adapters",
    "config",
    "properties ports",
    "results model_dir",
    "events export model_files",
    "compiler_passes.graph kvcache",
    "compiler_passes.states compiler_passes.inputs compiler_passes.rewrites compiler_passes.shapes compiler_passes.blocks",
    "compiler_passes",
    "compiler_passes.compiling compiler_passes.conversion",
    "compiler_passes.artifacts compiler_passes.npu_compiler",
    "pipelines.costs",
    "pipelines.generation pipelines.profiling",
    "pipelines.grammars pipelines.programs",
    "pipelines.scheduling.interface",
    "pipelines.scheduling.plans pipelines.scheduling.between_blocks",
    "pipelines.scheduling.time_slices",
    "pipelines.scheduling.policies",
    "pipelines.scheduling",
    "pipelines.engine",
    "pipelines.text pipelines.loading pipelines.embedding.packing",
    "pipelines.conversation pipelines.decisions",
    "pipelines.launch",
    "pipelines.embedding pipelines.daemon_client pipelines.speech",
    "pipelines.embedding.queue",
    "pipelines.embedding.windve",
    "pipelines.embedding.pool",
    "pipelines.encoder_pipeline",
    "pipelines.chat_session pipelines.snapshots pipelines.text_embedding_pipeline pipelines.text_rerank_pipeline",
    "pipelines.llm_pipeline pipelines.whisper_pipeline",
    "pipelines.simulator pipelines.diagnostics",
    "daemon server",
    "cli pyinstaller",
    "testing __main__",
    "",
)
"""The import order: a room may import only from rooms of earlier lines, not from others of its own line."""
RANKS = {room: rank for rank, line in enumerate(LEVELS) for room in line.split(" ")}
INJECTED = ("wire", "attach")
"""Rooms that strangers' programs load under another name, and that therefore import each other relatively."""


def python_files(root):
    return [path for room in ROOMS for path in sorted((root / room).rglob("*.py"))]


@cache
def nodes_of(path):
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def module_of(root, path):
    parts = path.relative_to(root).with_suffix("").parts
    parts = parts if parts[0] == "staticllm" else ("staticllm", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module):
    """Return the longest name in the table with which the module's name begins, without ``staticllm.``."""
    parts = module.split(".")[1:]
    while ".".join(parts) not in RANKS:
        parts.pop()
    return ".".join(parts)


def imports_of(root, path):
    """Yield the number of dots and the full name of each module that a file imports."""
    package = module_of(root, path.parent / "__init__.py").split(".")
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            names = [node.module] if node.module else [alias.name for alias in node.names]
            yield from ((node.level, ".".join([*base, name])) for name in names)


def _git(*arguments):
    *words, root = arguments
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    listed = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return listed


def test_the_top_level_has_only_known_names(root):
    listed = _git("ls-files", root)
    assert {line.split("/")[0] for line in listed.stdout.splitlines()} == HOUSE


def test_no_module_is_ignored_by_git(root):
    files = (f"{room}/**.py" for room in ROOMS)
    listed = _git("ls-files", "--others", "--ignored", "--exclude-standard", "--", *files, root)
    assert not listed.stdout.split(), "a clone would lack them"


def test_the_package_list_matches_the_disk(root):
    setup = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {path.parent for path in python_files(root)}
    assert set(setup["packages"]) == {module_of(root, folder / "__init__.py") for folder in folders}
    for package, folder in setup["package-dir"].items():
        assert (root / folder / "__init__.py").is_file(), package


def test_a_path_says_where_a_name_lives(root):
    """Inside the three mapped folders an import has dots, which count on the disk as in the package; else its full name."""
    for path in python_files(root):
        me = module_of(root, path)
        is_mapped = path.relative_to(root).parts[0] != "staticllm"
        for dots, name in imports_of(root, path):
            head, *rest = name.split(".")
            if head != "staticllm" or not rest:
                assert not dots, f"{me} imports {name} with dots, which is not there on the disk"
                continue
            is_near = rest[0] in ROOMS if is_mapped else rest[0] in INJECTED and me.split(".")[1] in INJECTED
            assert bool(dots) == is_near, f"{me} imports {name} {'with' if dots else 'without'} dots"


def test_imports_follow_the_import_order(root):
    bare = set(ROOMS) - {"staticllm"}
    for path in python_files(root):
        me = module_of(root, path)
        for _, name in imports_of(root, path):
            assert name.split(".")[0] not in bare, f"{me} imports the bare name {name}"
            if not name.startswith("staticllm.") or me == "staticllm":
                continue
            mine, other = room_of(me), room_of(name)
            allowed = mine == other or RANKS[other] < RANKS[mine]
            assert allowed, f"{me} may not import {name}: {mine} lies below {other} or beside it"


def needed_by(root, path, modules):
    """Return the files that a file imports: at once, in a function, or for the types alone."""
    found = set()
    package = module_of(root, path.parent / "__init__.py").split(".")
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(
                [*package[: len(package) - node.level + 1] * bool(node.level), *filter(None, [node.module])]
            )
            names = {f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules else base for alias in node.names}
        else:
            continue
        found |= names & modules.keys()
    return found - {module_of(root, path)}


def circles_of(graph):
    """Return the sets of modules that reach each other, by Tarjan's algorithm."""
    index, low, stack, found = {}, {}, [], []

    def visit(module):
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in graph[module]:
            if other not in index:
                visit(other)
            if other in stack:
                low[module] = min(low[module], low[other])
        if low[module] == index[module]:
            circle = {stack.pop()}
            while module not in circle:
                circle.add(stack.pop())
            if len(circle) > 1:
                found.append(frozenset(circle))

    for module in graph:
        if module not in index:
            visit(module)
    return set(found)


def test_no_files_import_each_other_in_a_circle(root):
    """Imports in functions and those of types count: they hide a circle, and do not open it."""
    modules = {module_of(root, path): path for path in python_files(root)}
    found = circles_of({module: needed_by(root, path, modules) for module, path in modules.items()})
    assert not found, [sorted(circle) for circle in found]


def test_no_scripts_import_each_other_in_a_circle(root):
    for folder in (root / "scripts", root / "scripts" / "papers"):
        scripts = {path.stem: path for path in folder.glob("*.py")}
        needs = {
            name: {other for _, other in imports_of(root, path)} & scripts.keys() for name, path in scripts.items()
        }
        assert any(needs.values())
        assert not circles_of(needs)


@pytest.fixture(scope="module")
def drawn(root):
    """The script that draws the house, and has the table of its parts."""
    return runpy.run_path(str(root / "scripts" / "draw_imports.py"))


def test_the_kernel_imports_no_feature(drawn):
    part_of = drawn["part_of"]
    needs = drawn["graph_of_files"]()
    kernel = {place: others for place, others in needs.items() if part_of(place) == "kernel"}
    assert len(kernel) > 150
    up = [f"{place} -> {other}" for place, others in kernel.items() for other in others if part_of(other) != "kernel"]
    assert not up, "the kernel knows protocols and values of its own; what implements them is handed to it"


def test_each_root_of_the_table_of_parts_exists(drawn, root):
    roots = [*drawn["KERNEL"], *(each for roots in drawn["FEATURES"].values() for each in roots)]
    assert len(roots) == len(set(roots))
    assert not [each for each in roots if not ((root / each).is_dir() or (root / f"{each}.py").is_file())]
    parts = {drawn["part_of"](place) for place in drawn["files"]()}
    assert parts == {"kernel", "doors", *drawn["FEATURES"]}


MAX_DOOR = 8
WIDE_DOORS = {
    "staticllm/system": 15,  # tools that have nothing to do with each other
    "kvcache": 13, "compiler_passes/compiling": 12, "pipelines/engine": 12, "pipelines/text": 11, "pipelines/speech": 10,
    "pipelines/generation": 9,
}  # fmt: skip
"""The most modules that other rooms may use, where these are more than ``MAX_DOOR``; a number may only fall."""


def test_a_room_is_entered_through_its_door(drawn, root):
    """``__all__`` of a folder names the modules that other rooms may use, and no others."""
    doors = drawn["doors"]()
    assert len(doors) > 30
    for folder in {path.parent for path in python_files(root) if path.name == "__init__.py"}:
        place = folder.relative_to(root).as_posix()
        tree = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
        named = [node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"]
        if place == "staticllm":
            continue
        given = ast.literal_eval(named[0]) if named else []
        names = [name for name in given if (folder / f"{name}.py").is_file()]  # others are functions
        assert names == sorted(doors.get(place, ())), f"{place}: other rooms use {sorted(doors.get(place, ()))}"
        assert len(names) <= WIDE_DOORS.get(place, MAX_DOOR), f"{place} has a wide door: {len(names)} modules"
    assert {place: len(doors[place]) for place in WIDE_DOORS} == WIDE_DOORS, "lower the numbers"


def test_the_search_finds_circles():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"e2"}, "e2": {"e", "a"}}
    assert circles_of(graph) == {frozenset("bc"), frozenset(["e", "e2"])}


def test_injected_packages_import_only_each_other_and_openvino(root):
    """They run in environments without staticllm and its dependencies, below another name."""
    known = sys.stdlib_module_names | {"numpy", "openvino"}
    for room in INJECTED:
        for path in sorted((root / "staticllm" / room).rglob("*.py")):
            for node in nodes_of(path):
                if isinstance(node, ast.ImportFrom) and node.level == 0:
                    assert node.module.split(".")[0] in known, f"{path} imports {node.module}"
                elif isinstance(node, ast.Import):
                    assert {alias.name.split(".")[0] for alias in node.names} <= known, path
            relative = {name.split(".")[1] for _, name in imports_of(root, path) if name.startswith("staticllm.")}
            assert relative <= set(INJECTED[: INJECTED.index(room) + 1]), f"{path} imports {relative}"


def test_the_diagram_of_imports_is_this_table(root):
    page = (root / "docs" / "structure.md").read_text(encoding="utf-8")
    diagram = re.search(r"\nImports point one way;(?s:.*?)\n\n((?:    .*\n)+)", page)[1]
    labels = [[name.removeprefix("pipelines.").replace(".", "/") for name in line.split(" ")] for line in LEVELS]
    assert [line.split() for line in diagram.splitlines()] == [*labels[:-1], ["__init__"]]


def test_the_modules_beside_the_rooms_are_the_pipelines(root):
    direct = {"llm_pipeline", "text_embedding_pipeline", "text_rerank_pipeline", "encoder_pipeline", "chat_session"}
    direct |= {"snapshots", "whisper_pipeline"}
    assert {path.stem for path in (root / "pipelines").glob("*.py")} == {"__init__", *direct}


def test_no_condition_on_a_models_name(root, zoo):
    names = {path.name for path in zoo.iterdir() if path.is_dir()} | {"model_type", "architectures"}
    for path in python_files(root):
        text = path.read_text(encoding="utf-8").lower()
        found = [name for name in names if re.search(rf"(?<![a-z0-9_]){name}(?![a-z0-9_])", text)]
        if path.name == "path_kind.py":  # it reads the end of the name, which is the kind of head, not the model
            found = [name for name in found if name != "architectures"]
        if path.name == "gguf_tokenizer.py":  # the format calls kinds of vocabularies so
            found = []
        if path.name == "gguf_architectures.py":  # what a file means depends on the name that it says
            found = []
        if path.name == "gguf_model.py":  # it writes this key
            found = [name for name in found if name != "model_type"]
        assert not found, f"{path.relative_to(root)} names {found}"


@pytest.mark.slow
def test_tests_null_need_no_openvino(root):
    """They are imported where it is missing; a test that imports it later fails by itself there."""
    names = ["openvino", "openvino_genai", "openvino_tokenizers"]
    code = f"import sys; sys.modules.update(dict.fromkeys({names})); import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "--collect-only", "-q", "-p", "no:cacheprovider", "tests/null"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, [line for line in done.stdout.splitlines() if line.startswith("ERROR")]


def test_every_folder_of_tests_says_what_it_needs(root):
    assert {path.name for path in (root / "tests").iterdir() if path.is_dir() and path.name[0] != "_"} == {
        "null", "cpu", "peer", "zoo", "device", "support",
    }  # fmt: skip
    conftests = {path.relative_to(root / "tests").as_posix() for path in (root / "tests").rglob("conftest.py")}
    assert conftests == {
        "conftest.py", "cpu/daemon/conftest.py", "cpu/hub/conftest.py", "cpu/scripts/conftest.py", "cpu/server/conftest.py",
        "peer/conftest.py",
    }  # fmt: skip


def test_one_statement_assigns_one_thing(root):
    """Names that are assigned together hide each other. Swaps are one thing, and so are constants that share a docstring."""
    for path in python_files(root):
        for node in nodes_of(path):
            if isinstance(node, ast.Assign) and node.col_offset:
                assert len(node.targets) == 1, f"{path}:{node.lineno}: one assignment a line"
                names, values = node.targets[0], node.value
                if isinstance(names, ast.Tuple) and isinstance(values, ast.Tuple):
                    later = {ast.unparse(part) for value in values.elts[1:] for part in ast.walk(value)}
                    is_swap = any(ast.unparse(name) in later for name in names.elts[:-1])
                    assert is_swap, f"{path}:{node.lineno}: one assignment a line"


def test_no_with_statement_takes_a_condition_and_all_that_wait_are_notified(root):
    """``Condition.__enter__`` is Python code, where Ctrl-C leaves the lock taken for good: ``with`` takes the lock itself.

    Ctrl-C in ``notify`` leaves a waiter that has been woken in the condition, and the next ``notify`` wakes that one only.
    """
    trees = {path: nodes_of(path) for path in python_files(root)}
    conditions = {
        ast.unparse(target)
        for nodes in trees.values()
        for node in nodes
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and "Condition(" in ast.unparse(node.value or node)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    }
    assert "self.wake" in conditions, "the engine's"
    found = []
    for path, nodes in trees.items():
        taken = [item.context_expr for node in nodes if isinstance(node, ast.With) for item in node.items]
        told = [each.func for each in nodes if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute)]
        names = [ast.unparse(each.value if isinstance(each, ast.Subscript) else each) for each in taken]
        found += [f"{path}:{each.lineno}" for each, name in zip(taken, names, strict=True) if name in conditions]
        found += [f"{path}:{each.lineno}" for each in told if each.attr == "notify"]
    assert found == []


def test_each_class_has_a_name_of_its_own(root):
    """A reader who meets a name looks for one class."""
    places = defaultdict(list)
    for path in python_files(root):
        for name in {node.name for node in nodes_of(path)[0].body if isinstance(node, ast.ClassDef)}:
            places[name].append(path.relative_to(root).as_posix())
    assert places["Engine"]
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
