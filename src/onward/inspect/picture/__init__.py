"""From a model to an SVG file: which blocks there are, where they go, how they look."""
