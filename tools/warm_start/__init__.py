"""How the demo's start policy is made; run by ``tools/rebuild_warm_start.py``."""
