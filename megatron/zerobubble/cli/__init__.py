"""What the command `zerobubble` runs. Entry points only: the work is done in the packages below."""
