"""Every classifier of timm and torchvision, filtered and compared with the oracle."""
