"""Job files: a table's configuration written down before there are devices to run it on.

`document` and `job_file` read one, `checking` puts it to the rules of `make_context_handle` and `AsyncEmbedding`,
`corrections` looks for a file that passes, `memory` and `prediction` say what the job will need. None imports JAX.
"""
