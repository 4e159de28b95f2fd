"""Tests of dsim."""
