"""Two processes with an accelerator each: the same bits, and reductions beside backward."""

import pytest
import torch

from tests.accelerator.support import DEVICE
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and torch.cuda.device_count() < 2, reason="needs two devices"
)


@pytest.mark.parametrize(("sharded", "streamed"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("overlap", "host"), [("commit", None), ("eager", "64MiB"), ("off", None)])
def test_the_bits_are_the_same(tmp_path, sharded, overlap, host, streamed):
    options = {"sharded": sharded, "overlap": overlap, "host": host, "streamed": streamed}
    where = "tests.accelerator.process_runs:compare"
    assert run_ranks(where, tmp_path, group=False, kind=DEVICE, **options) == [True, True]


@pytest.mark.skipif(DEVICE != "sim", reason="needs collectives that wait for a mark")
@pytest.mark.parametrize("overlap", ["commit", "off"])
def test_backward_does_not_wait_for_reductions(tmp_path, overlap):
    where = "tests.accelerator.process_runs:overlap_of_reductions"
    assert run_ranks(where, tmp_path, group=False, kind=DEVICE, overlap=overlap) == [0, 0]
