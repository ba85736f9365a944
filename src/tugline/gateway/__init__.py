"""One model call, from harness to engine and back, recorded on the way."""
