"""Tasks of our own, for models known by a configuration; apart, since a task may import from its folder."""
