"""Replays a model's timeline with real communication, and waits in place of compute (``replay.py --help``)."""
