"""Models of one's own: `package.module:factory` or `path/to/file.py:factory` to a callable.

In: a spec from the settings, never one from a bundle: a bundle that came from elsewhere must not choose what code runs.
Out: the factory. Refuses modules that would shadow our own top-level packages.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from schemas.errors import UsageError

OWN_NAMES = ("schemas", "models", "streams", "agents", "solaris")
"""Our top-level packages; their names are generic, so a clash is likely and must be said, not guessed around."""

Factory = Callable[..., Any]


def load_factory(spec: str) -> Factory:
    """The callable that `spec` names. Raises `UsageError` with what to change.

    A ranker's or foundation model's factory is called with `(config, state)`: the bundle's configuration of that part (a dict) and
    its tensors by name (numpy; empty where the bundle has none), and returns a `RankerLike` or a `FoundationLike`.
    """
    module_name, colon, attribute = spec.rpartition(":")
    if not colon or not module_name or not attribute:
        raise UsageError(f"model {spec!r}: write package.module:factory or path/to/file.py:factory")
    module = _from_file(spec, Path(module_name)) if module_name.endswith(".py") else _from_package(spec, module_name)
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise UsageError(f"model {spec!r}: {module_name} has no callable {attribute!r}")
    found: Factory = factory
    return found


def _from_package(spec: str, name: str) -> ModuleType:
    top = name.partition(".")[0]
    if top in OWN_NAMES:
        raise UsageError(
            f"model {spec!r}: the name {top!r} is one of Solaris' own packages ({', '.join(OWN_NAMES)}); rename yours, "
            "or name the file: path/to/file.py:factory"
        )
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"model {spec!r}: can't import {name}: {error}") from error


def _from_file(spec: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"model {spec!r}: there is no file {path}")
    # a name of its own, so that two files called model.py don't meet and neither hides a package
    name = f"_solaris_model_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise UsageError(f"model {spec!r}: {path} is not a Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except (ImportError, SyntaxError) as error:
        del sys.modules[name]
        raise UsageError(f"model {spec!r}: can't import {path}: {error}") from error
    return module
