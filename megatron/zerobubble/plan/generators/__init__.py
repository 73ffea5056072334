"""One schedule a file, named as in its paper. The registry is the door."""
