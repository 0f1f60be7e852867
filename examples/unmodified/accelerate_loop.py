"""A loop of one's own over Accelerate: accumulation, clipping, a schedule.

accelerate launch --config offload.yaml examples/unmodified/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from tiny import report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    """Train, and print every loss."""
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=16)
    loader = DataLoader(TensorDataset(torch.randn(256, 64)), batch_size=16, shuffle=True)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)

    losses = []
    for (x,) in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), x)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    report(losses, accelerator.unwrap_model(model))


if __name__ == "__main__":
    main()
