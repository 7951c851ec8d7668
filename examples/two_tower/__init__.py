"""A two-tower recommender on MovieLens: `python -m examples.two_tower train`."""
