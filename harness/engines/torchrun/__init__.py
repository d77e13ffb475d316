"""Ranks under torch's own elastic launcher. Start at engine.py; rendezvous.py decides where machines meet."""
