"""Starting several processes that train together."""
