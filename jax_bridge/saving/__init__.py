"""States of a training step outside of it: snapshots in memory and checkpoints in files."""
