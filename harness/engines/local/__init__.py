"""The engine that runs ranks on this machine. Start at engine.py."""
