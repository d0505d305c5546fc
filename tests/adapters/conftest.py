"""These modules import a framework. The search for doctests must not import them: it happens in every worker."""

collect_ignore = ["hf.py", "lit_cases.py"]
