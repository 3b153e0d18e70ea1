"""One file per verb; what they share is here. See solaris/cli.py for how a file becomes a verb."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import typer

from solaris.config import Config, load


def config(ctx: typer.Context, **flags: Any) -> Config:
    """All settings; `flags` are the verb's own options by field, such as `kafka__bootstrap=…` (None = not given)."""
    given = ctx.find_root().obj or {}
    named = [f"{name.replace('__', '.', 1)}={value}" for name, value in flags.items() if value is not None]
    return load(given.get("config"), os.environ, [*given.get("overrides", ()), *named])


def emit(facts: Mapping[str, Any], sentence: str, *, as_json: bool) -> None:
    """Print a result for a script (one JSON line) or for a person (a sentence)."""
    print(json.dumps(facts) if as_json else sentence, flush=True)
