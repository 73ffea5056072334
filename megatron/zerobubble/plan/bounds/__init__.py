"""Lower bounds on the iteration time of any plan, and certificates that carry them."""
