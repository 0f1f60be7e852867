"""How TensorBoard shows the engine's metrics in its tab for custom scalars."""

from __future__ import annotations

#: The layout, for `SummaryWriter.add_custom_scalars`: charts by group, and the names in each as
#: regular expressions. A writer for the folder of a finished run adds it to that run.
TENSORBOARD_LAYOUT: dict[str, dict[str, list[str | list[str]]]] = {
    "offload: waits": {
        "share of the time in which training waits": ["Multiline", [r"offload/waits/.*_share"]],
        "share of transfer time that is hidden": ["Multiline", [r"offload/transfer/hidden_share"]],
    },
    "offload: bandwidth": {
        "GB/s since the previous point": ["Multiline", [r"offload/bandwidth/.*_GBps"]],
        "GB/s of a tier while it is busy": ["Multiline", [r"offload/tier/.*_GBps"]],
        "bytes moved so far": ["Multiline", [r"offload/\w+/(written|read|forwarded)_bytes"]],
    },
    "offload: memory": {
        "host and device": ["Multiline", [r"offload/host/rss_bytes", r"offload/device/peak_bytes"]],
        "buffers": ["Multiline", [r"offload/memory/pinned_.*bytes"]],
        "tiers": ["Multiline", [r"offload/tier/.*/used_bytes"]],
    },
}
