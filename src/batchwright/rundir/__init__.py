"""The files of a run that training, launches and reports share. Standard library only."""
