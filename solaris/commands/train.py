"""Train a bundle (FM, compressor, ranker, priors) from a log."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from solaris.commands import config as settings
from solaris.commands import emit

HELP = """Train a bundle (FM, compressor, ranker, priors) from a log, in one pass over event time.

The figures it prints are of the newest tenth of the training span, which no model was trained on.

Examples:

    solaris train logs/demo --out bundle
    solaris train logs/demo --out bundle --until-ts 1780000000000 --ttl 4h --json

Exit codes: 0 done, 1 the FM is no better than the ranker without it, or the disk failed, 2 a wrong call, log or setting.
"""

app = typer.Typer()


@app.command(help=HELP)
def train(
    ctx: typer.Context,
    log: Annotated[Path, typer.Argument(help="A log folder with requests, from `solaris import` or `generate`.")],
    out: Annotated[Path, typer.Option(help="Folder of the bundle.")],
    until_ts: Annotated[
        int, typer.Option(help="End of training in event time, UTC ms, exclusive.", show_default="the end")
    ] = 2**62,
    ttl: Annotated[str | None, typer.Option(help="How long a vector counts, such as 4h.")] = None,
    warm_share: Annotated[float, typer.Option(help="Share of the requests that come before the first vector.")] = 0.5,
    seed: Annotated[int, typer.Option(help="The same seed gives the same bundle.")] = 1,
    device: Annotated[str, typer.Option(help="Where the FM trains: cpu, cuda or cuda:N.")] = "cpu",
    allow_no_gain: Annotated[
        bool, typer.Option("--allow-no-gain", help="Write the bundle even where the FM is no better than the ranker.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a bundle that is in the folder.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line instead of sentences.")] = False,
) -> None:
    """Train and write the bundle."""
    import torch

    from models.bundle import Bundle
    from schemas.errors import UsageError
    from schemas.log import Log
    from solaris.train import TrainConfig, Trainer
    from streams.predict import PredictConfig
    from streams.serve import ServeConfig
    from streams.verify import VerifyConfig

    torch.set_num_threads(1)
    if out.exists() and not force:
        raise UsageError(f"{out} exists; name a new folder, or add --force")
    loaded = settings(ctx, serve__ttl_ms=ttl)
    config = TrainConfig(
        until_ts=until_ts,
        allow_no_gain=allow_no_gain,
        warm_share=warm_share,
        seed=seed,
        device=device,
        serve=loaded.get(ServeConfig),
        predict=loaded.get(PredictConfig),
        verify=loaded.get(VerifyConfig),
    )
    bundle, report = Trainer(Log(log), config, lambda words: print(f"  {words}", file=sys.stderr, flush=True)).run()
    bundle.save(out, replace_old=force)
    stored = Bundle.load(out, ())
    gain = report.base.bce - report.solaris.bce
    gap = report.base.bce - report.fm.bce
    emit(
        {"bundle": str(out), "hash": stored.hash, "space": bundle.name, "metrics": report.metrics()},
        f"{out}: embedding space {bundle.name}. Held-out log loss: ranker alone {report.base.bce:.4f}, with embeddings "
        f"{report.solaris.bce:.4f}, FM itself {report.fm.bce:.4f}"
        + _carried(gain, gap)
        + f" at an exact coverage of {report.coverage['exact']:.0%}.",
        as_json=as_json,
    )


def _carried(gain: float, gap: float) -> str:
    """How much of the FM's gain reached the ranker, as words."""
    if gap <= 0:
        return "; the FM has no gain to carry over"
    if gain <= 0:
        return "; none of the FM's gain is carried over yet: train on more days or users"
    return f"; {gain / gap:.0%} of the FM's gain is carried over"
