"""The backends that come with tierkv, found through the entry points by URL scheme."""
