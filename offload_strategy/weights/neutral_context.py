"""Moving weights while their user's own modes and transforms are in force."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from offload_strategy.torch_support.grad_mode import no_grad


@contextmanager
def undisturbed() -> Iterator[None]:
    """Within, nobody sees what is done to tensors, or makes others of them.

    Selective checkpointing counts operations, inference mode makes tensors that can never be
    trained, and transforms wrap them.
    """
    with ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunction())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        if torch._C._functorch.peek_interpreter_stack() is not None:
            stack.enter_context(temporarily_clear_interpreter_stack())
        stack.enter_context(no_grad())
        yield
