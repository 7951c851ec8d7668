"""`python -m jax_bridge` is `async-emb`."""

from .cli import main

main()
