"""Measures, on the ranks of a job as they are, what predictions rest on: links and processors."""
