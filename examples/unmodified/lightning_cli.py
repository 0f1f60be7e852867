"""LightningCLI: the strategy comes from the command line, or from a config file.

python examples/unmodified/lightning_cli.py fit --trainer.strategy=ssd_offload
python examples/unmodified/lightning_cli.py fit --config examples/unmodified/lightning_cli.yaml
"""

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from tiny import report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(LightningModule):
    """Learns to repeat its input.

    Args:
        width: of the layer in the middle.
        lr: learning rate.
    """

    def __init__(self, width: int = 256, lr: float = 1e-2) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, 64)
        )
        self.lr = lr
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[0])
        self.losses.append(loss.item())
        return loss

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        return DataLoader(TensorDataset(torch.randn(256, 64)), batch_size=16, shuffle=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    def on_fit_end(self) -> None:
        report(self.losses, self)


def main() -> None:
    """Do what the command line says."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    LightningCLI(
        Model,
        seed_everything_default=0,
        trainer_defaults={"max_epochs": 1, "gradient_clip_val": 0.1, **quiet},
        save_config_kwargs={"overwrite": True},
    )


if __name__ == "__main__":
    main()
