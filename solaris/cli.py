"""From a command line to one verb of `solaris/commands/` and an exit code.

A file there is a verb: `import_.py` is `solaris import`. It has `app`, a typer.Typer, and the first line of its docstring
is its line in the help. It is imported only when it is called, so that `solaris --help` knows nothing of torch or Kafka.

Exit codes: 0 done, 1 the work failed, 2 the call or a setting is wrong, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("TYPER_USE_RICH", "0")  # plain help: importing what draws the boxes takes 0.2 s

import typer
from typer.core import TyperCommand, TyperGroup

from schemas.errors import SolarisError

COMMANDS = Path(__file__).with_name("commands")
OURS = ("schemas", "models", "streams", "agents")
# The order in which a newcomer needs them; a verb that isn't named here comes after these.
STORY = ("demo", "broker", "topics", "generate", "import", "train", "worker", "produce", "rank")

HELP = """A foundation model's signal in a real-time ranker, without its latency.

Settings come from solaris.toml (or --config), then the environment (SOLARIS_KAFKA__BOOTSTRAP), then flags; the last wins.

Examples:

\b
    solaris broker start --detach      a real Kafka on this machine
    solaris topics create              the topics that Solaris needs
    solaris --set kafka.bootstrap=kafka-1:9092 topics check
"""


class _Verbs(TyperGroup):
    """The group of all verbs: lists them from their files' docstrings, imports the one that is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {verb: TyperCommand(verb, help=_summary(path)) for verb, path in verbs().items()}

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - the base class's signature
        return list(self.commands)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and name is not None:
            app = importlib.import_module(f"solaris.commands.{verbs()[name].stem}").app
            app._add_completion = False  # a verb of ours, not a program of its own
            command = _keep_examples(typer.main.get_command(app))
            command.name = name
        return name, command, rest


def verbs() -> dict[str, Path]:
    """Verb → its file, in the order of the story."""
    found = {path.stem.rstrip("_"): path for path in sorted(COMMANDS.glob("*.py")) if path.stem != "__init__"}
    order = [verb for verb in STORY if verb in found]
    return {verb: found[verb] for verb in [*order, *(verb for verb in found if verb not in STORY)]}


def _keep_examples(command: Any) -> Any:
    """Mark indented paragraphs of the help so that the formatter doesn't wrap them into one."""
    paragraphs = (command.help or "").split("\n\n")
    command.help = "\n\n".join(f"\b\n{text}" if text.startswith("    ") else text for text in paragraphs)
    for inner in getattr(command, "commands", {}).values():
        _keep_examples(inner)
    return command


def _summary(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or path.stem).partition("\n")[0]


app = typer.Typer(
    cls=_Verbs,
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _globals(
    ctx: typer.Context,
    config: Annotated[
        Path | None, typer.Option(help="Settings file (TOML); default: solaris.toml if it is there.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="One setting; may be repeated.")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    ctx.obj = {"config": config, "overrides": overrides or [], "debug": debug}


def check_names() -> None:
    """Refuse to start where another installed package answers to one of our generic top-level names."""
    root = Path(__file__).resolve().parent.parent
    for name in OURS:
        spec = importlib.util.find_spec(name)
        places = [Path(place).resolve() for place in (spec.submodule_search_locations or [])] if spec else []
        if root / name not in places[:1]:
            where = places[0] if places else "nowhere"
            raise SolarisError(
                f"The package `{name}` is found at {where}, not beside solaris at {root}: another package of that name "
                "is in the way. Give Solaris a virtual environment of its own and run it from there."
            )


def main() -> None:
    """Entry point of the console script; exits with the codes named above."""
    debug = "--debug" in sys.argv
    # As at Ctrl-C, what was started is stopped on the way out; a verb that stops in its own order sets its own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        check_names()
        app(prog_name="solaris")
    except SolarisError as error:
        if debug:
            raise
        print(f"solaris: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # `solaris … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
