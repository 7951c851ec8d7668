"""What a table, its optimizer and its errors are, for whichever framework trains it.

Plain Python over NumPy: importing it brings neither torch nor jax. ``jax_bridge`` and ``torch_ext`` give the same
classes to their users, so that one ``except`` clause, or one optimizer, serves both.
"""
