"""What exporters, `inspect` and engines need to know about graphs: blocks, repeats, segments, matmuls."""
