"""Trains a small GPT with a plain PyTorch loop and the three lines that offload it.

    python examples/pytorch_loop.py --steps 20 --config full

The losses are those of accelerate_train.py and lightning_gpt.py with the same options, bit for bit.
"""

from torch.nn.utils import clip_grad_norm_

from offload_strategy import OffloadEngine
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
    """Train, and print every loss and what was moved."""
    parser = options_parser("Train a small GPT in plain PyTorch, out of core.", steps=20)
    parser.add_argument("--config", help="of the engine: a preset, a file or JSON")
    parser.add_argument("--hex", action="store_true", help="print losses to the last bit")
    options = parser.parse_args()

    model = make_model(options)
    inner, schedule = make_optimizer(model, options)
    training, validation = make_loaders(options)

    engine = OffloadEngine(options.config)  # the first line
    optimizer = engine.attach(model, inner)  # the second

    for index, (tokens, targets) in enumerate(training):
        micro_batch = index % options.accumulate
        last = micro_batch + 1 == options.accumulate
        # Not needed, but without this hint the engine updates ahead in vain when accumulating.
        engine.microbatch(micro_batch, last=last)
        loss = nats_per_byte(model(tokens), targets)
        (loss / options.accumulate).backward()
        if last:
            if options.clip:
                clip_grad_norm_(model.parameters(), options.clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        print(f"{index:4d}  loss {show(loss, options.hex)}", flush=True)

    print(f"validation loss {validate(model, validation):.3f} nats per byte")
    for key, value in engine.metrics().items():
        if key.endswith(("written_bytes", "read_bytes")):
            print(f"{key} {value / 1e6:.1f} MB")
    engine.close()  # the third


if __name__ == "__main__":
    main()
