"""Recording what really ran and when."""
