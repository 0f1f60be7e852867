"""A script that knows nothing of this package, for `accelerate launch`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator

from tests.integrations.deepspeed_runs import import_deepspeed, part_of_data, steps
from tests.integrations.lightning_runs import tiny_model

import_deepspeed()
torch.manual_seed(0)
model = tiny_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
accelerator = Accelerator(log_with="tensorboard", project_dir=sys.argv[1])
accelerator.init_trackers("board")
model, optimizer, loader = accelerator.prepare(model, optimizer, part_of_data(0, 1))
losses = []
for step, (x, y) in enumerate(steps(loader)):
    loss = torch.nn.functional.mse_loss(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    accelerator.log({"loss": losses[-1]}, step=step)
accelerator.end_training()
Path("launched.json").write_text(json.dumps([loss.hex() for loss in losses]))
