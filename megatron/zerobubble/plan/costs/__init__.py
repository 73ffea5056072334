"""Times, links and memory that plans are made from."""
