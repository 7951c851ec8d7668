"""Training steps: the traced program, the host's side of it, and states of it in memory."""
