"""Trains a small GPT with a plain Accelerate loop, which knows nothing of offloaded tensors.

    accelerate launch --config configs/accelerate/offload.yaml examples/accelerate_train.py

What offloads is the section `ssd_offload_config:` of the launch file; without it, or with
`python examples/accelerate_train.py`, the same losses come out, bit for bit.
"""

import importlib.util
import sys

from accelerate import Accelerator

from offload_strategy.examples.gpt import nats_per_byte
from offload_strategy.examples.recipe import (
    make_loaders,
    make_model,
    make_optimizer,
    options_parser,
    show,
    validate,
)


def main() -> None:
    """Train, and print every loss."""
    parser = options_parser("Train a small GPT with Accelerate.", steps=20)
    parser.add_argument("--hex", action="store_true", help="print losses to the last bit")
    options = parser.parse_args()

    has_tensorboard = importlib.util.find_spec("tensorboard") is not None
    accelerator = Accelerator(
        gradient_accumulation_steps=options.accumulate,
        log_with="tensorboard" if has_tensorboard else None,
        project_dir=options.logdir,
    )
    accelerator.init_trackers("accelerate_train", config=vars(options))

    model = make_model(options)
    optimizer, schedule = make_optimizer(model, options)
    training, validation = make_loaders(options)
    model, optimizer, schedule, training, validation = accelerator.prepare(
        model, optimizer, schedule, training, validation
    )

    for index, (tokens, targets) in enumerate(training):
        with accelerator.accumulate(model):
            loss = nats_per_byte(model(tokens), targets)
            accelerator.backward(loss)
            if options.clip and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), options.clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        accelerator.log({"train/loss": loss.item()}, step=index)
        accelerator.print(f"{index:4d}  loss {show(loss, options.hex)}", flush=True)

    after = validate(model, validation)
    accelerator.log({"validation/loss": after}, step=len(training))
    accelerator.print(f"validation loss {after:.3f} nats per byte")
    accelerator.end_training()
    if has_tensorboard:
        accelerator.print(f"Curves: {sys.executable} -m tensorboard.main --logdir {options.logdir}")


if __name__ == "__main__":
    main()
