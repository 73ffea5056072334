"""A timeline as text, as SVG and as a trace for Perfetto."""
