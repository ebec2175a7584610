"""torchtitan's trainer, a tiny Llama, on the CPU: RECORDS [--plain] [--die STEP …] [KEY=VALUE …].

Its checkpoints are Outlast's, or with --plain its own. Its last rank dies, once, behind each STEP.
What is logged is appended to RECORDS/logs.jsonl, and when to steps.jsonl; final.json has the
weights' hash, pid-RANK a worker's process. KEY is a setting of torchtitan's (``training.steps``),
VALUE is JSON.

torchtitan knows no CPU: what it asks of a device is answered here, and FSDP is told to sum where
gloo cannot average. Nothing of it is imported at the top: a warm worker would have it from before.
"""

import argparse
import hashlib
import json
import os
import signal
import sys
import time
import types
from pathlib import Path

import torch
from torch.distributed.fsdp import FSDPModule

PARSER = argparse.ArgumentParser()
PARSER.add_argument("records", type=Path)
PARSER.add_argument("--plain", action="store_true")
PARSER.add_argument("--every", default="3 steps", help="to save with Outlast")
PARSER.add_argument("--die", type=int, action="append", default=[])
PARSER.add_argument("settings", nargs="*")
OPTIONS = PARSER.parse_intermixed_args()
WORDS = [f"w{number}" for number in range(60)]
OURS = "outlast.integrations.torchtitan.checkpoints"


def have_a_cpu_for_a_device():
    torch._utils._get_available_device_type = lambda: "cpu"
    answers = {
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: "CPU",
        "get_device_properties": lambda device=None: types.SimpleNamespace(total_memory=1 << 34),
        "reset_peak_memory_stats": lambda: None,
        "empty_cache": lambda: None,
        "memory_stats": lambda device=None: {},
    }
    for name, answer in answers.items():
        setattr(torch.cpu, name, answer)
    divide = FSDPModule.set_gradient_divide_factor

    def summed(module, factor):
        divide(module, factor)
        module.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = summed


def texts(path):
    """Of many lengths, so that samples are packed across them; the same each time."""
    import datasets

    draw = torch.Generator().manual_seed(1)

    def text():
        length = int(torch.randint(5, 40, (1,), generator=draw))
        return " ".join(WORDS[n] for n in torch.randint(0, len(WORDS), (length,), generator=draw))

    return datasets.Dataset.from_list([{"text": text()} for _ in range(40)])


def configuration():
    import tokenizers
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.config import TrainingConfig
    from torchtitan.config.configs import DebugConfig
    from torchtitan.hf_datasets import DatasetConfig, text_datasets
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry
    from torchtitan.trainer import Trainer

    known = {word: number for number, word in enumerate(["[UNK]", *WORDS])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(OPTIONS.records / "tokenizer.json"))
    text_datasets.DATASETS["words"] = DatasetConfig("", texts, lambda sample: sample["text"])
    spec = model_registry("debugmodel", attn_backend="flex")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:  # flex has no backward pass on a CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config = Trainer.Config(
        loss=CrossEntropyLoss.Config(global_vocab_size=2048),
        hf_assets_path=str(OPTIONS.records),
        dump_folder=str(OPTIONS.records / "out"),
        model_spec=spec,
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(local_batch_size=2, seq_len=32, steps=20, disable_cuda_graphs=True),
        dataloader=text_datasets.HuggingFaceTextDataLoader.Config(dataset="words"),
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(enable=OPTIONS.plain, interval=5),
        debug=DebugConfig(seed=1, deterministic=True),
    )
    config.override.imports = [] if OPTIONS.plain else [(OURS, {"every": OPTIONS.every})]
    for setting in OPTIONS.settings:
        key, _, value = setting.partition("=")
        *path, name = key.split(".")
        place = config
        for part in path:
            place = getattr(place, part)
        assert hasattr(place, name), key
        setattr(place, name, json.loads(value))
    return config


def note_and_die(trainer):
    """Behind each step: as a validation would, in front of the next one's first batch."""
    log, is_last = trainer.metrics_processor.log, os.environ["RANK"] == str(world_size() - 1)

    def noted(step, loss, *args, **given):
        log(step, loss, *args, **given)
        if os.environ["RANK"] == "0":
            append("logs.jsonl", [step, loss, trainer.ntokens_seen])
            append("steps.jsonl", [time.monotonic(), step])
        mark = OPTIONS.records / f"died-{step}"
        if step in OPTIONS.die and is_last and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.metrics_processor.log = noted


def append(name, line):
    with (OPTIONS.records / name).open("a") as file:
        file.write(json.dumps(line) + "\n")


def world_size():
    return int(os.environ["WORLD_SIZE"])


def main():
    torch.set_num_threads(1)
    have_a_cpu_for_a_device()
    from torch.distributed.tensor import DTensor
    from torchtitan import train
    from torchtitan.config import ConfigManager
    from torchtitan.trainer import Trainer

    close = Trainer.close

    def closing(trainer):
        close(trainer)
        digest = hashlib.sha256()
        for part in trainer.model_parts:
            for name, value in sorted(part.state_dict().items()):
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                digest.update(name.encode() + whole.numpy().tobytes())
        if os.environ["RANK"] == "0" and sys.exception() is None:
            found = {"hash": digest.hexdigest(), "step": trainer.step}
            (OPTIONS.records / "final.json").write_text(json.dumps(found))

    begin = Trainer.train

    def beginning(trainer):
        note_and_die(trainer)
        begin(trainer)

    Trainer.close, Trainer.train = closing, beginning
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**alone, "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)
    ConfigManager.parse_args = lambda self: configuration()
    (OPTIONS.records / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    train.main()


main()
