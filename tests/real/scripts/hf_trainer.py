"""A Trainer with a tiny GPT-2: RECORDS [--plain] [--masked] [--die STEP …] [KEY=VALUE …]

With Outlast's callback, or without. Its last rank dies, once, at the end of each STEP. Behind the
step that --poison names its weights are no numbers. What is logged is appended to
RECORDS/logs.jsonl; RECORDS/final.json has the weights' hash.
"""

import argparse
import hashlib
import json
import os
import signal
import sys
from pathlib import Path

if "--alone" in sys.argv:
    sys.modules["outlast"] = None  # it cannot be imported

import ranks
import torch
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

PARSER = argparse.ArgumentParser()
PARSER.add_argument("records", type=Path)
PARSER.add_argument("--plain", action="store_true")
PARSER.add_argument("--masked", action="store_true")
PARSER.add_argument("--alone", action="store_true", help="plain, where there is no outlast")
PARSER.add_argument("--resume", action="store_true")
PARSER.add_argument("--from", dest="checkpoint", help="the Trainer's own")
PARSER.add_argument("--die", type=int, action="append", default=[])
PARSER.add_argument("--poison", type=int)
PARSER.add_argument("arguments", nargs="*", help="of TrainingArguments, as JSON")
OPTIONS = PARSER.parse_intermixed_args()
OF_TIME = ("runtime", "per_second")


class Points(torch.utils.data.Dataset):
    def __init__(self, num):
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, 64, (num, 16), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def masked(rows):
    """As a collator for masked language models: it draws."""
    labels = torch.stack([row["labels"] for row in rows])
    return {"input_ids": labels.masked_fill(torch.rand(labels.shape) < 0.2, 1), "labels": labels}


class Notes(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        if state.is_world_process_zero:
            kept = {key: value for key, value in logs.items() if not key.endswith(OF_TIME)}
            with (OPTIONS.records / "logs.jsonl").open("a") as file:
                file.write(json.dumps([state.global_step, kept]) + "\n")

    def on_step_end(self, args, state, control, **given):
        if state.is_world_process_zero:
            (OPTIONS.records / "step").write_text(str(state.global_step))
        if state.global_step == OPTIONS.poison:
            with torch.no_grad():
                next(iter(given["model"].parameters())).fill_(float("nan"))
        mark = OPTIONS.records / f"died-{state.global_step}"
        is_last = args.process_index == args.world_size - 1
        if state.global_step in OPTIONS.die and is_last and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def on_its_device(given):
    """The arguments; of ranks that share a GPU, each says that it is the first one there."""
    own = os.environ.get("LOCAL_RANK")
    if own and ranks.ON_A_GPU:
        os.environ["LOCAL_RANK"] = "0"
    args = TrainingArguments(OPTIONS.records / "trainer", **given)
    if ranks.ON_A_GPU:
        assert args.device == ranks.DEVICE, args.device
    if own:
        os.environ["LOCAL_RANK"] = own
    return args


def main():
    ranks.prepare()
    set_seed(1)
    sizes = {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, **sizes, **ends))
    given = {
        "num_train_epochs": 3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "logging_steps": 5,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": not ranks.ON_A_GPU,
        "learning_rate": 1e-3,
        "seed": 3,
    }
    if "WORLD_SIZE" in os.environ:
        given["ddp_backend"] = "nccl" if ranks.ON_A_GPU else "gloo"
    given |= {
        key: json.loads(value) for key, value in (one.split("=") for one in OPTIONS.arguments)
    }
    args = on_its_device(given)
    callbacks = [Notes()]
    if args.load_best_model_at_end:
        callbacks.append(EarlyStoppingCallback(2))
    if not (OPTIONS.plain or OPTIONS.alone):
        from outlast.integrations.transformers import OutlastCallback

        callbacks.append(OutlastCallback(every="3 steps"))
    trainer = Trainer(
        model,
        args,
        train_dataset=Points(50),
        eval_dataset=Points(8),
        data_collator=masked if OPTIONS.masked else None,
        callbacks=callbacks,
    )
    trainer.train(resume_from_checkpoint=OPTIONS.checkpoint or OPTIONS.resume)
    digest = hashlib.sha256()
    for _, value in sorted(model.state_dict().items()):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        digest.update(whole.cpu().numpy().tobytes())
    if args.process_index == 0:
        found = {"hash": digest.hexdigest(), "step": trainer.state.global_step}
        (OPTIONS.records / "final.json").write_text(json.dumps(found))


main()
