"""The search for the best order of ops under given times and a memory limit, and the lower bound it is measured against."""
