"""Job files: a table's configuration written down before there are devices to run it on.

`job_file` reads one, `checking` puts it to the rules of `make_context_handle` and `AsyncEmbedding`, `corrections` looks
for a file that passes, `memory` and `prediction` say what the job will need. None of it imports JAX.
"""
