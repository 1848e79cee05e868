"""Tests of ``ringprune bench``."""
