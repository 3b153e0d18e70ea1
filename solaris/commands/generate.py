"""Generate a log of impressions and clicks whose true probabilities are known."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from solaris import generate as maker
from solaris.commands import emit
from solaris.importers.progress import bar
from solaris.world import GenerateConfig

app = typer.Typer()
_DEFAULT = GenerateConfig()


@app.command()
def generate(
    out: Annotated[Path, typer.Option(help="Folder for the log; new or empty.")],
    users: Annotated[int, typer.Option(help="Users; one in ten arrives during the log.")] = _DEFAULT.users,
    items: Annotated[int, typer.Option(help="Items in all; they are born and expire.")] = _DEFAULT.items,
    days: Annotated[float, typer.Option(help="Length in days.")] = _DEFAULT.days,
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes.")] = _DEFAULT.seed,
    ts_start: Annotated[int, typer.Option(help="First moment, UTC milliseconds.")] = _DEFAULT.ts_start,
    ctr: Annotated[float, typer.Option(help="Share of impressions that are clicked.")] = _DEFAULT.ctr,
    return_24h: Annotated[
        float, typer.Option("--return-24h", help="Share of sessions after which the user is back within 24 h.")
    ] = _DEFAULT.return_24h,
    item_life_days: Annotated[float, typer.Option(help="Mean life of an item.")] = _DEFAULT.item_life_days,
    categories: Annotated[int, typer.Option(help="Item categories.")] = _DEFAULT.categories,
    content_noise: Annotated[
        float, typer.Option(help="Noise on the observed content; more makes history worth more.")
    ] = _DEFAULT.content_noise,
    taste: Annotated[
        float, typer.Option(help="Logits per unit of user · item; more makes a user's state worth knowing.")
    ] = _DEFAULT.taste,
    policy_temperature: Annotated[
        float, typer.Option(help="Chance in what is shown; less makes requests easier to foresee.")
    ] = _DEFAULT.policy_temperature,
    force: Annotated[bool, typer.Option("--force", help="Replace a log that is in the folder.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line instead of a sentence.")] = False,
) -> None:
    """Write events.jsonl, requests.jsonl, items.jsonl and log.json; log.json's note holds the best possible log loss.

    Examples:

        solaris generate --out out/log
        solaris generate --out out/large --users 4000 --items 2000 --days 21 --seed 7

    Exit codes: 0 done, 1 the disk failed, 2 a knob is out of range or the folder is not empty.
    """
    config = GenerateConfig(
        users=users,
        items=items,
        days=days,
        seed=seed,
        ts_start=ts_start,
        ctr=ctr,
        return_24h=return_24h,
        item_life_days=item_life_days,
        categories=categories,
        content_noise=content_noise,
        taste=taste,
        policy_temperature=policy_temperature,
    )
    with bar("generating") as progress:
        manifest = maker.generate(config, out, force=force, progress=progress)
    facts = {"log": str(out), "events": manifest.events, "requests": manifest.requests, "items": manifest.items}
    facts |= {"first_ts": manifest.first_ts, "last_ts": manifest.last_ts, "note": manifest.note}
    text = f"{out}: {manifest.events} events, {manifest.requests} requests, {manifest.items} items. {manifest.note}"
    emit(facts | {"config": dataclasses.asdict(config)}, text, as_json=as_json)
