"""The training step: scale, unscale, check, run or skip."""
