"""Ready-made sources: map-style datasets over files, local or remote. They need no torch."""
