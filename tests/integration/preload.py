"""What a worker imports, done once for all workers of a run. Nothing is called, so that nothing is shared but code."""

from agents import worker
from solaris import cli
from solaris.commands import worker as command

__all__ = ["cli", "command", "worker"]
