"""Lookups, updates, calls and training on CPUs, each beside what a user would otherwise pick: ``python -m benchmarks``.

Every suite is a module with a function ``rows(options)``, and runs in a process of its own:

    one_device   gather and update on one device, beside torch, FBGEMM and plain JAX
    growth       how time grows with ids and with rows
    calls        what one native call and one start/done pair cost, and how much of a lookup hides
    ranks        lookup and update over four host devices, beside shard_map
    training     an epoch of MovieLens, beside plain JAX
    memory       what is allocated above table and state
    startup      from import to the first step
"""
