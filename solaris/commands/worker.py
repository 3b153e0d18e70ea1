"""Run one worker: speculate, infer or serve."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from solaris.commands import config as settings

app = typer.Typer(
    no_args_is_help=True,
    help="""Run one worker: speculate, infer or serve. Start as many of each as you like; Kafka's groups share out the work.

    Examples:

        solaris worker serve --bundle bundle --state-dir state/serve
        solaris worker infer --bundle bundle --device cuda
        solaris worker speculate --bundle bundle --state-dir state/speculate --stats speculate.json

    Exit codes: 0 stopped by SIGTERM or Ctrl-C, everything committed; 1 a fault that is not a record's; 2 a wrong call or setting.
    """,
)

BundleDir = Annotated[Path, typer.Option(help="A bundle's folder, from `solaris train`.")]
StateDir = Annotated[Path, typer.Option(help="Where the partitions' state lies; one worker, one folder.")]
Stats = Annotated[Path | None, typer.Option(help="Write counts to this file twice a second (JSON).")]
Bootstrap = Annotated[str | None, typer.Option(help="host:port of Kafka, several with commas.")]


@app.command()
def speculate(
    ctx: typer.Context,
    bundle: BundleDir = Path("bundle"),
    state_dir: StateDir = Path(".solaris/state/speculate"),
    stats: Stats = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Predict which pairs will be ranked soon, verify which deserve the FM, ask for them."""
    _run("speculate", ctx, bundle, state_dir, stats, bootstrap)


@app.command()
def infer(
    ctx: typer.Context,
    bundle: BundleDir = Path("bundle"),
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    stats: Stats = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Run the FM on what was asked for, and write compressed embeddings."""
    _run("infer", ctx, bundle, Path("."), stats, bootstrap, device)


@app.command()
def serve(
    ctx: typer.Context,
    bundle: BundleDir = Path("bundle"),
    state_dir: StateDir = Path(".solaris/state/serve"),
    stats: Stats = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Answer ranking requests."""
    _run("serve", ctx, bundle, state_dir, stats, bootstrap)


def _run(
    role: str,
    ctx: typer.Context,
    bundle: Path,
    state_dir: Path,
    stats: Path | None,
    bootstrap: str | None,
    device: str = "cpu",
) -> None:
    import torch

    from agents.kafka import KafkaConfig
    from agents.transport.wiring import TransportConfig
    from agents.worker import WorkerConfig, run
    from models.bundle import MANIFEST
    from schemas.errors import UsageError
    from streams.dispatch import InferConfig
    from streams.items import ItemsConfig
    from streams.predict import PredictConfig
    from streams.serve import ServeConfig
    from streams.speculate import SpeculateConfig
    from streams.state.rocks import StateConfig
    from streams.verify import VerifyConfig

    if not (bundle / MANIFEST).is_file():
        raise UsageError(
            f"{bundle} is no bundle (it has no {MANIFEST}); make one with `solaris train LOG --out {bundle}`"
        )
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for framework in (
        "faust",
        "mode",
        "aiokafka",
        "agents",
    ):  # a line for every part that starts and stops; ours are `solaris.*`
        logging.getLogger(framework).setLevel(logging.WARNING)
    torch.set_num_threads(1)  # one worker, one core: scale by processes
    loaded = settings(ctx, kafka__bootstrap=bootstrap)
    serving: Any = loaded.get(ServeConfig)
    config = WorkerConfig(
        kafka=loaded.get(KafkaConfig),
        bundle=bundle,
        state_dir=state_dir,
        stats=stats,
        device=device,
        transport=loaded.get(TransportConfig),
        serve=serving,
        speculate=SpeculateConfig(
            ttl_ms=serving.ttl_ms,
            history_rows_max=serving.history_rows_max,
            shown_rows_max=serving.shown_rows_max,
            predict=loaded.get(PredictConfig),
            verify=loaded.get(VerifyConfig),
        ),
        infer=loaded.get(InferConfig),
        items=loaded.get(ItemsConfig),
        state=loaded.get(StateConfig),
    )
    code = run(role, config)
    if code:
        raise typer.Exit(code)
