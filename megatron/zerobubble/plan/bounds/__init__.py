"""Lower bounds on the iteration time of any plan."""
