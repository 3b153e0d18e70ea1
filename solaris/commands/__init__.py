"""One file per verb; what they share is here. See solaris/cli.py for how a file becomes a verb."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def emit(facts: Mapping[str, Any], sentence: str, *, as_json: bool) -> None:
    """Print a result for a script (one JSON line) or for a person (a sentence)."""
    print(json.dumps(facts) if as_json else sentence, flush=True)
