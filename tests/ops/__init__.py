"""Tests of the ops: compiled, in torch and on a GPU, against definitions written out here."""
