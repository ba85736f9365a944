"""Builders turn the recorded calls of a session into traces to train on, and a ledger."""
