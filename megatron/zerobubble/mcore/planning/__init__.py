"""What is measured of a running model, and what is planned with it: orders, layouts, and the files that hold them."""
