"""Reinforcement learning on real agent harnesses."""
