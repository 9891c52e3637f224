"""How the checker sees a model: indexes over its graphs, built once, that rules ask questions of."""
