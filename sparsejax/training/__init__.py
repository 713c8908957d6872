"""Training: data, state, step, checkpoints and the loop."""
