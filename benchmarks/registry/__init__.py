"""Every classifier of timm, torchvision and transformers, filtered and compared with the oracle."""
