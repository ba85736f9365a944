"""Builders: turn a session's recorded calls into traces for training and a token ledger."""
