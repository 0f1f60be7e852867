"""Where the time of an offloaded step goes, compared with plain PyTorch's."""
