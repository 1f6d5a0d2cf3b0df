"""What happened during training, and why."""
