"""Scripts of other people's, adapted by the lines that docs/script.md asks for, and no more.

Each is named by its repository and commit; a copy of that repository is given on the command line,
and nothing of it is kept here. A change is a place in a file (a line number, how many lines go) and
our lines in its stead. The file must be the very one: its digest is compared first.

    python benchmarks/public_scripts.py --from CHECKOUTS --to DIRECTORY [NAME …]

writes an adapted copy of each, with what it needs to run, and prints the command that drills it.
CHECKOUTS holds a clone of each repository under its own name (``nanoGPT``, ``minGPT`` …) at the
commit below. ``--plain`` leaves the scripts as they are.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple


class Edit(NamedTuple):
    """In place of ``gone`` lines from line ``at`` on (counted from 1) stand ``lines``.

    Attributes:
        file: below the repository.
        at: the first line.
        gone: how many lines go; 0 puts ours ahead of ``at``.
        lines: ours.
    """

    file: str
    at: int
    gone: int
    lines: tuple[str, ...]


class PublicScript(NamedTuple):
    """One script.

    Attributes:
        repository: on GitHub.
        commit: which.
        place: directory below the repository that it runs in.
        command: the script and its arguments: a small model, so that a step takes milliseconds.
        sha256: file → the first 16 digits of its digest, of each file that is edited.
        edits: what the documents ask for.
        without_gpu: what else it takes to run without a GPU.
        needs: of PyPI, besides torch.
        data: (repository, file, to) of what it reads.
        imports_own: whether it imports what lies where it runs, from a directory below.
    """

    repository: str
    commit: str
    place: str
    command: tuple[str, ...]
    sha256: dict[str, str]
    edits: tuple[Edit, ...]
    without_gpu: tuple[Edit, ...] = ()
    needs: tuple[str, ...] = ()
    data: tuple[tuple[str, str, str], ...] = ()
    imports_own: bool = False


SCRIPTS: dict[str, PublicScript] = {
    "makemore": PublicScript(
        "karpathy/makemore",
        "988aa59e4d8fefa526d06f3b453ad116258398d4",
        ".",
        ("makemore.py", "--max-steps", "1000", "--num-workers", "0"),
        {"makemore.py": "49b281f40d2c4897"},
        (
            Edit("makemore.py", 23, 0, ("import outlast",)),
            Edit(
                "makemore.py",
                669,
                2,
                (
                    "    loader = batch_loader.train_loader",
                    "    with outlast.session(model=model, optimizer=optimizer) as session:",
                    "      for batch in session.steps(loader, until=args.max_steps):",
                    "        step = session.step",
                ),
            ),
            Edit("makemore.py", 675, 1, ()),
            Edit("makemore.py", 715, 4, ()),
        ),
        needs=("tensorboard",),
    ),
    "adder": PublicScript(
        "karpathy/minGPT",
        "37baab71b9abea1b76ab957409a1cc2fbfba8a26",
        ".",
        (
            *("projects/adder/adder.py", "--trainer.max_iters=1000", "--trainer.num_workers=0"),
            "--model.model_type=gpt-nano",
        ),
        {"mingpt/trainer.py": "7e28e58add6f998e"},
        (
            Edit("mingpt/trainer.py", 9, 0, ("import outlast",)),
            Edit(
                "mingpt/trainer.py",
                80,
                9,
                (
                    "        optimizer = self.optimizer",
                    "        with outlast.session(model=model, optimizer=optimizer) as session:",
                    "          for batch in session.steps(train_loader, until=config.max_iters):",
                    "            self.iter_num = session.step",
                ),
            ),
            Edit("mingpt/trainer.py", 107, 3, ()),
        ),
        imports_own=True,
    ),
    "nanoGPT": PublicScript(
        "karpathy/nanoGPT",
        "3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
        ".",
        (
            *("train.py", "config/train_shakespeare_char.py", "--device=cpu", "--compile=False"),
            *("--eval_iters=2", "--eval_interval=50", "--log_interval=10", "--block_size=64"),
            *("--batch_size=8", "--n_layer=2", "--n_head=2", "--n_embd=64", "--max_iters=1000"),
            *(
                "--dropout=0.1",
                "--gradient_accumulation_steps=2",
                "--dtype=float32",
                "--backend=gloo",
            ),
        ),
        {"train.py": "413bd97b40bb400a"},
        (
            Edit("train.py", 26, 0, ("import outlast",)),
            Edit("train.py", 250, 1, ()),
            Edit(
                "train.py",
                255,
                1,
                (
                    "parts = {'model': model, 'optimizer': optimizer, 'scaler': scaler}",
                    "with outlast.session(**parts) as session:",
                    "  for iter_num in session.steps(range(max_iters + 1)):",
                    "    X, Y = get_batch('train')",
                ),
            ),
        ),
        (
            Edit("train.py", 88, 2, ("    device = 'cpu'",)),
            Edit("train.py", 212, 1, ("    model = DDP(model)",)),
        ),
        ("requests",),
        (("karpathy/char-rnn", "data/tinyshakespeare/input.txt", "data/shakespeare_char"),),
    ),
    "word_language_model": PublicScript(
        "pytorch/examples",
        "77f55b912142e11fcfdf5b530231fb9c52f181e8",
        "word_language_model",
        (
            *("main.py", "--use-optimizer", "--model", "Transformer", "--emsize", "16"),
            *("--nhid", "16", "--epochs", "2", "--batch_size", "32", "--log-interval", "50"),
            *("--lr", "0.001"),
        ),
        {"word_language_model/main.py": "391de12bb7c6e07d"},
        (
            Edit("word_language_model/main.py", 6, 0, ("import outlast",)),
            Edit(
                "word_language_model/main.py",
                171,
                1,
                (
                    "    starts = range(0, train_data.size(0) - 1, args.bptt)",
                    "    for batch, i in enumerate(session.steps(starts)):",
                ),
            ),
            Edit(
                "word_language_model/main.py",
                224,
                2,
                (
                    "with outlast.session(model=model, optimizer=optimizer) as session:",
                    "    for epoch in (1 + before for before in session.epochs(args.epochs)):",
                ),
            ),
            Edit("word_language_model/main.py", 242, 3, ()),
        ),
    ),
    "copy": PublicScript(
        "lucidrains/x-transformers",
        "9252ed7838021ee61e6c5be0930b3a9a88efdf06",
        ".",
        ("train_copy.py",),
        {"train_copy.py": "c61028cf325d5b36"},
        (
            Edit("train_copy.py", 2, 0, ("import outlast",)),
            Edit("train_copy.py", 28, 0, ("torch.manual_seed(0)",)),
            Edit(
                "train_copy.py",
                51,
                1,
                (
                    "with outlast.session(model=model, optimizer=optim) as session:",
                    "  for i in tqdm.tqdm(session.steps(range(NUM_BATCHES)), mininterval=10.0):",
                ),
            ),
        ),
        needs=("x-transformers==2.31.10", "tqdm"),
    ),
}
PREPARE = {"nanoGPT": "data/shakespeare_char/prepare.py"}
WIKITEXT = "data/wikitext-2"


def digest(path: Path) -> str:
    """The first 16 digits of a file's SHA-256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def adapt(name: str, checkouts: Path, target: Path, *, plain: bool) -> Path:
    """Write a copy of a script that can be run; returns where it runs."""
    script = SCRIPTS[name]
    source = checkouts / script.repository.partition("/")[2]
    at = subprocess.run(
        ["git", "-C", source, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if at != script.commit:
        raise SystemExit(f"{source} is at {at}; check out {script.commit}")
    copy = target / name
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns(".git"))
    for repository, file, to in script.data:
        shutil.copy(checkouts / repository.partition("/")[2] / file, copy / to)
    for file, wanted in script.sha256.items():
        found = digest(copy / file)
        if found != wanted:
            raise SystemExit(f"{file} of {name} has another content than expected: {found}")
    edits = script.without_gpu if plain else script.edits + script.without_gpu
    # From the last line up: the numbers are those of the file as it is.
    for edit in sorted(edits, key=lambda one: one.at, reverse=True):
        path = copy / edit.file
        lines = path.read_text().split("\n")
        lines[edit.at - 1 : edit.at - 1 + edit.gone] = edit.lines
        path.write_text("\n".join(lines))
    if name == "word_language_model":  # whose training text lies elsewhere
        text = copy / script.place / WIKITEXT
        shutil.copy(text / "valid.txt", text / "train.txt")
    return copy / script.place


def main() -> None:
    """Write them, and say how each is drilled."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--from", dest="checkouts", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("names", nargs="*", choices=[*SCRIPTS, []])
    given = parser.parse_args()
    for name in given.names or SCRIPTS:
        place = adapt(name, given.checkouts, given.to, plain=given.plain)
        script = SCRIPTS[name]
        needs = f"pip install {' '.join(script.needs)}; " if script.needs else ""
        prepare = f"python {PREPARE[name]}; " if name in PREPARE else ""
        command = " ".join(script.command)
        finds = "PYTHONPATH=$PWD " if script.imports_own else ""
        print(f"cd {place}; {needs}{prepare}{finds}outlast drill -- {command}")


if __name__ == "__main__":
    main()
