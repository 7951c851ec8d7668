"""What this machine and its packages are, and whether they fit together.

Each piece speaks for itself in another process (`self_report`, and that of torch_ext), because a broken one may hang or
end it; `children` bounds that; `report` makes lines of the answers, and imports neither JAX nor torch.
"""
