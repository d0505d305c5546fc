"""The arithmetic. Standard library only, and no other room of the package."""
