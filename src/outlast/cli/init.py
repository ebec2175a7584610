"""``outlast init``: thin; what is written is decided in :mod:`outlast.init`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from outlast.errors import ConfigError

if TYPE_CHECKING:
    from outlast.init.recipes import Training


class _Recipe(Protocol):
    def render(self) -> str: ...
    def next_command(self, file: str) -> str: ...


@click.group(name="init")
def command() -> None:
    """Write the file with which Slurm, Kubernetes or SkyPilot runs a script under outlast."""


def _common(function: Callable[..., Any]) -> Callable[..., Any]:
    """What every kind of file asks for."""
    for decorate in (
        click.argument("arguments", nargs=-1, type=click.UNPROCESSED),
        click.option("--force", is_flag=True, help="Overwrite the file if it is there."),
        click.option("-o", "--output", default=None, help="The file; - for standard output."),
        click.option(
            "--cpus",
            default=None,
            type=click.IntRange(1, 100_000),
            help="For a job without GPUs: workers a machine.",
        ),
        click.option(
            "--gpus-per-node", "--gpus", "gpus", type=int, help="GPUs, so workers, a machine (1)."
        ),
        click.option("--nodes", default="1", show_default=True, help="Machines: N, or MIN:MAX."),
        click.option("--name", default=None, help="The job's name; default: after the script."),
        click.option("--script", default="train.py", show_default=True, help="What is run."),
    ):
        function = decorate(function)
    return function


@command.command(name="slurm")
@_common
@click.option("--time", default="24:00:00", show_default=True, help="The job's time limit.")
@click.option("--partition", default="", help="Where it may run.")
@click.option("--grace", default=120, show_default=True, help="Seconds' notice of the limit.")
@click.option("--cpus-per-gpu", default=8, show_default=True, help="Cores for each GPU.")
@click.option("--dir", "directory", default="outlast-job", help="The job's directory; shared.")
def slurm(
    time: str, partition: str, grace: int, cpus_per_gpu: int, directory: str, **common: Any
) -> None:
    """A batch script for sbatch. The script's arguments come last, after --."""
    from outlast.init.recipes import Slurm

    recipe = Slurm(
        training=_training(common),
        directory=directory,
        time=time,
        partition=partition,
        grace_s=grace,
        cpus_per_gpu=cpus_per_gpu,
    )
    _write(recipe, common, f"{recipe.training.name}.sbatch")


@command.command(name="k8s")
@_common
@click.option(
    "--kind",
    type=click.Choice(["job", "jobset", "trainjob"]),
    default="job",
    show_default=True,
    help="Kubernetes' own Job, a JobSet, or Kubeflow Trainer's TrainJob.",
)
@click.option("--image", required=True, help="Has outlast and the script in it.")
@click.option("--claim", required=True, help="PersistentVolumeClaim for the job's directory.")
@click.option("--spot", type=click.Choice(["gke", "eks", "aks"]), help="Ask for spot machines.")
@click.option("--grace", type=int, help="Seconds a drain may take (120; on spot: the cloud's).")
def k8s(
    kind: str, image: str, claim: str, spot: str | None, grace: int | None, **common: Any
) -> None:
    """Manifests for kubectl apply. The script's arguments come last, after --."""
    from outlast.init.recipes import Kubernetes

    recipe = Kubernetes(
        training=_training(common),
        kind=kind,
        image=image,
        claim=claim,
        spot=spot or "",
        grace_s=grace,
    )
    _write(recipe, common, f"{recipe.training.name}.yaml")


@command.command(name="sky")
@_common
@click.option("--gpu-type", default="", help="SkyPilot's name of the GPU, as H100.")
@click.option("--bucket", default="", help="For the job's directory: s3://NAME, gs://NAME.")
@click.option("--volume", default="", help="For the job's directory: a SkyPilot volume.")
def sky(gpu_type: str, bucket: str, volume: str, **common: Any) -> None:
    """A task for sky jobs launch. The script's arguments come last, after --."""
    from outlast.init.recipes import Sky

    recipe = Sky(training=_training(common), accelerator=gpu_type, bucket=bucket, volume=volume)
    _write(recipe, common, f"{recipe.training.name}.sky.yaml")


def _training(common: dict[str, Any]) -> Training:
    from outlast.init.recipes import Training, name_of, nodes_of

    if common["gpus"] is not None and common["cpus"]:
        raise ConfigError("--gpus and --cpus: a job has GPUs or it has not; give one of them")
    fewest, nodes = nodes_of(common["nodes"])
    return Training(
        name=common["name"] or name_of(common["script"]),
        script=common["script"],
        arguments=common["arguments"],
        nodes=nodes,
        fewest=fewest,
        gpus=1 if common["gpus"] is None else common["gpus"],
        cpus=common["cpus"] or 0,
    )


def _write(recipe: _Recipe, common: dict[str, Any], default: str) -> None:
    output = common["output"] or default
    text = recipe.render()
    if output == "-":
        click.echo(text, nl=False)
        click.echo(f"Next: {recipe.next_command(default)}", err=True)
        return
    try:
        with Path(output).open("w" if common["force"] else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(
            f"{output} is there already; give another file with -o, or --force"
        ) from None
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}; see -o") from None
    click.echo(f"wrote {output}")
    click.echo(f"Next: {recipe.next_command(output)}")
