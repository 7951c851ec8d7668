"""Checkpoints: states of a training step in a directory of files."""
