"""``outlast init``: write the file with which a scheduler runs ``outlast run``.

Guarantees: a script's arguments arrive at the script as they were given, whatever is in them. What
a scheduler would refuse by its form (a name, a number) is refused here, in one line. The exit codes
in a file are those of :class:`outlast.errors.Exit`; none is written down a second time. How each is
answered is decided here, for all schedulers:

- drained (75): start again, and never count it: that is the plan, not a failure. No scheduler can
  tell a healthy machine from a doomed one, so `outlast run` bounds it itself: a notice that comes
  again and again before a step is made is waited with, and in the end it leaves with 76.
- usage (2), refused (78): never start again: the next attempt would say the same.
- gave up (76): never. A lost machine is not among its reasons: the others go on, or wait for it.
- storage (77): Kubernetes tries a few times, as the next pod may land on a machine whose mount
  works. Slurm and SkyPilot hand it to a person: queueing for, or renting, machines to meet the
  same full disk costs more than it can win.
- anything else (a killed process, a lost machine): start again; each file bounds how often.

A template is one file, in ``templates/``, that reads like its result. An argument is written so
that the reader of the file gets it back as it was. Three readers: bash, YAML, and Kubernetes, which
replaces ``$(NAME)`` in what YAML has given it.

What can go wrong: a site's own rules (accounts, quotas, queues) are not known here. The files are
meant to be read and changed; each line that is not plain says why it is there.

Rejected: building manifests as objects and dumping them (no comments, no order for a reader);
talking to the scheduler (its own command does that, with the person's own rights).
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from outlast._version import __version__
from outlast.cli.quantities import GRACE
from outlast.errors import ConfigError, Exit
from outlast.tiers import OBJECT_SCHEMES

if TYPE_CHECKING:
    import jinja2


def check(argument: str) -> str:
    """An argument that a process can be given; raises ConfigError for any other."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{argument!r} is not UTF-8; no manifest can hold it") from None
    if "\0" in argument:
        raise ConfigError(f"{argument!r} holds a zero byte; no process can be given that")
    return argument


def bash(argument: str) -> str:
    """The argument as one word of bash, on one line.

    A line break in single quotes would be right in a script, and wrong in a script within YAML.
    """
    if argument.isprintable():
        return shlex.quote(argument)
    return "$'" + "".join(map(_in_dollar_quotes, argument)) + "'"


def _in_dollar_quotes(character: str) -> str:
    if character in "\\'":
        return "\\" + character
    if character.isprintable():
        return character
    return "".join(f"\\{byte:03o}" for byte in character.encode())


def yaml(text: object) -> str:
    """The text as a YAML string, on one line: never a number, a date or a truth value."""
    return '"' + "".join(map(_in_double_quotes, str(text))) + '"'


def _in_double_quotes(character: str) -> str:
    if character in '\\"':
        return "\\" + character
    if character.isprintable():
        return character
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def kubernetes(argument: str) -> str:
    """The argument as an item of a container's ``args``."""
    return yaml(argument.replace("$", "$$"))


def bash_line(arguments: Iterable[str]) -> str:
    """Several arguments as one line of bash."""
    return " ".join(map(bash, arguments))


def render(template: str, **values: Any) -> str:
    """Render a template; a value that it names and nobody gave is an error."""
    return _environment().get_template(template).render(**values)


@functools.cache  # it keeps the templates that it has compiled
def _environment() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("outlast.cli"),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701 - shell and YAML, each value quoted by its filter
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["bash"] = bash
    environment.filters["bash_line"] = bash_line
    environment.filters["yaml"] = yaml
    environment.filters["kubernetes"] = kubernetes
    return environment


NODES_MAX: Final = 10_000
NAME: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
NAME_LENGTH: Final = 40  # leaves room for what schedulers append: a host name has 63 characters
MOUNT: Final = "/outlast"
SLACK_S: Final = 10  # between our own deadline and the kill, for Python to leave
DEFAULT_GRACE_S: Final = 120
POD_WAITS_S: Final = 86_400  # for enough others

