"""Complete training scripts."""
