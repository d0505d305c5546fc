"""From numbers to what a person sees: terminal plots, and later reports."""