# How long a pod has on a spot machine of this cloud, counted from SIGTERM, less the slack.
# GKE cuts at 15 s whatever the pod asks for, unless its node pool says more.
SPOT_GRACE_S: Final = {"gke": 15, "eks": 110, "karpenter": 110, "aks": 20}

# What a worker's pod asks for unless told otherwise: little enough for the smallest machines with a
# GPU (4 cores, 15 GB), and something, since a pod that asks for nothing is evicted first.
POD_MEMORY_GIB: Final = {"gpu": 8, "cpu": 2}
POD_CPUS_PER_GPU: Final = 2

_NODES: Final = re.compile(r"\d{1,9}(:\d{1,9})?", re.ASCII)
_TIME: Final = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}")
_PARTITIONS: Final = re.compile(r"[\w.-]+(,[\w.-]+)*", re.ASCII)
_IMAGE: Final = re.compile(r"[a-zA-Z0-9][\w./:@-]*", re.ASCII)
_SUBDOMAIN: Final = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
_ACCELERATOR: Final = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
_VERSION: Final = re.compile(r"\d+(\.\w+){1,3}", re.ASCII)
_PYTHON: Final = re.compile(r"3\.(1[1-9]|[2-9]\d)", re.ASCII)
_BUCKET: Final = re.compile(r"(s3|gs|r2|cos|oci|nebius|https)://[^\s\"'\\${}]+")
_MEM: Final = re.compile(r"0|[1-9]\d{0,9}[KMGT]?", re.ASCII)
_QUANTITY: Final = re.compile(r"[1-9]\d{0,9}([KMGTP]i|[kMGTP])", re.ASCII)
_RESOURCE: Final = re.compile(
    r"([a-z0-9][-a-z0-9.]{0,62}/)?[A-Za-z0-9][-\w.]{0,62}=[1-9]\d{0,9}([KMGTP]i|[kMGTP])?", re.ASCII
)
_OTHERWISE: Final = {"cpu": "--cpus-per-gpu", "memory": "--memory", "nvidia.com/gpu": "--gpus"}


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """What is run: the same for every scheduler.

    Attributes:
        name: the job's name: RFC 1123, and a letter first, as a host name's part must be.
        script: the training script, as the machines see it.
        arguments: what the script is given.
        nodes: machines; the most, where their number may change.
        fewest: as many as it can do with; None for all of ``nodes``.
        gpus: GPUs of each machine, and so its workers.
        cpus: for a job without GPUs: its workers, a core each; else 0.
    """

    name: str
    script: str
    arguments: tuple[str, ...] = ()
    nodes: int = 1
    fewest: int | None = None
    gpus: int = 1
    cpus: int = 0

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name) or len(self.name) > NAME_LENGTH:
            raise ConfigError(
                f"{self.name!r} is no name for a job: lower-case letters, digits and hyphens, "
                f"{NAME_LENGTH} at most, a letter first; give another with --name"
            )
        if not self.script or self.script.startswith("-"):
            raise ConfigError(f"{self.script!r} is no script; name one with --script train.py")
        for argument in (self.script, *self.arguments):
            check(argument)
        check_number("--nodes", self.nodes, 1, NODES_MAX)
        if self.fewest is not None:
            check_number(f"--nodes {self.fewest}:{self.nodes}:", self.fewest, 1, self.nodes)
        if self.gpus == 0:
            raise ConfigError("--gpus 0: for a job without GPUs give its workers with --cpus N")
        check_number("--gpus", self.gpus, 1, 128)
        check_number("--cpus", self.cpus, 0, 1024)

    @property
    def workers(self) -> int:
        """Training processes on each machine."""
        return self.cpus or self.gpus

    @property
    def least(self) -> int:
        """Machines without which it does not run."""
        return self.nodes if self.fewest is None else self.fewest

    @property
    def is_elastic(self) -> bool:
        """Whether the number of machines may change."""
        return self.least < self.nodes

    @property
    def nnodes(self) -> str:
        """The machines, as ``outlast run --nnodes`` is told them."""
        return f"{self.least}:{self.nodes}" if self.is_elastic else str(self.nodes)

    @property
    def command(self) -> list[str]:
        """The script and its arguments."""
        return [self.script, *self.arguments]


