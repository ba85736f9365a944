"""Helpers that several folders of tests share, in a module for each thing that they build."""
