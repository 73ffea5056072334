"""Problems from a model: presets, estimates of times and bytes from sizes, and layer files."""
