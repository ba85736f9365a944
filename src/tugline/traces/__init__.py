"""Builders: recorded calls of a session to traces to train on, and a ledger of all tokens."""
