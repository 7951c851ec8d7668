"""Several processes as one job: how they start, find each other, agree, name who is missing, and leave."""
