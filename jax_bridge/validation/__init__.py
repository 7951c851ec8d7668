"""What is asked of arguments before anything is compiled or allocated, and what would pass instead."""
