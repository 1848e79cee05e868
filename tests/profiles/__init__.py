"""Tests of ``ringprune profile``."""
