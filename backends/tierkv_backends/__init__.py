"""The backends that come with tierkv, one a module, found through the entry points by URL scheme."""
