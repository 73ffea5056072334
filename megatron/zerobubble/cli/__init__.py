"""The commands of `zerobubble`: entry points only."""
