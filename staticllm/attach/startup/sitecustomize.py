"""Python imports this module when it starts, if the launcher has put its folder on PYTHONPATH.

It waits for the import of OpenVINO and does nothing else, so that other programs start as quickly as before and have no other
modules. A ``sitecustomize`` of the environment, which this one hides, runs as well.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # the module typing would be imported for it
    from typing import Any

WATCHED = {"openvino._ov_api": "hook", "openvino_genai": "genai", "transformers.generation.utils": "hints"}
"""The modules that are changed when a program has imported them, and which of our modules does it, with ``attach(module)``."""
PARENT = "_staticllm_client"


class Loader:
    """Runs a module as its own loader does, and changes it after that."""

    def __init__(self, loader: "Any", package: str) -> None:
        self._loader = loader
        self._package = package

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def create_module(self, spec: object) -> object:
        return self._loader.create_module(spec)

    def exec_module(self, module: object) -> None:
        """Run the module, and change it."""
        self._loader.exec_module(module)
        try:
            change(module, self._package)
        except Exception as error:
            import os

            if os.environ.get("STATICLLM_ATTACH") == "require":
                raise
            sys.stderr.write(f"staticllm attach: {error}: this program runs natively\n")


class Finder:
    """Finds the watched modules, each once, in the way of the other finders. ``package`` holds the modules that change them."""

    def __init__(self, package: str) -> None:
        self._package = package
        self._left = set(WATCHED)

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        """Return how the module is loaded; None for all other modules."""
        if name not in self._left:
            return None
        self._left.discard(name)
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec: Any = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = Loader(spec.loader, self._package)
                return spec
        return None


def change(module: "Any", package: str) -> None:
    """Let one of our modules change a module that was imported.

    In programs of others, ``package`` lies below a private name, without the package that it lies in.
    """
    import importlib
    from pathlib import Path

    if package.startswith(PARENT) and PARENT not in sys.modules:
        parent = type(sys)(PARENT)
        parent.__path__ = [str(Path(__file__).resolve().parents[2])]
        sys.modules[PARENT] = parent
    importlib.import_module(f"{package}.{WATCHED[module.__name__]}").attach(module)


def _run_hidden() -> None:
    """Run the ``sitecustomize`` that Python would have found without this one."""
    from _frozen_importlib_external import PathFinder

    ours = "staticllm/attach/startup"  # also of another copy of staticllm, which would look for this one
    others = [path for path in sys.path if not path.replace("\\", "/").rstrip("/").endswith(ours)]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None or spec.origin == __file__:
        return
    module = type(sys)("sitecustomize")
    module.__spec__ = spec
    module.__file__ = spec.origin
    module.__loader__ = spec.loader
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def _start() -> None:
    import os

    if os.environ.get("STATICLLM_ATTACH") != "off":
        sys.meta_path.insert(0, Finder(f"{PARENT}.attach"))
    _run_hidden()


if __name__ == "sitecustomize":
    _start()
