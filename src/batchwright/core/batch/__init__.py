"""The batch of one step: the equation, what it is asked, and everything a plan says about it."""
