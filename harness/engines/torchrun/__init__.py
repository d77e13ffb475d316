"""The engine that starts torch's elastic launcher. Start at engine.py."""