def _limit_s(time: str) -> int | None:
    """Seconds of a time limit as Slurm reads it; None where there is none (0)."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:  # minutes[:seconds]
        hours, (minutes, seconds) = 0, [*parts, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds or None


class Slurm(msgspec.Struct, frozen=True, kw_only=True):
    """A batch script for ``sbatch``.

    Attributes:
        training: what is run.
        directory: the job's directory, on storage that all machines see.
        time: the job's time limit, in one of Slurm's forms.
        partition: where it may run, or "" for the site's default.
        grace_s: how long before the time limit Slurm says so.
        cpus_per_gpu: cores for each GPU: its worker, that one's data loaders, the keeper.
        mem: memory of each machine in Slurm's form, or "" for the site's default.
    """

    training: Training
    directory: str = "outlast-job"
    time: str = "24:00:00"
    partition: str = ""
    grace_s: int = DEFAULT_GRACE_S
    cpus_per_gpu: int = 8
    mem: str = ""

    def __post_init__(self) -> None:
        if not _TIME.fullmatch(self.time):
            raise ConfigError(
                f"--time {self.time} is not a time limit; write 24:00:00, 90 (minutes) or 2-12"
            )
        if self.partition and not _PARTITIONS.fullmatch(self.partition):
            raise ConfigError(f"{self.partition!r} is not a partition; sinfo lists them")
        if not self.directory:
            raise ConfigError("--dir '' names no directory; leave it out, or name one")
        check(self.directory)
        check_number("--grace", self.grace_s, 5, 65_535)
        limit_s = _limit_s(self.time)
        if limit_s is not None and limit_s <= self.grace_s:
            raise ConfigError(
                f"--time {self.time} is {limit_s} s, and its notice comes --grace {self.grace_s} s "
                "ahead: nothing would be trained; give more time, or less grace"
            )
        check_number("--cpus-per-gpu", self.cpus_per_gpu, 1, 256)
        if self.mem and not _MEM.fullmatch(self.mem):
            raise ConfigError(
                f"--mem {self.mem} is not what Slurm reads; write 200G, or 0 for all of a machine's"
            )

    def render(self) -> str:
        """The script."""
        training = self.training
        cores = training.cpus or training.gpus * self.cpus_per_gpu
        return render("slurm.sbatch.j2", job=self, training=training, cores=cores, **_codes())

    def next_command(self, file: str) -> str:
        """What to type next."""
        return f"sbatch {bash(file)}"


class Kubernetes(msgspec.Struct, frozen=True, kw_only=True):
    """Manifests for ``kubectl apply``.

    Attributes:
        training: what is run.
        kind: "job", "jobset" or "trainjob".
        image: the container image, with outlast and the script in it.
        claim: the PersistentVolumeClaim that holds the job's directory.
        spot: "gke", "eks" or "aks" to ask for that cloud's spot machines, "karpenter" for those
            that Karpenter or EKS Auto Mode makes, or "".
        grace_s: seconds between SIGTERM and SIGKILL that the drain may use; None for what the
            machines give.
        memory: that each pod asks for, as 64Gi; "" for a little for each worker.
        cpus_per_gpu: cores that it asks for, for each GPU.
        resources: what else it gets, such as "rdma/ib=1".
    """

    training: Training
    image: str
    claim: str
    kind: str = "job"
    spot: str = ""
    grace_s: int | None = None
    memory: str = ""
    cpus_per_gpu: int = POD_CPUS_PER_GPU
    resources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _IMAGE.fullmatch(self.image):
            raise ConfigError(f"{self.image!r} is not an image; write registry/name:tag")
        if not _SUBDOMAIN.fullmatch(self.claim) or len(self.claim) > 253:
            raise ConfigError(
                f"{self.claim!r} is not a PersistentVolumeClaim's name; see: kubectl get pvc"
            )
        if self.grace_s is not None:
            check_number("--grace", self.grace_s, 5, 86_400)
        if self.memory and not _QUANTITY.fullmatch(self.memory):
            raise ConfigError(f"--memory {self.memory} is not an amount; write 64Gi or 500G")
        check_number("--cpus-per-gpu", self.cpus_per_gpu, 1, 256)
        names = [one.partition("=")[0] for one in self.resources]
        for one, name in zip(self.resources, names, strict=True):
            if not _RESOURCE.fullmatch(one):
                raise ConfigError(f"{one!r} is not a resource; write --resource rdma/ib=1")
            if name in _OTHERWISE:
                raise ConfigError(f"--resource {one}: say that with {_OTHERWISE[name]}")
            if names.count(name) > 1:
                raise ConfigError(f"--resource {name} is given twice; give it once")

    @property
    def requests(self) -> dict[str, str]:
        """What each pod asks for besides its GPUs: resource → amount."""
        training = self.training
        each = POD_MEMORY_GIB["cpu" if training.cpus else "gpu"]
        return {
            "cpu": str(training.cpus or training.gpus * self.cpus_per_gpu),
            "memory": self.memory or f"{each * training.workers}Gi",
        }

    @property
    def limits(self) -> dict[str, str]:
        """What it gets to itself: resource → number."""
        gpus = {} if self.training.cpus else {"nvidia.com/gpu": str(self.training.gpus)}
        return gpus | dict(one.split("=", 1) for one in self.resources)

    @property
    def drain_s(self) -> int:
        """How long a drain may take."""
        if self.grace_s is not None:
            return self.grace_s
        return SPOT_GRACE_S.get(self.spot, DEFAULT_GRACE_S)

    @property
    def arguments(self) -> list[str]:
        """What ``outlast run`` is given, before the script."""
        several = [
            *("--nnodes", self.training.nnodes),
            # Pods come one by one, and one that is replaced when there is a machine for it. Who
            # waits too long gives up, and that is for a person.
            *("--rdzv-conf", f"join_timeout={POD_WAITS_S}"),
        ]
        flags = several if self.training.nodes > 1 else ["--standalone"]
        return [*flags, "--nproc-per-node", str(self.training.workers)]

    def render(self) -> str:
        """The manifests."""
        return render(
            f"k8s-{self.kind}.yaml.j2",
            job=self,
            training=self.training,
            mount=MOUNT,
            slack_s=SLACK_S,
            never=sorted(map(int, (Exit.USAGE, Exit.GAVE_UP, Exit.REFUSED))),
            **_codes(),
        )

    def next_command(self, file: str) -> str:
        """What to type next."""
        return f"kubectl apply -f {bash(file)}"


class Sky(msgspec.Struct, frozen=True, kw_only=True):
    """A task for ``sky jobs launch``.

    Attributes:
        training: what is run.
        accelerator: SkyPilot's name of the GPU; not used where the job has none.
        bucket: the bucket that holds the job's directory, or "".
        volume: the SkyPilot volume that holds it, or "". One of the two.
        spot: whether machines that may be taken back are rented; None: with a bucket they are.
    """

    training: Training
    accelerator: str = ""
    bucket: str = ""
    volume: str = ""
    spot: bool | None = None

    def __post_init__(self) -> None:
        if self.training.cpus and self.accelerator:
            raise ConfigError("--gpu-type and --cpus: a job has GPUs or it has not; give one")
        if not self.training.cpus and not _ACCELERATOR.fullmatch(self.accelerator):
            given = f"{self.accelerator!r} is no GPU" if self.accelerator else "no GPU is named"
            raise ConfigError(
                f"{given}; name one with --gpu-type H100 (sky gpus list), or give --cpus"
            )
        if self.training.is_elastic:
            raise ConfigError(
                f"SkyPilot rents a fixed number of machines; give --nodes {self.training.nodes}"
            )
        if bool(self.bucket) == bool(self.volume):
            raise ConfigError(
                "a machine's own disk goes with it: say where the job's directory is to be, with "
                "either --bucket s3://NAME or --volume NAME"
            )
        if self.bucket and not _BUCKET.fullmatch(self.bucket):
            raise ConfigError(f"{self.bucket!r} is not a bucket; write s3://NAME or gs://NAME")
        if self.bucket and self.training.nodes > 1:
            raise ConfigError(
                f"{self.training.nodes} machines do not see each other's files in a mounted bucket "
                "in time; give a volume that all can write, with --volume NAME"
            )
        if self.volume and not _SUBDOMAIN.fullmatch(self.volume):
            raise ConfigError(f"{self.volume!r} is not a volume's name; see: sky volumes ls")

    @property
    def use_spot(self) -> bool:
        """Volumes are Kubernetes' and RunPod's, where spot machines are mostly not to be had."""
        return bool(self.bucket) if self.spot is None else self.spot

    @property
    def tier(self) -> str:
        """The bucket as a tier of ours, "" where outlast does not speak its protocol."""
        is_ours = self.bucket.partition("://")[0] in OBJECT_SCHEMES
        return f"{self.bucket.rstrip('/')}/{self.training.name}-checkpoints" if is_ours else ""

    def render(self) -> str:
        """The task."""
        # SkyPilot ends the other machines' processes when one fails, and looks at all codes: on
        # several machines a 137 says nothing.
        again = [int(Exit.DRAINED)] + ([137, 143] if self.training.nodes == 1 else [])
        return render(
            "sky.yaml.j2", job=self, training=self.training, mount=MOUNT, again=again, **_codes()
        )

    def next_command(self, file: str) -> str:
        """What to type next."""
        return f"sky jobs launch {bash(file)}"


class Container(msgspec.Struct, frozen=True, kw_only=True):
    """A file from which ``docker build`` or ``podman build`` makes the image of the others.

    Attributes:
        script: the training script, where the image is built.
        torch: its version.
        python: its version, as 3.12.
        image: what the image is called.
        requirements: a file of what else is installed, or "".
    """

    script: str
    torch: str
    python: str
    image: str
    requirements: str = ""

    def __post_init__(self) -> None:
        check(self.script)
        check(self.requirements)
        if not _IMAGE.fullmatch(self.image):
            raise ConfigError(f"{self.image!r} is not an image; write registry/name:tag")
        if not _VERSION.fullmatch(self.torch):
            raise ConfigError(f"--torch {self.torch} is not a version; write 2.13.0")
        if not _PYTHON.fullmatch(self.python):
            raise ConfigError(f"--python {self.python}: outlast needs 3.11 or newer; write 3.12")

    def render(self) -> str:
        """The file."""
        wheel = f"outlast-{__version__}-py3-none-any.whl"
        return render("Containerfile.j2", job=self, wheel=wheel)

    def next_command(self, file: str) -> str:
        """What to type next."""
        return f"docker build -t {bash(self.image)} -f {bash(file)} ."


def _codes() -> dict[str, Any]:
    return {"exit": {code.name.lower(): int(code) for code in Exit}}


def check_number(flag: str, value: int, least: int, most: int) -> None:
    """Raise ConfigError for a number out of its range."""
    if not least <= value <= most:
        raise ConfigError(f"{flag} {value} is not between {least} and {most}")


def nodes_of(text: str) -> tuple[int, int]:
    """What --nodes says, the fewest and the most: ``4`` → (4, 4), ``2:4`` → (2, 4).

    Raises:
        ConfigError: it is neither.
    """
    if not _NODES.fullmatch(text):
        raise ConfigError(f"--nodes {text} is neither N nor MIN:MAX; write 4 or 2:4")
    fewest, _, most = text.partition(":")
    return int(fewest), int(most or fewest)


def name_of(script: str) -> str:
    """A job's name after its script: ``src/train_gpt.py`` → ``train-gpt``."""
    stem = re.sub(r"\.py$", "", script.replace("\\", "/").rpartition("/")[2])
    return re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:NAME_LENGTH].rstrip("-")


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
@click.option("--grace", type=GRACE, default="120s", show_default=True, help="Notice of the limit.")
@click.option("--cpus-per-gpu", default=8, show_default=True, help="Cores for each GPU.")
@click.option("--mem", default="", help="Memory of each machine, as 200G; 0 for all of it.")
@click.option("--dir", "directory", default="outlast-job", help="The job's directory; shared.")
def slurm(
    *,
    time: str,
    partition: str,
    grace: float,
    cpus_per_gpu: int,
    mem: str,
    directory: str,
    **common: Any,
) -> None:
    """A batch script for sbatch. The script's arguments come last, after --."""
    recipe = Slurm(
        training=_training(common),
        directory=directory,
        time=time,
        partition=partition,
        grace_s=round(grace),
        cpus_per_gpu=cpus_per_gpu,
        mem=mem,
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
@click.option("--spot", type=click.Choice(list(SPOT_GRACE_S)), help="Ask for spot machines.")
@click.option("--grace", type=GRACE, help="What a drain may take (120s; on spot: the cloud's).")
@click.option("--memory", default="", help="That each pod asks for, as 64Gi.")
@click.option("--cpus-per-gpu", default=POD_CPUS_PER_GPU, help="Cores that it asks for.")
@click.option(
    "--resource", "resources", multiple=True, help="What else it gets, as rdma/ib=1; repeatable."
)
def k8s(
    *,
    kind: str,
    image: str,
    claim: str,
    spot: str | None,
    grace: float | None,
    memory: str,
    cpus_per_gpu: int,
    resources: tuple[str, ...],
    **common: Any,
) -> None:
    """Manifests for kubectl apply. The script's arguments come last, after --."""
    recipe = Kubernetes(
        training=_training(common),
        kind=kind,
        image=image,
        claim=claim,
        spot=spot or "",
        grace_s=None if grace is None else round(grace),
        memory=memory,
        cpus_per_gpu=cpus_per_gpu,
        resources=resources,
    )
    _write(recipe, common, f"{recipe.training.name}.yaml")


@command.command(name="sky")
@_common
@click.option("--gpu-type", default="", help="SkyPilot's name of the GPU, as H100.")
@click.option("--bucket", default="", help="For the job's directory: s3://NAME, gs://NAME.")
@click.option("--volume", default="", help="For the job's directory: a SkyPilot volume.")
@click.option("--spot/--no-spot", default=None, help="Rent spot machines; default: with a bucket.")
def sky(gpu_type: str, bucket: str, volume: str, spot: bool | None, **common: Any) -> None:
    """A task for sky jobs launch. The script's arguments come last, after --."""
    training = _training(common)
    recipe = Sky(training=training, accelerator=gpu_type, bucket=bucket, volume=volume, spot=spot)
    _write(recipe, common, f"{recipe.training.name}.sky.yaml")


@command.command(name="container")
@click.option("--script", default="train.py", show_default=True, help="What is run.")
@click.option("--image", default="train:1", show_default=True, help="What the image is called.")
@click.option("--torch", default=None, help="Its version; default: the one that is here.")
@click.option("--python", default=None, help="Its version, as 3.12; default: the one that is here.")
@click.option("--requirements", default=None, help="What else is installed: a file for pip.")
@click.option("-o", "--output", default=None, help="The file; - for standard output.")
@click.option("--force", is_flag=True, help="Overwrite the file if it is there.")
def container(
    *,
    script: str,
    image: str,
    torch: str | None,
    python: str | None,
    requirements: str | None,
    output: str | None,
    force: bool,
) -> None:
    """A Containerfile (Dockerfile) for the image that k8s asks for, and sky can use."""
    if requirements is None and Path("requirements.txt").is_file():
        requirements = "requirements.txt"
    recipe = Container(
        script=script,
        image=image,
        torch=torch or importlib.metadata.version("torch").partition("+")[0],
        python=python or f"{sys.version_info.major}.{sys.version_info.minor}",
        requirements=requirements or "",
    )
    _write(recipe, {"output": output, "force": force}, "Containerfile")


def _training(common: dict[str, Any]) -> Training:
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


def _write(
    recipe: Slurm | Kubernetes | Sky | Container, common: dict[str, Any], default: str
) -> None:
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
