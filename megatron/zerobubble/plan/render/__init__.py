"""Renderers of timelines: text, SVG, and traces for Perfetto."""
