"""Weights: whose they are, and those that are in memory only while they are needed."""
