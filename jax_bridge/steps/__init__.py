"""Training steps: the traced program, and the host's side of it."""
