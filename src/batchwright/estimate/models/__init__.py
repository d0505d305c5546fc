"""Tasks of our own, for models that are known by a configuration. A folder of its own: a task's folder is searched for imports."""
