"""Profiles of steps that are easy to reckon by hand."""

from offload_strategy.plan_runtime.profile import PathRates, Profile, TensorLife


def stack(layers, nbytes=100, seconds=1.0, *, path=100.0, **options):
    """Layers that each save one tensor, backward twice as long as forward, last in first out."""
    forward = layers * seconds
    uses = [((n + 1) * seconds, forward + 2 * seconds * (layers - n)) for n in range(layers)]
    tensors = tuple(TensorLife(f"layer {n}", nbytes, times) for n, times in enumerate(uses))
    options.setdefault("paths", (PathRates("disk", path, path),))
    return Profile(forward, 3 * forward, tensors, **options)


def random_step(chance, **options):
    """A step of 20 s with tensors of any lifetimes."""
    tensors = []
    for number in range(22):
        uses = tuple(sorted(chance.uniform(0, 20) for _ in range(2)))
        tensors.append(TensorLife(f"t{number}", chance.randint(1, 300), uses))
    return Profile(10.0, 20.0, tuple(tensors), **options)
