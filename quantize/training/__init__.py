"""The training loop, its checkpoints, and fine-tuning."""
