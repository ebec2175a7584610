"""Train a tiny GPT-2, made from a configuration, with the Trainer of Transformers.

outlast run --dir jobs/trainer examples/trainer.py

While it trains, kill a worker from another terminal (pgrep -f launch.worker finds it), or press
Ctrl-C and type the command again. It ends with the same trainer/model.safetensors, to the last
bit, as the script without Outlast.
"""

import json
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from outlast.integrations.transformers import OutlastCallback

EPOCHS, CONTEXT = 30, 64


class Rows(torch.utils.data.Dataset):
    """The bytes of a text, in rows of CONTEXT."""

    def __init__(self, path):
        self.rows = torch.tensor(list(path.read_bytes())).unfold(0, CONTEXT, CONTEXT)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main():
    set_seed(0)
    sizes = {"vocab_size": 256, "n_positions": CONTEXT, "n_embd": 64, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    args = TrainingArguments(
        "trainer",
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=16,
        learning_rate=1e-3,
        logging_steps=20,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    data = Rows(Path(json.decoder.__file__))  # any text will do
    trainer = Trainer(model, args, train_dataset=data, callbacks=[OutlastCallback()])
    trainer.train()
    trainer.save_model("trainer")


if __name__ == "__main__":
    main()
