"""Tests of the ways of summing values over the ranks."""
