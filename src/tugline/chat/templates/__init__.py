"""Render messages to token ids; parse token ids back to messages."""
