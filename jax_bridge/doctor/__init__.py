"""What this machine and its packages are, and whether they fit together.

`probes` asks each piece in a process of its own, because a broken one may hang or end the process; `children` bounds
that; `report` makes lines of the answers. None of it imports JAX or torch into the process that reports.
"""
