"""Analysis of graphs: blocks, repeats, weights that devices can divide."""
